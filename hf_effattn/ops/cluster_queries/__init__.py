"""Clustering of the queries of every head."""

import torch

from ..arguments import check_count, check_mask, choose_backend
from . import reference

METHODS = ("kmeans", "lsh")
DEFAULT_ITERATIONS = 3
DEFAULT_BITS = 32


def cluster_queries(
    query: torch.Tensor,
    clusters: int,
    *,
    method: str = "kmeans",
    key: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    iterations: int = DEFAULT_ITERATIONS,
    bits: int = DEFAULT_BITS,
    query_mask: torch.Tensor | None = None,
    seed: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Put every query of every head into one of `clusters` clusters (docstring to be completed)."""
    check_count("clusters", clusters)
    B, H, N, _ = query.shape
    labels = torch.zeros(B, H, N, dtype=torch.int64, device=query.device)
    for b in range(B):
        rows = torch.arange(N) if query_mask is None else query_mask[b].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        for h in range(H):
            points = query[b, h, rows].detach().float()
            labels[b, h, rows] = reference.nearest(points, reference.lloyd(points, clusters, iterations, seed, False))
    return labels
