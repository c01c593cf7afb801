"""Clustering the queries of one head: K-means, K-means in the keys' metric, LSH. Plain PyTorch, any device."""

import torch

# Added to the diagonal of the keys' covariance, as a share of its mean: fewer keys than dimensions leave it singular.
METRIC_RIDGE = 1e-4
# Centroids are fitted on at least this many queries per cluster.
FIT_QUERIES_PER_CLUSTER = 4
# Farthest-first seeding looks at this many of them, or at this many per cluster.
SEEDING_QUERIES = 512
SEEDING_QUERIES_PER_CLUSTER = 2


def strided_rows(length: int, count: int) -> torch.Tensor:
    """`count` row numbers evenly spread over `0 .. length - 1` (all of them where `count >= length`)."""
    count = min(length, count)
    return torch.arange(count) * length // max(1, count)


def fit_rows(length: int, clusters: int, fit_queries: int) -> torch.Tensor:
    """The rows, of queries or of keys, that the centroids and their metric are fitted on."""
    return strided_rows(length, max(fit_queries, FIT_QUERIES_PER_CLUSTER * clusters))


def seeding_rows(length: int, clusters: int) -> torch.Tensor:
    """The rows among the fitted ones that can become seeds."""
    return strided_rows(length, max(SEEDING_QUERIES, SEEDING_QUERIES_PER_CLUSTER * clusters))


def in_keys_metric(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Queries `(N, D)` moved so that their squared distance is the mean squared difference of their scores.

    With `G` the covariance of the keys, `(Q_i - Q_j) G (Q_i - Q_j)^T` is the variance over the keys of
    `Q_i·K_t - Q_j·K_t`: a shift of all scores of a query changes no softmax, so the keys' mean does not count.
    """
    centered = key - key.mean(dim=0)
    covariance = centered.T @ centered / len(key)
    ridge = METRIC_RIDGE * covariance.diagonal().mean() + torch.finfo(key.dtype).tiny
    return query @ torch.linalg.cholesky(covariance + ridge * torch.eye(key.shape[1]).to(key))


def hash_planes(head_dim: int, bits: int, seed: int) -> torch.Tensor:
    """Random directions `(D, bits)`. Signs of projections as ±1: Hamming distance = (bits - dot product) / 2."""
    return torch.randn(head_dim, bits, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_sign(points: torch.Tensor) -> torch.Tensor:
    """±1, with 0 counted as positive."""
    return torch.where(points >= 0, 1.0, -1.0).to(points)


def first_seed(length: int, seed: int) -> int:
    """The point that farthest-first seeding starts from."""
    return int(torch.randint(length, (1,), generator=torch.Generator().manual_seed(seed)))


def farthest_first(points: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """Seeds for K-means: again and again the point farthest from all seeds so far."""
    chosen = [first_seed(len(points), seed)]
    distance = torch.full_like(points[:, 0], torch.inf)
    while len(chosen) < clusters:
        distance = distance.minimum((points - points[chosen[-1]]).square().sum(dim=1))
        chosen.append(int(distance.argmax()))
    return points[chosen]


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Number of the centroid at the smallest squared distance, the first of equals."""
    return (centroids.square().sum(dim=1) / 2 - points @ centroids.T).argmin(dim=1)


def lloyd(points: torch.Tensor, centroids: torch.Tensor, iterations: int, binary: bool) -> torch.Tensor:
    """Lloyd's algorithm (majority bits where `binary`); an empty cluster keeps its centroid."""
    centroids = centroids.clone()
    for _ in range(iterations):
        labels = nearest(points, centroids)
        for j in range(len(centroids)):
            member = points[labels == j]
            if len(member):
                centroids[j] = as_sign(member.mean(dim=0)) if binary else member.mean(dim=0)
    return centroids


def cluster_head(
    query: torch.Tensor,
    key: torch.Tensor | None,
    clusters: int,
    method: str,
    iterations: int,
    bits: int,
    fit_queries: int,
    seed: int,
) -> torch.Tensor:
    """Labels `(N,)` of the valid queries `(N, D)` of one head, given its valid keys `(M, D)`."""
    if len(query) <= clusters:
        return torch.arange(len(query), device=query.device)
    rows = fit_rows(len(query), clusters, fit_queries)
    if method == "lsh":
        points = as_sign(query @ hash_planes(query.shape[1], bits, seed).to(query))
        fitted = points[rows]
        seeds = fitted[strided_rows(len(fitted), clusters)]
    else:
        points = query
        if key is not None and len(key):
            points = in_keys_metric(query, key[fit_rows(len(key), clusters, fit_queries)])
        fitted = points[rows]
        seeds = farthest_first(fitted[seeding_rows(len(fitted), clusters)], clusters, seed)
    return nearest(points, lloyd(fitted, seeds, iterations, binary=method == "lsh"))


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
    """Labels `(B, H, N)`, head by head; a masked query has label 0."""
    B, H, N, _ = query.shape
    labels = torch.zeros(B, H, N, dtype=torch.int64, device=query.device)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    for b in range(B):
        rows = slice(None) if query_mask is None else query_mask[b].nonzero()[:, 0]
        key_rows = slice(None) if key_mask is None else key_mask[b].nonzero()[:, 0]
        for h in range(H):
            keys = None if key is None else key[b, h, key_rows].to(dtype)
            labels[b, h, rows] = cluster_head(
                query[b, h, rows].to(dtype), keys, clusters, method, iterations, bits, fit_queries, seed
            )
    return labels
