"""Attention of a converted model: slices of a pretrained layer's own queries, keys and values.

Sizes: `B` batch, `H` heads, `N` length, `D` head_dim, `L` slice length, `S` slices.

The paper's sum of local and global attention (Lee 2023, Eq. 10) doubles the output of a layer that was trained with
exact attention, and takes the values through their projection twice. The merged form here approximates the one
softmax that the layer was trained with: tokens of the slice one by one, every other slice by the means of its queries,
keys and values, weighted by the number of its tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..ops import slice_attention
from ..ops.slice_attention import extension_tokens

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Terms = tuple[torch.Tensor | None, torch.Tensor | None]
NO_TERMS: Terms = (None, None)


def first_and_last_tokens(key_mask: torch.Tensor | None, query: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """The sequence's first and, unless causal, last token, `(B, N)`: [CLS] and [SEP], which draw attention everywhere.

    Args:
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        query (`torch.Tensor`): `(B, H, N, D)`.
        causal (`bool`): whether the last token must stay hidden.
    """
    if key_mask is None:
        key_mask = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    rank = key_mask.cumsum(dim=1)
    ends = rank == 1
    if not causal:
        ends = ends | (rank == rank[:, -1:])
    return ends & key_mask


def slice_means(rows: torch.Tensor, key_mask: torch.Tensor | None, slice_length: int) -> torch.Tensor:
    """Masked mean of each slice, `(B, heads, S, D)`; 0 for a slice without a token.

    Args:
        rows (`torch.Tensor`): `(B, heads, N, D)`.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        slice_length (`int`): `L`.
    """
    if key_mask is not None:
        rows = rows.masked_fill(~key_mask[:, None, :, None], 0.0)
    sums = F.pad(rows, (0, 0, 0, -rows.shape[2] % slice_length)).unflatten(2, (-1, slice_length)).sum(dim=3)
    return sums / slice_sizes(rows, key_mask, slice_length).clamp(min=1)[:, None, :, None]


def slice_sizes(rows: torch.Tensor, key_mask: torch.Tensor | None, slice_length: int) -> torch.Tensor:
    """Tokens of each slice, `(B or 1, S)`, in the dtype of the rows.

    Args:
        rows (`torch.Tensor`): `(B, heads, N, D)`.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        slice_length (`int`): `L`.
    """
    N = rows.shape[2]
    mask = rows.new_ones(1, N) if key_mask is None else key_mask.to(rows.dtype)
    return F.pad(mask, (0, -N % slice_length)).unflatten(1, (-1, slice_length)).sum(dim=2)


def merged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    slice_length: int,
    extension_ratio: float = 1,
    causal: bool = False,
    sinks: bool = True,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    local_terms: Terms = NO_TERMS,
    slice_terms: Terms = NO_TERMS,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """One softmax over the tokens of the extended slice and the means of all other slices.

    `Y_i = (1 − w_i) Y_l,i + w_i Y_g,s` for a token `i` of slice `s`, with `w_i = sigmoid(lse_g,s − lse_l,i)`. The
    global scores are `scale · q̄_s · k̄_t + log n_t`, `n_t` the tokens of slice `t`, over the slices that no token of
    `s` sees whole. Causal: only slices before, by the mean query of the slice before, so that nothing of a slice's
    own later tokens is in its earlier ones.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, H, N, D)`.
        value (`torch.Tensor`): `(B, H, N, Dv)`.
        slice_length (`int`): `L`.
        extension_ratio (`float`): `α` in [1, 3].
        causal (`bool`): whether later tokens are hidden.
        sinks (`bool`): whether every slice sees the first and (unless causal) the last token of the sequence.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        local_terms (`tuple`): position terms `(H, L, D)` of queries and `(H, αL, D)` of keys in a slice, or None.
        slice_terms (`tuple`): position terms `(H, S, D)` of the slices' queries and keys, or None.
        dropout_p (`float`): dropout on the weights.

    Returns: `(B, H, N, Dv)`, 0 in masked rows.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    sink_mask = first_and_last_tokens(key_mask, query, causal=causal) if sinks else None
    local, _, local_lse = slice_attention(
        query,
        key,
        value,
        slice_length=slice_length,
        extension_ratio=extension_ratio,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        query_positions=local_terms[0],
        key_positions=local_terms[1],
        sink_mask=sink_mask,
        dropout_p=dropout_p,
        return_lse=True,
    )
    # Every slice sees the sinks one by one, so they are in no mean of keys: each key counts once.
    summarised = key_mask
    if sink_mask is not None:
        summarised = ~sink_mask if key_mask is None else key_mask & ~sink_mask
    means = slice_means(query, key_mask, slice_length), slice_means(key, summarised, slice_length)
    mean_query, mean_key = (
        rows if term is None else rows + term for rows, term in zip(means, slice_terms, strict=True)
    )
    mean_value = slice_means(value, summarised, slice_length)
    sizes = slice_sizes(query, summarised, slice_length)
    S = mean_query.shape[2]
    slices = torch.arange(S, device=query.device)
    whole = 1 if extension_tokens(slice_length, extension_ratio) == slice_length else 0  # neighbours seen whole
    if causal:
        mean_query = F.pad(mean_query[:, :, :-1], (0, 0, 1, 0))
        visible = slices < slices[:, None] - whole
    else:
        visible = (slices - slices[:, None]).abs() > whole
    visible = (visible & (sizes > 0)[:, None])[:, None]  # (B or 1, 1, S, S)
    scores = (mean_query * scale) @ mean_key.transpose(2, 3) + sizes.clamp(min=1).log()[:, None, None]
    scores = scores.to(local_lse.dtype)
    # A finite fill and a weight of 0 below: a slice that sees no other must give no NaN, nor must its gradient.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(dim=-1).to(value.dtype), dropout_p)
    coarse = weights @ mean_value  # (B, H, S, Dv)
    N = query.shape[2]
    of_token = torch.arange(N, device=query.device) // slice_length
    gap = scores.logsumexp(dim=-1).index_select(2, of_token) - local_lse
    gap = gap.masked_fill(~visible.any(dim=-1).index_select(2, of_token), -torch.inf)
    share = gap.sigmoid().to(value.dtype)[..., None]
    output = local + share * (coarse.index_select(2, of_token) - local)
    return output if key_mask is None else output.masked_fill(~key_mask[:, None, :, None], 0.0)


def summed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    project: Callable[[torch.Tensor], Projected],
    *,
    slice_length: int,
    extension_ratio: float = 1,
    causal: bool = False,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    local_terms: Terms = NO_TERMS,
    slice_terms: Terms = NO_TERMS,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """The paper's composition: `Y_l + ψ(Y_g)`, the global attention among the projected slice embeddings (Eq. 10, 15).

    Causal: the query of the slice before, and keys of slices before (Eq. 12 and below).

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, H, N, D)`.
        value (`torch.Tensor`): `(B, H, N, D)`.
        project (`Callable`): queries, keys and values `(B, H, S, D)` of slice embeddings `(B, S, H · D)`.
        slice_length (`int`): `L`.
        extension_ratio (`float`): `α` in [1, 3].
        causal (`bool`): whether later tokens are hidden.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        local_terms (`tuple`): position terms `(H, L, D)` of queries and `(H, αL, D)` of keys in a slice, or None.
        slice_terms (`tuple`): position terms `(H, S, D)` of the slices' queries and keys, or None.
        dropout_p (`float`): dropout on the weights.

    Returns: `(B, H, N, D)`, 0 in masked rows.
    """
    local, means = slice_attention(
        query,
        key,
        value,
        slice_length=slice_length,
        extension_ratio=extension_ratio,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        query_positions=local_terms[0],
        key_positions=local_terms[1],
        dropout_p=dropout_p,
    )
    slice_query, slice_key, slice_value = project(means.transpose(1, 2).flatten(2))
    if slice_terms[0] is not None and slice_terms[1] is not None:
        slice_query, slice_key = slice_query + slice_terms[0], slice_key + slice_terms[1]
    visible = (slice_sizes(query, key_mask, slice_length) > 0)[:, None, None]  # (B or 1, 1, 1, S)
    S = slice_query.shape[2]
    slices = torch.arange(S, device=query.device)
    if causal:
        visible = visible & (slices <= slices[:, None])
    # Every row sees its first place, also one without a token: SDPA has no finite result for no key.
    coarse = F.scaled_dot_product_attention(
        slice_query, slice_key, slice_value, attn_mask=visible | (slices == 0), dropout_p=dropout_p, scale=scale
    )
    if causal:
        coarse = F.pad(coarse[:, :, :-1], (0, 0, 1, 0))
    output = local + coarse.index_select(2, torch.arange(query.shape[2], device=query.device) // slice_length)
    return output if key_mask is None else output.masked_fill(~key_mask[:, None, :, None], 0.0)
