"""Clustering the queries for a CPU: all heads of a chunk at once."""

import torch

from ..kmeans.batched import Points, cluster, fitting_bytes_per_head
from ..kmeans.sampling import most_fit_rows
from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk, row_chunks
from .reference import METRIC_RIDGE, Inputs, empty_labels, hash_planes


def keys_metric(key: torch.Tensor) -> torch.Tensor:
    """`G` `(P, D, D)`: the covariance of the keys `(P, M, D)`, its mean diagonal 1, and the ridge."""
    centered = key - key.mean(dim=1, keepdim=True)
    return as_metric(torch.bmm(centered.transpose(1, 2), centered))


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
    labels = (query.new_empty if query_mask is None else query.new_zeros)(B, H, N, dtype=torch.int64)
    dtype = accumulation_dtype(query.dtype)
    planes = hash_planes(D, bits, seed).to(query.device, dtype) if method == "lsh" else None
    group = 1 if key is None else H // key.shape[1]
    bytes_per_head = fitting_bytes_per_head(query, clusters, fit_queries, D if planes is None else bits)
    count = most_fit_rows(clusters, fit_queries)

    def run(chunk: RowChunk) -> None:
        queries, metric = Points(chunk.of_query_heads(query), chunk.query_rows, planes), None
        keys = None if key is None else Points(chunk.of_heads(key), chunk.key_rows)
        if keys is not None and keys.length:
            metric = keys_metric(keys.spread(count)).repeat_interleave(group, dim=0)
        cluster(queries, chunk.of_query_heads(labels), queries.spread(count), clusters, iterations, seed, metric)

    for_every_chunk(run, row_chunks(query, key_mask, query_mask, bytes_per_head, group), query.device)
    return labels


cluster_queries = register_op("cluster_queries", Inputs, _forward, fake=empty_labels)
