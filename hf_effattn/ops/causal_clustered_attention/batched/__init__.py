"""Causal attention over clusters for a CPU: one softmax over parts, each a few batched products; see `parts`.

The groups and the weights are computed again in the backward pass, so that between the two passes only the inputs are
alive. Registered with `torch.library`: to `torch.compile` each pass is one op.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `S` tokens of a segment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...shared.dropout import TOPK_AND_SUMMARY_WEIGHTS
from ...shared.precision import accumulation_dtype
from ...shared.row_chunks import RowChunk
from ...shared.tables import chunks_of, draw_dropout, empty_output
from ..reference import ARGUMENTS, Settings, add_special, without_special
from .grouping import group
from .parts import Gradients, LocalPart, Part, SummaryPart, TopPart
from .remainder import RemainderPart


def largest_buffer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> int:
    """A quarter of the numbers per head in the scores, the centroids' scores, or the copies of top keys.

    The segments are walked in many small steps, better walked for several heads at once.
    """
    layout = settings.layout(query.shape[2])
    head_dim = max(key.shape[3], value.shape[3])
    length = layout.segments * layout.segment_length
    clusters = min(settings.clusters, length)
    blocks = layout.served * min(layout.segment_length, clusters + layout.segment_length // 4)
    summaries = layout.first_cluster_columns[-1] // 2 if settings.method == "bi-clustered" else 0
    scores = max(layout.local_keys + settings.topk + summaries, head_dim)
    return max(length * scores, clusters * length, blocks * settings.topk * head_dim) // 4


@dataclass
class _Weights:
    """The weights `(batch, rows, columns)` of a part, and its dropout factors."""

    part: Part
    softmax: torch.Tensor
    factor: torch.Tensor | None

    @property
    def dropped(self) -> torch.Tensor:
        """The weights after dropout."""
        return self.softmax if self.factor is None else self.softmax * self.factor


class _Chunk:
    """What both passes compute of a chunk of heads."""

    def __init__(
        self,
        chunk: RowChunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        settings: Settings,
        dropout_seed: torch.Tensor | None,
    ) -> None:
        keys, values = chunk.keys(key), chunk.keys(value)
        self.chunk, self.settings = chunk, settings
        self.P, self.N, _ = keys.shape
        self.layout = settings.layout(self.N)
        self.query = self.pad(chunk.queries(query)) * settings.scale
        self.key, self.value = (
            F.pad(rows, (0, 0, 0, self.layout.segments * self.layout.segment_length - self.N))
            for rows in (keys, values)
        )
        self.factor = None
        if dropout_seed is not None:
            whole = settings.layout(query.shape[2])
            shape = query.shape[2], settings.columns(whole)
            like = self.query.new_empty(0, dtype=accumulation_dtype(query.dtype))
            factor = draw_dropout(chunk, shape, like, settings.dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            self.factor = self.pad(factor.view(self.P, -1, shape[1]))

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(P, g · N, D)` as `(P, g, segments, S, D)`, the last segment filled up with 0."""
        rows = rows.unflatten(1, (self.chunk.group, -1))
        length = self.layout.segments * self.layout.segment_length
        return F.pad(rows, (0, 0, 0, length - self.N)).unflatten(2, (self.layout.segments, -1))

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Inverse of `pad`."""
        return padded.flatten(2, 3)[:, :, : self.N].flatten(1, 2)

    def parts(self) -> Iterator[Part]:
        """All columns of the softmax; the local ones first, so that every query has a score at once."""
        layout, settings, tables = self.layout, self.settings, (self.key, self.value)
        yield LocalPart(*tables, self.chunk.group, layout)
        if not layout.served:
            return
        grouping = group(self.query, self.key, layout, settings)
        if settings.topk:
            yield TopPart(*tables, grouping, layout, settings)
        if settings.method == "bi-clustered":
            for run in layout.runs():
                yield SummaryPart(*tables, run, grouping, layout, settings)
        else:
            yield RemainderPart(*tables, grouping, layout, layout.local_keys + settings.topk)

    def weights(self) -> list[_Weights]:
        """The softmax, part by part."""
        found = [(part, part.scores(self.query)) for part in self.parts()]
        dtype = accumulation_dtype(self.query.dtype)
        largest = torch.full((*self.query.shape[:4], 1), -torch.inf, dtype=dtype, device=self.query.device)
        for part, scores in found:
            region = part.region(largest)
            region.copy_(torch.maximum(region, part.from_rows(scores.amax(dim=2, keepdim=True))))
        total = torch.zeros_like(largest)
        for part, scores in found:
            scores.sub_(part.take(largest)).exp_()
            part.add(total, scores.sum(dim=2, keepdim=True))
        inverse = total.reciprocal_()
        weights = []
        for part, scores in found:
            factor = None if self.factor is None else part.take(self.factor[..., part.columns])
            weights.append(_Weights(part, scores.mul_(part.take(inverse)), factor))
        return weights


@torch.library.custom_op(
    "hf_effattn::causal_clustered_attention",
    mutates_args=(),
    schema=f"({ARGUMENTS}) -> Tensor",
)
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
    with torch.autocast(query.device.type, enabled=False):
        for part_of_batch in chunks_of(query, key, key_mask, key_mask, largest_buffer(query, key, value, settings)):
            chunk = _Chunk(part_of_batch, query, key, value, settings, dropout_seed)
            result = chunk.query.new_zeros(*chunk.query.shape[:4], value.shape[3])
            result = result.to(accumulation_dtype(query.dtype))
            for weights in chunk.weights():
                part = weights.part
                part.add(result, weights.dropped.to(value.dtype) @ part.values)
            part_of_batch.store_queries(output, chunk.unpad(result))
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
    with torch.autocast(query.device.type, enabled=False):
        for part_of_batch in chunks_of(query, key, key_mask, key_mask, largest_buffer(query, key, value, settings)):
            chunk = _Chunk(part_of_batch, query, key, value, settings, dropout_seed)
            grads = _chunk_gradients(chunk, chunk.pad(part_of_batch.queries(grad_output)))
            part_of_batch.store_queries(grad_query, chunk.unpad(grads.query) * settings.scale)
            for target, gradient in ((grad_key, grads.key), (grad_value, grads.value)):
                part_of_batch.store_keys(target, gradient[:, : chunk.N])
    return grad_query, grad_key, grad_value


def _chunk_gradients(chunk: _Chunk, grad: torch.Tensor) -> Gradients:
    """What one chunk adds to the gradients."""
    dtype = accumulation_dtype(grad.dtype)
    found = chunk.weights()
    row_dot = torch.zeros(*grad.shape[:4], 1, dtype=dtype, device=grad.device)
    grad_weights = []
    for weights in found:
        part = weights.part
        product = (part.take(grad) @ part.values.transpose(1, 2)).to(dtype)
        if weights.factor is not None:
            product *= weights.factor
        part.add(row_dot, torch.linalg.vecdot(weights.softmax, product)[..., None])
        grad_weights.append(product)
    rows = chunk.query, chunk.key, chunk.value
    sums = Gradients(*(torch.zeros(tensor.shape, dtype=dtype, device=grad.device) for tensor in rows))
    for weights, product in zip(found, grad_weights, strict=True):
        part = weights.part
        grad_table = weights.dropped.to(grad.dtype).transpose(1, 2) @ part.take(grad)
        grad_scores = product.sub_(part.take(row_dot)).mul_(weights.softmax)
        part.add_gradients(chunk.query, grad_scores, grad_table, sums)
    return sums


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
    """One softmax over the local keys, the top keys of the nearest past centroid, and what stands for the others."""
    return _forward(query, key, value, key_mask, dropout_seed, *settings.values())
