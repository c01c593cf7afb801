"""Clustering the queries for a CPU: all heads of a chunk at once."""

import torch

from ..kmeans.batched import chosen_rows, cluster_chunk, fitting_bytes_per_head
from ..kmeans.sampling import fit_rows
from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk, row_chunks
from .reference import METRIC_RIDGE, Inputs, empty_labels, hash_planes


def keys_metric(key: torch.Tensor) -> torch.Tensor:
    """`G` `(P, D, D)`: the covariance of the keys `(P, M, D)`, its mean diagonal 1, and the ridge."""
    centered = key - key.mean(dim=1, keepdim=True)
    return as_metric(centered.transpose(1, 2) @ centered / key.shape[1])


def as_metric(covariance: torch.Tensor) -> torch.Tensor:
    """Covariances `(P, D, D)` with 1 as the mean of the diagonal, and the ridge; in place."""
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    size = diagonal.mean(dim=1)[:, None, None]
    covariance /= torch.where(size > 0, size, 1.0)
    diagonal += METRIC_RIDGE
    return covariance


def _forward(x: Inputs) -> torch.Tensor:
    """Labels `(B, H, N)`; a masked query has label 0."""
    query, key, key_mask, query_mask, clusters, method, iterations, bits, fit_queries, seed = x
    B, H, N, D = query.shape
    empty = torch.empty if query_mask is None else torch.zeros
    labels = empty(B, H, N, dtype=torch.int64, device=query.device)
    dtype = accumulation_dtype(query.dtype)
    planes = hash_planes(D, bits, seed).to(query.device, dtype) if method == "lsh" else None
    group = 1 if key is None else H // key.shape[1]
    bytes_per_head = fitting_bytes_per_head(query, clusters, fit_queries, D if planes is None else bits)

    def cluster(chunk: RowChunk) -> None:
        metric = None
        keys = 0 if key is None else key.shape[2] if chunk.key_rows is None else len(chunk.key_rows)
        if key is not None and keys:
            chosen = fit_rows(keys, clusters, fit_queries).to(query.device)
            own = chosen_rows(chunk.of_heads(key), chunk.key_rows, chosen).to(dtype)
            metric = keys_metric(own)
            if group > 1:
                metric = metric.repeat_interleave(group, dim=0)
        cluster_chunk(chunk, labels, query, clusters, iterations, fit_queries, seed, metric, planes)

    for_every_chunk(cluster, row_chunks(query, key_mask, query_mask, bytes_per_head, group), query.device)
    return labels


cluster_queries = register_op("cluster_queries", Inputs, _forward, fake=empty_labels)
