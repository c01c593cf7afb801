"""K-means and LSH clustering of the queries of every head, one head at a time. Plain PyTorch, any device."""

import torch


def seed_centroids(points: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """`clusters` of the points, evenly spread over the sequence; the seed shifts where in each stretch they lie."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.rand(clusters, generator=generator)
    ranks = ((torch.arange(clusters) + shift) * len(points) / clusters).long().clamp(max=len(points) - 1)
    return points[ranks.to(points.device)]


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Index of the centroid at the smallest squared distance: `|c|²/2 - p·c`, the first of equals."""
    return (centroids.square().sum(dim=1) / 2 - points @ centroids.T).argmin(dim=1)


def lloyd(points: torch.Tensor, clusters: int, iterations: int, seed: int, binary: bool) -> torch.Tensor:
    """Lloyd's algorithm; an empty cluster keeps its centroid."""
    centroids = seed_centroids(points, clusters, seed)
    for _ in range(iterations):
        labels = nearest(points, centroids)
        for j in range(clusters):
            member = points[labels == j]
            if len(member):
                mean = member.mean(dim=0)
                centroids[j] = mean.sign() if binary else mean
    return centroids
