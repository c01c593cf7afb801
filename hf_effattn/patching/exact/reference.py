"""Exact attention as transformers runs it, who sees whom in it, and its weights.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...ops.bi_clustered_attention.exact_heads import FLASH
from ...ops.causal_clustered_attention.local import PartialOutput, merge_
from ...ops.causal_clustered_attention.sinks import add_sinks_
from ...ops.shared.precision import accumulation_dtype
from .sinks import with_sinks
from .softcap import apply_softcap


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float | None,
    dropout_p: float,
    causal: bool,
    module: nn.Module | None = None,
    attention_sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Transformers' SDPA path, `(B, H, N, Dv)`, bit for bit; `mask` `(B, 1, N, M)` from `visible_keys`."""
    if not query.shape[0]:  # that path asks torch how many heads no text has, and torch cannot tell
        grouped = query.shape[1] > key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    # Without a module, all that is asked of one: how many heads share their keys.
    called: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1]) if module is None else module
    options = {"dropout": dropout_p, "is_causal": causal and mask is None}
    output = sdpa_path(called, query, key, value, mask, scaling=scale, attention_sinks=attention_sinks, **options)
    return output.transpose(1, 2)


def sdpa_path(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    attention_sinks: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Transformers' SDPA path, `(B, N, H, Dv)`, and with sinks `(H,)`, which that has not, the same by `with_sinks`.

    Other arguments are those of transformers.
    """
    if attention_sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)[0]
    N, Dv = query.shape[2], value.shape[3]
    query, key, value, mask, scaling = with_sinks(query, key, value, mask, attention_sinks, scaling)
    is_causal = options.get("is_causal")
    if N > 1 and mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        query = F.pad(query, (0, 0, 1, 0))  # one before all others: the first of them sees its own key beside the sink
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)[0][:, -N:, :, :Dv]


def causal_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: slice,
    scale: float | None,
    attention_sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Some rows of exact attention that hides the future, on a CPU: two steps of one softmax, without a mask.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, Hk, N, D)`.
        value (`torch.Tensor`): `(B, Hk, N, D)`.
        rows (`slice`): neighbouring queries, `n`.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        attention_sinks (`torch.Tensor`, *optional*): `(H,)`, of a score that has no value.

    Returns:
        `torch.Tensor`: `(B, H, n, D)`.
    """
    dtype, heads = accumulation_dtype(query.dtype), key.shape[1]
    # (B · Hk, H / Hk, ·, D): keys that query heads share are not copied.
    queries = query[:, :, rows].unflatten(1, (heads, -1)).flatten(0, 1)
    keys, values = (tensor.flatten(0, 1)[:, None].expand(-1, queries.shape[1], -1, -1) for tensor in (key, value))

    def attend(seen: slice, *, causal: bool) -> PartialOutput:
        output, log_sum = FLASH(queries, keys[:, :, seen], values[:, :, seen], 0.0, causal, scale=scale)
        return output.to(dtype), log_sum[..., None].to(dtype)

    partial = attend(rows, causal=True)
    if rows.start:
        merge_(partial, attend(slice(rows.start), causal=False))
    if attention_sinks is not None:
        add_sinks_(*partial, attention_sinks.to(dtype).view(heads, -1, 1, 1).repeat(len(query), 1, 1, 1))
    return partial[0].to(query.dtype).unflatten(0, (-1, heads)).flatten(1, 2)


def visible_keys(key_mask: torch.Tensor | None, length: int, *, causal: bool) -> torch.Tensor | None:
    """Who sees whom, `(B, 1, N, M)`; None without a mask: there SDPA hides the future itself.

    Args:
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend.
        length (`int`): `N`.
        causal (`bool`): whether no query sees a later key.
    """
    if key_mask is None:
        return None
    mask = key_mask[:, None, None, :].expand(-1, 1, length, -1)
    return mask & causal_square(length, mask.shape[3], mask.device) if causal else mask


def causal_square(length: int, keys: int, device: torch.device) -> torch.Tensor:
    """Who sees whom where the future is hidden, `(N, M)`."""
    return torch.ones(length, keys, dtype=torch.bool, device=device).tril()


def exact_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    *,
    causal: bool,
    rows: Sequence[int] | None = None,
    attention_sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The weights `(B, H, N, M)` of exact attention, of which the SDPA path returns none; 0 in rows that see no key.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, Hk, M, D)`.
        mask (`torch.Tensor`, *optional*): `(B, 1, N, M)`, boolean or to be added.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        causal (`bool`): whether no query sees a later key, where there is no mask that says so.
        rows (`Sequence[int]`, *optional*): the queries whose weights are wanted. Default: all.
        attention_sinks (`torch.Tensor`, *optional*): `(H,)`, of a score whose weight is left out.
        bias (`torch.Tensor`, *optional*): `(1, H, N, M)`, added to the scores; not with `rows`.
        softcap (`float`, *optional*): the bound of the scores, by a tanh.
    """
    if mask is None and causal and query.shape[2] > 1:
        mask = causal_square(query.shape[2], key.shape[2], query.device)
    if rows is not None:
        query, mask = query[:, :, rows], None if mask is None else mask[..., rows, :]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if softcap is not None:
        scores = apply_softcap(scores, softcap)
    seen = mask if mask is not None and mask.dtype == torch.bool else None
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if attention_sinks is not None:
        column = attention_sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return weights if seen is None else weights * seen
