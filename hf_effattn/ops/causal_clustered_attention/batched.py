"""Causal attention over clusters for a CPU: a few large steps for many segments, on parts of one softmax.

Beside the inputs the backward pass gets what of the forward pass is dear and as small as they are: the output, the
log-sum-exp, and the labels. Tables are made again. All arithmetic is in float32, or float64 for float64 inputs.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `N` queries and keys, `S` segments of a span,
`n` queries of a segment, `C` query clusters per query head. What belongs to a span's segments is `(P · S, g, n, ·)`.
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
from .finished_keys import FinishedKeys
from .local import Attended, LocalPart, merge_
from .older import OlderPart, PastQueries
from .reference import Settings, add_special, without_special
from .sinks import HAVE_GRADIENTS, add_sinks_, gradient_of_sinks
from .spans import Span, spans

# Of the key/value heads of a chunk, all together: fewer make too small steps, more leave the cache.
CHUNK_ROWS = 2**15
# Queries of a segment that attend to their own keys in one step: of torch's causal step a score takes twice as long as
# of its other one, but every step has a price.
SQUARE = 256


def chunks(settings: Settings) -> list[RowChunk]:
    """On a CPU as many key/value heads at once as make a few large steps, whatever the number of texts in the batch.

    Otherwise what a text gets would differ in its last bits from what it gets alone.
    """
    query, key, _, key_mask = settings[:4]
    heads, numbers = key.shape[1], 0
    if query.device.type == "cpu" and heads:
        threads = torch.get_num_threads()
        parts = -(-heads * query.shape[2] // CHUNK_ROWS)
        parts = max(1, min(heads, -(-parts // threads) * threads))
        numbers = CHUNK_BYTES * parts // (query.shape[1] * accumulation_dtype(query.dtype).itemsize)
    return chunks_of(query, key, key_mask, key_mask, numbers)


def row_parts(length: int) -> list[slice]:
    """Rows of a segment that attend exactly in one step."""
    return [slice(start, min(start + SQUARE, length)) for start in range(0, length, SQUARE)]


class _Segments:
    """The parts of one softmax of a span: of a segment's own keys, those of the window, and older ones."""

    def __init__(self, chunk: "_Chunk", span: Span) -> None:
        self.chunk, self.span = chunk, span
        self.query = span.cut(chunk.query, span.rows)
        self.older: OlderPart | None = None
        # Of which of the `P · S` heads of segments, the older keys' number, and the part.
        self.exact_older: list[tuple[torch.Tensor, int, LocalPart]] = []
        self.past: PastQueries | None = None
        if span.new.stop:
            self._look_at_older()

    def _look_at_older(self) -> None:
        """Cluster queries and keys, and choose who attends how to the keys older than the window."""
        chunk, settings, query, span = self.chunk, self.chunk.settings, self.query, self.span
        finished = chunk.finished
        labels = None if chunk.query_labels is None else span.cut(chunk.query_labels, span.past_queries)
        metric = finished.metrics(span) if settings.clusters > 1 else None
        self.past = PastQueries(span.cut(chunk.query, span.past_queries), metric, labels, settings)
        covariance = self.past.of_heads.mean(dim=1)
        if chunk.key_labels is None:
            self.key_labels = finished.labels_of(span, covariance)
        else:
            self.key_labels = chunk.key_labels[:, span.new_keys].unflatten(1, (span.count, -1)).flatten(0, 1)
        finished.add(span, self.key_labels, covariance)
        exact = torch.zeros(len(query), dtype=torch.bool, device=query.device)
        if settings.max_predicted_error < inf:
            exact = finished.predicted(self.past.of_heads, span) > settings.max_predicted_error
            for i, older in enumerate(span.older):
                heads = exact[i :: span.count].nonzero()[:, 0]
                if len(heads):
                    key, value = (rows[heads, :older] for rows in (chunk.key, chunk.value))
                    own = heads * span.count + i
                    rows = slice(span.start + i * span.length, span.start + (i + 1) * span.length)
                    factor = chunk.exact_factor(heads, rows, slice(0, older))
                    self.exact_older.append((own, older, LocalPart(query[own], key, value, False, factor)))
        if not self.exact_older or not exact.all():
            factor = None
            if chunk.factor is not None:
                factor = span.cut(chunk.factor[..., settings.local_keys :], span.rows)
            self.older = OlderPart(query, finished, self.past, span, factor, settings)

    def store_labels(self, of_queries: torch.Tensor, of_keys: torch.Tensor) -> None:
        """Write the labels that were found for these segments to `(P, g, N)` and `(P, N)`."""
        if self.past is not None:
            of_queries[:, :, self.span.past_queries] = self.span.join(self.past.labels)
            of_keys[:, self.span.new_keys] = self.key_labels.reshape(len(of_keys), -1)

    def _attend_locally(self) -> Attended:
        """What `attend` finds of a segment's own keys and of those of the window."""
        query, chunk = self.query, self.chunk
        found = query.new_empty(*query.shape[:3], chunk.value.shape[2]), query.new_empty(*query.shape[:3], 1)
        for rows, parts in chunk.local_parts(query, self.span):
            near, *others = (part.attend() for _, part in parts)
            for other in others:
                merge_(near, other)
            for target, numbers in zip(found, near, strict=True):
                target[:, :, rows] = numbers
        return found

    def attend(self) -> Attended:
        """Outputs `(P · S, g, n, Dv)` and log-sum-exp `(P · S, g, n, 1)`."""
        found = self._attend_locally()
        if self.older is not None:
            older = self.older.attend()
            for heads, _, _ in self.exact_older:
                older[1][heads] = -torch.inf
            merge_(found, older)
        for heads, _, part in self.exact_older:
            of_heads = found[0][heads], found[1][heads]
            merge_(of_heads, part.attend())
            for target, numbers in zip(found, of_heads, strict=True):
                target[heads] = numbers
        if self.chunk.sinks is not None:
            add_sinks_(*found, self.chunk.sinks.repeat_interleave(self.span.count, dim=0)[..., None, None])
        return found

    def backward(
        self, grad: torch.Tensor, whole: Attended, of_query: torch.Tensor, of_key: torch.Tensor, of_value: torch.Tensor
    ) -> None:
        """Add to the gradients of a chunk's rows, but for those of the finished keys by clusters.

        `whole` is what `attend` has found.
        """
        span = self.span
        of_rows = torch.zeros_like(self.query)
        for rows, parts in self.chunk.local_parts(self.query, span):
            own_grad, *own_whole = (numbers[:, :, rows].contiguous() for numbers in (grad, *whole))
            for first, part in parts:
                more = part.backward(own_grad, own_whole[0], own_whole[1])
                of_rows[:, :, rows] += more[0]
                span.add_keys(of_key, more[1], first)
                span.add_keys(of_value, more[2], first)
        for heads, older, part in self.exact_older:
            more = part.backward(grad[heads], whole[0][heads], whole[1][heads])
            of_rows[heads] += more[0]
            of_head = heads // span.count
            of_key[of_head, :older] += more[1]
            of_value[of_head, :older] += more[2]
            grad = grad.index_fill(0, heads, 0.0)
        if self.older is not None:
            more_rows, of_past = self.older.backward(grad, whole, of_key, of_value)
            of_rows += more_rows
            of_query[:, :, span.past_queries] += span.join(of_past)
        of_query[:, :, span.rows] += span.join(of_rows)


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
        self.spans = list(spans(settings, self.key.shape[1], len(self.key)))
        self.finished = FinishedKeys(self.key, self.value, settings, self.spans)
        self.query_labels: torch.Tensor | None = None
        self.key_labels: torch.Tensor | None = None
        if kept is not None:
            self.query_labels = self.by_head(chunk.queries(kept.query_labels))[..., 0]
            self.key_labels = chunk.keys(kept.key_labels)[..., 0]

    def by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(P, g · N, D)` as `(P, g, N, D)`."""
        return rows.unflatten(1, (self.chunk.group, -1))

    def segments(self) -> Iterator[_Segments]:
        """A span after the other."""
        for span in self.spans:
            yield _Segments(self, span)

    def local_parts(self, query: torch.Tensor, span: Span) -> Iterator[tuple[slice, list[tuple[int, LocalPart]]]]:
        """Rows of every segment over their own keys, and over all from the window on that stand before those.

        With the number of the first key, in the first segment.
        """
        begin, window = span.start - span.window, span.window
        # Copied once, for all parts.
        key, value = (span.keys(numbers, begin, window + span.length) for numbers in (self.key, self.value))
        factor = None
        if self.factor is not None:
            first = self.settings.window - window
            factor = span.cut(self.factor[..., first : first + key.shape[1]], span.rows)
        for rows in row_parts(span.length):
            found = []
            start = window + rows.start
            for own, causal in ((slice(start, window + rows.stop), True), (slice(0, start), False)):
                if own.stop > own.start:
                    of_part = None if factor is None else factor[:, :, rows, own]
                    part = LocalPart(query[:, :, rows], key[:, own], value[:, own], causal, of_part)
                    found.append((begin + own.start, part))
            yield rows, found

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

    output: torch.Tensor  # `(B, H, N, Dv)`, in float32 or float64
    log_sum: torch.Tensor  # log-sum-exp of the scores, `(B, H, N, 1)`
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
        for segments in chunk.segments():
            attended, span = segments.attend(), segments.span
            if settings.keeps:
                for target, rows in zip(kept[:2], attended, strict=True):
                    part.store_queries(target, span.join(rows).flatten(1, 2), span.rows)
                segments.store_labels(query_labels[..., 0], key_labels[..., 0])
            part.store_queries(output, span.join(attended[0]).flatten(1, 2), span.rows)
            del segments, attended  # before the next span asks for as much memory
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

    A call that seemed to have no way back kept nothing, and has one where its graph was exported without gradients.
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
            span = segments.span
            own_grad, *whole = (span.cut(rows, span.rows) for rows in (grad, *kept_rows))
            segments.backward(own_grad.contiguous(), (whole[0], whole[1]), of_query, of_key, of_value)
            del segments, own_grad, whole  # before the next span asks for as much memory
        chunk.finished.store_gradients(of_key, of_value)
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
