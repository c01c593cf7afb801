"""Exact attention with logit softcapping, a tanh on the scores (Gemma 2: Riviere et al. 2024, section 2).

SDPA has none. transformers computes it eagerly, with several matrices of `N * N` for each head, half of them hidden in
a decoder. Here some rows at a time meet the keys that they see, in float32, and nothing is approximated.

Sizes: `B` batch, `H` heads, `Hk` heads of keys, `N` query length, `M` key length, `D` head_dim, `Dv` that of values.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ...ops.derivatives import learns
from ...ops.shared.precision import accumulation_dtype, fast_dtype, split_scale
from .query_chunks import in_query_chunks
from .windows import IN_BLOCKS, keys_beside_block

# Queries in a chunk. Smaller chunks make small matrix products, larger ones compute more scores that are masked.
ROWS = 256


def apply_softcap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """`softcap * tanh(scores / softcap)`."""
    return softcap * torch.tanh(scores / softcap)


def attend_with_softcap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    softcap: float,
    scale: float | None,
    dropout: float,
    causal: bool,
) -> torch.Tensor:
    """Attention by scores that stay within `softcap`, `(B, N, H, Dv)`; memory is linear in the length.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, Hk, M, D)`.
        value (`torch.Tensor`): `(B, Hk, M, Dv)`.
        mask (`torch.Tensor`, *optional*): of keys, bool `(B, M)`; `(B or 1, H or 1, N or 1, M)`, boolean or to be
            added; or from `mask_of_blocks`. True = attend. Rows that see nothing are the mean of some values.
        softcap (`float`): above 0, the bound of the scores.
        scale (`float`, *optional*): factor on the products of queries and keys. Default `D ** -0.5`.
        dropout (`float`): dropout on the attention weights.
        causal (`bool`): whether the future is hidden, beside a mask of keys or none; the window of a mask of blocks
            then reaches backwards only.
    """
    scale, dtype = query.shape[3] ** -0.5 if scale is None else scale, value.dtype
    query, key, value = (rows.to(fast_dtype(rows)) for rows in (query, key, value))
    run = partial(_attend, key=key, value=value, softcap=softcap, scale=scale, dropout=dropout)
    if mask is not None and mask.ndim == IN_BLOCKS:
        L, sides = mask.shape[3], keys_beside_block(mask, causal)
        parts = []
        for index, queries in enumerate(query.split(L, dim=2)):
            seen = partial(_seen_in_block, mask[:, :, index], index * L, sides, key.shape[2])
            attend = partial(_of_rows, run, seen)
            parts.append(in_query_chunks(attend, queries, mask.shape[4], ROWS))
        output = torch.cat(parts, dim=2)
    else:
        attend = partial(_of_rows, run, partial(_seen, mask, causal, key.shape[2]))
        output = in_query_chunks(attend, query, key.shape[2], ROWS)
    return output.transpose(1, 2).to(dtype).contiguous()


# From the place of the first of some queries and their number: the slice of keys that they see, and the mask of these,
# `(B or 1, H or 1, n or 1, keys)`.
Seen = Callable[[int, int], tuple[slice, torch.Tensor | None]]


def _of_rows(run: Callable[..., torch.Tensor], seen: Seen, query: torch.Tensor, first: int) -> torch.Tensor:
    keys, mask = seen(first, query.shape[2])
    return run(query, keys=keys, mask=mask)


def _seen(
    mask: torch.Tensor | None, causal: bool, length: int, first: int, rows: int
) -> tuple[slice, torch.Tensor | None]:
    if mask is not None and mask.ndim > 2:
        return slice(0, length), mask if mask.shape[2] == 1 else mask[:, :, first : first + rows]
    end = first + rows if causal else length
    of_keys = None if mask is None else mask[:, None, None, :end]
    if not causal:
        return slice(0, end), of_keys
    device = None if mask is None else mask.device
    earlier = torch.ones(rows, end, dtype=torch.bool, device=device).tril(first)[None, None]
    return slice(0, end), earlier if of_keys is None else earlier & of_keys


def _seen_in_block(
    mask: torch.Tensor, start: int, sides: tuple[int, int], length: int, first: int, rows: int
) -> tuple[slice, torch.Tensor]:
    """Of a block that begins at `start`, whose mask is `(B, 1, L, S)`."""
    before, after = sides
    keys = slice(max(0, start + first - before), min(length, start + first + rows + after))
    columns = slice(keys.start - start + before, keys.stop - start + before)
    return keys, mask[:, :, first : first + rows, columns]


def _attend(
    query: torch.Tensor,
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: slice,
    mask: torch.Tensor | None,
    softcap: float,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """Some rows, `(B, H, n, Dv)`, of those keys."""
    heads, rows = key.shape[1], query.shape[2]
    of_query, of_score = split_scale(scale, query.dtype)
    together = (query * of_query).unflatten(1, (heads, -1)).flatten(2, 3)  # heads that share keys, as rows of one
    scores = (together @ key[:, :, keys].transpose(2, 3)).to(accumulation_dtype(query.dtype))
    if learns(scores):
        scores = apply_softcap(scores * of_score, softcap)
    else:
        scores = scores.mul_(of_score / softcap).tanh_().mul_(softcap)
    if mask is not None:
        by_head = scores.unflatten(2, (-1, rows))
        of_head = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))
        if mask.dtype == torch.bool:
            by_head = by_head.masked_fill(~of_head, torch.finfo(scores.dtype).min)
        else:
            by_head = by_head + of_head
        scores = by_head.flatten(2, 3)
    weights = F.dropout(scores.softmax(dim=-1).to(value.dtype), dropout, training=dropout > 0)
    return (weights @ value[:, :, keys]).unflatten(2, (-1, rows)).flatten(1, 2)
