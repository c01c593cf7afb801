"""Clustering the queries on a GPU: hash codes, or K-means in the keys' metric."""

import torch
import triton.language as tl

from ...kmeans.reference import as_sign
from ...kmeans.sampling import most_fit_rows
from ...kmeans.triton import assign, fit, own_clusters
from ...kmeans.triton.rows import find_rows
from ...shared.gradients import register_op
from ...shared.triton.launch import kernel
from ..reference import Inputs, empty_labels
from .metric import keys_metric


@kernel
def _cluster_queries_planes_kernel(planes_ptr, numbers, seed, BLOCK: tl.constexpr):
    """Independent numbers, each a sum of 12 uniform ones: normal enough for directions, without sine and cosine."""
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.full([BLOCK], -6.0, tl.float32)
    for part in range(3):
        a, b, c, d = tl.rand4x(seed, 3 * o_n + part)
        b_sum += a + b + c + d
    tl.store(planes_ptr + o_n, b_sum, mask=o_n < numbers)


def draw_planes(query: torch.Tensor, bits: int, seed: int) -> torch.Tensor:
    """Hash planes `(D, bits)`, drawn on the GPU at every call: a CUDA graph cannot capture a copy from the host.

    They are not those of the other forms, whose generator runs on the host only.
    """
    planes = query.new_empty(query.shape[3], bits)
    _cluster_queries_planes_kernel[(-(-planes.numel() // 1024),)](planes, planes.numel(), seed, BLOCK=1024)
    return planes


def share_rows(
    query: torch.Tensor, key: torch.Tensor, query_mask: torch.Tensor | None, key_mask: torch.Tensor | None
) -> bool:
    """Whether queries and keys have the same rows that count, as in self-attention."""
    if query_mask is None or key_mask is None:
        return query.shape[2] == key.shape[2] and query_mask is key_mask
    same_layout = query_mask.shape == key_mask.shape and query_mask.stride() == key_mask.stride()
    return same_layout and query_mask.data_ptr() == key_mask.data_ptr()


def _forward(x: Inputs) -> torch.Tensor:
    """Labels `(B, H, N)`; a masked query has label 0."""
    query, key, key_mask, query_mask, clusters, method, iterations, bits, fit_queries, seed = x
    B, H, N, _ = query.shape
    if query.numel() == 0 or clusters >= N:
        return own_clusters(query, query_mask)
    most = most_fit_rows(clusters, fit_queries)
    rows = find_rows(query, query_mask, most)
    points, metric = query, None
    if method == "lsh":
        with torch.autocast(query.device.type, enabled=False):
            points = as_sign(query @ draw_planes(query, bits, seed))
    elif key is not None and key.shape[2]:
        key_rows = rows if share_rows(query, key, query_mask, key_mask) else find_rows(key, key_mask, most)
        metric = keys_metric(key, key_rows)
    centroids = fit(points, rows, metric, clusters, iterations, seed, binary=method == "lsh")
    labels = torch.empty(B, H, N, dtype=torch.int64, device=query.device)
    assign(points, rows, centroids, labels)
    return labels


cluster_queries = register_op("cluster_queries_triton", Inputs, _forward, fake=empty_labels)
