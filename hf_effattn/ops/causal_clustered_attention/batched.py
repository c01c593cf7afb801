"""Causal attention over clusters for a CPU: a few large steps per segment, on parts of one softmax.

Nothing but the inputs is kept for the backward pass, and to `torch.compile` each pass is one op. All arithmetic is in
float32, or float64 for float64 inputs.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `N` queries and keys, `n` of a segment, `C`
query clusters per query head.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Any

import torch

from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, exact_dropout_rows
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import chunks_of, draw_dropout, empty_output
from .local import Attended, LocalPart, merge
from .older import FinishedKeys, OlderPart, PastQueries
from .reference import ARGUMENTS, Settings, add_special, without_special


def largest_buffer(query: torch.Tensor, settings: Settings) -> int:
    """Numbers per head of what a step looks at: the past queries of all segments and the centroids' scores.

    Not on a CPU few heads at a time are few large steps, too.
    """
    return query.shape[2] * max(query.shape[3] // 2, settings.clusters) if query.device.type == "cpu" else 0


class _Segment:
    """A segment's parts of one softmax: its own keys, those of the window, and older ones, by clusters or exactly."""

    def __init__(self, chunk: "_Chunk", start: int, clusters: tuple[PastQueries, slice, torch.Tensor] | None) -> None:
        """`clusters`: past queries, the keys that are seen over clusters from now on, their labels; None: no older."""
        settings = chunk.settings
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

    def attend(self) -> tuple[Attended, list[Attended], Attended]:
        """Outputs and log-sum-exp: of near keys, of older ones by clusters in parts, of all."""
        near = merge([part.attend() for _, part in self.local])
        older = [] if self.older is None else self.older.attend()
        whole = merge([near, *older])
        if self.exact_older is not None:
            exact = self.exact_older.attend()
            of_heads = merge([(near[0][self.heads], near[1][self.heads]), exact])
            if self.older is None:
                return near, older, of_heads
            for target, found in zip(whole, of_heads, strict=True):
                target[self.heads] = found
        return near, older, whole

    def backward(
        self, grad: torch.Tensor, of_query: torch.Tensor, of_key: torch.Tensor, of_value: torch.Tensor
    ) -> None:
        """Add to the gradients of a chunk's rows, but for those of the finished keys by clusters."""
        near, older, whole = self.attend()
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
            of_rows, of_past = self.older.backward(grad, near, older, of_key, of_value)
            of_query[:, :, self.fitted] += of_past
            of_query[:, :, self.rows] += of_rows


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
            shape, like = (self.all_rows, settings.columns(self.all_rows)), self.query
            factor = draw_dropout(chunk, shape, like, settings.dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            self.factor = factor.view(*self.query.shape[:3], -1)
        self.finished = FinishedKeys(self.key, self.value, settings)

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
        past = PastQueries.of_segments(self.query, fitted, finished.metrics(blocks), settings) if late else []
        labels = finished.labels(blocks, [one.of_heads.mean(dim=1) for one in past])
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
        chunk.finished.store_gradients(of_key, of_value)
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
    """One softmax over the local keys, the exact keys, and what stands for the others at the nearest past centroid."""
    return _forward(query, key, value, key_mask, dropout_seed, *settings.values())
