"""Clustered attention for a CPU: heads in chunks, batched matrix products, a hand-written backward pass.

The attention of the centroids is computed again in the backward pass instead of being kept, so that between the two
passes only the inputs are alive.
"""

import torch

from ..shared.centroids import centroid_backward, centroid_dropout, centroid_scores
from ..shared.gradients import register_op
from ..shared.precision import in_products, product_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import attend_by_chunks, cluster_sizes, cluster_sums, gradients_by_chunks, softmax_, table_rows
from .reference import Inputs


def _centroid_attention(chunk: RowChunk, x: Inputs) -> tuple[torch.Tensor, ...]:
    """Of a chunk: centroids, their attention, dropout factors of it (1 without), keys, values, tables' rows, sizes."""
    dtype = product_dtype(x.query)
    q, v = (rows.to(dtype) for rows in (chunk.queries(x.query), chunk.keys(x.value)))
    k = in_products(chunk.keys(x.key))
    index = table_rows(chunk, x.labels, x.clusters)
    sizes = cluster_sizes(index, len(q), chunk.group * x.clusters).clamp(min=1)[..., None]
    centroids = cluster_sums(q, index, *sizes.shape[:2]) / sizes
    attention = softmax_(centroid_scores(centroids, k, x.scale))
    factor = torch.ones(())
    if x.dropout_seed is not None:
        factor = centroid_dropout(chunk, attention, x.key.shape[2], x.dropout_p, x.dropout_seed)
    return centroids, attention, factor, k, v, index, sizes


def _of_members(tables: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """What every query gets, `(P, N, D)`, of what its cluster has, `(P, C, D)`."""
    return tables.flatten(0, 1).index_select(0, index).view(len(tables), -1, tables.shape[2])


def _forward(x: Inputs) -> torch.Tensor:
    """`V_i = A^c_{l(i)} V`: every query gets what its centroid gets."""

    def attend(chunk: RowChunk) -> torch.Tensor:
        _, attention, factor, _, v, index, _ = _centroid_attention(chunk, x)
        if x.dropout_seed is not None:
            attention *= factor
        return _of_members(attention.to(v.dtype) @ v, index)

    return attend_by_chunks(x, x.clusters * x.key.shape[2], attend)


def gradients(grad_output: torch.Tensor, x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels held fixed."""

    def backward(chunk: RowChunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        centroids, attention, factor, k, v, index, sizes = _centroid_attention(chunk, x)
        grad_values = cluster_sums(chunk.queries(grad_output), index, *sizes.shape[:2]).to(v.dtype)
        grad_attention = (grad_values @ v.transpose(1, 2)).to(attention.dtype)
        weights = attention
        if x.dropout_seed is not None:
            weights = attention * factor
            grad_attention *= factor
        grad_v = weights.to(v.dtype).transpose(1, 2) @ grad_values
        grad_centroids, grad_k = centroid_backward(attention, grad_attention, centroids, k, x.scale)
        return _of_members((grad_centroids / sizes).to(v.dtype), index), grad_k, grad_v

    return gradients_by_chunks(x, x.clusters * x.key.shape[2], backward)


clustered_attention = register_op("clustered_attention", Inputs, _forward, gradients)
