"""Bi-clustered attention for a CPU: queries sorted by cluster, cut into blocks, batched matrix products.

The queries of a block share their exact keys, those of a head share the means of the key clusters: scores against the
former are one product per block, against the latter one per head, without a copy of the means for every block. As in
the clustered form, nothing but the inputs is kept for the backward pass, and to `torch.compile` each pass is one op.

Sizes: `P` key/value heads of a chunk, `T` top keys, `G` key clusters, `length` queries of a block.
"""

import torch

from ..arguments import check_label_range
from ..cluster_blocks import ClusterBlocks, block_length
from ..clustered_attention.batched import (
    accumulation_dtype,
    centroid_scores,
    chunks_of,
    cluster_rows,
    cluster_sizes,
    cluster_sums,
    draw_dropout,
    empty_output,
    softmax_,
    table_rows,
)
from ..dropout import TOPK_AND_SUMMARY_WEIGHTS
from ..row_chunks import RowChunk


def largest_buffer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, clusters: int, key_clusters: int, topk: int
) -> int:
    """Numbers per head in the centroids' scores, the packed queries, their scores, or the copies of the top keys."""
    length = block_length(query.shape[2] / clusters)
    blocks = clusters + query.shape[2] // length
    head_dim = max(key.shape[3], value.shape[3])
    return max(clusters * key.shape[2], blocks * length * max(head_dim, topk + key_clusters), blocks * topk * head_dim)


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
        self.key, self.value = chunk.keys(key), chunk.keys(value)
        self.P, self.M, _ = self.key.shape
        self.T, self.G = min(topk, self.M), key_clusters
        tables = chunk.group * clusters  # C
        index = table_rows(chunk, labels, clusters)
        sizes = cluster_sizes(index, self.P, tables)
        self.blocks = ClusterBlocks.of(index, sizes)
        self.blocks_of_heads = torch.bincount(self.blocks.clusters // tables, minlength=self.P).tolist()
        # Scaled before any product, which float16 could not hold otherwise.
        self.packed_query = self.blocks.pack(chunk.queries(query) * scale)
        top = self.top_keys(sizes)  # T_j: (P, C, T)
        heads = torch.arange(self.P, device=key.device)[:, None, None]
        # Rows of the flat (P · M, D) key table, per block.
        self.top_rows = (top + heads * self.M).flatten(0, 1).index_select(0, self.blocks.clusters)  # (blocks, T)

        self.key_index = cluster_rows(chunk.keys(key_labels), self.G)
        key_sizes = cluster_sizes(self.key_index, self.P, self.G)  # n_c: (P, G)
        self.key_sizes = key_sizes.clamp(min=1)[..., None]
        self.mean_keys, self.mean_values = self.cluster_means(self.key), self.cluster_means(self.value)
        self.log_rest = self.log_rest_sizes(top, key_sizes).index_select(0, self.blocks.clusters)  # (blocks, G)

        self.factor = None
        if dropout_seed is not None:
            shape = query.shape[2], min(topk, key.shape[2]) + self.G
            factor = draw_dropout(chunk, shape, self.log_rest, dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            factor = torch.cat([factor[..., : self.T], factor[..., -self.G :]], dim=2)
            self.factor = self.blocks.pack(factor.view(self.P, -1, self.T + self.G))

    def top_keys(self, sizes: torch.Tensor) -> torch.Tensor:
        """The keys with the largest product with the centroids of clusters of `sizes` `(P, C)`: `(P, C, T)`."""
        sums = self.packed_query.sum(dim=1, dtype=accumulation_dtype(self.key.dtype))
        centroids = self.blocks.sum(sums, sizes.numel()).view(*sizes.shape, -1) / sizes.clamp(min=1)[..., None]
        return centroid_scores(centroids, self.key, 1.0).topk(self.T, dim=-1).indices

    def cluster_means(self, rows: torch.Tensor) -> torch.Tensor:
        """Means of keys or values `(P, M, D)` over the key clusters, `(P, G, D)`."""
        return (cluster_sums(rows, self.key_index, self.P, self.G) / self.key_sizes).to(rows.dtype)

    def log_rest_sizes(self, top: torch.Tensor, key_sizes: torch.Tensor) -> torch.Tensor:
        """`log n_jc` `(P · C, G)`; -inf, and so no weight, for key clusters without a key outside `T_j`."""
        P, C, T = top.shape
        chosen = self.key_index.view(P, 1, -1).expand(-1, C, -1).gather(2, top) % self.G  # (P, C, T)
        row = torch.arange(P * C, device=top.device)[:, None] * self.G
        counts = torch.bincount((chosen.view(P * C, T) + row).flatten(), minlength=P * C * self.G).view(P, C, self.G)
        return (key_sizes[:, None] - counts).to(accumulation_dtype(self.key.dtype)).log_().flatten(0, 1)

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The top rows of keys or values `(P, M, D)`, per block: `(blocks, T, D)`."""
        return table.flatten(0, 1).index_select(0, self.top_rows.flatten()).view(*self.top_rows.shape, -1)

    def of_heads(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Views of `(blocks, length, ...)` as `(rows, ...)`, one per head."""
        return [part.flatten(0, 1) for part in blocks.split(self.blocks_of_heads)]

    def times(self, weights: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """`weights` `(blocks, length, G)` times the table `(P, G, D)` of their head: `(blocks, length, D)`."""
        product = torch.empty(*weights.shape[:2], tables.shape[2], dtype=tables.dtype, device=tables.device)
        for rows, table, target in zip(self.of_heads(weights), tables, self.of_heads(product), strict=True):
            torch.mm(rows, table, out=target)
        return product

    def transposed_times(self, weights: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Per head, `weights` `(blocks, length, G)` transposed times `packed` `(blocks, length, D)`: `(P, G, D)`."""
        pairs = zip(self.of_heads(weights), self.of_heads(packed), strict=True)
        return torch.stack([rows.T @ others for rows, others in pairs])

    def weights(self, top_keys: torch.Tensor) -> torch.Tensor:
        """`p_i`, one softmax over the top keys and the key clusters: `(blocks, length, T + G)`."""
        shape = *self.packed_query.shape[:2], self.T + self.G
        scores = torch.empty(shape, dtype=self.log_rest.dtype, device=self.key.device)
        scores[..., : self.T] = torch.bmm(self.packed_query, top_keys.transpose(1, 2))
        summary_scores = self.times(self.packed_query, self.mean_keys.transpose(1, 2))
        torch.add(summary_scores, self.log_rest[:, None], out=scores[..., self.T :])
        return softmax_(scores)

    def weighted_sum(self, weights: torch.Tensor, top_rows: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        """`weights` `(blocks, length, T + G)` over `top_rows` `(blocks, T, D)` and `means` `(P, G, D)`, packed."""
        return torch.baddbmm(self.times(weights[..., self.T :], means), weights[..., : self.T], top_rows)


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
            weights = chunk.weights(chunk.take(chunk.key))
            if chunk.factor is not None:
                weights *= chunk.factor
            values = chunk.weighted_sum(weights.to(value.dtype), chunk.take(chunk.value), chunk.mean_values)
            part.store_queries(output, chunk.blocks.unpack(values, chunk.P))
    return output


@bi_clustered_attention.register_fake
def _(query, key, value, *settings):  # type: ignore[no-untyped-def]
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
            T, blocks, packed_query = chunk.T, chunk.blocks, chunk.packed_query
            packed_grad = blocks.pack(part.queries(grad_output))
            top_keys, top_values = chunk.take(chunk.key), chunk.take(chunk.value)
            softmax = chunk.weights(top_keys)
            grad_weights = torch.empty_like(softmax)
            grad_weights[..., :T] = torch.bmm(packed_grad, top_values.transpose(1, 2))
            grad_weights[..., T:] = chunk.times(packed_grad, chunk.mean_values.transpose(1, 2))
            weights = softmax
            if chunk.factor is not None:
                grad_weights *= chunk.factor
                weights = softmax * chunk.factor
            weights = weights.to(value.dtype)
            grad_top_values = torch.bmm(weights[..., :T].transpose(1, 2), packed_grad)
            grad_mean_values = chunk.transposed_times(weights[..., T:], packed_grad)

            row_dot = torch.linalg.vecdot(softmax, grad_weights)[..., None]
            grad_scores = grad_weights.sub_(row_dot).mul_(softmax).to(key.dtype)
            grad_q = blocks.unpack(chunk.weighted_sum(grad_scores, top_keys, chunk.mean_keys), chunk.P)
            part.store_queries(grad_query, grad_q * scale)
            grad_top_keys = torch.bmm(grad_scores[..., :T].transpose(1, 2), packed_query)
            grad_mean_keys = chunk.transposed_times(grad_scores[..., T:], packed_query)

            rows = chunk.top_rows.flatten()
            for target, grad_means, grad_top in (
                (grad_key, grad_mean_keys, grad_top_keys),
                (grad_value, grad_mean_values, grad_top_values),
            ):
                shares = grad_means.to(dtype) / chunk.key_sizes  # of every key of a cluster in its mean's gradient
                summed = shares.flatten(0, 1).index_select(0, chunk.key_index)
                summed.index_add_(0, rows, grad_top.flatten(0, 1).to(dtype))
                part.store_keys(target, summed.view(chunk.P, chunk.M, -1))
    return grad_query, grad_key, grad_value


@bi_clustered_attention_backward.register_fake
def _(grad_output, query, key, value, *settings):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors, (clusters, key_clusters, topk, key_mask, query_mask, scale, dropout_p, seed) = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors, key_mask, query_mask, seed)
    ctx.settings = clusters, key_clusters, topk, scale, dropout_p


def _backward(ctx, grad_output):  # type: ignore[no-untyped-def]
    *tensors, key_mask, query_mask, seed = ctx.saved_tensors
    clusters, key_clusters, topk, scale, dropout_p = ctx.settings
    counts = clusters, key_clusters, topk
    grads = bi_clustered_attention_backward(
        grad_output, *tensors, *counts, key_mask, query_mask, scale, dropout_p, seed
    )
    return (*grads, *[None] * 10)


bi_clustered_attention.register_autograd(_backward, setup_context=_setup_context)
