"""K-means on the points of one problem, head by head. Plain PyTorch, any device."""

from typing import Any, NamedTuple

import torch

from ..shared.precision import accumulation_dtype
from .sampling import SEEDING, first_seed, fit_rows, strided_rows


class Inputs(NamedTuple):
    """The arguments of every form: problems are heads of points `(B, H, N, D)`, with a mask `(B, N)`."""

    points: torch.Tensor
    mask: torch.Tensor | None
    clusters: int
    iterations: int
    fit_points: int
    seed: int


def squared_distances(points: torch.Tensor, centers: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """`(x - c) G (x - c)^T` of points `(N, D)` and centers `(C, D)`: `(N, C)`; no metric: `G` is the identity."""
    columns = []
    for center in centers:
        difference = points - center
        moved = difference if metric is None else difference @ metric
        columns.append((moved * difference).sum(dim=1))
    return torch.stack(columns, dim=1)


def farthest_first(points: torch.Tensor, clusters: int, seed: int, metric: torch.Tensor | None) -> torch.Tensor:
    """Row numbers of `clusters` seeds: again and again the point farthest from all seeds so far."""
    chosen = [first_seed(len(points), seed)]
    distance = torch.full_like(points[:, 0], torch.inf)
    while len(chosen) < clusters:
        distance = distance.minimum(squared_distances(points, points[chosen[-1:]], metric)[:, 0])
        chosen.append(int(distance.argmax()))
    return torch.tensor(chosen, device=points.device)


def find_seeds(points: torch.Tensor, clusters: int, seed: int, metric: torch.Tensor | None) -> torch.Tensor:
    """Seeds `(C, D)` out of the fitted points `(N, D)`, found in as many groups as `sampling` says."""
    candidates = points[SEEDING.rows_of(len(points), clusters)]
    seeds = points.new_empty(clusters, points.shape[1])
    groups = SEEDING.groups(clusters)
    for i in range(groups):
        group, share = candidates[i::groups], len(range(i, clusters, groups))
        seeds[i::groups] = group[farthest_first(group, share, seed, metric)]
    return seeds


def nearest(points: torch.Tensor, centroids: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """Number of the centroid at the smallest squared distance, the first of equals."""
    return squared_distances(points, centroids, metric).argmin(dim=1)


def as_sign(points: torch.Tensor) -> torch.Tensor:
    """±1, with 0 counted as positive."""
    return torch.where(points >= 0, 1.0, -1.0).to(points)


def lloyd(
    points: torch.Tensor, centroids: torch.Tensor, iterations: int, metric: torch.Tensor | None, binary: bool
) -> torch.Tensor:
    """Lloyd's algorithm (majority bits where `binary`); an empty cluster keeps its centroid."""
    centroids = centroids.clone()
    for _ in range(iterations):
        labels = nearest(points, centroids, metric)
        for j in range(len(centroids)):
            member = points[labels == j]
            if len(member):
                centroids[j] = as_sign(member.mean(dim=0)) if binary else member.mean(dim=0)
    return centroids


def cluster_points(
    points: torch.Tensor,
    clusters: int,
    iterations: int,
    fit_points: int,
    seed: int,
    metric: torch.Tensor | None = None,
    binary: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels `(N,)` and centroids `(C, D)` of the points `(N, D)` that count.

    `metric` `(D, D)` weighs the distances. `binary` is for points of ±1: their evenly spread first ones are the seeds,
    as codes are few and far apart, and centroids are codes again.
    """
    if len(points) <= clusters:
        centroids = points.new_zeros(clusters, points.shape[1])
        centroids[: len(points)] = points
        return torch.arange(len(points), device=points.device), centroids
    fitted = points[fit_rows(len(points), clusters, fit_points)]
    seeds = fitted[strided_rows(len(fitted), clusters)] if binary else find_seeds(fitted, clusters, seed, metric)
    centroids = lloyd(fitted, seeds, iterations, metric, binary)
    return nearest(points, centroids, metric), centroids


def kmeans(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels `(B, H, N)` and centroids `(B, H, C, D)` of points `(B, H, N, D)`; a masked point has label 0."""
    points, mask, clusters, iterations, fit_points, seed = Inputs(*arguments)
    B, H, N, D = points.shape
    points = points.to(accumulation_dtype(points.dtype))
    labels = torch.zeros(B, H, N, dtype=torch.int64, device=points.device)
    centroids = points.new_zeros(B, H, clusters, D)
    for b in range(B):
        rows = slice(None) if mask is None else mask[b].nonzero()[:, 0]
        for h in range(H):
            labels[b, h, rows], centroids[b, h] = cluster_points(
                points[b, h, rows], clusters, iterations, fit_points, seed
            )
    return labels, centroids


def empty_clusters(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for labels and centroids, what `torch.compile` knows of the op."""
    (B, H, N, D), dtype = x.points.shape, accumulation_dtype(x.points.dtype)
    return x.points.new_empty(B, H, N, dtype=torch.int64), x.points.new_empty(B, H, x.clusters, D, dtype=dtype)
