"""Labels of queries and keys in one pass over the heads on a CPU: what four ops find one after the other.

`cluster_queries` of the queries, their `query_residuals`, `cluster_queries` of the keys in the metric of those, and
`predicted_error` look at the same rows. On a CPU, taking these and calling operators costs as much as arithmetic.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..cluster_queries.batched import as_metric, keys_metric
from ..cluster_queries.reference import hash_planes
from ..kmeans.batched import Members, Points, cluster, fitting_bytes_per_head
from ..kmeans.sampling import most_fit_rows, strided_rows
from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk, row_chunks
from .residuals import PREDICTION_ROWS, error_of

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """The arguments of the op; those of the clustering are those of `cluster_queries`.

    Sizes: `B` batch, `H` query heads, `P` key/value heads, `N` queries, `M` keys, `D` head_dim.
    """

    query: torch.Tensor  # `(B, H, N, D)`, any strides, on a CPU
    key: torch.Tensor  # `(B, P, M, D)`, any strides
    mask: torch.Tensor | None  # bool `(B, N)`, True = counts, of queries and keys; others get label 0
    clusters: int
    key_clusters: int
    method: str
    in_keys_metric: bool  # whether K-means runs on the queries in the metric of the keys
    iterations: int
    key_iterations: int
    bits: int
    fit_queries: int
    seed: int
    scale: float  # factor on the scores
    predict: bool  # whether to predict errors; else they are 0


def _empty(x: Inputs) -> Found:
    """Memory for labels and predicted errors."""
    labels, key_labels = (rows.new_empty(rows.shape[:3], dtype=torch.int64) for rows in (x.query, x.key))
    return labels, key_labels, x.query.new_empty(x.key.shape[:2], dtype=accumulation_dtype(x.query.dtype))


def _forward(x: Inputs) -> Found:
    """Integer labels `(B, H, N)` and `(B, P, M)`, and the predicted errors `(B, P)`."""
    query, key, mask = x[:3]
    D, dtype, group = query.shape[3], accumulation_dtype(query.dtype), query.shape[1] // key.shape[1]
    empty = query.new_empty if mask is None else query.new_zeros
    labels, key_labels = (empty(rows.shape[:3], dtype=torch.int64) for rows in (query, key))
    predicted = query.new_zeros(key.shape[:2], dtype=dtype)
    planes = hash_planes(D, x.bits, x.seed).to(dtype) if x.method == "lsh" else None
    count, key_count = (most_fit_rows(clusters, x.fit_queries) for clusters in (x.clusters, x.key_clusters))

    def run(chunk: RowChunk) -> None:
        queries = Points(chunk.of_query_heads(query), chunk.query_rows, planes)
        keys = Points(chunk.of_heads(key), chunk.key_rows)
        own_labels, own_key_labels = chunk.of_query_heads(labels), chunk.of_heads(key_labels)
        metric = None
        if x.in_keys_metric and planes is None and keys.length:
            metric = keys_metric(keys.spread(count)).repeat_interleave(group, dim=0)
        cluster(queries, own_labels, queries.spread(count), x.clusters, x.iterations, x.seed, metric)

        looked_at = queries if planes is None else Points(queries.own, queries.counted)
        residuals = residuals_of(looked_at, own_labels, x.clusters, x.fit_queries)
        n = residuals.shape[1]
        covariance = torch.bmm(residuals.transpose(1, 2), residuals).unflatten(0, (-1, group))  # (P, group, D, D)
        if group * n <= key_count:
            metric = as_metric(covariance.sum(dim=1))  # the residuals' mean is 0
        else:
            some = strided_rows(group * n, key_count)
            metric = keys_metric(residuals.unflatten(0, (-1, group)).flatten(1, 2).index_select(1, some))
        cluster(keys, own_key_labels, keys.spread(key_count), x.key_clusters, x.key_iterations, x.seed, metric)
        if x.predict:
            within = residuals_of(keys, own_key_labels, x.key_clusters, PREDICTION_ROWS)
            spread = torch.bmm(within.transpose(1, 2), within) / within.shape[1]
            chunk.of_heads(predicted)[:] = error_of(covariance[None], n, spread[None], x.scale)[0]

    width = D if planes is None else max(D, x.bits)
    bytes_per_head = fitting_bytes_per_head(query, max(x.clusters, x.key_clusters), x.fit_queries, width)
    for_every_chunk(run, row_chunks(query, mask, mask, bytes_per_head, group), query.device)
    return labels, key_labels, predicted


cluster_both: Callable[..., Found] = register_op("cluster_both", Inputs, _forward, fake=_empty, shown=3)


def residuals_of(points: Points, labels: torch.Tensor, clusters: int, count: int) -> torch.Tensor:
    """Residuals of evenly spread points from their means in each cluster, `(P, n, D)`; labels `(P, N)`."""
    return Members(points.spread(count), clusters).residuals(labels[:, points.places(count)])
