"""Causal attention over clusters as its definition reads, segment by segment. Plain PyTorch, any device."""

from dataclasses import dataclass, fields
from itertools import product

import torch

from ..bi_clustered_attention.offsets import ERROR_PER_VARIANCE
from ..bi_clustered_attention.reference import SMALLEST, means, squared_distances
from ..cluster_queries.reference import cluster_head, keys_metric
from ..kmeans.reference import nearest
from ..kmeans.sampling import fit_rows
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, dropout_factor, exact_dropout_rows
from ..shared.masking import for_every_head

# Of Lloyd's algorithm on the keys, at most: a third round saves no error that its time would not save elsewhere.
KEY_ITERATIONS = 2


@dataclass(frozen=True)
class Settings:
    """What both forms are told, see the public op."""

    method: str
    clusters: int
    topk: int
    key_clusters: int
    segment_length: int
    window: int
    iterations: int
    fit_queries: int
    exact_above: float
    seed: int
    prefill: bool
    scale: float
    dropout_p: float

    def values(self) -> tuple[str | int | float | bool, ...]:
        """The fields in their order, as an op takes them."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def first_order(self) -> bool:
        """Whether a summary follows the query, instead of staying what it is at the centroid."""
        return self.method == "bi-clustered"

    @property
    def local_keys(self) -> int:
        """Keys of the window and the segment itself."""
        return self.window + self.segment_length

    @property
    def columns(self) -> int:
        """Weights of a query that dropout can drop: of local keys, exact keys and summaries."""
        return self.local_keys + self.topk + self.key_clusters

    def older(self, start: int) -> int:
        """How many keys are older than the window of the segment that starts at `start`."""
        return max(0, start - self.window)

    def fitted(self, start: int, end: int) -> slice:
        """The queries whose clusters a segment reads: those of the segment before it, or with `prefill` its own."""
        return slice(start, end) if self.prefill else slice(start - self.segment_length, start)


# Of the registered ops, as `torch.library` reads them: the inputs, then the fields of `Settings`.
ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? dropout_seed, "
ARGUMENTS += ", ".join(f"{field.type.__name__} {field.name}" for field in fields(Settings))  # type: ignore[union-attr]


def without_special(value: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values `(B, heads, N, Dv)` with 0 for NaN and infinities, and what these add to every output of their head.

    A product gives a later value the weight 0, and 0 times NaN would be NaN in outputs before it. None, and the values
    themselves, where all are finite.
    """
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
    return output + for_every_head(special, output)


def query_clusters(
    past: torch.Tensor, keys: torch.Tensor, readers: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Centroids `(C, D)` of past queries `(n, D)`, the offsets of these, and the nearest centroid to `readers`."""
    with torch.no_grad():
        points, rows, others = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (past, keys, readers))
        arguments = settings.clusters, "kmeans", settings.iterations, 1, settings.fit_queries, settings.seed
        labels = cluster_head(points, rows, *arguments).unique(return_inverse=True)[1]  # no empty cluster
        metric = keys_metric(rows[fit_rows(len(rows), settings.clusters, settings.fit_queries)])
    centroids = means(past, labels, int(labels.max()) + 1)
    with torch.no_grad():
        chosen = nearest(others, centroids.to(others.dtype), metric)
    return centroids, (past - centroids[labels]).detach(), chosen


@torch.no_grad()
def cluster_keys(key: torch.Tensor, offsets: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Labels `(M,)` of the older keys `(M, D)`: alike are those that no offset `(n, D)` tells apart."""
    rows, points = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (key, offsets))
    rounds = min(settings.iterations, KEY_ITERATIONS)
    return cluster_head(rows, points, settings.key_clusters, "kmeans", rounds, 1, settings.fit_queries, settings.seed)


def older_columns(
    rows: torch.Tensor,
    centroid: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_labels: torch.Tensor,
    distances: torch.Tensor,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What the queries `(n, D)` of one cluster see of the older keys: scores, values, and their places in dropout."""
    at_centroid = key @ centroid  # (M,)
    preference = at_centroid.detach()
    if settings.first_order:  # what the mean of its cluster represents badly, not what weighs most
        preference = preference + distances.clamp(min=SMALLEST).log()
    chosen = preference.topk(min(settings.topk, len(key))).indices  # T_j
    rest = torch.ones_like(key_labels, dtype=torch.bool).index_fill(0, chosen, False)
    scores, values, columns = [rows @ key[chosen].T], [value[chosen]], [*range(len(chosen))]
    for c in range(settings.key_clusters):
        members = (key_labels == c) & rest
        if not members.any():
            continue
        share = at_centroid[members].softmax(dim=0)
        score = at_centroid[members].logsumexp(dim=0).expand(len(rows))  # log S_jc
        if settings.first_order:
            score = score + (rows - centroid) @ (share @ key[members])  # its tangent
        scores.append(score[:, None])
        values.append((share @ value[members])[None])
        columns.append(settings.topk + c)
    return torch.cat(scores, dim=1), torch.cat(values), columns


class Dropout:
    """Dropout factors of the query heads of a key/value head, drawn for the whole length: padding shifts nothing.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        rows (`torch.Tensor`): those that count.
        first_problem (`int`): number of the first query head.
    """

    def __init__(
        self, query: torch.Tensor, rows: torch.Tensor, settings: Settings, seed: torch.Tensor, first_problem: int
    ) -> None:
        self.query, self.rows, self.settings, self.seed = query, rows, settings, seed
        self.first_problem = first_problem

    def __call__(self, head: int, own: slice, first: int) -> torch.Tensor:
        """Of a segment's rows: of its local keys from `first` on, of its exact keys and its summaries."""
        p, N, problem = self.settings.dropout_p, self.query.shape[2], self.first_problem + head
        shape = N, self.settings.columns
        factor = dropout_factor(shape, self.query, p, int(self.seed), problem, TOPK_AND_SUMMARY_WEIGHTS)
        start = own.start - self.settings.window  # of the first column
        near = self.settings.older(own.start)
        columns = [factor[self.rows][own, near - start : own.stop - start]]
        if first < near:  # exact: other numbers than those of the other columns
            seed = self.seed + 1
            drawn = exact_dropout_rows(N, N, self.rows, self.rows, self.query, p, seed, problem)
            columns.insert(0, torch.cat([of_rows for _, of_rows in drawn if of_rows is not None])[own, first:near])
        else:
            columns.append(factor[self.rows][own, self.settings.local_keys :])
        return torch.cat(columns, dim=1)


def predicted_error(key: torch.Tensor, mean_keys: torch.Tensor, offsets: list[torch.Tensor]) -> float:
    """The error that keys `(M, D)` with these clusters' means will make: of the offsets of the worst query head."""
    spread = key - mean_keys
    within = spread.T @ spread / len(key)
    return max(ERROR_PER_VARIANCE * float((eta @ within * eta).sum() / len(eta)) for eta in offsets)


def attend_segment(
    group: list[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    settings: Settings,
    draw: Dropout | None,
) -> list[torch.Tensor]:
    """Outputs `(n, Dv)` of a segment, of every query head `(N, D)` in the group that shares a key/value head."""
    end, older = min(start + settings.segment_length, len(key)), settings.older(start)
    clustered: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    if older:
        fitted = settings.fitted(start, end)
        clustered = [query_clusters(query[fitted], key[:older], query[start:end], settings) for query in group]
    key_labels, distances = torch.zeros(older, dtype=torch.int64, device=key.device), key.new_ones(older)
    if older and settings.first_order:
        offsets = [of_head[1] for of_head in clustered]
        key_labels = cluster_keys(key[:older], torch.cat(offsets), settings)
        old_keys = key[:older].detach()
        mean_keys = means(old_keys, key_labels, settings.key_clusters)[key_labels]
        distances = squared_distances(old_keys, mean_keys, torch.cat(offsets))
        if predicted_error(old_keys, mean_keys, offsets) > settings.exact_above:
            older, clustered = 0, []
    first = settings.older(start) if clustered else 0  # of the local keys
    position = torch.arange(len(key), device=key.device)
    visible = position[first:end] <= position[start:end, None]
    outputs = []
    for head, query in enumerate(group):
        rows = query[start:end]
        local = (rows @ key[first:end].T).masked_fill(~visible, -torch.inf)
        factor = None if draw is None else draw(head, slice(start, end), first)
        output = value.new_zeros(end - start, value.shape[1])
        clusters = clustered[head][2] if clustered else position[start:end] * 0
        for j in clusters.unique():
            own = clusters == j
            scores, values, columns = [local[own]], [value[first:end]], [*range(end - first)]
            if clustered:
                centroid = clustered[head][0][j]
                more = older_columns(rows[own], centroid, key[:first], value[:first], key_labels, distances, settings)
                scores.append(more[0])
                values.append(more[1])
                columns += [end - first + column for column in more[2]]
            weights = torch.cat(scores, dim=1).softmax(dim=1)
            if factor is not None:
                weights = weights * factor[own][:, columns]
            output[own] = weights @ torch.cat(values)
        outputs.append(output)
    return outputs


def causal_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    settings: Settings,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """One softmax over the local keys, the exact keys of the nearest past centroid, and what stands for the others."""
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
        queries = [query[b, p * group + h, rows] for h in range(group)]
        for start in range(0, len(rows), settings.segment_length):
            own = rows[start : start + settings.segment_length]
            found = attend_segment(queries, key[b, p, rows], value[b, p, rows], start, settings, draw)
            for h, of_head in enumerate(found):
                output[b, p * group + h, own] = of_head
    return output if special is None else add_special(output, special, key_mask)
