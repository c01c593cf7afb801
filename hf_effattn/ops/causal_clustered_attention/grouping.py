"""K-means of the rows that a segment's clusters are made of."""

import torch

from ..kmeans.batched import find_seeds, lloyd, nearest, prepare
from ..kmeans.sampling import fit_rows
from .reference import Settings


def labels_of(points: torch.Tensor, clusters: int, settings: Settings, metric: torch.Tensor) -> torch.Tensor:
    """Labels `(heads, n)` by K-means of points `(heads, n, D)`; of fewer points, each is a cluster."""
    n = points.shape[1]
    if n <= clusters:
        return torch.arange(n, device=points.device).expand(len(points), n)
    rows = fit_rows(n, clusters, settings.fit_queries)
    fitted = points if len(rows) == n else points.index_select(1, rows.to(points.device))
    seeds = find_seeds(fitted, clusters, settings.seed, metric)
    return nearest(points, *prepare(lloyd(fitted, seeds, settings.rounds, metric, binary=False), metric))
