"""Clustered attention in the paper's words (Source: Vyas 2020, clustered attention). Plain PyTorch, any device."""

import torch
import torch.nn.functional as F

from ..shared.arguments import check_label_range
from ..shared.dropout import CENTROID_WEIGHTS, dropout_factor


def cluster_centroids(
    query: torch.Tensor, labels: torch.Tensor, clusters: int, query_mask: torch.Tensor | None
) -> torch.Tensor:
    """`Qc_j`: mean of the queries with label `j`, `(B, H, C, D)`; padded queries count in none, an empty one is 0."""
    member = F.one_hot(labels.long(), clusters).to(query.dtype)  # (B, H, N, C)
    if query_mask is not None:
        member = member * query_mask[:, None, :, None]
    sizes = member.sum(dim=2).clamp(min=1)  # (B, H, C)
    return member.transpose(2, 3) @ query / sizes[..., None]


def for_every_head(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values `(B, key/value heads, M, D)` repeated for the query heads that share them: `(B, H, M, D)`."""
    return rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1)


def zero_masked(rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Rows `(B, H, N, D)` with 0 where the mask `(B, N)` is False: 0 times what stands in padding may be NaN."""
    return rows if mask is None else rows.masked_fill(~mask[:, None, :, None], 0.0)


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension; False in `mask` has weight 0, also where a whole row is False."""
    if mask is None:
        return scores.softmax(dim=-1)
    # A finite fill: with -inf a row without any key would be NaN in the forward pass and in its gradient.
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1) * mask


def centroid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """`A^c = softmax(scale · Qc K^T)` over unmasked keys, `(B, H, C, M)`."""
    check_label_range(labels, clusters)
    scores = scale * cluster_centroids(query, labels, clusters, query_mask) @ key.transpose(2, 3)
    return masked_softmax(scores, None if key_mask is None else key_mask[:, None, None, :])


def centroid_dropout(attention: torch.Tensor, dropout_p: float, seed: int) -> torch.Tensor:
    """Dropout factors for `A^c` `(B, H, C, M)`: one draw for all the queries of a cluster."""
    B, H, C, M = attention.shape
    factors = [
        dropout_factor((C, M), attention, dropout_p, seed, problem, CENTROID_WEIGHTS) for problem in range(B * H)
    ]
    return torch.stack(factors).view(B, H, C, M)


def clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """`V_i = A^c_{l(i)} V`: every query gets what its centroid gets."""
    key, value = for_every_head(key, query), for_every_head(value, query)
    query, key, value = zero_masked(query, query_mask), zero_masked(key, key_mask), zero_masked(value, key_mask)
    attention = centroid_attention(query, key, labels, clusters, key_mask, query_mask, scale)
    if dropout_seed is not None:
        attention = attention * centroid_dropout(attention, dropout_p, int(dropout_seed))
    values = attention @ value  # (B, H, C, Dv)
    output = values.gather(2, labels.long()[..., None].expand(-1, -1, -1, value.shape[3]))
    return output if query_mask is None else output * query_mask[:, None, :, None]
