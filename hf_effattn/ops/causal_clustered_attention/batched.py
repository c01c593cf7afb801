"""Causal attention over clusters for a CPU: a few large steps for many segments, on parts of one softmax.

Beside the inputs the backward pass gets what is expensive to compute and as small as they are: the output, the
log-sum-exp and the labels. It makes the tables again. All arithmetic is in float32, or float64 for float64 inputs.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `N` queries and keys, `S` segments of a batch,
`n` queries of a segment, `C` query clusters per query head. What belongs to a batch's segments is `(P · S, g, n, ·)`.
"""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch

from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, exact_dropout_rows
from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import CHUNK_BYTES, RowChunk
from ..shared.tables import chunks_of, draw_dropout, empty_output, gradients_of_chunks, output_of_chunks
from .completed_keys import CompletedKeys
from .distant_keys import DistantPart, PreviousQueries
from .local import LocalPart, PartialOutput, merge_
from .reference import Settings, add_special, without_special
from .segment_batches import SegmentBatch, segment_batches
from .sinks import HAVE_GRADIENTS, add_sinks_, gradient_of_sinks

# Rows of all key/value heads of a chunk: with fewer the steps are too small, with more they leave the cache.
CHUNK_ROWS = 2**15
# Queries of a segment that attend to their own keys in one step. A score of torch's causal attention takes twice as
# long as one of its full attention, but every call has a price.
SQUARE = 256


def chunks(settings: Settings) -> list[RowChunk]:
    """Chunks of key/value heads; on a CPU of as many as make a few large steps.

    Their size does not depend on the number of texts: otherwise a text in a batch would differ in its last bits from
    the text alone.
    """
    query, key, _, key_mask = settings[:4]
    heads, numbers = key.shape[1], 0
    if query.device.type == "cpu" and heads:
        threads = torch.get_num_threads()
        parts = -(-heads * query.shape[2] // CHUNK_ROWS)
        parts = max(1, min(heads, -(-parts // threads) * threads))
        numbers = CHUNK_BYTES * parts // (query.shape[1] * accumulation_dtype(query.dtype).itemsize)
    return chunks_of(query, key, key_mask, key_mask, numbers)


class _Segments:
    """The parts of one softmax for the segments of a batch: their own keys, the window's, and distant keys."""

    def __init__(self, chunk: "_Chunk", batch: SegmentBatch) -> None:
        self.chunk, self.batch = chunk, batch
        self.query = batch.cut(chunk.query, batch.rows)
        self.distant: DistantPart | None = None
        # Which of the `P · S` heads of segments, how many distant keys they have, and the part.
        self.exact_distant: list[tuple[torch.Tensor, int, LocalPart]] = []
        self.previous: PreviousQueries | None = None
        if batch.new.stop:
            self._look_at_distant_keys()

    def _look_at_distant_keys(self) -> None:
        """Cluster queries and keys, and choose which head attends to the distant keys in which way."""
        chunk, settings, query, batch = self.chunk, self.chunk.settings, self.query, self.batch
        completed = chunk.completed
        labels = None if chunk.query_labels is None else batch.cut(chunk.query_labels, batch.previous_queries)
        metric = completed.metrics(batch) if settings.clusters > 1 else None
        self.previous = PreviousQueries(batch.cut(chunk.query, batch.previous_queries), metric, labels, settings)
        covariance = self.previous.of_heads.mean(dim=1)
        if chunk.key_labels is None:
            self.key_labels = completed.labels_of(batch, covariance)
        else:
            self.key_labels = chunk.key_labels[:, batch.new_keys].unflatten(1, (batch.count, -1)).flatten(0, 1)
        completed.add(batch, self.key_labels, covariance)
        exact = torch.zeros(len(query), dtype=torch.bool, device=query.device)
        if settings.max_predicted_error < inf:
            exact = completed.predicted(self.previous.of_heads, batch) > settings.max_predicted_error
            for i, distant in enumerate(batch.distant):
                heads = exact[i :: batch.count].nonzero()[:, 0]
                if len(heads):
                    key, value = (rows[heads, :distant] for rows in (chunk.key, chunk.value))
                    places = heads * batch.count + i
                    rows = slice(batch.start + i * batch.length, batch.start + (i + 1) * batch.length)
                    factor = chunk.exact_factor(heads, rows, slice(0, distant))
                    self.exact_distant.append((places, distant, LocalPart(query[places], key, value, False, factor)))
        if not self.exact_distant or not exact.all():
            factor = None
            if chunk.factor is not None:
                factor = batch.cut(chunk.factor[..., settings.local_keys :], batch.rows)
            self.distant = DistantPart(query, completed, self.previous, batch, factor, settings)

    def store_labels(self, of_queries: torch.Tensor, of_keys: torch.Tensor) -> None:
        """Write the labels that were found for these segments to `(P, g, N)` and `(P, N)`."""
        if self.previous is not None:
            of_queries[:, :, self.batch.previous_queries] = self.batch.join(self.previous.labels)
            of_keys[:, self.batch.new_keys] = self.key_labels.reshape(len(of_keys), -1)

    def _attend_locally(self) -> PartialOutput:
        """What `attend` finds of a segment's own keys and of those of the window."""
        query, chunk = self.query, self.chunk
        local = query.new_empty(*query.shape[:3], chunk.value.shape[2]), query.new_empty(*query.shape[:3], 1)
        for rows, parts in chunk.local_parts(query, self.batch):
            near, *others = (part.attend() for _, part in parts)
            for other in others:
                merge_(near, other)
            for target, numbers in zip(local, near, strict=True):
                target[:, :, rows] = numbers
        return local

    def attend(self) -> PartialOutput:
        """Outputs `(P · S, g, n, Dv)` and log-sum-exp `(P · S, g, n, 1)`."""
        whole = self._attend_locally()
        if self.distant is not None:
            distant = self.distant.attend()
            for heads, _, _ in self.exact_distant:
                distant[1][heads] = -torch.inf
            merge_(whole, distant)
        for heads, _, part in self.exact_distant:
            of_heads = whole[0][heads], whole[1][heads]
            merge_(of_heads, part.attend())
            for target, numbers in zip(whole, of_heads, strict=True):
                target[heads] = numbers
        if self.chunk.sinks is not None:
            add_sinks_(*whole, self.chunk.sinks.repeat_interleave(self.batch.count, dim=0)[..., None, None])
        return whole

    def backward(
        self,
        grad: torch.Tensor,
        whole: PartialOutput,
        of_query: torch.Tensor,
        of_key: torch.Tensor,
        of_value: torch.Tensor,
    ) -> None:
        """Add to the gradients of a chunk's rows, except what completed keys get through their clusters.

        `whole` is what `attend` has found.
        """
        batch = self.batch
        of_rows = torch.zeros_like(self.query)
        for rows, parts in self.chunk.local_parts(self.query, batch):
            own_grad, *own_whole = (numbers[:, :, rows].contiguous() for numbers in (grad, *whole))
            for first, part in parts:
                more = part.backward(own_grad, own_whole[0], own_whole[1])
                of_rows[:, :, rows] += more[0]
                batch.add_keys(of_key, more[1], first)
                batch.add_keys(of_value, more[2], first)
        for heads, distant, part in self.exact_distant:
            more = part.backward(grad[heads], whole[0][heads], whole[1][heads])
            of_rows[heads] += more[0]
            of_head = heads // batch.count
            of_key[of_head, :distant] += more[1]
            of_value[of_head, :distant] += more[2]
            grad = grad.index_fill(0, heads, 0.0)
        if self.distant is not None:
            more_rows, of_previous = self.distant.backward(grad, whole, of_key, of_value)
            of_rows += more_rows
            of_query[:, :, batch.previous_queries] += batch.join(of_previous)
        of_query[:, :, batch.rows] += batch.join(of_rows)


class _Chunk:
    """A chunk's rows, in float32 or float64; the queries are scaled."""

    def __init__(self, chunk: RowChunk, settings: Settings, kept: "Kept | None" = None) -> None:
        """`kept`: of the forward pass."""
        query, key, value, _, dropout_seed = settings[:5]
        dtype = accumulation_dtype(query.dtype)
        self.chunk, self.settings = chunk, settings
        self.query = self.by_head(chunk.queries(query)).to(dtype) * settings.scale
        self.key, self.value = chunk.keys(key).to(dtype), chunk.keys(value).to(dtype)
        self.sinks: torch.Tensor | None = None  # `(P, g)`
        if settings.sinks is not None:
            of_heads = chunk.of_query_heads(settings.sinks.expand(len(query), -1))
            self.sinks = of_heads.unflatten(0, (-1, chunk.group)).to(dtype)
        self.seed, self.all_rows, self.factor = dropout_seed, query.shape[2], None
        if dropout_seed is not None:
            shape, like = (self.all_rows, settings.columns(self.all_rows)), self.query
            factor = draw_dropout(chunk, shape, like, settings.dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            self.factor = factor.view(*self.query.shape[:3], -1)
        self.batches = list(segment_batches(settings, self.key.shape[1], len(self.key)))
        self.completed = CompletedKeys(self.key, self.value, settings, self.batches)
        self.query_labels: torch.Tensor | None = None
        self.key_labels: torch.Tensor | None = None
        if kept is not None:
            self.query_labels = self.by_head(chunk.queries(kept.query_labels))[..., 0]
            self.key_labels = chunk.keys(kept.key_labels)[..., 0]

    def by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(P, g · N, D)` as `(P, g, N, D)`."""
        return rows.unflatten(1, (self.chunk.group, -1))

    def segments(self) -> Iterator[_Segments]:
        """One batch of segments after the other."""
        for batch in self.batches:
            yield _Segments(self, batch)

    def local_parts(
        self, query: torch.Tensor, batch: SegmentBatch
    ) -> Iterator[tuple[slice, list[tuple[int, LocalPart]]]]:
        """Rows of every segment, with their parts: over their own keys, and over all keys from the window to those.

        Each part comes with the number of its first key in the first segment.
        """
        begin, window = batch.start - batch.window, batch.window
        # Copied once, for all parts.
        key, value = (batch.keys(numbers, begin, window + batch.length) for numbers in (self.key, self.value))
        factor = None
        if self.factor is not None:
            first = self.settings.window - window
            factor = batch.cut(self.factor[..., first : first + key.shape[1]], batch.rows)
        for row in range(0, batch.length, SQUARE):
            rows = slice(row, min(row + SQUARE, batch.length))
            parts = []
            start = window + rows.start
            for columns, causal in ((slice(start, window + rows.stop), True), (slice(0, start), False)):
                if columns.stop > columns.start:
                    of_part = None if factor is None else factor[:, :, rows, columns]
                    part = LocalPart(query[:, :, rows], key[:, columns], value[:, columns], causal, of_part)
                    parts.append((begin + columns.start, part))
            yield rows, parts

    def exact_factor(self, heads: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor | None:
        """Dropout `(heads, g, n, m)` of exact weights, drawn apart from that of the other columns."""
        if self.seed is None:
            return None
        N, query_rows, p, g = self.all_rows, self.chunk.query_rows, self.settings.dropout_p, self.chunk.group
        drawn = []
        for problem in [self.chunk.first_problem + head * g + h for head in heads.tolist() for h in range(g)]:
            factors = exact_dropout_rows(N, N, query_rows, query_rows, self.query, p, self.seed + 1, problem)
            drawn.append(torch.cat([of_rows for _, of_rows in factors if of_rows is not None])[rows, keys])
        return torch.stack(drawn).unflatten(0, (-1, g))


class Kept(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    output: torch.Tensor  # `(B, H, N, Dv)`, in float32 or float64
    log_sum: torch.Tensor  # log-sum-exp of the scores, `(B, H, N, 1)`
    query_labels: torch.Tensor  # of the previous queries, `(B, H, N, 1)`
    key_labels: torch.Tensor  # `(B, heads, N, 1)`

    @staticmethod
    def empty(x: Settings) -> "Kept":
        """Zeros to be written, without rows where nothing is to be kept."""
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
    """One softmax over the local keys, the exact keys, and summaries of the others at the nearest centroid."""
    query, key, value, key_mask = settings[:4]
    finite, special = without_special(value, key_mask)
    output, kept = output_of_chunks(query, key, value, key_mask), Kept.empty(settings)

    def attend(part: RowChunk) -> None:
        chunk = _Chunk(part, settings._replace(value=finite))
        query_labels = chunk.query.new_zeros(*chunk.query.shape[:3], 1, dtype=torch.int64)
        key_labels = torch.zeros_like(chunk.key[..., :1], dtype=torch.int64)
        for segments in chunk.segments():
            attended, batch = segments.attend(), segments.batch
            if settings.keeps:
                for target, rows in zip(kept[:2], attended, strict=True):
                    part.store_queries(target, batch.join(rows).flatten(1, 2), batch.rows)
                segments.store_labels(query_labels[..., 0], key_labels[..., 0])
            part.store_queries(output, batch.join(attended[0]).flatten(1, 2), batch.rows)
            del segments, attended  # before the next batch asks for as much memory
        if settings.keeps:
            part.store_queries(kept.query_labels, query_labels.flatten(1, 2))
            part.store_keys(kept.key_labels, key_labels)

    for_every_chunk(attend, chunks(settings), query.device)
    return output if special is None else add_special(output, special, key_mask), *kept


def _fake(settings: Settings) -> tuple[torch.Tensor, ...]:
    return empty_output(settings.query, settings.value), *Kept.empty(settings)


def gradients(
    grad_output: torch.Tensor, output: torch.Tensor, log_sum: torch.Tensor, query_labels: torch.Tensor,
    key_labels: torch.Tensor, settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key, value and sinks, of what `Kept` holds and the arguments of `_forward`.

    A call without gradients keeps nothing. A graph that was exported so may still be asked for gradients: then the
    forward pass runs again.
    """
    if len(output) and output.shape[2] < settings.query.shape[2]:
        _, output, log_sum, query_labels, key_labels = _forward(settings._replace(keeps=True))
    (query, key, value, key_mask), kept = settings[:4], Kept(output, log_sum, query_labels, key_labels)
    finite, _ = without_special(value, key_mask)
    grad_query, grad_key, grad_value = gradients_of_chunks(query, key, value, key_mask)

    def attend(part: RowChunk) -> None:
        chunk = _Chunk(part, settings._replace(value=finite), kept)
        of_query, of_key, of_value = (torch.zeros_like(rows) for rows in (chunk.query, chunk.key, chunk.value))
        grad, *kept_rows = (chunk.by_head(part.queries(rows)) for rows in (grad_output, output, log_sum))
        grad = grad.to(of_query.dtype)
        for segments in chunk.segments():
            batch = segments.batch
            own_grad, *whole = (batch.cut(rows, batch.rows) for rows in (grad, *kept_rows))
            segments.backward(own_grad.contiguous(), (whole[0], whole[1]), of_query, of_key, of_value)
            del segments, own_grad, whole  # before the next batch asks for as much memory
        chunk.completed.store_gradients(of_key, of_value)
        part.store_queries(grad_query, of_query.mul_(settings.scale).flatten(1, 2))
        part.store_keys(grad_key, of_key)
        part.store_keys(grad_value, of_value)

    for_every_chunk(attend, chunks(settings), query.device)
    of_sinks = query.new_empty(0)
    if settings.sinks is not None:
        delta = torch.linalg.vecdot(grad_output.to(output.dtype), output)
        if key_mask is not None:
            delta.masked_fill_(~key_mask[:, None], 0.0)
        of_sinks = gradient_of_sinks(settings.sinks, log_sum[..., 0], delta)
    return grad_query, grad_key, grad_value, of_sinks


causal_clustered_attention = register_op(
    "causal_clustered_attention", Settings, _forward, gradients, HAVE_GRADIENTS, fake=_fake, keeps=slice(1, None)
)
