"""Clustering the queries of one head: K-means, K-means in the keys' metric, LSH. Plain PyTorch, any device."""

from typing import Any, NamedTuple

import torch

from ..kmeans.reference import as_sign, cluster_points
from ..kmeans.sampling import fit_rows

# Added to the diagonal of the metric, whose mean is 1: fewer keys than dimensions leave it singular.
METRIC_RIDGE = 1e-4


class Inputs(NamedTuple):
    """The arguments of every form, see the public op."""

    query: torch.Tensor
    key: torch.Tensor | None
    key_mask: torch.Tensor | None
    query_mask: torch.Tensor | None
    clusters: int
    method: str
    iterations: int
    bits: int
    fit_queries: int
    seed: int


def keys_metric(key: torch.Tensor) -> torch.Tensor:
    """`G` `(D, D)`, the covariance of the keys `(M, D)`, with 1 as the mean of its diagonal.

    `(Q_i - Q_j) G (Q_i - Q_j)^T` is, up to a factor, the variance over the keys of `Q_i·K_t - Q_j·K_t`: a shift of
    all scores of a query changes no softmax, so the keys' mean does not count. Equal keys leave the plain distance.
    """
    centered = key - key.mean(dim=0)
    return as_metric(centered.T @ centered / len(key))


def as_metric(covariance: torch.Tensor) -> torch.Tensor:
    """A covariance `(D, D)` with 1 as the mean of its diagonal, and the ridge."""
    size = covariance.diagonal().mean()
    return covariance / torch.where(size > 0, size, 1.0) + METRIC_RIDGE * torch.eye(len(covariance)).to(covariance)


def hash_planes(head_dim: int, bits: int, seed: int) -> torch.Tensor:
    """Random directions `(D, bits)`. Signs of projections as ±1: Hamming distance = (bits - dot product) / 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(head_dim, bits, generator=generator, dtype=torch.float64, device="cpu")


def cluster_head(query: torch.Tensor, key: torch.Tensor | None, x: Inputs) -> torch.Tensor:
    """Labels `(N,)` of the valid queries `(N, D)` of one head, given its valid keys `(M, D)`."""
    points, metric = query, None
    if x.method == "lsh":
        points = as_sign(query @ hash_planes(query.shape[1], x.bits, x.seed).to(query))
    elif key is not None and len(key):
        metric = keys_metric(key[fit_rows(len(key), x.clusters, x.fit_queries)])
    settings = x.clusters, x.iterations, x.fit_queries, x.seed
    return cluster_points(points, *settings, metric, binary=x.method == "lsh")[0]


def cluster_queries(*arguments: Any) -> torch.Tensor:
    """Labels `(B, H, N)`, head by head; a masked query has label 0."""
    x = Inputs(*arguments)
    query, key, key_mask, query_mask = x[:4]
    B, H, N, _ = query.shape
    labels = torch.zeros(B, H, N, dtype=torch.int64, device=query.device)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    for b in range(B):
        rows = slice(None) if query_mask is None else query_mask[b].nonzero()[:, 0]
        key_rows = slice(None) if key_mask is None else key_mask[b].nonzero()[:, 0]
        for h in range(H):
            keys = None if key is None else key[b, h // (H // key.shape[1]), key_rows].to(dtype)
            labels[b, h, rows] = cluster_head(query[b, h, rows].to(dtype), keys, x)
    return labels


def empty_labels(x: Inputs) -> torch.Tensor:
    """Memory for labels `(B, H, N)`, what `torch.compile` knows of the op."""
    return x.query.new_empty(x.query.shape[:3], dtype=torch.int64)
