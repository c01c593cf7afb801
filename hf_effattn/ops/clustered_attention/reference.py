"""Clustered attention in the paper's words (Source: Vyas 2020, clustered attention). Plain PyTorch, any device."""

from typing import Any, NamedTuple

import torch

from ..shared.arguments import check_label_range
from ..shared.dropout import CENTROID_WEIGHTS, dropout_factor
from ..shared.masking import cluster_centroids, masked_softmax, unmasked


class Inputs(NamedTuple):
    """The arguments of every form, see the public ops; without `topk` it is clustered, else improved attention."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    labels: torch.Tensor
    clusters: int
    topk: int
    key_mask: torch.Tensor | None
    query_mask: torch.Tensor | None
    scale: float
    dropout_p: float
    dropout_seed: torch.Tensor | None


def centroid_scores(inputs: Inputs) -> torch.Tensor:
    """`scale · Qc K^T`, `(B, H, C, M)`, of `unmasked` inputs; of masked keys the lowest number."""
    check_label_range(inputs.labels, inputs.clusters)
    centroids = cluster_centroids(inputs.query, inputs.labels, inputs.clusters, inputs.query_mask)
    scores, mask = inputs.scale * centroids @ inputs.key.transpose(2, 3), inputs.key_mask
    return scores if mask is None else scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)


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


def clustered_attention(*arguments: Any) -> torch.Tensor:
    """`V_i = A^c_{l(i)} V`: every query gets what its centroid gets."""
    x = unmasked(Inputs(*arguments))
    attention = centroid_attention(centroid_scores(x), x.key_mask)
    if x.dropout_seed is not None:
        attention = attention * centroid_dropout(attention, x.dropout_p, int(x.dropout_seed))
    values = attention @ x.value  # (B, H, C, Dv)
    output = values.gather(2, x.labels.long()[..., None].expand(-1, -1, -1, x.value.shape[3]))
    return output if x.query_mask is None else output * x.query_mask[:, None, :, None]
