"""Causal attention over clusters for a CPU: a few large steps per segment, on parts of one softmax.

Beside the inputs the backward pass gets what of the forward pass is dear and as small as they are: the output and
log-sum-exp of all exact keys, and the labels. Tables are made again. All arithmetic is in float32, or float64 for
float64 inputs.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `N` queries and keys, `n` of a segment, `C`
query clusters per query head.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch

from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, exact_dropout_rows
from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import chunks_of, draw_dropout, empty_output, gradients_of_chunks, output_of_chunks
from .local import Attended, LocalPart, merge
from .older import FinishedKeys, OlderPart, PastQueries
from .reference import Settings, add_special, without_special


def largest_buffer(settings: Settings, *, backward: bool = False) -> int:
    """Numbers per head of what a step looks at: the past queries of all segments and the centroids' scores.

    The backward pass holds gradients, too: of more heads at once, memory would be faulted in anew for every chunk. Not
    on a CPU few heads at a time are few large steps.
    """
    query = settings.query
    if query.device.type != "cpu":
        return 0
    return query.shape[2] * max(query.shape[3] * (3 if backward else 1) // 2, settings.clusters)


class _Segment:
    """A segment's parts of one softmax: its own keys, those of the window, and older ones, by clusters or exactly."""

    def __init__(self, chunk: "_Chunk", start: int, clusters: tuple[PastQueries, slice, torch.Tensor] | None) -> None:
        """`clusters`: past queries, the keys that are seen over clusters from now on, their labels; None: no older."""
        settings, self.clusters = chunk.settings, clusters
        self.rows = slice(start, min(start + settings.segment_length, chunk.key.shape[1]))
        self.fitted, self.old = settings.fitted(start, self.rows.stop), slice(0, settings.older(start))
        query = chunk.query[:, :, self.rows]
        self.local = [(self.rows, chunk.local_part(query, self.rows, self.rows))]
        if self.old.stop < start:
            window = slice(self.old.stop, start)
            self.local.append((window, chunk.local_part(query, self.rows, window)))
        self.older: OlderPart | None = None
        self.exact_older: LocalPart | None = None  # of `heads`, instead
        self.heads = torch.empty(0, dtype=torch.int64)
        if clusters is None:
            return
        finished, (past, new, labels) = chunk.finished, clusters
        finished.add(new, labels, past.of_heads.mean(dim=1))
        if settings.exact_above < inf:
            self.heads = (finished.predicted(past) > settings.exact_above).nonzero()[:, 0]
        if len(self.heads):
            key, value = (rows[self.heads, self.old] for rows in (chunk.key, chunk.value))
            exact_factor = chunk.exact_factor(self.heads, self.rows, self.old)
            self.exact_older = LocalPart(query[self.heads], key, value, False, exact_factor)
        if len(self.heads) < len(query):
            factor = None if chunk.factor is None else chunk.factor[:, :, self.rows, settings.local_keys :]
            self.older = OlderPart(query, finished, past, factor, settings)

    def store_labels(self, of_queries: torch.Tensor, of_keys: torch.Tensor) -> None:
        """Write the labels that were found for this segment to `(P, g, N)` and `(P, N)`."""
        if self.clusters is not None:
            past, new, labels = self.clusters
            of_queries[:, :, self.fitted], of_keys[:, new] = past.labels, labels

    def attend(self) -> tuple[Attended, Attended]:
        """Outputs and log-sum-exp: of all exact keys, and of all."""
        near = merge([part.attend() for _, part in self.local])
        exact: Attended | None = None
        if self.exact_older is not None:
            exact = merge([(near[0][self.heads], near[1][self.heads]), self.exact_older.attend()])
            if self.older is None:
                return exact, exact
        if self.older is None:
            return near, near
        rest = merge([near, *self.older.attend_exactly()])
        if exact is not None:
            for target, found in zip(rest, exact, strict=True):
                target[self.heads] = found
        return rest, self._whole(rest, self.older.attend())

    def _whole(self, rest: Attended, clusters: Attended) -> Attended:
        """Of all, where heads that attend exactly leave out the clusters."""
        whole = merge([rest, clusters])
        if len(self.heads):
            for target, found in zip(whole, rest, strict=True):
                target[self.heads] = found[self.heads]
        return whole

    def backward(
        self, grad: torch.Tensor, rest: Attended, of_query: torch.Tensor, of_key: torch.Tensor, of_value: torch.Tensor
    ) -> None:
        """Add to the gradients of a chunk's rows, but for those of the finished keys by clusters.

        `rest` is what `attend` has found of all exact keys.
        """
        whole = rest
        if self.older is not None:
            clusters = self.older.attend()
            whole = self._whole(rest, clusters)
        for keys, part in self.local:
            more = part.backward(grad, *whole)
            of_query[:, :, self.rows] += more[0]
            of_key[:, keys] += more[1]
            of_value[:, keys] += more[2]
        if self.exact_older is not None:
            more = self.exact_older.backward(grad[self.heads], whole[0][self.heads], whole[1][self.heads])
            of_query[self.heads, :, self.rows] += more[0]
            of_key[self.heads, self.old] += more[1]
            of_value[self.heads, self.old] += more[2]
            grad = grad.index_fill(0, self.heads, 0.0)
        if self.older is not None:
            of_rows, of_past = self.older.backward(grad, rest, clusters[1], whole, of_key, of_value)
            of_query[:, :, self.fitted] += of_past
            of_query[:, :, self.rows] += of_rows


class _Chunk:
    """A chunk's rows, in float32 or float64; the queries are scaled."""

    def __init__(self, chunk: RowChunk, settings: Settings, kept: "Kept | None" = None) -> None:
        """`kept`: of the forward pass."""
        query, key, value, _, dropout_seed = settings[:5]
        dtype = accumulation_dtype(query.dtype)
        self.chunk, self.settings = chunk, settings
        self.query = self.by_head(chunk.queries(query)).to(dtype) * settings.scale
        self.key, self.value = chunk.keys(key).to(dtype), chunk.keys(value).to(dtype)
        self.seed, self.all_rows, self.factor = dropout_seed, query.shape[2], None
        if dropout_seed is not None:
            shape, like = (self.all_rows, settings.columns(self.all_rows)), self.query
            factor = draw_dropout(chunk, shape, like, settings.dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            self.factor = factor.view(*self.query.shape[:3], -1)
        self.finished = FinishedKeys(self.key, self.value, settings)
        self.query_labels: torch.Tensor | None = None
        self.key_labels: torch.Tensor | None = None
        if kept is not None:
            self.query_labels = self.by_head(chunk.queries(kept.query_labels))[..., 0]
            self.key_labels = chunk.keys(kept.key_labels)[..., 0]

    def by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(P, g · N, D)` as `(P, g, N, D)`."""
        return rows.unflatten(1, (self.chunk.group, -1))

    def segments(self) -> Iterator[_Segment]:
        """One after the other; what is clustered is clustered for all of them at once."""
        settings, finished, N = self.settings, self.finished, self.key.shape[1]
        starts = range(0, N, settings.segment_length)
        late = [start for start in starts if settings.older(start)]
        ends = [settings.older(start) for start in late]
        blocks = [slice(first, end) for first, end in pairwise([0, *ends])]
        fitted = [settings.fitted(start, min(start + settings.segment_length, N)) for start in late]
        past: list[PastQueries] = []
        if late:
            metrics = finished.metrics(blocks)
            past = PastQueries.of_segments(self.query, fitted, metrics, self.query_labels, settings)
        if self.key_labels is not None:
            labels = [self.key_labels[:, rows] for rows in blocks]
        else:
            labels = finished.labels_of_blocks(blocks, [one.of_heads.mean(dim=1) for one in past])
        clusters = dict(zip(late, zip(past, blocks, labels, strict=True), strict=True))
        for start in starts:
            yield _Segment(self, start, clusters.get(start))

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


class Kept(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    rest: torch.Tensor  # the output of all exact keys alone `(B, H, N, Dv)`, in float32 or float64
    log_sum: torch.Tensor  # of their scores, `(B, H, N, 1)`
    query_labels: torch.Tensor  # of the past queries, `(B, H, N, 1)`
    key_labels: torch.Tensor  # `(B, heads, N, 1)`

    @staticmethod
    def empty(x: Settings) -> "Kept":
        """Zeros, to be written; of no rows where nothing is to be kept."""
        query, key, value = x[:3]
        N = query.shape[2] if x.keeps else 0
        of_queries, of_keys = (*query.shape[:2], N), (*key.shape[:2], N)
        dtype = accumulation_dtype(query.dtype)
        return Kept(
            query.new_zeros(*of_queries, value.shape[3], dtype=dtype),
            query.new_zeros(*of_queries, 1, dtype=dtype),
            query.new_zeros(*of_queries, 1, dtype=torch.int64),
            key.new_zeros(*of_keys, 1, dtype=torch.int64),
        )


def _forward(settings: Settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One softmax over the local keys, the exact keys, and what stands for the others at the nearest past centroid."""
    query, key, value, key_mask = settings[:4]
    finite, special = without_special(value, key_mask)
    output, kept = output_of_chunks(query, key, value, key_mask), Kept.empty(settings)

    def attend(part: RowChunk) -> None:
        chunk = _Chunk(part, settings._replace(value=finite))
        query_labels = chunk.query.new_zeros(*chunk.query.shape[:3], 1, dtype=torch.int64)
        key_labels = torch.zeros_like(chunk.key[..., :1], dtype=torch.int64)
        for segment in chunk.segments():
            of_rest, of_all = segment.attend()
            part.store_queries(output, of_all[0].flatten(1, 2), segment.rows)
            if settings.keeps:
                for target, rows in zip(kept[:2], of_rest, strict=True):
                    part.store_queries(target, rows.flatten(1, 2), segment.rows)
                segment.store_labels(query_labels[..., 0], key_labels[..., 0])
        if settings.keeps:
            part.store_queries(kept.query_labels, query_labels.flatten(1, 2))
            part.store_keys(kept.key_labels, key_labels)

    chunks = chunks_of(query, key, key_mask, key_mask, largest_buffer(settings))
    for_every_chunk(attend, chunks, query.device)
    return output if special is None else add_special(output, special, key_mask), *kept


def _fake(settings: Settings) -> tuple[torch.Tensor, ...]:
    return empty_output(settings.query, settings.value), *Kept.empty(settings)


def gradients(
    grad_output: torch.Tensor, rest: torch.Tensor, log_sum: torch.Tensor, query_labels: torch.Tensor,
    key_labels: torch.Tensor, settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value, of what `Kept` holds and the arguments of `_forward`."""
    (query, key, value, key_mask), kept = settings[:4], Kept(rest, log_sum, query_labels, key_labels)
    finite, _ = without_special(value, key_mask)
    grad_query, grad_key, grad_value = gradients_of_chunks(query, key, value, key_mask)

    def attend(part: RowChunk) -> None:
        chunk = _Chunk(part, settings._replace(value=finite), kept)
        of_query, of_key, of_value = (torch.zeros_like(rows) for rows in (chunk.query, chunk.key, chunk.value))
        grad, own_rest, own_log_sum = (chunk.by_head(part.queries(rows)) for rows in (grad_output, rest, log_sum))
        grad = grad.to(of_query.dtype)
        for segment in chunk.segments():
            rows = slice(None), slice(None), segment.rows
            of_rest = own_rest[rows], own_log_sum[rows]
            segment.backward(grad[rows].contiguous(), of_rest, of_query, of_key, of_value)
        chunk.finished.store_gradients(of_key, of_value)
        part.store_queries(grad_query, of_query.mul_(settings.scale).flatten(1, 2))
        part.store_keys(grad_key, of_key)
        part.store_keys(grad_value, of_value)

    chunks = chunks_of(query, key, key_mask, key_mask, largest_buffer(settings, backward=True))
    for_every_chunk(attend, chunks, query.device)
    return grad_query, grad_key, grad_value


causal_clustered_attention = register_op(
    "causal_clustered_attention", Settings, _forward, gradients, fake=_fake, keeps=slice(1, None)
)
