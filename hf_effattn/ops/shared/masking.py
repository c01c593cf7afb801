"""What the definitions share: masks, and heads and centroids of all the queries. Plain PyTorch, any device."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F

Inputs = TypeVar("Inputs", bound=Any)


def zero_masked(rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Rows `(B, H, N, D)` with 0 where the mask `(B, N)` is False: 0 times what stands in padding may be NaN."""
    return rows if mask is None else rows.masked_fill(~mask[:, None, :, None], 0.0)


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension; False in `mask` has weight 0, also where a whole row is False."""
    if mask is None:
        return scores.softmax(dim=-1)
    # A finite fill: with -inf a row without any key would be NaN in the forward pass and in its gradient.
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1) * mask


def repeat_heads(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values `(B, key/value heads, M, D)` repeated for the query heads that share them: `(B, H, M, D)`."""
    return rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1)


def unmasked(inputs: Inputs) -> Inputs:
    """An op's inputs, a `NamedTuple`, with 0 in masked rows, and keys and values of every query head."""
    x = inputs
    key, value = (zero_masked(repeat_heads(rows, x.query), x.key_mask) for rows in (x.key, x.value))
    return x._replace(query=zero_masked(x.query, x.query_mask), key=key, value=value)


def cluster_centroids(
    query: torch.Tensor, labels: torch.Tensor, clusters: int, query_mask: torch.Tensor | None
) -> torch.Tensor:
    """`Qc_j`: mean of the queries with label `j`, `(B, H, C, D)`; padded queries count in none, an empty one is 0."""
    member = F.one_hot(labels.long(), clusters).to(query.dtype)  # (B, H, N, C)
    if query_mask is not None:
        member = member * query_mask[:, None, :, None]
    sizes = member.sum(dim=2).clamp(min=1)  # (B, H, C)
    return member.transpose(2, 3) @ query / sizes[..., None]
