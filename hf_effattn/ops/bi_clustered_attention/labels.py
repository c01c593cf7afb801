"""Labels of queries and keys in one walk over the heads on a CPU: what four ops find one after the other.

`cluster_queries` of the queries, their `query_offsets`, `cluster_queries` of the keys in the metric of those offsets,
and `predicted_error` look at the same rows; on a CPU, taking these and calling operators costs as much as arithmetic.
"""

from typing import NamedTuple, cast

import torch

from ..cluster_queries.batched import as_metric, keys_metric, of_query_heads
from ..cluster_queries.reference import hash_planes
from ..kmeans.batched import Members, Points, cluster, fitting_bytes_per_head
from ..kmeans.sampling import most_fit_rows, strided_rows
from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk, row_chunks
from .offsets import PREDICTION_ROWS, error_of

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Clustering(NamedTuple):
    """How queries and keys are clustered, see `cluster_queries`."""

    clusters: int
    key_clusters: int
    method: str
    in_keys_metric: bool  # whether K-means runs on the queries in the metric of the keys
    iterations: int
    key_iterations: int
    bits: int
    fit_queries: int
    seed: int


class Inputs(NamedTuple):
    """The arguments of the op, see `cluster_both`; behind the tensors those of `Clustering`."""

    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor | None
    clusters: int
    key_clusters: int
    method: str
    in_keys_metric: bool
    iterations: int
    key_iterations: int
    bits: int
    fit_queries: int
    seed: int
    scale: float
    predict: bool


def cluster_both(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    how: Clustering,
    *,
    scale: float | None = None,
    predict: bool = True,
) -> Found:
    """Labels of queries and keys, and predicted errors.

    Sizes: `B` batch, `H` query heads, `P` key/value heads, `N` queries, `M` keys, `D` head_dim.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides, on a CPU.
        key (`torch.Tensor`): `(B, P, M, D)`, any strides.
        mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts, of queries and keys; others get label 0.
        how (`Clustering`): the settings.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        predict (`bool`): whether to predict errors; else they are 0.

    Returns:
        Integer labels `(B, H, N)` and `(B, P, M)`, and the errors `(B, P)`.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return cast("Found", _op(query.detach(), key.detach(), mask, *how, scale, predict))


def _empty(x: Inputs) -> Found:
    """Memory for labels and predicted errors."""
    labels, key_labels = (rows.new_empty(rows.shape[:3], dtype=torch.int64) for rows in (x.query, x.key))
    return labels, key_labels, x.query.new_empty(x.key.shape[:2], dtype=accumulation_dtype(x.query.dtype))


def _forward(x: Inputs) -> Found:
    query, key, mask = x[:3]
    D, dtype, group = query.shape[3], accumulation_dtype(query.dtype), query.shape[1] // key.shape[1]
    empty = query.new_empty if mask is None else query.new_zeros
    labels, key_labels = (empty(rows.shape[:3], dtype=torch.int64) for rows in (query, key))
    predicted = query.new_zeros(key.shape[:2], dtype=dtype)
    planes = hash_planes(D, x.bits, x.seed).to(dtype) if x.method == "lsh" else None
    count, key_count = (most_fit_rows(clusters, x.fit_queries) for clusters in (x.clusters, x.key_clusters))

    def run(chunk: RowChunk) -> None:
        queries, keys = Points.of_queries(chunk, query, planes), Points.of_keys(chunk, key)
        own_labels, own_key_labels = chunk.of_query_heads(labels), chunk.of_heads(key_labels)
        metric = None
        if x.in_keys_metric and planes is None and keys.length:
            metric = of_query_heads(keys_metric(keys.spread(count)), group)
        cluster(queries, own_labels, queries.spread(count), x.clusters, x.iterations, x.seed, metric)

        looked_at = queries if planes is None else Points.of_queries(chunk, query)
        offsets = offsets_of(looked_at, own_labels, x.clusters, x.fit_queries)
        n = offsets.shape[1]
        covariance = torch.bmm(offsets.transpose(1, 2), offsets).unflatten(0, (-1, group))  # (P, group, D, D)
        if group * n <= key_count:
            metric = as_metric(covariance.sum(dim=1))  # the offsets' mean is 0
        else:
            some = strided_rows(group * n, key_count)
            metric = keys_metric(offsets.unflatten(0, (-1, group)).flatten(1, 2).index_select(1, some))
        cluster(keys, own_key_labels, keys.spread(key_count), x.key_clusters, x.key_iterations, x.seed, metric)
        if x.predict:
            within = offsets_of(keys, own_key_labels, x.key_clusters, PREDICTION_ROWS)
            spread = torch.bmm(within.transpose(1, 2), within) / within.shape[1]
            chunk.of_heads(predicted)[:] = error_of(covariance[None], n, spread[None], x.scale)[0]

    width = D if planes is None else max(D, x.bits)
    bytes_per_head = fitting_bytes_per_head(query, max(x.clusters, x.key_clusters), x.fit_queries, width)
    for_every_chunk(run, row_chunks(query, mask, mask, bytes_per_head, group), query.device)
    return labels, key_labels, predicted


_op = register_op("cluster_both", Inputs, _forward, fake=_empty, shown=3)


def offsets_of(points: Points, labels: torch.Tensor, clusters: int, count: int) -> torch.Tensor:
    """What evenly spread points differ by from the means of theirs in each cluster, `(P, n, D)`; labels `(P, N)`."""
    return Members(points.spread(count), clusters).offsets(labels[:, points.places(count)])
