"""Attention of the centroids `A^c` for a CPU: its scores, its dropout, its gradients."""

import torch

from .dropout import CENTROID_WEIGHTS
from .row_chunks import RowChunk
from .tables import draw_dropout


def centroid_scores(centroids: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale · Qc K^T` `(P, C, M)`; the product in the dtype of `key`, the result in float32 or float64."""
    scores = (centroids * scale).to(key.dtype) @ key.transpose(1, 2)
    return scores.to(centroids.dtype)


def centroid_dropout(
    chunk: RowChunk, attention: torch.Tensor, length: int, dropout_p: float, seed: torch.Tensor
) -> torch.Tensor:
    """Dropout factors for `A^c` `(P, C, keys)`: one draw for all the queries of a cluster."""
    shape = attention.shape[1] // chunk.group, length
    factor = draw_dropout(chunk, shape, attention, dropout_p, seed, CENTROID_WEIGHTS)
    factor = factor.view(attention.shape[0], attention.shape[1], length)
    return factor if chunk.key_rows is None else factor.index_select(2, chunk.key_rows)


def centroid_backward(
    attention: torch.Tensor, grad_attention: torch.Tensor, centroids: torch.Tensor, key: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the centroids `(P, C, D)` and keys `(P, M, D)` through `A^c`; `grad_attention` is overwritten."""
    mean = torch.linalg.vecdot(attention, grad_attention)[..., None]
    grad_scores = grad_attention.sub_(mean).mul_(attention).mul_(scale).to(key.dtype)
    grad_centroids = (grad_scores @ key).to(centroids.dtype)
    return grad_centroids, grad_scores.transpose(1, 2) @ centroids.to(key.dtype)
