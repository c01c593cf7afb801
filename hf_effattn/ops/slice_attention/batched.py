"""Slice attention for a CPU: slices as a batch of matrix products, a hand-written backward pass.

The slices of a chunk of heads stand one after the other in one table, so that a slice's neighbours are the same table
moved by one: no extended slice is ever copied. The attention weights are computed again in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F

from ..shared.dropout import dropout_factor
from ..shared.gradients import register_op
from ..shared.precision import accumulation_dtype, split_scale
from ..shared.row_chunks import CHUNK_BYTES
from ..shared.tables import softmax_, unwritten_output
from .layout import Layout
from .reference import DIFFERENTIABLE, LOCAL_WEIGHTS, Inputs, sink_rows, sink_visible, window_positions


class _Inputs(Inputs):
    """With what follows from the arguments."""

    @cached_property
    def layout(self) -> Layout:
        """Where the rows of the slices lie."""
        group = self.query.shape[1] // self.key.shape[1]
        return Layout(self.slice_length, self.extension, self.causal, self.query.shape[2], group)

    @cached_property
    def sinks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Positions of the sinks, and which of them there are, `(B, K)`; None without any."""
        sinks = None if self.sink_mask is None else sink_rows(self.sink_mask, self.key_mask)
        return None if sinks is None or sinks[0].shape[1] == 0 else sinks


class _Chunk:
    """What both passes compute of some heads of some items: packed rows, the mask and the scores.

    `T` counts the slices of all its heads, `G = group · L` the queries of a slice.
    """

    def __init__(self, inputs: _Inputs, items: slice, heads: slice) -> None:
        self.layout = layout = inputs.layout
        self.inputs, self.items, self.heads = inputs, items, heads
        self.query_heads = slice(heads.start * layout.group, heads.stop * layout.group)
        self.b, self.h = items.stop - items.start, heads.stop - heads.start
        self.token = self._tokens()
        query = layout.pack(inputs.query[items, self.query_heads], self.token, layout.group)
        if inputs.query_positions is not None:
            positions = inputs.query_positions[self.query_heads].unflatten(0, (self.h, layout.group))
            # Without the empty slice, whose scores must stay 0.
            query[:, :, : layout.slices] += positions.flatten(1, 2)[:, None]
        self.of_queries, self.of_scores = split_scale(inputs.scale, query.dtype)
        self.query = query.mul_(self.of_queries).flatten(0, 2)  # (T, G, D)
        self.keys = layout.pack_neighbours(inputs.key[items, heads], self.token)
        self.values = layout.pack_neighbours(inputs.value[items, heads], self.token)
        self.key_positions = None if inputs.key_positions is None else inputs.key_positions[heads]
        self.sinks = None
        if inputs.sinks is not None:
            rows, counts = inputs.sinks
            self.sinks = rows[items], counts[items]
            self.sink_keys, self.sink_values = (self._take_sinks(x, *self.sinks) for x in (inputs.key, inputs.value))

    def _tokens(self) -> torch.Tensor | None:
        """Which rows of the slices are tokens, `(b, slices, L)`; None where all are."""
        layout, key_mask = self.layout, self.inputs.key_mask
        missing = layout.slices * layout.slice_length - layout.length
        if key_mask is None:
            if not missing:
                return None
            mask = torch.ones(self.b, layout.length, dtype=torch.bool, device=self.inputs.query.device)
        else:
            mask = key_mask[self.items]
        return F.pad(mask, (0, missing)).unflatten(1, (layout.slices, layout.slice_length))

    def sink_index(self, places: torch.Tensor, columns: int) -> torch.Tensor:
        """Positions `(b, K)` of the sinks, repeated to gather rows of `columns` numbers: `(b, h, K, columns)`."""
        return places[:, None, :, None].expand(-1, self.h, -1, columns)

    def _take_sinks(self, rows: torch.Tensor, places: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Rows of the sinks, `(b · h, K, D)`, 0 where a place holds none."""
        taken = rows[self.items, self.heads].gather(2, self.sink_index(places, rows.shape[3]))
        return taken.masked_fill_(~held[:, None, :, None], 0.0).flatten(0, 1).to(self.query.dtype)

    def per_slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(T, G, ...)` as `(b, h, slices, group, L, ...)`, without the empty slices."""
        layout = self.layout
        sizes = (self.b, self.h, layout.places, layout.group, layout.slice_length)
        return tensor.view(*sizes, *tensor.shape[2:])[:, :, : layout.slices]

    def key_part(self, neighbour: int, rows: slice, columns: slice) -> torch.Tensor:
        """Keys of one part of the windows with their position terms, `(T, rows, D)`."""
        keys = self.layout.part(self.keys, neighbour, rows)
        if self.key_positions is None:
            return keys
        shaped = keys.unflatten(0, (self.b, self.h, self.layout.places)) + self.key_positions[:, None, columns]
        return shaped.flatten(0, 2)

    def scores(self) -> torch.Tensor:
        """Scores of all queries, invisible keys at the lowest number, `(T, G, window + K)` in float32 or float64."""
        # A product of bfloat16 is rounded to a part in 256 of itself, what all scores of a query share included.
        dtype = accumulation_dtype(self.query.dtype)
        query = self.query.to(dtype)
        if self.of_scores != 1:
            query = query * self.of_scores
        parts = [torch.bmm(query, self.key_part(*part).to(dtype).transpose(1, 2)) for part in self.layout.parts]
        if self.sinks is not None:
            sinks = self.sink_keys.to(dtype).transpose(1, 2)
            parts.append(self.per_head(query).bmm(sinks).view(*query.shape[:2], -1))
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        hidden = self._hidden()
        if hidden is not None:
            self.per_slice(scores).masked_fill_(hidden, torch.finfo(scores.dtype).min)
        return scores

    def per_head(self, rows: torch.Tensor) -> torch.Tensor:
        """`(T, G, ...)` as `(b · h, places · G, ...)`: what meets the sinks, which all slices of a head share."""
        return rows.reshape(self.b * self.h, -1, rows.shape[2])

    def _hidden(self) -> torch.Tensor | None:
        """Which keys a query does not see, `(1 or b, 1, slices, 1, 1 or L, window + K)`."""
        layout = self.layout
        if self.token is None and not layout.causal and not layout.extension and self.sinks is None:
            return None
        L, e = layout.slice_length, layout.extension
        window = window_positions(layout.slices, L, e, layout.causal, self.query.device)
        hidden = ((window < 0) | (window >= layout.length))[None]  # (1, slices, window)
        if self.token is not None:
            token = self.token.flatten(1)
            hidden = hidden | ~token[:, window.clamp(0, token.shape[1] - 1)]
        hidden = hidden[:, :, None]
        if layout.causal:
            hidden = hidden | (window[:, None] > window[:, e : e + L, None])
        if self.sinks is not None:
            seen = sink_visible(*self.sinks, layout.slices, L, e, layout.causal)[:, :, None]
            hidden = hidden.expand(self.b, -1, -1, -1)
            hidden = torch.cat([hidden, ~seen.expand(-1, -1, hidden.shape[2], -1)], dim=3)
        return hidden[:, None, :, None]

    def dropout_factor(self, weights: torch.Tensor) -> torch.Tensor | None:
        """Dropout factors `(T, G, window + K)`, or None without dropout."""
        seed = self.inputs.dropout_seed
        if seed is None:
            return None
        layout, H = self.layout, self.inputs.query.shape[1]
        rows = replace(layout, length=layout.slices * layout.slice_length)
        drawn = [
            dropout_factor(
                (rows.length, weights.shape[2]), weights, self.inputs.dropout_p, int(seed), problem, LOCAL_WEIGHTS
            )
            for item in range(self.items.start, self.items.stop)
            for problem in range(item * H + self.query_heads.start, item * H + self.query_heads.stop)
        ]
        return rows.pack(torch.stack(drawn).unflatten(0, (self.b, -1)), None, layout.group).flatten(0, 2)

    def attend(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights `(T, G, window + K)` times the values of the window and the sinks, `(T, G, Dv)`."""
        weights = weights.to(self.values.dtype)
        (neighbour, rows, columns), *others = self.layout.parts
        output = torch.bmm(weights[:, :, columns], self.layout.part(self.values, neighbour, rows))
        for neighbour, rows, columns in others:
            output.baddbmm_(weights[:, :, columns], self.layout.part(self.values, neighbour, rows))
        if self.sinks is not None:
            on_sinks = self.per_head(weights[:, :, self.layout.window :])
            output += torch.bmm(on_sinks, self.sink_values).view_as(output)
        return output

    def against_values(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the weights, `(T, G, window + K)`, from that of the output `(T, G, Dv)`."""
        parts = [
            torch.bmm(grad, self.layout.part(self.values, neighbour, rows).transpose(1, 2))
            for neighbour, rows, _ in self.layout.parts
        ]
        if self.sinks is not None:
            parts.append(self.per_head(grad).bmm(self.sink_values.transpose(1, 2)).view(*grad.shape[:2], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def slice_sizes(self) -> torch.Tensor | float:
        """Tokens of each slice, at least 1, to divide `(b, h, slices, ...)` by."""
        if self.token is None:
            return float(self.layout.slice_length)
        return self.token.sum(dim=2).clamp(min=1)[:, None, :, None]

    def store(self, target: torch.Tensor, table: torch.Tensor, heads: slice) -> None:
        """Write `(T, group · L, D)` to the chunk's rows of `(B, heads, N, D)`."""
        target[self.items, heads] = self.layout.unpack(table, self.b).to(target.dtype)

    def sum_to_neighbours(self, like: torch.Tensor, parts: list[torch.Tensor], on_sinks: torch.Tensor) -> torch.Tensor:
        """Gradients of keys or values `(T, L, D)`, summed from those of the parts of the windows and of the sinks."""
        layout, dtype = self.layout, accumulation_dtype(like.dtype)
        table = torch.zeros(like.shape, dtype=dtype, device=like.device)
        for (neighbour, rows, _), part in zip(layout.parts, parts, strict=True):
            layout.part(table, neighbour, rows).add_(part)
        table = layout.part(table, 0, slice(None))
        if self.sinks is not None:
            rows_of_head = table.view(self.b, self.h, -1, table.shape[2])
            summed = on_sinks.unflatten(0, (self.b, self.h)).to(dtype)
            places, held = self.sinks
            summed = summed.masked_fill(~held[:, None, :, None], 0.0)
            rows_of_head.scatter_add_(2, self.sink_index(places, table.shape[2]), summed)
        return table


def _chunks(inputs: _Inputs) -> Iterator[_Chunk]:
    """As many whole items as fit a chunk's largest buffer, else some heads of one."""
    layout = inputs.layout
    B, heads = inputs.key.shape[:2]
    columns = layout.window + (0 if inputs.sinks is None else inputs.sinks[0].shape[1])
    width = max(columns, inputs.query.shape[3], inputs.value.shape[3])
    per_head = layout.places * layout.group * layout.slice_length * width * 4
    if layout.length == 0:
        return
    items = max(1, min(B, CHUNK_BYTES // (per_head * heads)))
    parts = min(heads, -(-heads * per_head // CHUNK_BYTES)) if items == 1 else 1
    some = -(-heads // parts)
    for first in range(0, B, items):
        for head in range(0, heads, some):
            yield _Chunk(inputs, slice(first, min(B, first + items)), slice(head, min(heads, head + some)))


def _forward(inputs: _Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Y_l = softmax((S W_q + P_l W_q)(S_ext W_k + P_ext W_k)^T) S_ext W_v` per slice, its means, its log-sum-exps."""
    output, pooled, lse = empty_outputs(inputs)
    with torch.autocast(inputs.query.device.type, enabled=False):
        for chunk in _chunks(inputs):
            scores = chunk.scores()
            # The log-sum-exp of large scores is too coarse to take weights from.
            largest = scores.amax(dim=2, keepdim=True)
            weights = scores.sub_(largest).exp_()
            mass = weights.sum(dim=2, keepdim=True)
            weights /= mass
            sums = mass.log_().add_(largest)
            factor = chunk.dropout_factor(weights)
            values = chunk.attend(weights if factor is None else weights.mul_(factor))
            if chunk.token is not None:
                padding = ~chunk.token[:, None, :, None, :, None]
                chunk.per_slice(values).masked_fill_(padding, 0.0)
                chunk.per_slice(sums).masked_fill_(padding, torch.finfo(sums.dtype).min)
            chunk.store(output, values, chunk.query_heads)
            chunk.store(lse[..., None], sums, chunk.query_heads)
            means = chunk.per_slice(values).sum(dim=4, dtype=lse.dtype).transpose(2, 3).flatten(1, 2)
            pooled[chunk.items, chunk.query_heads] = (means / chunk.slice_sizes()).to(pooled.dtype)
    return output, pooled, lse


def empty_outputs(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the output `(B, H, N, Dv)`, the means `(B, H, slices, Dv)` and the log-sum-exps `(B, H, N)` go."""
    query, value = x.query, x.value
    B, H, N, _ = query.shape
    pooled = query.new_empty(B, -(-N // x.slice_length), H, value.shape[3]).transpose(1, 2)
    lse = query.new_empty(B, H, N, dtype=accumulation_dtype(query.dtype))
    return unwritten_output(query, value), pooled, lse


def gradients(
    grad_output: torch.Tensor, grad_pooled: torch.Tensor, grad_lse: torch.Tensor, inputs: _Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and of both position terms (empty where there are none)."""
    layout, query = inputs.layout, inputs.query
    dtype = accumulation_dtype(query.dtype)
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, inputs.key, inputs.value))
    grad_positions = [
        grad_lse.new_zeros(0) if tensor is None else torch.zeros_like(tensor, dtype=dtype)
        for tensor in (inputs.query_positions, inputs.key_positions)
    ]
    with torch.autocast(query.device.type, enabled=False):
        for chunk in _chunks(inputs):
            grad = layout.pack(grad_output[chunk.items, chunk.query_heads], chunk.token, layout.group)
            grad = grad.flatten(0, 2)  # (T, G, Dv)
            of_means = grad_pooled[chunk.items, chunk.query_heads] / chunk.slice_sizes()
            of_means = of_means.to(grad.dtype).unflatten(1, (chunk.h, layout.group)).transpose(2, 3)
            of_means = of_means[:, :, :, :, None]  # (b, h, slices, group, 1, Dv)
            if chunk.token is not None:
                of_means = of_means * chunk.token[:, None, :, None, :, None]
            chunk.per_slice(grad).add_(of_means)

            weights = softmax_(chunk.scores())
            factor = chunk.dropout_factor(weights)
            dropped = (weights if factor is None else weights * factor).to(chunk.values.dtype)
            grad_weights = chunk.against_values(grad).to(dtype)
            if factor is not None:
                grad_weights *= factor
            shared = torch.linalg.vecdot(weights, grad_weights)[..., None]
            shared -= layout.pack(
                grad_lse[chunk.items, chunk.query_heads, :, None], chunk.token, layout.group
            ).view_as(shared)
            grad_scores = grad_weights.sub_(shared).mul_(weights)
            if chunk.of_scores != 1:
                grad_scores *= chunk.of_scores
            grad_scores = grad_scores.to(chunk.keys.dtype)

            key_parts, value_parts, grad_q = [], [], torch.zeros_like(chunk.query)
            for neighbour, rows, columns in layout.parts:
                on_part = grad_scores[:, :, columns]
                keys = chunk.key_part(neighbour, rows, columns)
                grad_q.baddbmm_(on_part, keys)
                key_parts.append(torch.bmm(on_part.transpose(1, 2), chunk.query))
                value_parts.append(torch.bmm(dropped[:, :, columns].transpose(1, 2), grad))
                if inputs.key_positions is not None:
                    summed = key_parts[-1].unflatten(0, (chunk.b, chunk.h, -1)).sum(dim=(0, 2), dtype=dtype)
                    grad_positions[1][chunk.heads, columns] += summed
            sink_parts = [grad, grad]
            if chunk.sinks is not None:
                on_sinks = chunk.per_head(grad_scores[:, :, layout.window :])
                grad_q += torch.bmm(on_sinks, chunk.sink_keys).view_as(grad_q)
                sink_parts[0] = torch.bmm(on_sinks.transpose(1, 2), chunk.per_head(chunk.query))
                on_sinks = chunk.per_head(dropped[:, :, layout.window :])
                sink_parts[1] = torch.bmm(on_sinks.transpose(1, 2), chunk.per_head(grad))
            grad_q.mul_(chunk.of_queries)
            if inputs.query_positions is not None:
                summed = chunk.per_slice(grad_q).sum(dim=(0, 2), dtype=dtype)  # (h, group, L, D)
                grad_positions[0][chunk.query_heads] += summed.flatten(0, 1)
            chunk.store(grad_query, grad_q, chunk.query_heads)
            chunk.store(grad_key, chunk.sum_to_neighbours(chunk.keys, key_parts, sink_parts[0]), chunk.heads)
            chunk.store(grad_value, chunk.sum_to_neighbours(chunk.values, value_parts, sink_parts[1]), chunk.heads)
    return grad_query, grad_key, grad_value, grad_positions[0].to(query.dtype), grad_positions[1].to(query.dtype)


slice_attention = register_op(
    "slice_attention", _Inputs, _forward, gradients, DIFFERENTIABLE, fake=empty_outputs, outputs=3
)
