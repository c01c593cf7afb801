"""Clustering the queries for a CPU: all heads of a chunk at once. To `torch.compile` it is one op."""

import torch

from ..clustered_attention.batched import accumulation_dtype, cluster_rows, cluster_sizes, cluster_sums
from ..row_chunks import CHUNK_BYTES, RowChunk, row_chunks
from .reference import (
    METRIC_RIDGE,
    as_sign,
    first_seed,
    fit_rows,
    hash_planes,
    seeding_rows,
    strided_rows,
)


def metric_factor(key: torch.Tensor) -> torch.Tensor:
    """`L (P, D, D)`, lower triangular: `Q L` has the distances of the scores against the keys `(P, M, D)`."""
    centered = key - key.mean(dim=1, keepdim=True)
    covariance = centered.transpose(1, 2) @ centered / key.shape[1]
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    diagonal += METRIC_RIDGE * diagonal.mean(dim=1, keepdim=True) + torch.finfo(key.dtype).tiny
    # No check of success: a failure needs values that are not finite, and any labels are legal labels.
    factor, _ = torch.linalg.cholesky_ex(covariance)
    return factor


def farthest_first(points: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """Seeds `(P, C, D)` out of the points `(P, N, D)`: again and again the one farthest from all so far."""
    P, N, D = points.shape
    norms = points.square().sum(dim=2)
    # All distances at once: what is left for each of the C steps is too small to be worth a second thread.
    distances = torch.baddbmm(norms[:, :, None] + norms[:, None], points, points.transpose(1, 2), alpha=-2)
    distances = distances.flatten(0, 1)  # row p · N + i: distances of point i of head p
    first_row = torch.arange(P, device=points.device) * N
    chosen = [first_row + first_seed(N, seed)]
    nearest_seed = torch.full_like(norms, torch.inf)
    for _ in range(1, clusters):
        torch.minimum(nearest_seed, distances.index_select(0, chosen[-1]), out=nearest_seed)
        chosen.append(nearest_seed.argmax(dim=1) + first_row)
    return points.flatten(0, 1).index_select(0, torch.stack(chosen, dim=1).flatten()).view(P, clusters, D)


def nearest(points: torch.Tensor, directions: torch.Tensor, half_norms: torch.Tensor) -> torch.Tensor:
    """Number of the centroid at the smallest `|c|²/2 - p·c` for every point `(P, N, D)`: `(P, N)`."""
    return torch.baddbmm(half_norms[:, None], points, directions.transpose(1, 2), alpha=-1).argmin(dim=2)


def half_norms(centroids: torch.Tensor) -> torch.Tensor:
    """`|c|²/2`, `(P, C)`."""
    return centroids.square().sum(dim=2) / 2


def lloyd(points: torch.Tensor, centroids: torch.Tensor, iterations: int, binary: bool) -> torch.Tensor:
    """Lloyd's algorithm (majority bits where `binary`); an empty cluster keeps its centroid."""
    P, clusters, _ = centroids.shape
    for _ in range(iterations):
        index = cluster_rows(nearest(points, centroids, half_norms(centroids)), clusters)
        sizes = cluster_sizes(index, P, clusters)[..., None]
        means = cluster_sums(points, index, P, clusters) / sizes.clamp(min=1)
        centroids = torch.where(sizes > 0, as_sign(means) if binary else means, centroids)
    return centroids


def label_chunk(
    chunk: RowChunk,
    labels: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    clusters: int,
    method: str,
    iterations: int,
    bits: int,
    fit_queries: int,
    seed: int,
) -> None:
    """Fit the centroids of a chunk on some of its queries and write the labels of all of them."""
    dtype = accumulation_dtype(query.dtype)
    heads = chunk.last_head - chunk.first_head
    rows = query.shape[2] if chunk.query_rows is None else len(chunk.query_rows)
    if rows <= clusters:
        chunk.store_queries(labels, torch.arange(rows, device=query.device)[:, None].expand(heads, rows, 1))
        return
    chosen = fit_rows(rows, clusters, fit_queries).to(query.device)
    fitted = chunk.queries(query, chosen).to(dtype)
    planes = factor = None
    if method == "lsh":
        planes = hash_planes(query.shape[3], bits, seed).to(fitted)
        fitted = as_sign(fitted @ planes)
        centroids = fitted[:, strided_rows(fitted.shape[1], clusters)]
    else:
        keys = 0 if key is None else key.shape[2] if chunk.key_rows is None else len(chunk.key_rows)
        if key is not None and keys:
            chosen = fit_rows(keys, clusters, fit_queries).to(query.device)
            factor = metric_factor(chunk.keys(key, chosen).to(dtype))
            fitted = fitted @ factor
        centroids = farthest_first(fitted[:, seeding_rows(fitted.shape[1], clusters)], clusters, seed)
    centroids = lloyd(fitted, centroids, iterations, binary=method == "lsh")

    # (Q L)·c = Q·(c L^T): move the centroids instead of all the queries.
    directions = centroids if factor is None else centroids @ factor.transpose(1, 2)
    norms = half_norms(centroids)
    step = max(1, CHUNK_BYTES // (heads * clusters * dtype.itemsize))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        points = chunk.queries(query, part).to(dtype)
        points = points if planes is None else as_sign(points @ planes)
        chunk.store_queries(labels, nearest(points, directions, norms)[..., None], part)


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
    labels = torch.zeros(B, H, N, 1, dtype=torch.int64, device=query.device)
    rows = len(fit_rows(N, clusters, fit_queries))
    # A quarter: the seeding is a long chain of small steps, better walked once for many heads.
    bytes_per_head = rows * max(clusters, D, bits) * accumulation_dtype(query.dtype).itemsize // 4
    with torch.autocast(query.device.type, enabled=False):
        for chunk in row_chunks(query, key_mask, query_mask, bytes_per_head):
            label_chunk(chunk, labels, query, key, clusters, method, iterations, bits, fit_queries, seed)
    return labels[..., 0]


@cluster_queries.register_fake
def _(query, *settings):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape[:3], dtype=torch.int64)
