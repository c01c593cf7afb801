"""Exact attention of some heads, for a CPU: what no summary of keys serves runs beside the clustered heads.

Sizes: `P` heads, `N` queries, `M` keys.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..shared.dropout import exact_dropout_rows
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk, valid_rows

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def exact_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    exact_heads: torch.Tensor | None,
) -> Iterator[RowChunk]:
    """A chunk for each key/value head that is True in `exact_heads` `(B, heads)` and has queries and keys."""
    if exact_heads is None:
        return
    group = query.shape[1] // key.shape[1]
    for batch, head in exact_heads.nonzero().tolist():
        query_rows, key_rows = valid_rows(query_mask, batch), valid_rows(key_mask, batch)
        counts = [rows is None or len(rows) for rows in (query_rows, key_rows)]
        if all(counts) and query.shape[2] and key.shape[2]:
            problem = (batch * key.shape[1] + head) * group
            yield RowChunk(batch, head, head + 1, group, problem, query_rows, key_rows)


def attend_exactly(
    part: RowChunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropout_p: float,
    seed: torch.Tensor | None,
) -> torch.Tensor:
    """Output of a chunk's queries, `(1, group · N, Dv)`."""
    if seed is None:
        q, k, v = part.queries(query), part.keys(key), part.keys(value)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]
    pieces = [
        (weights if factor is None else weights * factor).to(value.dtype) @ part.keys(value)[0]
        for _, weights, factor in _weights(part, query, key, scale, dropout_p, seed)
    ]
    return torch.cat(pieces)[None]


def exact_backward(
    part: RowChunk,
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropout_p: float,
    seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a chunk's queries, keys and values, `(1, rows, D)`, in float32 or float64."""
    dtype = accumulation_dtype(query.dtype)
    rows_of = part.queries(query), part.keys(key), part.keys(value), part.queries(grad_output)
    q, k, v, grad = (rows[0].to(dtype) for rows in rows_of)
    if seed is None and q.device.type == "cpu" and q.shape[1] == v.shape[1]:
        # What scaled_dot_product_attention runs there; inside of an operator there is no autograd to ask it by. It
        # goes back through a head on one thread: the queries are cut into as many parts as there are threads.
        threads = torch.get_num_threads()
        q, grad = (F.pad(rows, (0, 0, 0, -len(q) % threads)).view(threads, 1, -1, rows.shape[1]) for rows in (q, grad))
        k, v = (rows.expand(threads, 1, -1, -1) for rows in (k, v))
        output, log_sum = FLASH(q, k, v, 0.0, False, scale=scale)
        grads = FLASH_BACKWARD(grad, q, k, v, output, log_sum, 0.0, False, scale=scale)
        grad_q = grads[0].reshape(1, -1, q.shape[3])[:, : rows_of[0].shape[1]]
        return grad_q, grads[1].sum(dim=0), grads[2].sum(dim=0)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, weights, factor in _weights(part, query, key, scale, dropout_p, seed):
        weights = weights.to(dtype)
        grad_weights = grad[rows] @ v.T
        if factor is None:
            grad_v.addmm_(weights.T, grad[rows])
        else:
            grad_weights *= factor
            grad_v.addmm_((weights * factor).T, grad[rows])
        grad_scores = grad_weights.sub_(torch.linalg.vecdot(weights, grad_weights)[:, None]).mul_(weights).mul_(scale)
        torch.mm(grad_scores, k, out=grad_q[rows])
        grad_k.addmm_(grad_scores.T, q[rows])
    return grad_q[None], grad_k[None], grad_v[None]


def _weights(
    part: RowChunk, query: torch.Tensor, key: torch.Tensor, scale: float, dropout_p: float, seed: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """Of some of a chunk's queries at once: which, their weights `(rows, M)`, and the dropout factors of these."""
    dtype = accumulation_dtype(query.dtype)
    q, k = part.queries(query)[0].to(dtype) * scale, part.keys(key)[0].to(dtype)
    per_head = len(q) // part.group
    for head in range(part.group):
        own = q[head * per_head : (head + 1) * per_head]
        problem = part.first_problem + head
        for rows, factor in exact_dropout_rows(
            query.shape[2], key.shape[2], part.query_rows, part.key_rows, q, dropout_p, seed, problem
        ):
            start = head * per_head
            yield slice(start + rows.start, start + rows.stop), (own[rows] @ k.T).softmax(dim=1), factor
