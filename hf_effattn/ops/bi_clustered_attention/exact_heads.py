"""Exact attention of some heads, for a CPU: heads that no summary of keys serves, beside the clustered ones.

Sizes: `P` heads, `N` queries, `M` keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from threading import Lock

import torch
import torch.nn.functional as F

from ..shared.dropout import exact_dropout_rows
from ..shared.precision import accumulation_dtype, product_dtype
from ..shared.row_chunks import CHUNK_BYTES, RowChunk
from ..shared.tables import chunks_of
from .reference import Inputs

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class ExactPart:
    """Some queries of a head that attends exactly: `rows` of those that count in `chunk`."""

    chunk: RowChunk
    rows: slice


class KeyGradients:
    """Adds up the key gradients of the parts of each head, in their order, on any number of threads.

    A head is added up as soon as its last part is there, so that gradients of parts do not stay in memory.
    """

    def __init__(self, parts: list[ExactPart]) -> None:
        self._lock = Lock()
        self._waiting: dict[ExactPart, list[torch.Tensor]] = {}
        self._of_head: dict[ExactPart, list[ExactPart]] = {}
        for _, of_head in groupby(parts, key=lambda part: id(part.chunk)):
            together = list(of_head)
            self._of_head |= dict.fromkeys(together, together)

    def add(self, part: ExactPart, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of the part's head if no other part of it is missing, else nothing."""
        with self._lock:
            self._waiting[part] = gradients
            together = self._of_head[part]
            if any(member not in self._waiting for member in together):
                return []
            first, *others = (self._waiting.pop(member) for member in together)
        for more in others:
            for total, gradient in zip(first, more, strict=True):
                total += gradient
        return first


def exact_parts(x: Inputs) -> list[ExactPart]:
    """Each key/value head that is True in `exact_heads` `(B, heads)`, if it has queries and keys, a part per thread.

    With dropout a head is one part, as its random numbers are drawn one after the other.
    """
    if x.exact_heads is None:
        return []
    parts: list[ExactPart] = []
    threads = torch.get_num_threads() if x.dropout_seed is None and _in_flash(x) else 1
    # A buffer of this size makes every head a chunk.
    for chunk in chunks_of(x.query, x.key, x.key_mask, x.query_mask, CHUNK_BYTES, ~x.exact_heads):
        count = x.query.shape[2] if chunk.query_rows is None else len(chunk.query_rows)
        edges = [count * i // threads for i in range(threads + 1)]
        parts += [ExactPart(chunk, slice(*edge)) for edge in pairwise(edges) if edge[0] < edge[1]]
    return parts


def attend_exactly(part: ExactPart, x: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output of a part's queries, `(1, group · rows, Dv)`, and log-sum-exp of their scores `(1, group · rows, 1)`.

    None where the backward pass does not need it.
    """
    chunk = part.chunk
    if x.dropout_seed is None:
        q, k, v = _by_query_head(part, x)
        if not _in_flash(x):
            return F.scaled_dot_product_attention(q, k, v, scale=x.scale).flatten(1, 2), None
        output, log_sum = FLASH(q, k, v, 0.0, False, scale=x.scale)
        return output.flatten(1, 2), log_sum.flatten(1, 2)[..., None]
    v = chunk.keys(x.value)[0].to(product_dtype(x.value))
    pieces = [
        (weights if factor is None else weights * factor).to(v.dtype) @ v for _, weights, factor in _weights(chunk, x)
    ]
    return torch.cat(pieces)[None], None


def exact_backward(
    part: ExactPart, grad_output: torch.Tensor, output: torch.Tensor, log_sum: torch.Tensor, x: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a part's queries, keys and values, `(1, rows, D)`, in float32 or float64.

    `output` `(B, H, N, Dv)` and `log_sum` `(B, H, N, 1)` are what `attend_exactly` has found.
    """
    dtype, chunk = accumulation_dtype(x.query.dtype), part.chunk
    if x.dropout_seed is None and _in_flash(x):
        # What scaled_dot_product_attention runs on a CPU. Inside a custom op there is no autograd to call it through.
        q, k, v = (rows.to(dtype) for rows in _by_query_head(part, x))
        grad, out, of_scores = (
            chunk.queries(rows, part.rows).unflatten(1, (chunk.group, -1)).to(dtype)
            for rows in (grad_output, output, log_sum)
        )
        grads = FLASH_BACKWARD(grad, q, k, v, out, of_scores[..., 0], 0.0, False, scale=x.scale)
        return grads[0].flatten(1, 2), grads[1].sum(dim=1), grads[2].sum(dim=1)
    rows_of = chunk.queries(x.query), chunk.keys(x.key), chunk.keys(x.value), chunk.queries(grad_output)
    q, k, v, grad = (rows[0].to(dtype) for rows in rows_of)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, weights, factor in _weights(chunk, x):
        weights = weights.to(dtype)
        grad_weights = grad[rows] @ v.T
        if factor is None:
            grad_v.addmm_(weights.T, grad[rows])
        else:
            grad_weights *= factor
            grad_v.addmm_((weights * factor).T, grad[rows])
        grad_scores = grad_weights.sub_(torch.linalg.vecdot(weights, grad_weights)[:, None])
        grad_scores.mul_(weights).mul_(x.scale)
        torch.mm(grad_scores, k, out=grad_q[rows])
        grad_k.addmm_(grad_scores.T, q[rows])
    return grad_q[None], grad_k[None], grad_v[None]


def _in_flash(x: Inputs) -> bool:
    return x.query.device.type == "cpu" and x.query.shape[3] == x.value.shape[3]


def _by_query_head(part: ExactPart, x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A part's queries `(1, group, rows, D)`, and the keys and values of its head for each query head."""
    chunk = part.chunk
    q = chunk.queries(x.query, part.rows).unflatten(1, (chunk.group, -1))
    k, v = (chunk.keys(rows)[:, None].expand(-1, chunk.group, -1, -1) for rows in (x.key, x.value))
    return q, k, v


def _weights(chunk: RowChunk, x: Inputs) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """Some of a chunk's queries at a time: which they are, their weights `(rows, M)`, and dropout factors."""
    dtype, lengths = accumulation_dtype(x.query.dtype), (x.query.shape[2], x.key.shape[2])
    q, k = chunk.queries(x.query)[0].to(dtype) * x.scale, chunk.keys(x.key)[0].to(dtype)
    per_head = len(q) // chunk.group
    for head in range(chunk.group):
        head_queries = q[head * per_head : (head + 1) * per_head]
        problem, start = chunk.first_problem + head, head * per_head
        masks = chunk.query_rows, chunk.key_rows
        for rows, factor in exact_dropout_rows(*lengths, *masks, q, x.dropout_p, x.dropout_seed, problem):
            yield slice(start + rows.start, start + rows.stop), (head_queries[rows] @ k.T).softmax(dim=1), factor
