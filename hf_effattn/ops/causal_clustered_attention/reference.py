"""Causal attention over clusters as its definition reads, segment by segment. Plain PyTorch, any device."""

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from ..bi_clustered_attention.reference import SMALLEST, means, squared_distances
from ..bi_clustered_attention.residuals import ERROR_PER_VARIANCE
from ..cluster_queries.reference import as_metric, keys_metric
from ..kmeans.reference import cluster_points, nearest
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, dropout_factor, exact_dropout_rows
from ..shared.masking import repeat_heads

# Most rounds of Lloyd's algorithm: the time of a second one lowers the error more if it is spent elsewhere.
MOST_ITERATIONS = 1


class Settings(NamedTuple):
    """The arguments of both forms, see the public op."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    dropout_seed: torch.Tensor | None
    sinks: torch.Tensor | None
    method: str
    clusters: int
    topk: int
    key_clusters: int
    segment_length: int
    window: int
    iterations: int
    fit_queries: int
    max_predicted_error: float
    seed: int
    scale: float
    dropout_p: float
    keeps: bool  # whether the forward pass leaves something to a backward one

    @property
    def linear_summaries(self) -> bool:
        """Whether summaries are linear in the query, instead of constant at their centroid."""
        return self.method == "bi-clustered"

    @property
    def local_keys(self) -> int:
        """Keys of the window and the segment itself."""
        return self.window + self.segment_length

    @property
    def rounds(self) -> int:
        """Rounds of Lloyd's algorithm, of queries and of keys."""
        return min(self.iterations, MOST_ITERATIONS)

    def columns(self, length: int) -> int:
        """Weights of a query that dropout can drop: of local keys, exact keys and summaries of every segment."""
        segments = -(-length // self.segment_length)
        return self.local_keys + self.topk + self.key_clusters * segments

    def distant(self, start: int) -> int:
        """How many keys stand before the window of the segment that starts at `start`."""
        return max(0, start - self.window)

    def fitted(self, start: int) -> slice:
        """The queries whose clusters a segment reads: those of the segment before it."""
        return slice(start - self.segment_length, start)


def without_special(value: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values `(B, heads, N, Dv)` with 0 for NaN and infinities, and what these add to every output of their head.

    In a matrix product a later value has weight 0, and 0 times NaN would be NaN in earlier outputs. Where all values
    are finite, returns them and None.
    """
    # The usual case is found in one pass without memory. Where the sum overflows, every value is looked at.
    if bool(value.detach().sum(dtype=torch.promote_types(value.dtype, torch.float32)).isfinite()):
        return value, None
    special = ~value.isfinite()
    if key_mask is not None:
        special = special & key_mask[:, None, :, None]
    if not special.any():
        return value, None
    return value.masked_fill(special, 0.0), value.detach().masked_fill(~special, 0.0).cumsum(dim=2)


def add_special(output: torch.Tensor, special: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
    """Outputs `(B, H, N, Dv)` with what `without_special` took out; those of masked rows stay 0."""
    if key_mask is not None:
        special = special.masked_fill(~key_mask[:, None, :, None], 0.0)
    return output + repeat_heads(special, output)


@dataclass
class QueryClusters:
    """Clusters of the previous queries `(n, D)` of a head."""

    centroids: torch.Tensor  # `(C, D)`, none of an empty cluster
    sizes: torch.Tensor  # `(C,)`
    residuals: torch.Tensor  # of the previous queries from their centroids, `(n, D)`
    chosen: torch.Tensor  # the nearest centroid to every query of the segment


def query_clusters(
    previous: torch.Tensor, readers: torch.Tensor, metric: torch.Tensor, settings: Settings
) -> QueryClusters:
    """Clusters of previous queries `(n, D)` in the metric of the distant keys, and the nearest for each reader."""
    with torch.no_grad():
        points, others = (rows.to(metric.dtype) for rows in (previous, readers))
        raw_labels, _ = cluster_points(
            points, settings.clusters, settings.rounds, settings.fit_queries, settings.seed, metric
        )
        labels, sizes = raw_labels.unique(return_inverse=True, return_counts=True)[1:]  # no empty cluster
    centroids = means(previous, labels, len(sizes))
    with torch.no_grad():
        chosen = nearest(others, centroids.to(others.dtype), metric)
    return QueryClusters(centroids, sizes, (previous - centroids[labels]).detach(), chosen)


@dataclass
class CompletedKeys:
    """Keys of a head that a segment is the first to see over clusters. Their clusters then stay."""

    labels: torch.Tensor  # `(m,)`, of the keys' clusters
    spread: torch.Tensor  # `K_t - K̄_g(t)` `(m, D)`, from the mean of the cluster
    distances: torch.Tensor  # `d_t²` `(m,)`; 1 where no summary follows the query


@torch.no_grad()
def complete_keys(key: torch.Tensor, residuals: torch.Tensor, settings: Settings) -> CompletedKeys:
    """Clusters of the keys `(m, D)`: alike are those that no residual `(n, D)` of a previous query tells apart."""
    if not settings.linear_summaries:
        return CompletedKeys(torch.zeros_like(key[:, 0]).long(), key - key.mean(dim=0), torch.ones_like(key[:, 0]))
    rows, points = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (key, residuals))
    arguments = settings.key_clusters, settings.rounds, settings.fit_queries, settings.seed
    labels, _ = cluster_points(rows, *arguments, as_metric(points.T @ points / len(points)))
    mean_keys = means(key, labels, settings.key_clusters)[labels]
    return CompletedKeys(labels, key - mean_keys, squared_distances(key, mean_keys, residuals))


def exact_keys(clusters: QueryClusters, key: torch.Tensor, distances: torch.Tensor, topk: int) -> torch.Tensor:
    """`T`: of the keys `(M, D)` the `topk` that a previous query weighs most, times their `d_t²`: largest first.

    In logarithms, so that keys are told apart however little they weigh.
    """
    with torch.no_grad():
        of_centroids = (clusters.centroids @ key.T).log_softmax(dim=1)  # (C, M)
        weight = (clusters.sizes.to(key.dtype).log()[:, None] + of_centroids).logsumexp(dim=0)
        return (weight + distances.clamp(min=SMALLEST).log()).topk(min(topk, len(key))).indices


def distant_columns(
    rows: torch.Tensor,
    centroid: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_labels: torch.Tensor,
    chosen: torch.Tensor,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What queries `(n, D)` see of the distant keys at a centroid: scores, values, and their places in dropout."""
    at_centroid = key @ centroid  # (M,)
    rest = torch.ones_like(key_labels, dtype=torch.bool).index_fill(0, chosen, False)
    scores, values, columns = [rows @ key[chosen].T], [value[chosen]], [*range(len(chosen))]
    for c in key_labels.unique().tolist():
        members = (key_labels == c) & rest
        if not members.any():
            continue
        share = at_centroid[members].softmax(dim=0)
        score = at_centroid[members].logsumexp(dim=0).expand(len(rows))  # log S_jc
        if settings.linear_summaries:
            score = score + (rows - centroid) @ (share @ key[members])  # its tangent
        scores.append(score[:, None])
        values.append((share @ value[members])[None])
        columns.append(settings.topk + c)
    return torch.cat(scores, dim=1), torch.cat(values), columns


@dataclass
class Dropout:
    """Dropout factors of the query heads of a key/value head, drawn for the whole length: padding shifts nothing."""

    query: torch.Tensor  # `(B, H, N, D)`
    rows: torch.Tensor  # those that count
    settings: Settings
    seed: torch.Tensor
    first_problem: int  # number of the first query head

    def __call__(self, head: int, segment: slice, first: int) -> torch.Tensor:
        """Factors of a segment's rows: of its local keys from `first` on, of its exact keys and its summaries."""
        p, N, problem = self.settings.dropout_p, self.query.shape[2], self.first_problem + head
        shape = N, self.settings.columns(N)
        factor = dropout_factor(shape, self.query, p, int(self.seed), problem, TOPK_AND_SUMMARY_WEIGHTS)
        start = segment.start - self.settings.window  # of the first column
        near = self.settings.distant(segment.start)
        columns = [factor[self.rows][segment, near - start : segment.stop - start]]
        if first < near:  # exact weights, drawn apart from those of the other columns
            seed = self.seed + 1
            drawn = exact_dropout_rows(N, N, self.rows, self.rows, self.query, p, seed, problem)
            columns.insert(0, torch.cat([of_rows for _, of_rows in drawn if of_rows is not None])[segment, first:near])
        else:
            columns.append(factor[self.rows][segment, self.settings.local_keys :])
        return torch.cat(columns, dim=1)


def predicted_error(spread: torch.Tensor, clusters: list[QueryClusters]) -> float:
    """The error that keys with this spread `(M, D)` in their clusters will make, of the worst query head."""
    within = spread.T @ spread / len(spread)
    residuals = [of_head.residuals for of_head in clusters]
    return max(ERROR_PER_VARIANCE * float((eta @ within * eta).sum() / len(eta)) for eta in residuals)


def attend_segment(
    group: list[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    completed: list[CompletedKeys],
    settings: Settings,
    draw: Dropout | None,
    sinks: list[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Outputs `(n, Dv)` of a segment, of every query head `(N, D)` in the group that shares a key/value head.

    `completed` are the keys that the segments before have seen over clusters; this one adds its own. `sinks` are those
    of the query heads.
    """
    end, distant = min(start + settings.segment_length, len(key)), settings.distant(start)
    clustered: list[QueryClusters] = []
    key_labels, distances = torch.zeros(distant, dtype=torch.int64, device=key.device), key.new_ones(distant)
    if distant:
        with torch.no_grad():
            metric = keys_metric(key[:distant].to(torch.promote_types(key.dtype, torch.float32)))
        fitted = settings.fitted(start)
        clustered = [query_clusters(query[fitted], query[start:end], metric, settings) for query in group]
        first = sum(len(block.labels) for block in completed)
        residuals = torch.cat([of_head.residuals for of_head in clustered])
        completed.append(complete_keys(key[first:distant], residuals, settings))
        key_labels = torch.cat([b * settings.key_clusters + block.labels for b, block in enumerate(completed)])
        distances = torch.cat([block.distances for block in completed])
        spread = torch.cat([block.spread for block in completed])
        if settings.linear_summaries and predicted_error(spread, clustered) > settings.max_predicted_error:
            distant, clustered = 0, []
    first = settings.distant(start) if clustered else 0  # of the local keys
    position = torch.arange(len(key), device=key.device)
    visible = position[first:end] <= position[start:end, None]
    outputs = []
    for head, query in enumerate(group):
        rows = query[start:end]
        local = (rows @ key[first:end].T).masked_fill(~visible, -torch.inf)
        factor = None if draw is None else draw(head, slice(start, end), first)
        output = value.new_zeros(end - start, value.shape[1])
        own_clusters, chosen = position[start:end] * 0, position[:0]
        if clustered:
            own_clusters = clustered[head].chosen
            chosen = exact_keys(clustered[head], key[:first], distances, settings.topk)
        for j in own_clusters.unique():
            # All rows, not those of the cluster: how many later ones share it must change no last bit of a product.
            scores, values, columns = [local], [value[first:end]], [*range(end - first)]
            if clustered:
                centroid = clustered[head].centroids[j]
                more = distant_columns(rows, centroid, key[:first], value[:first], key_labels, chosen, settings)
                scores.append(more[0])
                values.append(more[1])
                columns += [end - first + column for column in more[2]]
            weights = softmax(torch.cat(scores, dim=1), sinks[head])
            if factor is not None:
                weights = weights * factor[:, columns]
            members = own_clusters == j
            output[members] = (weights @ torch.cat(values))[members]
        outputs.append(output)
    return outputs


def softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Weights of scores `(n, m)`, beside a sink's, which has no value."""
    if sink is None:
        return scores.softmax(dim=1)
    return torch.cat([scores, sink.to(scores.dtype).expand(len(scores), 1)], dim=1).softmax(dim=1)[:, :-1]


def causal_clustered_attention(*arguments: Any) -> torch.Tensor:
    """One softmax over the local keys, the exact keys, and summaries of the others at the nearest centroid."""
    settings = Settings(*arguments)
    query, key, value, key_mask, dropout_seed = settings[:5]
    B, H, N, _ = query.shape
    group = H // max(1, key.shape[1])
    value, special = without_special(value, key_mask)
    query = query * settings.scale
    output = query.new_zeros(B, H, N, value.shape[3])
    for b, p in product(range(B), range(key.shape[1])):
        rows = torch.arange(N, device=query.device) if key_mask is None else key_mask[b].nonzero()[:, 0]
        draw = None
        if dropout_seed is not None:
            draw = Dropout(query, rows, settings, dropout_seed, b * H + p * group)
        heads = range(p * group, (p + 1) * group)
        queries = [query[b, head, rows] for head in heads]
        sinks = [None if settings.sinks is None else settings.sinks[head] for head in heads]
        completed: list[CompletedKeys] = []
        for start in range(0, len(rows), settings.segment_length):
            segment_rows = rows[start : start + settings.segment_length]
            outputs = attend_segment(
                queries, key[b, p, rows], value[b, p, rows], start, completed, settings, draw, sinks
            )
            for head, of_head in zip(heads, outputs, strict=True):
                output[b, head, segment_rows] = of_head
    return output if special is None else add_special(output, special, key_mask)
