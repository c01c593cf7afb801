"""Clustered attention in the paper's words (Source: Vyas 2020, clustered attention). Plain PyTorch, any device."""

import torch

from ..shared.arguments import check_label_range
from ..shared.dropout import CENTROID_WEIGHTS, dropout_factor
from ..shared.masking import cluster_centroids, for_every_head, masked_softmax, zero_masked


def centroid_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """`scale · Qc K^T`, `(B, H, C, M)`; of masked keys the lowest number."""
    check_label_range(labels, clusters)
    scores = scale * cluster_centroids(query, labels, clusters, query_mask) @ key.transpose(2, 3)
    return scores if key_mask is None else scores.masked_fill(~key_mask[:, None, None], torch.finfo(scores.dtype).min)


def centroid_attention(scores: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
    """`A^c = softmax(scale · Qc K^T)` over unmasked keys, `(B, H, C, M)`."""
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
    scores = centroid_scores(query, key, labels, clusters, key_mask, query_mask, scale)
    attention = centroid_attention(scores, key_mask)
    if dropout_seed is not None:
        attention = attention * centroid_dropout(attention, dropout_p, int(dropout_seed))
    values = attention @ value  # (B, H, C, Dv)
    output = values.gather(2, labels.long()[..., None].expand(-1, -1, -1, value.shape[3]))
    return output if query_mask is None else output * query_mask[:, None, :, None]
