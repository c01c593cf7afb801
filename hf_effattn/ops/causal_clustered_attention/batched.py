"""Causal attention over clusters for a CPU: a few large steps per segment, on parts of one softmax.

Nothing but the inputs is kept for the backward pass, and to `torch.compile` each pass is one op. All arithmetic is in
float32, or float64 for float64 inputs.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `N` queries and keys, `n` of a segment, `C`
query clusters per query head.
"""

from collections.abc import Iterator
from copy import copy
from math import inf
from typing import Any

import torch

from ..bi_clustered_attention.offsets import ERROR_PER_VARIANCE
from ..cluster_queries.batched import keys_metric
from ..kmeans.batched import find_seeds, lloyd, nearest, prepare
from ..kmeans.sampling import fit_rows
from ..shared.cluster_blocks import ClusterBlocks
from ..shared.cluster_table import attend_backward, attend_in_part
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, exact_dropout_rows
from ..shared.head_threads import for_every_chunk
from ..shared.key_summaries import KeyClusters, Summaries
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import chunks_of, cluster_rows, cluster_sizes, cluster_sums, draw_dropout, empty_output
from .local import Attended, LocalPart, merge
from .reference import ARGUMENTS, KEY_ITERATIONS, Settings, add_special, without_special


def largest_buffer(query: torch.Tensor, settings: Settings) -> int:
    """Numbers per head in the centroids' scores of the older keys, or in the tables that blocks of queries read.

    Not on a CPU few heads at a time are few large steps, too.
    """
    if query.device.type != "cpu":
        return 0
    rows = settings.clusters + settings.segment_length // 16
    return max(settings.clusters * query.shape[2], rows * (settings.topk + settings.key_clusters) * query.shape[3])


def fit_clusters(
    points: torch.Tensor, clusters: int, iterations: int, settings: Settings, metric: torch.Tensor
) -> torch.Tensor:
    """Centroids `(heads, clusters, D)` by K-means of points `(heads, n, D)`; of fewer points, each is one, then 0."""
    n = points.shape[1]
    if n <= clusters:
        return torch.cat([points, points.new_zeros(len(points), clusters - n, points.shape[2])], dim=1)
    fitted = points.index_select(1, fit_rows(n, clusters, settings.fit_queries).to(points.device))
    return lloyd(fitted, find_seeds(fitted, clusters, settings.seed, metric), iterations, metric, binary=False)


def label(points: torch.Tensor, centroids: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """Labels `(heads, n)` of the points that `fit_clusters` saw."""
    n, clusters = points.shape[1], centroids.shape[1]
    if n <= clusters:
        return torch.arange(n, device=points.device).expand(len(points), n)
    return nearest(points, *prepare(centroids, metric))


class PastClusters:
    """Clusters of past queries `(P, g, n', D)`, and of the keys `(P, m, D)` older than a segment's window.

    Attributes:
        centroids: `(P, g · C, D)`.
        index: `(P · g · n',)` row of every past query in the centroids' table.
        sizes: `(P, g · C, 1)`, at least 1.
        readers: `(P, g, n)` nearest centroid of the segment's queries.
        key_labels: `(P, m)`.
        covariance: `Σ_η` `(P, D, D)`; None where no summary follows the query.
        predicted: error of every head, `(P,)`.
    """

    def __init__(self, query: torch.Tensor, past: torch.Tensor, key: torch.Tensor, settings: Settings) -> None:
        P, g, _, D = query.shape
        C, G = settings.clusters, settings.key_clusters
        points = past.flatten(0, 1)
        fitted = fit_rows(key.shape[1], C, settings.fit_queries).to(key.device)
        metric = keys_metric(key.index_select(1, fitted)).repeat_interleave(g, dim=0)
        labels = label(points, fit_clusters(points, C, settings.iterations, settings, metric), metric)
        self.index = cluster_rows(labels, C)
        sizes = cluster_sizes(self.index, P * g, C)
        self.sizes = sizes.clamp(min=1).view(P, g * C, 1)
        centroids = cluster_sums(points, self.index, P * g, C) / sizes.clamp(min=1)[..., None]
        self.centroids = centroids.view(P, g * C, D)
        directions, half_norms = prepare(centroids, metric)
        half_norms = half_norms.masked_fill(sizes == 0, torch.inf)
        self.readers = nearest(query.flatten(0, 1), directions, half_norms).view(P, g, -1)
        self.key_labels = torch.zeros(key.shape[:2], dtype=torch.int64, device=key.device)
        self.covariance: torch.Tensor | None = None
        self.predicted = key.new_zeros(P)
        if not settings.first_order:
            return
        offsets = points - centroids.flatten(0, 1).index_select(0, self.index).view_as(points)
        of_heads = (offsets.transpose(1, 2) @ offsets / offsets.shape[1]).view(P, g, D, D)
        self.covariance = of_heads.mean(dim=1)
        offsets = offsets.view(P, -1, D)
        fitted = fit_rows(offsets.shape[1], G, settings.fit_queries).to(key.device)
        metric = keys_metric(offsets.index_select(1, fitted))
        rounds = min(settings.iterations, KEY_ITERATIONS)
        self.key_labels = label(key, fit_clusters(key, G, rounds, settings, metric), metric)
        if settings.exact_above == inf:
            return
        member = (self.key_labels[:, None] == torch.arange(G, device=key.device)[:, None]).to(key.dtype)  # (P, G, m)
        key_sizes = member.sum(dim=2, keepdim=True)
        means = member @ key / key_sizes.clamp(min=1)
        within = (key.transpose(1, 2) @ key - (means * key_sizes).transpose(1, 2) @ means) / key.shape[1]
        self.predicted = (of_heads * within[:, None]).sum(dim=(2, 3)).amax(dim=1) * ERROR_PER_VARIANCE

    def of_heads(self, heads: torch.Tensor, g: int) -> "PastClusters":
        """Those of some key/value heads."""
        part = copy(self)
        for name in ("centroids", "sizes", "readers", "key_labels", "covariance", "predicted"):
            whole = getattr(self, name)
            setattr(part, name, None if whole is None else whole[heads])
        C = self.centroids.shape[1] // g
        labels = self.index.view(len(self.centroids), g, -1) % C
        part.index = cluster_rows(labels[heads].flatten(0, 1), C)
        return part


class OlderPart:
    """A segment's queries `(P, g, n, D)` over the keys `(P, m, D)` that are older than its window, by clusters."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: PastClusters,
        factor: torch.Tensor | None, settings: Settings,
    ) -> None:  # fmt: skip
        P, g, n, D = query.shape
        self.shape, self.past = query.shape, past
        self.keys = KeyClusters(key, value, past.key_labels, settings.key_clusters)
        self.summaries = Summaries(
            self.keys, past.centroids, settings.topk, past.covariance,
            tangents=settings.first_order, in_order=factor is not None,
        )  # fmt: skip
        tables = cluster_rows(past.readers.flatten(0, 1), settings.clusters)
        self.blocks = ClusterBlocks.of(tables, cluster_sizes(tables, P, g * settings.clusters))
        # Behind the scaled query a 1, for the biases of the table.
        rows = query.reshape(P, g * n, D)
        self.packed = self.blocks.pack(rows, rows.new_ones(1, 1, 1).expand(P, g * n, 1))
        self.factor = None
        if factor is not None:  # (P, g, n, topk + G)
            factor = torch.cat([factor[..., : self.summaries.T], factor[..., settings.topk :]], dim=3)
            self.factor = self.blocks.pack(factor.flatten(1, 2))

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks.pack(rows.reshape(self.shape[0], -1, rows.shape[3]))

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return self.blocks.unpack(packed, self.shape[0]).view(*self.shape[:3], -1)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs `(P, g, n, Dv)` and log-sum-exp `(P, g, n, 1)`."""
        output, log_sum = attend_in_part(self.summaries.table, self.blocks, self.packed, self.factor)
        return self._unpack(output), self._unpack(log_sum)

    def backward(
        self, grad: torch.Tensor, log_sum: torch.Tensor, others: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the queries, of `past`, and of keys and values side by side `(P, m, D + Dv)`.

        `log_sum` is this part's, `others` output and log-sum-exp of the rest of the softmax.
        """
        P, g, _, D = self.shape
        output, other_sum = others
        share, rest = torch.sigmoid(log_sum - other_sum), torch.sigmoid(other_sum - log_sum)
        other_dot = torch.linalg.vecdot(grad, output)[..., None]
        other = self._pack(share), self._pack(rest), self._pack(other_dot)
        grad_query, of_table = attend_backward(
            self.summaries.table,
            self.blocks,
            self.packed,
            self.factor,
            self._pack(grad),
            (other[0], other[1], other[2]),
        )
        grad_centroids, grad_rows = self.summaries.backward(of_table)
        grad_centroids = grad_centroids / self.past.sizes.view(-1, 1)
        grad_past = grad_centroids.index_select(0, self.past.index).view(P, g, -1, D)
        return self._unpack(grad_query[..., :D].contiguous()), grad_past, self.keys.blocks.unpack(grad_rows, P)


class _Segment:
    """A segment's parts of one softmax: its own keys, those of the window, and older ones, by clusters or exactly."""

    def __init__(self, chunk: "_Chunk", start: int) -> None:
        settings = chunk.settings
        self.rows = slice(start, min(start + settings.segment_length, chunk.key.shape[1]))
        self.fitted, self.old = settings.fitted(start, self.rows.stop), slice(0, settings.older(start))
        query = chunk.query[:, :, self.rows]
        self.local = [(self.rows, chunk.local_part(query, self.rows, self.rows))]
        if self.old.stop < start:
            window = slice(self.old.stop, start)
            self.local.append((window, chunk.local_part(query, self.rows, window)))
        # Key/value heads, and the part of the older keys that they attend to.
        self.older: list[tuple[torch.Tensor | None, OlderPart | LocalPart]] = []
        if not self.old.stop:
            return
        key, value = chunk.key[:, self.old], chunk.value[:, self.old]
        past = PastClusters(query, chunk.query[:, :, self.fitted], key, settings)
        exact = past.predicted > settings.exact_above
        factor = None if chunk.factor is None else chunk.factor[:, :, self.rows, settings.local_keys :]
        if not exact.any():
            self.older.append((None, OlderPart(query, key, value, past, factor, settings)))
            return
        heads = exact.nonzero()[:, 0]
        exact_factor = chunk.exact_factor(heads, self.rows, self.old)
        self.older.append((heads, LocalPart(query[heads], key[heads], value[heads], False, exact_factor)))
        heads = (~exact).nonzero()[:, 0]
        if len(heads):
            part = past.of_heads(heads, query.shape[1])
            factor = None if factor is None else factor[heads]
            self.older.append((heads, OlderPart(query[heads], key[heads], value[heads], part, factor, settings)))

    def attend(self) -> tuple[Attended, Attended, Attended]:
        """Outputs and log-sum-exp: of near keys, of older ones, of all; without older ones three times the same."""
        near = merge([part.attend() for _, part in self.local])
        if not self.older:
            return near, near, near
        older = torch.empty_like(near[0]), torch.empty_like(near[1])
        for heads, part in self.older:
            found = part.attend()
            if heads is None:
                older = found
            else:
                older[0][heads], older[1][heads] = found
        return near, older, merge([near, older])

    def backward(
        self, grad: torch.Tensor, of_query: torch.Tensor, of_key: torch.Tensor, of_value: torch.Tensor
    ) -> None:
        """Add to the gradients of a chunk's rows."""
        near, older, whole = self.attend()
        for keys, part in self.local:
            more = part.backward(grad, *whole)
            of_query[:, :, self.rows] += more[0]
            of_key[:, keys] += more[1]
            of_value[:, keys] += more[2]
        for heads, older_part in self.older:
            own: Any = slice(None) if heads is None else heads
            if isinstance(older_part, LocalPart):
                more = older_part.backward(grad[own], whole[0][own], whole[1][own])
            else:
                others = near[0][own], near[1][own]
                of_rows, of_past, of_both = older_part.backward(grad[own], older[1][own], others)
                of_query[own, :, self.fitted] += of_past
                more = of_rows, of_both[..., : of_key.shape[2]], of_both[..., of_key.shape[2] :]
            of_query[own, :, self.rows] += more[0]
            of_key[own, self.old] += more[1]
            of_value[own, self.old] += more[2]


class _Chunk:
    """A chunk's rows, in float32 or float64; the queries are scaled."""

    def __init__(
        self, chunk: RowChunk, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings,
        dropout_seed: torch.Tensor | None,
    ) -> None:  # fmt: skip
        dtype = accumulation_dtype(query.dtype)
        self.chunk, self.settings = chunk, settings
        self.query = self.by_head(chunk.queries(query)).to(dtype) * settings.scale
        self.key, self.value = chunk.keys(key).to(dtype), chunk.keys(value).to(dtype)
        self.seed, self.all_rows, self.factor = dropout_seed, query.shape[2], None
        if dropout_seed is not None:
            shape, like = (self.all_rows, settings.columns), self.query
            factor = draw_dropout(chunk, shape, like, settings.dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            self.factor = factor.view(*self.query.shape[:3], -1)

    def by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(P, g · N, D)` as `(P, g, N, D)`."""
        return rows.unflatten(1, (self.chunk.group, -1))

    def segments(self) -> Iterator[_Segment]:
        """One after the other."""
        for start in range(0, self.key.shape[1], self.settings.segment_length):
            yield _Segment(self, start)

    def local_part(self, query: torch.Tensor, rows: slice, keys: slice) -> LocalPart:
        """The queries of a segment over its own keys, or those of its window."""
        factor = self.factor
        if factor is not None:
            first = rows.start - self.settings.window
            factor = factor[:, :, rows, keys.start - first : keys.stop - first]
        return LocalPart(query, self.key[:, keys], self.value[:, keys], keys == rows, factor)

    def exact_factor(self, heads: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor | None:
        """Dropout `(heads, g, n, m)` of exact weights, by other numbers than those of the other columns."""
        if self.seed is None:
            return None
        N, own, p, g = self.all_rows, self.chunk.query_rows, self.settings.dropout_p, self.chunk.group
        drawn = []
        for problem in [self.chunk.first_problem + head * g + h for head in heads.tolist() for h in range(g)]:
            found = exact_dropout_rows(N, N, own, own, self.query, p, self.seed + 1, problem)
            drawn.append(torch.cat([of_rows for _, of_rows in found if of_rows is not None])[rows, keys])
        return torch.stack(drawn).unflatten(0, (-1, g))


@torch.library.custom_op("hf_effattn::causal_clustered_attention", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    *values: Any,
) -> torch.Tensor:
    settings = Settings(*values)
    value, special = without_special(value, key_mask)
    output = empty_output(query, value)

    def attend(part: RowChunk) -> None:
        chunk = _Chunk(part, query, key, value, settings, dropout_seed)
        found = chunk.query.new_empty(*chunk.query.shape[:3], value.shape[3])
        for segment in chunk.segments():
            found[:, :, segment.rows] = segment.attend()[2][0]
        part.store_queries(output, found.flatten(1, 2))

    chunks = chunks_of(query, key, key_mask, key_mask, largest_buffer(query, settings))
    for_every_chunk(attend, chunks, query.device)
    return output if special is None else add_special(output, special, key_mask)


@_forward.register_fake
def _(query, key, value, *settings):
    return empty_output(query, value)


@torch.library.custom_op(
    "hf_effattn::causal_clustered_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_output, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    *values: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    settings = Settings(*values)
    value, _ = without_special(value, key_mask)
    grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))

    def attend(part: RowChunk) -> None:
        chunk = _Chunk(part, query, key, value, settings, dropout_seed)
        of_query, of_key, of_value = (torch.zeros_like(rows) for rows in (chunk.query, chunk.key, chunk.value))
        grad = chunk.by_head(part.queries(grad_output)).to(of_query.dtype)
        for segment in chunk.segments():
            segment.backward(grad[:, :, segment.rows].contiguous(), of_query, of_key, of_value)
        part.store_queries(grad_query, of_query.mul_(settings.scale).flatten(1, 2))
        part.store_keys(grad_key, of_key)
        part.store_keys(grad_value, of_value)

    chunks = chunks_of(query, key, key_mask, key_mask, largest_buffer(query, settings))
    for_every_chunk(attend, chunks, query.device)
    return grad_query, grad_key, grad_value


@_backward_op.register_fake
def _(grad_output, query, key, value, *settings):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _backward(ctx, grad_output):
    grads = _backward_op(grad_output, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *[None] * (2 + len(ctx.settings)))


_forward.register_autograd(_backward, setup_context=_setup_context)


def causal_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    settings: Settings,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """One softmax over the local keys, the exact keys of the nearest past centroid, and what stands for the others."""
    return _forward(query, key, value, key_mask, dropout_seed, *settings.values())
