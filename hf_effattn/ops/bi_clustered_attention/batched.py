"""Bi-clustered attention for a CPU: queries sorted by cluster, cut into blocks, batched matrix products.

The queries of a block share their columns, the top keys and the means of the key clusters: the means stand behind the
keys in one table, so that scores, outputs and gradients are one product per block each. As in the clustered form,
nothing but the inputs is kept for the backward pass, and to `torch.compile` each pass is one op.

Sizes: `P` key/value heads of a chunk, `M` keys, `T` top keys, `G` key clusters, `length` queries of a block.
"""

import torch

from ..shared.arguments import check_label_range
from ..shared.centroids import centroid_scores
from ..shared.cluster_blocks import ClusterBlocks, block_length
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import (
    chunks_of,
    cluster_rows,
    cluster_sizes,
    cluster_sums,
    draw_dropout,
    empty_output,
    softmax_,
    table_rows,
)


def largest_buffer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, clusters: int, key_clusters: int, topk: int
) -> int:
    """Numbers per head in the centroids' scores, the packed queries, their scores, or the copies of the top keys."""
    length = block_length(query.shape[2] / clusters)
    blocks = clusters + query.shape[2] // length
    head_dim = max(key.shape[3], value.shape[3])
    columns = topk + key_clusters
    return max(clusters * key.shape[2], blocks * length * max(head_dim, columns), blocks * columns * head_dim)


class _Chunk:
    """What both passes compute of a chunk: its blocks, their top keys, the means of the key clusters.

    `C` below counts the clusters of all query heads that share a key/value head.
    """

    def __init__(
        self,
        chunk: RowChunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        labels: torch.Tensor,
        key_labels: torch.Tensor,
        clusters: int,
        key_clusters: int,
        topk: int,
        scale: float,
        dropout_p: float,
        dropout_seed: torch.Tensor | None,
    ) -> None:
        keys, values = chunk.keys(key), chunk.keys(value)
        self.P, self.M, _ = keys.shape
        self.T, self.G = min(topk, self.M), key_clusters
        tables = chunk.group * clusters  # C
        index = table_rows(chunk, labels, clusters)
        sizes = cluster_sizes(index, self.P, tables)
        self.blocks = ClusterBlocks.of(index, sizes)
        # Scaled before any product, which float16 could not hold otherwise.
        self.packed_query = self.blocks.pack(chunk.queries(query) * scale)
        # The order of the top keys decides nothing but their dropout.
        top = self.centroid_scores(sizes, keys).topk(self.T, dim=-1, sorted=dropout_seed is not None).indices

        self.key_index = cluster_rows(chunk.keys(key_labels), self.G)
        key_sizes = cluster_sizes(self.key_index, self.P, self.G)  # n_c: (P, G)
        self.key_sizes = key_sizes.clamp(min=1)[..., None]
        self.keys, self.values = self.with_means(keys), self.with_means(values)  # (P, M + G, D)
        self.log_rest = self.log_rest_sizes(top, key_sizes).index_select(0, self.blocks.clusters)  # (blocks, G)
        # Rows of these tables, flat, that a block's queries attend to: (blocks · (T + G),)
        means = torch.arange(self.M, self.M + self.G, device=key.device).expand(*top.shape[:2], -1)
        heads = torch.arange(self.P, device=key.device)[:, None, None] * (self.M + self.G)
        columns = (torch.cat([top, means], dim=2) + heads).flatten(0, 1)
        self.columns = columns.index_select(0, self.blocks.clusters).flatten()

        self.factor = None
        if dropout_seed is not None:
            shape = query.shape[2], min(topk, key.shape[2]) + self.G
            factor = draw_dropout(chunk, shape, self.log_rest, dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            factor = torch.cat([factor[..., : self.T], factor[..., -self.G :]], dim=2)
            self.factor = self.blocks.pack(factor.view(self.P, -1, self.T + self.G))

    def centroid_scores(self, sizes: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Products `(P, C, M)` of the centroids of clusters of `sizes` `(P, C)` with the keys."""
        sums = self.packed_query.sum(dim=1, dtype=accumulation_dtype(keys.dtype))
        centroids = self.blocks.sum(sums, sizes.numel()).view(*sizes.shape, -1) / sizes.clamp(min=1)[..., None]
        return centroid_scores(centroids, keys, 1.0)

    def with_means(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys or values `(P, M, D)`, and behind them their means over the key clusters: `(P, M + G, D)`."""
        means = cluster_sums(rows, self.key_index, self.P, self.G) / self.key_sizes
        return torch.cat([rows, means.to(rows.dtype)], dim=1)

    def log_rest_sizes(self, top: torch.Tensor, key_sizes: torch.Tensor) -> torch.Tensor:
        """`log n_jc` `(P · C, G)`; -inf, and so no weight, for key clusters without a key outside `T_j`."""
        P, C, T = top.shape
        chosen = self.key_index.view(P, 1, -1).expand(-1, C, -1).gather(2, top) % self.G  # (P, C, T)
        row = torch.arange(P * C, device=top.device)[:, None] * self.G
        counts = torch.bincount((chosen.view(P * C, T) + row).flatten(), minlength=P * C * self.G).view(P, C, self.G)
        return (key_sizes[:, None] - counts).to(accumulation_dtype(self.keys.dtype)).log_().flatten(0, 1)

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """What a block's queries attend to, of the table `(P, M + G, D)`: `(blocks, T + G, D)`."""
        return table.flatten(0, 1).index_select(0, self.columns).view(len(self.blocks.clusters), -1, table.shape[2])

    def weights(self, keys: torch.Tensor) -> torch.Tensor:
        """`p_i`, one softmax over the top keys and the key clusters: `(blocks, length, T + G)`."""
        scores = torch.bmm(self.packed_query, keys.transpose(1, 2)).to(self.log_rest.dtype)
        scores[..., self.T :] += self.log_rest[:, None]
        return softmax_(scores)


@torch.library.custom_op("hf_effattn::bi_clustered_attention", mutates_args=())
def bi_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic V̄_c` with `T = T_j`, `j = l(i)`, `p_i` one softmax over both."""
    check_label_range(labels, clusters)
    check_label_range(key_labels, key_clusters, of="key")
    output = empty_output(query, value)
    settings = clusters, key_clusters, topk, scale, dropout_p, dropout_seed
    with torch.autocast(query.device.type, enabled=False):
        numbers = largest_buffer(query, key, value, clusters, key_clusters, topk)
        for part in chunks_of(query, key, key_mask, query_mask, numbers):
            chunk = _Chunk(part, query, key, value, labels, key_labels, *settings)
            weights = chunk.weights(chunk.take(chunk.keys))
            if chunk.factor is not None:
                weights *= chunk.factor
            values = torch.bmm(weights.to(value.dtype), chunk.take(chunk.values))
            part.store_queries(output, chunk.blocks.unpack(values, chunk.P))
    return output


@bi_clustered_attention.register_fake
def _(query, key, value, *settings):
    return empty_output(query, value)


@torch.library.custom_op("hf_effattn::bi_clustered_attention_backward", mutates_args=())
def bi_clustered_attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and sets `T_j` held fixed."""
    grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    dtype = accumulation_dtype(query.dtype)
    settings = clusters, key_clusters, topk, scale, dropout_p, dropout_seed
    with torch.autocast(query.device.type, enabled=False):
        numbers = largest_buffer(query, key, value, clusters, key_clusters, topk)
        for part in chunks_of(query, key, key_mask, query_mask, numbers):
            chunk = _Chunk(part, query, key, value, labels, key_labels, *settings)
            packed_grad = chunk.blocks.pack(part.queries(grad_output))
            keys = chunk.take(chunk.keys)
            softmax = chunk.weights(keys)
            grad_weights = torch.bmm(packed_grad, chunk.take(chunk.values).transpose(1, 2)).to(dtype)
            weights = softmax
            if chunk.factor is not None:
                grad_weights *= chunk.factor
                weights = softmax * chunk.factor
            grad_values = torch.bmm(weights.to(value.dtype).transpose(1, 2), packed_grad)

            row_dot = torch.linalg.vecdot(softmax, grad_weights)[..., None]
            grad_scores = grad_weights.sub_(row_dot).mul_(softmax).to(key.dtype)
            grad_q = chunk.blocks.unpack(torch.bmm(grad_scores, keys), chunk.P)
            part.store_queries(grad_query, grad_q * scale)
            grad_keys = torch.bmm(grad_scores.transpose(1, 2), chunk.packed_query)

            for target, of_columns in ((grad_key, grad_keys), (grad_value, grad_values)):
                summed = softmax.new_zeros(chunk.P * (chunk.M + chunk.G), of_columns.shape[2])
                summed.index_add_(0, chunk.columns, of_columns.flatten(0, 1).to(dtype))
                of_rows, of_means = summed.view(chunk.P, chunk.M + chunk.G, -1).split([chunk.M, chunk.G], dim=1)
                shares = of_means / chunk.key_sizes  # of every key of a cluster in its mean's gradient
                of_rows = of_rows + shares.flatten(0, 1).index_select(0, chunk.key_index).view(of_rows.shape)
                part.store_keys(target, of_rows)
    return grad_query, grad_key, grad_value


@bi_clustered_attention_backward.register_fake
def _(grad_output, query, key, value, *settings):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:
    tensors, (clusters, key_clusters, topk, key_mask, query_mask, scale, dropout_p, seed) = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors, key_mask, query_mask, seed)
    ctx.settings = clusters, key_clusters, topk, scale, dropout_p


def _backward(ctx, grad_output):
    *tensors, key_mask, query_mask, seed = ctx.saved_tensors
    clusters, key_clusters, topk, scale, dropout_p = ctx.settings
    counts = clusters, key_clusters, topk
    grads = bi_clustered_attention_backward(
        grad_output, *tensors, *counts, key_mask, query_mask, scale, dropout_p, seed
    )
    return (*grads, *[None] * 10)


bi_clustered_attention.register_autograd(_backward, setup_context=_setup_context)
