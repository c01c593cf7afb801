"""Clustering the queries for a CPU: all heads of a chunk at once. To `torch.compile` it is one op."""

import torch

from ..clustered_attention.batched import accumulation_dtype, cluster_rows, cluster_sizes, cluster_sums
from ..row_chunks import row_chunks
from .reference import (
    METRIC_RIDGE,
    SEEDING_QUERIES,
    SEEDING_QUERIES_PER_CLUSTER,
    as_sign,
    first_seed,
    hash_bits,
    strided_rows,
)


def in_keys_metric(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Queries `(P, N, D)` whose distances are those of their scores against the keys `(P, M, D)`; see reference."""
    centered = key - key.mean(dim=1, keepdim=True)
    covariance = centered.transpose(1, 2) @ centered / key.shape[1]
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    diagonal += METRIC_RIDGE * diagonal.mean(dim=1, keepdim=True) + torch.finfo(key.dtype).tiny
    # No check of success: a failure needs values that are not finite, and any labels are legal labels.
    factor, _ = torch.linalg.cholesky_ex(covariance)
    return query @ factor


def farthest_first(points: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """Seeds `(P, C, D)` out of the points `(P, N, D)`: again and again the one farthest from all so far."""
    P, N, D = points.shape
    heads = torch.arange(P, device=points.device)
    seeds = points.new_empty(P, clusters, D)
    seeds[:, 0] = points[:, first_seed(N, seed)]
    norms = points.square().sum(dim=2)
    distance = torch.full_like(norms, torch.inf)
    for j in range(1, clusters):
        last = seeds[:, j - 1, :, None]
        # |p - s|² without |s|², which is added where it matters: distances to different seeds are compared.
        to_last = torch.baddbmm(norms[..., None], points, last, alpha=-2)[..., 0].add_(last.square().sum(dim=1))
        torch.minimum(distance, to_last, out=distance)
        seeds[:, j] = points[heads, distance.argmax(dim=1)]
    return seeds


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Number of the nearest centroid `(P, C, D)` of every point `(P, N, D)`: `(P, N)`."""
    half_norms = centroids.square().sum(dim=2)[:, None] / 2
    return torch.baddbmm(half_norms, points, centroids.transpose(1, 2), alpha=-1).argmin(dim=2)


def lloyd(points: torch.Tensor, centroids: torch.Tensor, iterations: int, binary: bool) -> torch.Tensor:
    """Lloyd's algorithm (majority bits where `binary`); an empty cluster keeps its centroid."""
    P, clusters, _ = centroids.shape
    for _ in range(iterations):
        index = cluster_rows(nearest(points, centroids), clusters)
        sizes = cluster_sizes(index, P, clusters)[..., None]
        means = cluster_sums(points, index, P, clusters) / sizes.clamp(min=1)
        centroids = torch.where(sizes > 0, as_sign(means) if binary else means, centroids)
    return centroids


@torch.library.custom_op("hf_effattn::cluster_queries", mutates_args=())
def cluster_queries(
    query: torch.Tensor,
    key: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    clusters: int,
    method: str,
    iterations: int,
    bits: int,
    fit_queries: int,
    seed: int,
) -> torch.Tensor:
    """Labels `(B, H, N)`; a masked query has label 0."""
    B, H, N, D = query.shape
    dtype = accumulation_dtype(query.dtype)
    labels = torch.zeros(B, H, N, 1, dtype=torch.int64, device=query.device)
    binary = method == "lsh"
    bytes_per_head = N * max(clusters, D) * dtype.itemsize
    with torch.autocast(query.device.type, enabled=False):
        for chunk in row_chunks(query, key_mask, query_mask, bytes_per_head):
            points = chunk.queries(query).to(dtype)
            P, rows, _ = points.shape
            if rows <= clusters:
                own = torch.arange(rows, device=query.device).expand(P, rows)
                chunk.store_queries(labels, own[..., None])
                continue
            if binary:
                points = hash_bits(points.flatten(0, 1), bits, seed).view(P, rows, bits)
            elif key is not None:
                keys = chunk.keys(key).to(dtype)
                points = in_keys_metric(points, keys) if keys.shape[1] else points
            fitted = points[:, strided_rows(rows, fit_queries)] if fit_queries < rows else points
            if binary:
                centroids = fitted[:, strided_rows(fitted.shape[1], clusters)]
            else:
                candidates = max(SEEDING_QUERIES, SEEDING_QUERIES_PER_CLUSTER * clusters)
                centroids = farthest_first(fitted[:, strided_rows(fitted.shape[1], candidates)], clusters, seed)
            centroids = lloyd(fitted, centroids, iterations, binary)
            chunk.store_queries(labels, nearest(points, centroids)[..., None])
    return labels[..., 0]


@cluster_queries.register_fake
def _(query, *settings):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape[:3], dtype=torch.int64)
