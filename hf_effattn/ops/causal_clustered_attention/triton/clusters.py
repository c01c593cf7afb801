"""What late segments read: clusters of past queries, and the finished keys by cluster, for all segments at once.

Sizes as in `layout`; `P = B · Hk` key/value heads, `g` query heads that share one, `C` and `G` clusters of queries and
of a block's keys. What belongs to the late segments has them first: `L · P` problems of keys, `L · P · g` of queries.
"""

from math import inf
from typing import NamedTuple

import torch

from ...bi_clustered_attention.offsets import ERROR_PER_VARIANCE
from ...bi_clustered_attention.triton.forward import distances_of
from ...bi_clustered_attention.triton.products import cluster_products
from ...cluster_queries.batched import as_metric
from ...kmeans.sampling import most_fit_rows
from ...kmeans.triton import Centroids, assign, fit, own_clusters
from ...kmeans.triton.rows import Rows, find_rows
from ...kmeans.triton.seeding import FLOAT16_SCALE
from ...shared.triton.sort import SortedRows, sort_by_cluster
from .layout import Layout


class Clusters(NamedTuple):
    """Of all late segments."""

    labels: torch.Tensor  # of the past queries, `(L · P · g, n)`
    centroids: torch.Tensor  # `(L · P · g, C, D)` in the dtype of the query
    sizes: torch.Tensor  # of their clusters, `(L · P · g, C)` int32
    readers: SortedRows  # the segments' own queries, by the nearest centroid
    keys: SortedRows  # of every block, by cluster
    log_squares: torch.Tensor | None  # `log2 d_t²` of every place of a block `(L · P, n)`; None in a backward pass
    exact: torch.Tensor | None  # `(L, P)`: heads that attend exactly to all older keys; None: none does


def find_clusters(
    layout: Layout, query: torch.Tensor, key: torch.Tensor, counts: torch.Tensor | None, tiles: tuple[int, int]
) -> Clusters:
    """Of queries and keys as `layout` lays them out; `tiles` are rows of a tile of queries, and of one of keys."""
    settings, L, (B, H, _, D) = layout.settings, layout.late, query.shape
    P, g, n, C = B * key.shape[1], H // key.shape[1], settings.segment_length, settings.clusters
    past, past_mask = layout.past(query), layout.past_mask(counts)
    blocks, key_mask = layout.of_segments(key, 0, L), layout.key_mask()
    metric = prefix_metrics(layout, blocks)
    labels = kmeans_labels(past, past_mask, metric, C, layout)
    queries = sort_by_cluster(labels, past_mask, C, tiles[0])
    centroids = query.new_empty(L * P * g, C, D)
    products, _ = cluster_products(past, past, queries, centroids, parts=1)
    sizes = queries.starts[:, : C + 1].diff(dim=1)
    chosen = nearest_centroids(layout.of_segments(query, layout.first_late, L), centroids, metric, sizes)
    readers = sort_by_cluster(chosen, None, C, tiles[0])

    exact, log_squares = None, torch.zeros(L * P, n, dtype=torch.float32, device=key.device)
    key_labels = torch.zeros(L, P, n, dtype=torch.int64, device=key.device)
    if settings.first_order:
        covariance = products.view(L * P, g, D, D).mean(dim=1)
        key_labels = kmeans_labels(blocks, key_mask, as_metric(covariance), settings.key_clusters, layout)
    keys = sort_by_cluster(key_labels, key_mask, settings.key_clusters, tiles[1])
    if settings.first_order:
        mean_keys = torch.empty(L * P, settings.key_clusters, D, dtype=torch.float32, device=key.device)
        spread, _ = cluster_products(blocks, blocks, keys, mean_keys, parts=1)
        log_squares, _ = distances_of(blocks, keys, mean_keys, products, queries, g, settings.scale)
        if settings.exact_above < inf:
            exact = predicted_errors(layout, products, sizes, spread, g) > settings.exact_above
    return Clusters(labels.view(L * P * g, n), centroids, sizes, readers, keys, log_squares, exact)


def prefix_metrics(layout: Layout, blocks: torch.Tensor) -> torch.Tensor:
    """Of every late segment the metric of all keys that are older, `(L · P, D, D)` float32; blocks `(L, P, n, D)`."""
    L, n, rows = layout.late, blocks.shape[2], blocks.float()
    # Around a mean near all keys: the product of the sums would eat the digits of the sum of the products.
    first = rows[:1].sum(dim=2, keepdim=True) / (n - layout.shift)
    rows = rows - first
    rows[0, :, : layout.shift] = 0
    sums, products = rows.sum(dim=2, keepdim=True).cumsum(dim=0), (rows.mT @ rows).cumsum(dim=0)
    older = torch.arange(1, L + 1, device=rows.device).view(L, 1, 1, 1) * n - layout.shift
    means = sums / older
    return as_metric((products / older - means.mT * means).flatten(0, 1))


def kmeans_labels(
    points: torch.Tensor, mask: torch.Tensor | None, metric: torch.Tensor, clusters: int, layout: Layout
) -> torch.Tensor:
    """Labels `(items, heads, n)` by K-means of points `(items, heads, n, D)`; of fewer points, each is a cluster."""
    settings = layout.settings
    if clusters >= points.shape[2]:
        return own_clusters(points, mask)
    rows = find_rows(points, mask, most_fit_rows(clusters, settings.fit_queries))
    fitted = fit(points, rows, metric, clusters, settings.rounds, settings.seed)
    labels = torch.empty(points.shape[:3], dtype=torch.int64, device=points.device)
    assign(points, rows, fitted, labels)
    return labels


def nearest_centroids(
    query: torch.Tensor, centroids: torch.Tensor, metric: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """The number of the nearest centroid `(L, B · H, n)` to queries `(L, B · H, n, D)`, none of an empty cluster."""
    heads, C, D = centroids.shape
    points = centroids.float()
    directions = (points.view(len(metric), -1, D) @ metric).view(heads, C, D)
    if query.dtype == torch.float16:
        directions = (directions * FLOAT16_SCALE.value).clamp_(-65504.0, 65504.0)
    half_norms = (directions * points).sum(dim=2) / 2
    labels = torch.empty(query.shape[:3], dtype=torch.int64, device=query.device)
    known = Centroids(points, points, directions.to(query.dtype), half_norms.masked_fill_(sizes == 0, inf))
    assign(query, Rows(query.shape[2], query.shape[2]), known, labels)
    return labels


def predicted_errors(
    layout: Layout, products: torch.Tensor, sizes: torch.Tensor, spread: torch.Tensor, group: int
) -> torch.Tensor:
    """The error that first order will make in every late segment `(L, P)`, of the worst query head.

    `products` are those of offsets `(L · P · g, D, D)`, `spread` those of a block's keys in their clusters
    `(L · P, D, D)`.
    """
    L, settings = layout.late, layout.settings
    older = torch.arange(1, L + 1, device=spread.device)[:, None] * settings.segment_length - layout.shift
    within = spread.view(L, -1, 1, spread[0].numel()).cumsum(dim=0)
    of_heads = products.view(L, -1, group, spread[0].numel())
    counted = sizes.sum(dim=1).clamp(min=1).view(L, -1, group)
    variances = torch.linalg.vecdot(of_heads, within) / counted
    return variances.amax(dim=2) / older * (settings.scale**2 * ERROR_PER_VARIANCE)
