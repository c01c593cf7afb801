"""Exact attention of some queries at a time, where scores have a part that no kernel of torch adds.

Sizes: `B` batch, `H` heads, `N` length, `D` head_dim.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from ...ops.shared.graphs import in_a_graph

# Queries in a chunk on a CPU without gradients: their scores stay in its caches.
ROWS = 128
# Scores in a chunk. A GPU needs more of them to be busy.
SCORES = {"cpu": 2**24}
SCORES_OF_GPU = 2**27
# With more scores than this the backward pass computes them again, which costs time, instead of keeping them.
KEPT = 2**26


def in_query_chunks(
    attend: Callable[[torch.Tensor, int], torch.Tensor], query: torch.Tensor, keys: int, most: int | None = None
) -> torch.Tensor:
    """What `attend` gives for some queries at a time.

    Args:
        attend (`Callable`): of queries `(B, H, n, D)` and the place of the first of them.
        query (`torch.Tensor`): `(B, H, N, D)`.
        keys (`int`): how many each of them sees.
        most (`int`, *optional*): no more rows at once than these.

    Returns:
        `torch.Tensor`: `(B, H, N, D)`.
    """
    if in_a_graph():  # a graph would hold as many parts as the first text has
        return attend(query, 0)
    of_row = max(1, query.shape[0] * query.shape[1] * keys)
    at_once = max(16, SCORES.get(query.device.type, SCORES_OF_GPU) // of_row)
    at_once = at_once if most is None else min(at_once, most)
    run: Callable[..., torch.Tensor] = attend
    if torch.is_grad_enabled() and of_row * query.shape[2] > KEPT:
        run = partial(checkpoint, attend, use_reentrant=False)
    parts = query.split(at_once, dim=2)
    return torch.cat([run(part, index * at_once) for index, part in enumerate(parts)], dim=2)


def floor(dtype: torch.dtype) -> float:
    """What a mask adds to the score of a key that is not seen: finite, also times a scale or beside a bias."""
    return torch.finfo(dtype).min / 4


def added_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask, `(B, N)` or of four dimensions, boolean or to be added, as one of four dimensions to be added."""
    if mask is None:
        return None
    mask = mask[:, None, None] if mask.ndim == 2 else mask
    least = floor(dtype)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, least)
    return mask.to(dtype).clamp(min=least)
