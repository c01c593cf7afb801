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
from ...kmeans.sampling import most_fit_rows
from ...kmeans.triton import assign, fit, own_clusters
from ...kmeans.triton.rows import Rows as CountedRows
from ...kmeans.triton.rows import find_rows
from ...shared.triton.sort import SortedRows, sort_by_cluster
from .layout import Layout, Rows
from .metric import known_centroids, offsets_metrics, prefix_metrics


class Clusters(NamedTuple):
    """Of all late segments."""

    labels: torch.Tensor  # of the past queries, `(L · P · g, n)`
    centroids: torch.Tensor  # `(L · P · g, C, D)` in the dtype of the query
    sizes: torch.Tensor  # of their clusters, `(L · P · g, C)` int32
    readers: SortedRows  # the segments' own queries, by the nearest centroid
    keys: SortedRows  # of every block, by cluster
    # `log2 d_t²` of every place of a block `(L · P, n)`, -inf without a key; None in a backward pass, and where no
    # summary follows the query
    log_squares: torch.Tensor | None
    exact: torch.Tensor | None  # `(L, P)`: heads that attend exactly to all older keys; None: none does


def find_clusters(layout: Layout, rows: Rows, counts: torch.Tensor | None, tiles: tuple[int, int]) -> Clusters:
    """Of these rows; `counts`: tokens of each item that count, `tiles`: rows of a tile of queries, and of keys."""
    settings, L, (_, _, _, D) = layout.settings, layout.late, rows.query.shape
    P, g, n, C = rows.heads // rows.group, rows.group, settings.segment_length, settings.clusters
    past, past_mask = layout.past(rows.query), layout.past_mask(counts)
    blocks, key_mask = layout.of_segments(rows.key, 0, L), layout.key_mask()
    metric = prefix_metrics(layout, rows)
    labels = kmeans_labels(past, past_mask, metric, C, layout)
    queries = sort_by_cluster(labels, past_mask, C, tiles[0])
    centroids = rows.query.new_empty(L * P * g, C, D)
    products, _ = cluster_products(past, past, queries, centroids, parts=1)
    chosen = torch.empty(L, P * g, n, dtype=torch.int64, device=centroids.device)
    own = layout.of_segments(rows.query, layout.first_late, L)
    assign(own, CountedRows(n, n), known_centroids(centroids, queries.starts, metric), chosen)
    readers = sort_by_cluster(chosen, None, C, tiles[0])
    sizes = queries.starts[:, : C + 1].diff(dim=1)

    if not settings.first_order:
        key_labels = torch.zeros(L, P, n, dtype=torch.int64, device=centroids.device)
        keys = sort_by_cluster(key_labels, key_mask, 1, tiles[1])
        return Clusters(labels.view(L * P * g, n), centroids, sizes, readers, keys, None, None)
    key_labels = kmeans_labels(
        blocks, key_mask, offsets_metrics(layout, rows, products), settings.key_clusters, layout
    )
    keys = sort_by_cluster(key_labels, key_mask, settings.key_clusters, tiles[1])
    mean_keys = torch.empty(L * P, settings.key_clusters, D, dtype=torch.float32, device=centroids.device)
    spread, _ = cluster_products(blocks, blocks, keys, mean_keys, parts=1)
    log_squares, _ = distances_of(blocks, keys, mean_keys, products, queries, g, settings.scale)
    exact = None
    if settings.exact_above < inf:
        exact = predicted_errors(layout, products, sizes, spread, g) > settings.exact_above
    return Clusters(labels.view(L * P * g, n), centroids, sizes, readers, keys, log_squares, exact)


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
