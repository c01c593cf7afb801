"""Improved clustered attention for a CPU: queries sorted by cluster, cut into blocks, batched matrix products.

A block holds up to `block_length` queries of one cluster, so its queries share the `topk` keys of that cluster and
all the recomputed scores are one batched product. As in the clustered form, nothing but the inputs is kept for the
backward pass.
"""

from typing import cast

import torch

from ..clustered_attention.reference import Inputs
from ..shared.centroids import centroid_backward, centroid_dropout, centroid_scores
from ..shared.cluster_blocks import ClusterBlocks, block_length
from ..shared.cluster_table import ClusterTable, attend, attend_backward
from ..shared.dropout import TOPK_WEIGHTS
from ..shared.gradients import register_op
from ..shared.precision import accumulation_dtype, in_products, product_dtype, split_scale
from ..shared.row_chunks import RowChunk
from ..shared.tables import attend_by_chunks, cluster_sizes, draw_dropout, gradients_by_chunks, softmax_, table_rows
from ..shared.topk import largest


def largest_buffer(x: Inputs) -> int:
    """Numbers per head in `A^c`, in the packed queries, or in the copies of the top keys that the blocks make."""
    length = block_length(x.query.shape[2] / x.clusters)
    blocks = x.clusters + x.query.shape[2] // length
    head_dim = max(x.key.shape[3], x.value.shape[3])
    return max(x.clusters * x.key.shape[2], blocks * length * head_dim, blocks * x.topk * head_dim)


class _Chunk:
    """What both passes compute of a chunk: centroids, their attention, the top keys and the blocks.

    `C` below counts the clusters of all query heads that share a key/value head.
    """

    def __init__(self, chunk: RowChunk, x: Inputs) -> None:
        products = product_dtype(x.query)
        self.of_queries, self.of_keys = split_scale(x.scale, products)
        self.key, self.value = in_products(chunk.keys(x.key), self.of_keys), chunk.keys(x.value).to(products)
        self.clusters = chunk.group * x.clusters
        self.P, self.M, _ = self.key.shape
        self.index = table_rows(chunk, x.labels, x.clusters)
        sizes = cluster_sizes(self.index, self.P, self.clusters)
        self.blocks = ClusterBlocks.of(self.index, sizes)
        self.sizes = sizes.clamp(min=1)[..., None]
        self.packed_query = self.blocks.pack(chunk.queries(x.query).to(products) * self.of_queries)
        block_sums = self.packed_query.sum(dim=1, dtype=accumulation_dtype(products))
        sums = self.blocks.sum(block_sums, self.P * self.clusters)
        self.centroids = sums.view(self.P, self.clusters, -1) / self.sizes
        self.attention = centroid_scores(self.centroids, self.key, 1.0)  # A^c after the softmax: (P, C, M)
        self.top = largest(self.attention, min(x.topk, self.M), in_order=x.dropout_seed is not None)  # T_j: (P, C, T)
        softmax_(self.attention)
        self.top_attention = self.attention.gather(2, self.top)
        heads = torch.arange(self.P, device=x.key.device)[:, None, None] * self.M
        self.top_rows = (self.top + heads).flatten()  # of the flat (P · M, D) keys
        self.rest_factor = self.topk_factor = None
        if x.dropout_seed is not None:
            self.rest_factor = centroid_dropout(chunk, self.attention, x.key.shape[2], x.dropout_p, x.dropout_seed)
            shape = (x.query.shape[2], min(x.topk, x.key.shape[2]))
            factor = draw_dropout(chunk, shape, self.attention, x.dropout_p, x.dropout_seed, TOPK_WEIGHTS)
            factor = factor[..., : self.top.shape[2]].reshape(self.P, -1, self.top.shape[2])
            self.topk_factor = self.blocks.pack(factor)

    def table(self) -> ClusterTable:
        """The top keys with the mass `m_j` that they share; `V^b = Σ_{t∉T_j} A^c_jt V_t` is the offset."""
        keys, values = (
            rows.flatten(0, 1).index_select(0, self.top_rows).view(self.P * self.clusters, -1, rows.shape[2])
            for rows in (self.key, self.value)
        )
        rest = self.attention.scatter_(2, self.top, 0.0)
        rest = rest if self.rest_factor is None else rest * self.rest_factor
        offset = (rest.to(values.dtype) @ self.value).flatten(0, 1)
        return ClusterTable(keys, values, self.top_attention.sum(dim=-1).flatten(), offset)

    def backward(self, packed_grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the queries `(P, N, D)`, the keys and the values, for packed ones of the output."""
        table = self.table()
        packed, grad = attend_backward(table, self.blocks, self.packed_query, self.topk_factor, packed_grad)
        mass, offset = cast("torch.Tensor", grad.mass), cast("torch.Tensor", grad.offset)
        dtype = self.attention.dtype

        # The rest: O_i += Σ_{t∉T} A^c_jt V_t, and m_j = Σ_{t∈T} A^c_jt.
        grad_rest = offset.view(self.P, self.clusters, -1).to(self.value.dtype)
        grad_attention = (grad_rest @ self.value.transpose(1, 2)).to(dtype)
        rest = self.attention  # its columns T_j are 0 since the table was made
        if self.rest_factor is not None:
            grad_attention *= self.rest_factor
            rest = rest * self.rest_factor
        grad_v = rest.to(self.value.dtype).transpose(1, 2) @ grad_rest
        of_mass = mass.view(self.P, self.clusters, 1).expand_as(self.top_attention)
        grad_attention.scatter_(2, self.top, of_mass)
        attention = self.attention.scatter_(2, self.top, self.top_attention)
        grad_centroids, grad_k = centroid_backward(attention, grad_attention, self.centroids, self.key, 1.0)

        grad_q = self.blocks.unpack(packed, self.P).to(dtype)
        grad_q += (grad_centroids / self.sizes).flatten(0, 1).index_select(0, self.index).view_as(grad_q)
        of_keys = []
        for of_rows, of_top in ((grad_k, grad.keys), (grad_v, grad.values)):
            summed = of_rows.to(dtype).flatten(0, 1).index_add_(0, self.top_rows, of_top.flatten(0, 1))
            of_keys.append(summed.view(self.P, self.M, -1))
        if self.of_keys != 1:
            of_keys[0] *= self.of_keys
        return grad_q.mul_(self.of_queries), of_keys[0], of_keys[1]


def _forward(x: Inputs) -> torch.Tensor:
    """`V_i = m_j softmax(scale · Q_i K_T^T) V_T + Σ_{t∉T} A^c_jt V_t` with `j = l(i)`, `T = T_j`."""

    def attend_chunk(part: RowChunk) -> torch.Tensor:
        chunk = _Chunk(part, x)
        values = attend(chunk.table(), chunk.blocks, chunk.packed_query, chunk.topk_factor)
        return chunk.blocks.unpack(values, chunk.P)

    return attend_by_chunks(x, largest_buffer(x), attend_chunk)


def gradients(grad_output: torch.Tensor, x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and sets `T_j` held fixed."""

    def backward(part: RowChunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chunk = _Chunk(part, x)
        return chunk.backward(chunk.blocks.pack(part.queries(grad_output).to(chunk.packed_query.dtype)))

    return gradients_by_chunks(x, largest_buffer(x), backward)


improved_clustered_attention = register_op("improved_clustered_attention", Inputs, _forward, gradients)
