"""Attention within sorted blocks for a CPU: some blocks of all heads at a time, a hand-written backward pass.

Rows of queries, keys and values are gathered through the order block by block, so that no sorted copy of them exists,
and weights are computed again in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..shared.dropout import dropout_factor
from ..shared.gradients import register_op
from ..shared.precision import accumulation_dtype, product_dtype
from ..shared.row_chunks import CHUNK_BYTES
from ..shared.tables import empty_gradient, empty_output
from .reference import BLOCK_WEIGHTS, DIFFERENTIABLE, MEMBERSHIP_FLOOR, Inputs, check_values


@dataclass(frozen=True)
class BlockChunk:
    """`g` blocks, possibly of several rows, each padded to the `w` words of the longest."""

    blocks: list[tuple[int, int, int, int]]  # `(row, block, block length, blocks of the window)` of each
    # rows of the flat `(B · N, ...)` tensors, `(g · w,)`; an empty place points to a word that counts
    query_rows: torch.Tensor
    key_rows: torch.Tensor  # `(g · window · w,)`, the same for the keys
    filled: torch.Tensor | None  # `(g, w)`, places with a query; None where all have one
    hidden: torch.Tensor | None  # `(g, w or 1, window · w)`, True = not seen; None where all are

    def queries(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows of `(B, H, N, D)` in the chunk's order, by key/value head: `(g · heads, H / heads · w, D)`."""
        _, H, _, D = tensor.shape
        rows = gathered(flat_rows(tensor), self.query_rows).view(len(self.blocks), -1, H, D)
        if self.filled is not None:
            rows = rows.masked_fill(~self.filled[..., None, None], 0.0)
        return rows.transpose(1, 2).reshape(len(self.blocks) * heads, -1, D)

    def keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of `(B, heads, N, D)` of the windows: `(g · heads, window · w, D)`."""
        _, heads, _, D = tensor.shape
        rows = gathered(flat_rows(tensor), self.key_rows).view(len(self.blocks), -1, heads, D)
        return rows.transpose(1, 2).reshape(len(self.blocks) * heads, -1, D)

    def store_queries(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Write `(g · heads, group · w, D)` to the queries' rows of `target` `(B · N, H, D)`."""
        H, D = target.shape[1:]
        rows = values.view(len(self.blocks), H, -1, D).transpose(1, 2).flatten(0, 1).to(target.dtype)
        if self.filled is None:
            target.index_copy_(0, self.query_rows, rows)
        else:
            places = self.filled.flatten().nonzero()[:, 0]
            target.index_copy_(0, self.query_rows.index_select(0, places), rows.index_select(0, places))

    def add_keys(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Add `(g · heads, window · w, D)` to the keys' rows of `target` `(B · N, heads, D)`."""
        heads, D = target.shape[1:]
        rows = values.view(len(self.blocks), heads, -1, D).transpose(1, 2).flatten(0, 1)
        target.index_add_(0, self.key_rows, rows.to(target.dtype))

    def shared_membership(self, membership: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`P` of the queries `(g, w, k)` and of the keys `(g, window · w, k)`, and `P_q · P_k + 1e-4`."""
        rows = membership.flatten(0, 1)
        of_queries = gathered(rows, self.query_rows).view(len(self.blocks), -1, rows.shape[1])
        of_keys = gathered(rows, self.key_rows).view(len(self.blocks), -1, rows.shape[1])
        shared = (of_queries @ of_keys.transpose(1, 2)).to(accumulation_dtype(rows.dtype))
        return of_queries, of_keys, shared.add_(MEMBERSHIP_FLOOR)

    def dropout(self, query: torch.Tensor, like: torch.Tensor, dropout_p: float, seed: torch.Tensor) -> torch.Tensor:
        """Factors for the weights `like` `(g, H, w, window · w)`."""
        g, H, w, columns = like.shape
        factor = torch.ones_like(like).view(g, H, w, columns // w, w)
        for place, (row, block, length, window) in enumerate(self.blocks):
            problem = row * query.shape[2] + block
            drawn = dropout_factor((H, length, window * length), like, dropout_p, int(seed), problem, BLOCK_WEIGHTS)
            factor[place, :, :length, :window, :length] = drawn.view(H, length, window, length)
        return factor.view(like.shape)


def gathered(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows at `index`, in the dtype of products."""
    return rows.index_select(0, index).to(product_dtype(rows))


def flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`(B, H, N, D)` as rows `(B · N, H, D)`: a view of what transformers hands over."""
    return tensor.transpose(1, 2).flatten(0, 1)


def chunks_of(x: Inputs) -> Iterator[BlockChunk]:
    """All used blocks in chunks whose scores stay within `CHUNK_BYTES`, or of one block."""
    check_values(x)
    order, block_length, window_blocks, key_mask = x.order, x.block_length, x.window_blocks, x.key_mask
    heads, itemsize = x.query.shape[1], accumulation_dtype(x.query.dtype).itemsize
    B, N = order.shape
    words = [N] * B if key_mask is None else key_mask.sum(dim=1).tolist()
    # Rows with blocks of like length share a chunk: the shorter are padded to the longest.
    rows = sorted((length, words[b], b) for b, length in enumerate(block_length.tolist()) if words[b])
    blocks = [
        (b, i, min(length, n), min(window_blocks, -(-n // length)))
        for length, n, b in rows
        for i in range(-(-n // length))
    ]
    counted = torch.tensor(words, device=order.device)
    start = 0
    while start < len(blocks):
        stop = start + 1
        while stop < len(blocks):
            _, _, w, window = blocks[stop]
            if (stop + 1 - start) * heads * w * window * w * itemsize > CHUNK_BYTES:
                break
            stop += 1
        yield _chunk(blocks[start:stop], counted, x)
        start = stop


def _chunk(blocks: list[tuple[int, int, int, int]], words: torch.Tensor, x: Inputs) -> BlockChunk:
    order, labels = x.order, x.labels
    N = order.shape[1]
    b, i, length, window = torch.tensor(blocks, device=order.device).T[..., None]
    n = words[b]
    used = -(-n // length)
    place = torch.arange(int(length.max()), device=order.device)
    step = torch.arange(int(window.max()), device=order.device)

    query_rank = i * length + place  # (g, w)
    filled = (place < length) & (query_rank < n)
    key_rank = (((i - step) % used) * length)[..., None] + place  # (g, window, w)
    seen = (step < window)[..., None] & (place < length)[:, None] & (key_rank < n[..., None])
    key_rank, seen = key_rank.flatten(1), seen.flatten(1)

    first = b * N
    query_index = order.flatten()[first + query_rank.where(filled, 0)]
    key_index = order.flatten()[first + key_rank.where(seen, 0)]
    visible = seen[:, None, :]
    if x.causal:
        visible = visible & (key_index[:, None, :] <= query_index[..., None])
    if labels is not None:
        query_label, key_label = labels[b, query_index], labels[b, key_index]
        distance = query_rank[..., None] - key_rank[:, None, :]
        reach = (x.window_blocks - 1) * length[..., None]
        visible = visible & (query_label[..., None] == key_label[:, None, :]) & (distance <= reach)
    return BlockChunk(
        blocks,
        (first + query_index).flatten(),
        (first + key_index).flatten(),
        None if filled.all() else filled,
        None if visible.all() else ~visible,
    )


def chunk_weights(
    chunk: BlockChunk, q: torch.Tensor, k: torch.Tensor, scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """Softmax weights `(g, H, w, window · w)` in float32 or float64."""
    # A product of bfloat16 is rounded to a part in 256 of itself, what all scores of a query share included.
    dtype = accumulation_dtype(q.dtype)
    scores = (q.to(dtype) * scale) @ k.to(dtype).transpose(1, 2)
    g = len(chunk.blocks)
    scores = scores.view(g, -1, len(chunk.query_rows) // g, k.shape[1])
    if bias is not None:
        scores += bias[:, None]
    if chunk.hidden is not None:
        scores.masked_fill_(chunk.hidden[:, None], torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, out=scores)


def _forward(x: Inputs) -> torch.Tensor:
    """Every word attends to the words of its window, 0 elsewhere."""
    output, heads = empty_output(x.query, x.value), x.key.shape[1]
    rows = flat_rows(output)
    with torch.autocast(x.query.device.type, enabled=False):
        for chunk in chunks_of(x):
            q, k, v = chunk.queries(x.query, heads), chunk.keys(x.key), chunk.keys(x.value)
            bias = None if x.membership is None else chunk.shared_membership(x.membership)[2].log_()
            weights = chunk_weights(chunk, q, k, x.scale, bias)
            if x.dropout_seed is not None:
                weights *= chunk.dropout(x.query, weights, x.dropout_p, x.dropout_seed)
            chunk.store_queries(rows, weights.to(v.dtype).view(*q.shape[:2], -1) @ v)
    return output


def gradients(grad_output: torch.Tensor, x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and, where there is one (else empty), membership."""
    query, key, value, membership, heads = x.query, x.key, x.value, x.membership, x.key.shape[1]
    dtype = accumulation_dtype(query.dtype)
    grad_query = empty_output(query, query)
    # A key is in the windows of several blocks: their sum must not be rounded at every step.
    grad_key, grad_value = (rows.new_zeros(rows.shape, dtype=dtype) for rows in (flat_rows(key), flat_rows(value)))
    grad_membership = query.new_zeros(0 if membership is None else membership.shape, dtype=dtype)
    with torch.autocast(query.device.type, enabled=False):
        for chunk in chunks_of(x):
            q, k, v = chunk.queries(query, heads), chunk.keys(key), chunk.keys(value)
            grad = chunk.queries(grad_output, heads)
            gate = None if membership is None else chunk.shared_membership(membership)
            weights = chunk_weights(chunk, q, k, x.scale, None if gate is None else gate[2].log())
            grad_weights = (grad @ v.transpose(1, 2)).to(dtype).view(weights.shape)
            dropped = weights
            if x.dropout_seed is not None:
                factor = chunk.dropout(query, weights, x.dropout_p, x.dropout_seed)
                dropped = weights * factor
                grad_weights *= factor
            chunk.add_keys(grad_value, dropped.to(v.dtype).view(*q.shape[:2], -1).transpose(1, 2) @ grad)
            mean = torch.linalg.vecdot(weights, grad_weights)[..., None]
            grad_scores = grad_weights.sub_(mean).mul_(weights)
            if gate is not None:
                of_queries, of_keys, shared = gate
                grad_shared = grad_scores.sum(dim=1).div_(shared).to(of_queries.dtype)
                flat = grad_membership.flatten(0, 1)
                flat.index_add_(0, chunk.query_rows, (grad_shared @ of_keys).flatten(0, 1).to(dtype))
                flat.index_add_(0, chunk.key_rows, (grad_shared.transpose(1, 2) @ of_queries).flatten(0, 1).to(dtype))
            grad_scores = grad_scores.mul_(x.scale).to(q.dtype).view(*q.shape[:2], -1)
            chunk.store_queries(flat_rows(grad_query), grad_scores @ k)
            chunk.add_keys(grad_key, grad_scores.transpose(1, 2) @ q)
    grad_key, grad_value = _unflatten(grad_key, key), _unflatten(grad_value, value)
    return grad_query, grad_key, grad_value, grad_membership.to(query.dtype)


def _unflatten(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    B, _, N, _ = like.shape
    return rows.to(like.dtype).unflatten(0, (B, N)).transpose(1, 2)


sorted_block_attention = register_op(
    "sorted_block_attention", Inputs, _forward, gradients, DIFFERENTIABLE, empty=empty_gradient
)
