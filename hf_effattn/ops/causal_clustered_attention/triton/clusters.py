"""What late segments read: clusters of previous queries, and the completed keys by cluster, for all segments at once.

Sizes as in `layout`; `P = B · Hk` key/value heads, `g` query heads that share one, `C` and `G` clusters of queries and
of a block's keys. What belongs to the late segments has them first: `L · P` problems of keys, `L · P · g` of queries.
"""

from math import inf
from typing import NamedTuple

import torch
import triton.language as tl

from ...bi_clustered_attention.residuals import ERROR_PER_VARIANCE
from ...bi_clustered_attention.triton.forward import distances_of
from ...bi_clustered_attention.triton.products import cluster_products
from ...kmeans.sampling import most_fit_rows
from ...kmeans.triton import assign, fit, own_clusters
from ...kmeans.triton.rows import Rows as CountedRows
from ...kmeans.triton.rows import find_rows
from ...shared.triton.launch import kernel
from ...shared.triton.sort import SortedRows, sort_by_cluster
from .layout import Layout, Rows
from .metric import known_centroids, prefix_metrics, residual_metrics


class Clusters(NamedTuple):
    """Clusters of all late segments."""

    labels: torch.Tensor  # of the previous queries, `(L · P · g, n)`
    centroids: torch.Tensor  # `(L · P · g, C, D)` in the dtype of the query
    starts: torch.Tensor  # of their clusters, see `SortedRows`, `(L · P · g, C + 2)`
    readers: SortedRows  # the segments' own queries, by the nearest centroid
    keys: SortedRows  # of every block, by cluster
    # `log2 d_t²` of every place of a block `(L · P, n)`, -inf without a key; None in a backward pass, and where no
    # summary follows the query
    log_squares: torch.Tensor | None
    exact: torch.Tensor | None  # `(L, P)`: heads that attend exactly to all distant keys; None: none does


def find_clusters(layout: Layout, rows: Rows, tiles: tuple[int, int]) -> Clusters:
    """Clusters of these rows; `tiles`: rows of a tile of queries, and of keys."""
    settings, L, (_, _, _, D) = layout.settings, layout.late, rows.query.shape
    P, g, n, C = rows.heads // rows.group, rows.group, settings.segment_length, settings.clusters
    previous = layout.of_segments(rows.query, layout.first_previous, L)
    blocks, key_mask = layout.of_segments(rows.key, 0, L), layout.key_mask()
    metric = None if C == 1 else prefix_metrics(layout, rows)
    labels = kmeans_labels(previous, None, metric, C, layout)
    queries = sort_by_cluster(labels, None, C, tiles[0])
    centroids = rows.query.new_empty(L * P * g, C, D)
    products, _ = cluster_products(previous, previous, queries, centroids, parts=1)
    chosen = labels.view(L, P * g, n)
    if metric is not None:
        chosen = torch.empty_like(chosen)
        late_queries = layout.of_segments(rows.query, layout.first_late, L)
        assign(late_queries, CountedRows(n, n), known_centroids(centroids, queries.starts, metric), chosen)
    readers = sort_by_cluster(chosen, None, C, tiles[0])

    key_metric = residual_metrics(layout, rows, products) if settings.key_clusters > 1 else None
    key_labels = kmeans_labels(blocks, key_mask, key_metric, settings.key_clusters, layout)
    keys = sort_by_cluster(key_labels, key_mask, settings.key_clusters, tiles[1])
    if not settings.linear_summaries:
        return Clusters(labels.view(L * P * g, n), centroids, queries.starts, readers, keys, None, None)
    mean_keys = torch.empty(L * P, settings.key_clusters, D, dtype=torch.float32, device=centroids.device)
    spread, _ = cluster_products(blocks, blocks, keys, mean_keys, parts=1)
    log_squares, _ = distances_of(blocks, keys, mean_keys, products, queries, g, settings.scale)
    exact = None
    if settings.max_predicted_error < inf:
        exact = too_far(layout, rows, products, queries.starts, spread)
    return Clusters(labels.view(L * P * g, n), centroids, queries.starts, readers, keys, log_squares, exact)


def kmeans_labels(
    points: torch.Tensor, mask: torch.Tensor | None, metric: torch.Tensor | None, clusters: int, layout: Layout
) -> torch.Tensor:
    """Labels `(items, heads, n)` by K-means of points `(items, heads, n, D)`; of fewer points, each is a cluster.

    `metric`: None for one cluster.
    """
    settings = layout.settings
    if metric is None:
        return torch.zeros(points.shape[:3], dtype=torch.int64, device=points.device)
    if clusters >= points.shape[2]:
        return own_clusters(points, mask)
    rows = find_rows(points, mask, most_fit_rows(clusters, settings.fit_queries))
    fitted = fit(points, rows, metric, clusters, settings.rounds, settings.seed)
    labels = torch.empty(points.shape[:3], dtype=torch.int64, device=points.device)
    assign(points, rows, fitted, labels)
    return labels


@kernel
def _causal_error_kernel(
    products_ptr, spread_ptr, starts_ptr, exact_ptr,
    key_heads, group, numbers, clusters, segment_length, shift, factor, max_predicted_error,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether the error that first order will make in a segment, of the worst query head, is too large.

    `numbers` are those of a matrix: of the products of a query head's offsets, of those of a block's keys in their
    clusters.
    """
    i_p = tl.program_id(0).to(tl.int64)
    seen = i_p // key_heads + 1
    o_g = tl.arange(0, GROUP)
    m_g = o_g < group
    b_total = tl.zeros([GROUP], tl.float32)
    for first in range(0, numbers, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        m_n = o_n < numbers
        b_spread = tl.zeros([BLOCK], tl.float32)
        for block in range(0, seen):
            p_spread = spread_ptr + (block * key_heads + i_p % key_heads) * numbers
            b_spread += tl.load(p_spread + o_n, mask=m_n, other=0.0)
        # [GROUP, BLOCK]
        p_products = products_ptr + (i_p * group + o_g[:, None]) * numbers + o_n[None, :]
        b_products = tl.load(p_products, mask=m_g[:, None] & m_n[None, :], other=0.0)
        b_total += tl.sum(b_products * b_spread[None, :], 1)
    p_counted = starts_ptr + (i_p * group + o_g) * (clusters + 2) + clusters
    b_counted = tl.maximum(tl.load(p_counted, mask=m_g, other=1), 1).to(tl.float32)
    older = (seen * segment_length - shift).to(tl.float32)
    error = tl.max(tl.where(m_g, b_total / b_counted, 0.0), 0) / older * factor
    tl.store(exact_ptr + i_p, error > max_predicted_error)


def too_far(
    layout: Layout, rows: Rows, products: torch.Tensor, starts: torch.Tensor, spread: torch.Tensor
) -> torch.Tensor:
    """The late segments `(L, P)` in which the predicted error is larger than `max_predicted_error`: boolean.

    `products` are those of residuals `(L · P · g, D, D)` from clusters that begin at `starts`, `spread` those of a
    block's keys in their clusters `(L · P, D, D)`.
    """
    settings = layout.settings
    exact = torch.empty(layout.late, rows.heads // rows.group, dtype=torch.bool, device=spread.device)
    group = 1 << (rows.group - 1).bit_length()
    _causal_error_kernel[(exact.numel(),)](
        products, spread, starts, exact, exact.shape[1], rows.group, spread[0].numel(), settings.clusters,
        settings.segment_length, layout.shift, settings.scale**2 * ERROR_PER_VARIANCE,
        settings.max_predicted_error, GROUP=group, BLOCK=max(64, 4096 // group),
    )  # fmt: skip
    return exact
