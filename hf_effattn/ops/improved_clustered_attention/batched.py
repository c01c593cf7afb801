"""Improved clustered attention for a CPU: queries sorted by cluster, cut into blocks, batched matrix products.

A block holds up to `block_length` queries of one cluster, so its queries share the `topk` keys of that cluster and
all the recomputed scores are one batched product. As in the clustered form, nothing but the inputs is kept for the
backward pass, and to `torch.compile` each pass is one op.
"""

import torch

from ..shared.arguments import check_label_range
from ..shared.centroids import centroid_backward, centroid_dropout, centroid_scores
from ..shared.cluster_blocks import ClusterBlocks, block_length
from ..shared.dropout import TOPK_WEIGHTS
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import chunks_of, cluster_sizes, draw_dropout, empty_output, softmax_, table_rows


def largest_buffer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, clusters: int, topk: int) -> int:
    """Numbers per head in `A^c`, in the packed queries, or in the copies of the top keys that the blocks make."""
    length = block_length(query.shape[2] / clusters)
    blocks = clusters + query.shape[2] // length
    head_dim = max(key.shape[3], value.shape[3])
    return max(clusters * key.shape[2], blocks * length * head_dim, blocks * topk * head_dim)


class _Chunk:
    """What both passes compute of a chunk: centroids, their attention, the top keys and the blocks.

    `C` below counts the clusters of all query heads that share a key/value head.
    """

    def __init__(
        self,
        chunk: RowChunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        labels: torch.Tensor,
        clusters: int,
        topk: int,
        scale: float,
        dropout_p: float,
        dropout_seed: torch.Tensor | None,
    ) -> None:
        self.query, self.key, self.value = chunk.queries(query), chunk.keys(key), chunk.keys(value)
        self.scale, self.clusters = scale, chunk.group * clusters
        self.P, self.M, _ = self.key.shape
        self.index = table_rows(chunk, labels, clusters)
        sizes = cluster_sizes(self.index, self.P, self.clusters)
        self.blocks = ClusterBlocks.of(self.index, sizes)
        self.sizes = sizes.clamp(min=1)[..., None]
        self.packed_query = self.blocks.pack(self.query)
        self.centroids = self.cluster_sums(self.packed_query) / self.sizes
        self.attention = centroid_scores(self.centroids, self.key, scale)  # A^c after the softmax: (P, C, M)
        self.top = self.attention.topk(min(topk, self.M), dim=-1).indices  # T_j: (P, C, T)
        softmax_(self.attention)
        self.top_attention = self.attention.gather(2, self.top)
        self.mass = self.top_attention.sum(dim=-1)  # m_j: (P, C)
        # Rows of the flat (P · M, D) key table, per block.
        heads = torch.arange(self.P, device=key.device)[:, None, None] * self.M
        self.top_rows = (self.top + heads).flatten(0, 1).index_select(0, self.blocks.clusters)  # (blocks, T)
        self.block_mass = self.mass.flatten().index_select(0, self.blocks.clusters)[:, None, None]
        self.rest_factor = self.topk_factor = None
        if dropout_seed is not None:
            self.rest_factor = centroid_dropout(chunk, self.attention, key.shape[2], dropout_p, dropout_seed)
            shape = (query.shape[2], min(topk, key.shape[2]))
            factor = draw_dropout(chunk, shape, self.attention, dropout_p, dropout_seed, TOPK_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            factor = factor[..., : self.top.shape[2]].reshape(self.P, -1, self.top.shape[2])
            self.topk_factor = self.blocks.pack(factor)

    def cluster_sums(self, packed: torch.Tensor) -> torch.Tensor:
        """Sum over the members of each cluster of rows in their blocks `(blocks, length, D)`: `(P, C, D)`."""
        block_sums = packed.sum(dim=1, dtype=accumulation_dtype(packed.dtype))
        return self.blocks.sum(block_sums, self.P * self.clusters).view(self.P, self.clusters, -1)

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The top rows of keys or values `(P, M, D)`, per block: `(blocks, T, D)`."""
        return table.flatten(0, 1).index_select(0, self.top_rows.flatten()).view(*self.top_rows.shape, -1)

    def topk_softmax(self, top_keys: torch.Tensor) -> torch.Tensor:
        """`softmax(scale · Q_i K_T^T)` `(blocks, length, T)`."""
        # Scaled before the product, which float16 could not hold otherwise.
        scores = torch.bmm(self.packed_query * self.scale, top_keys.transpose(1, 2))
        return softmax_(scores.to(self.attention.dtype))

    def rest(self) -> torch.Tensor:
        """`A^c` with the columns of `T_j` at 0, in place."""
        return self.attention.scatter_(2, self.top, 0.0)


@torch.library.custom_op("hf_effattn::improved_clustered_attention", mutates_args=())
def improved_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """`V_i = m_j softmax(scale · Q_i K_T^T) V_T + Σ_{t∉T} A^c_jt V_t` with `j = l(i)`, `T = T_j`."""
    check_label_range(labels, clusters)
    output = empty_output(query, value)
    with torch.autocast(query.device.type, enabled=False):
        for part in chunks_of(query, key, key_mask, query_mask, largest_buffer(query, key, value, clusters, topk)):
            chunk = _Chunk(part, query, key, value, labels, clusters, topk, scale, dropout_p, dropout_seed)
            rest = chunk.rest()
            if chunk.rest_factor is not None:
                rest *= chunk.rest_factor
            rest_values = (rest.to(value.dtype) @ chunk.value).flatten(0, 1)  # V^b: (P · C, Dv)
            weights = chunk.topk_softmax(chunk.take(chunk.key))
            weights *= chunk.block_mass
            if chunk.topk_factor is not None:
                weights *= chunk.topk_factor
            rest_blocks = rest_values.index_select(0, chunk.blocks.clusters)[:, None]
            values = torch.baddbmm(rest_blocks, weights.to(value.dtype), chunk.take(chunk.value))
            part.store_queries(output, chunk.blocks.unpack(values, chunk.P))
    return output


@improved_clustered_attention.register_fake
def _(query, key, value, labels, clusters, topk, key_mask, query_mask, scale, dropout_p, dropout_seed):
    return empty_output(query, value)


@torch.library.custom_op("hf_effattn::improved_clustered_attention_backward", mutates_args=())
def improved_clustered_attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
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
    with torch.autocast(query.device.type, enabled=False):
        for part in chunks_of(query, key, key_mask, query_mask, largest_buffer(query, key, value, clusters, topk)):
            chunk = _Chunk(part, query, key, value, labels, clusters, topk, scale, dropout_p, dropout_seed)
            blocks, tables = chunk.blocks, chunk.P * chunk.clusters

            # The recomputed keys: O_i = m_j · softmax(S_i) V_T.
            packed_query, packed_grad = chunk.packed_query, blocks.pack(part.queries(grad_output))
            top_keys, top_values = chunk.take(chunk.key), chunk.take(chunk.value)
            softmax = chunk.topk_softmax(top_keys)
            grad_weights = torch.bmm(packed_grad, top_values.transpose(1, 2)).to(dtype)
            weights = softmax * chunk.block_mass
            if chunk.topk_factor is not None:
                grad_weights *= chunk.topk_factor
                weights = weights * chunk.topk_factor
            row_dot = torch.linalg.vecdot(softmax, grad_weights)  # (blocks, length); 0 in empty places
            grad_mass = blocks.sum(row_dot.sum(dim=1), tables).view(chunk.P, chunk.clusters, 1)
            grad_top_values = torch.bmm(weights.to(value.dtype).transpose(1, 2), packed_grad)
            grad_scores = grad_weights.sub_(row_dot[..., None]).mul_(softmax).mul_(chunk.block_mass * scale)
            grad_scores = grad_scores.to(key.dtype)
            grad_q = blocks.unpack(torch.bmm(grad_scores, top_keys), chunk.P).to(dtype)
            grad_top_keys = torch.bmm(grad_scores.transpose(1, 2), packed_query)

            # The rest: O_i += Σ_{t∉T} A^c_jt V_t, and m_j = Σ_{t∈T} A^c_jt.
            grad_rest_values = chunk.cluster_sums(packed_grad).to(value.dtype)
            grad_attention = (grad_rest_values @ chunk.value.transpose(1, 2)).to(dtype)
            rest = chunk.rest()
            if chunk.rest_factor is not None:
                grad_attention *= chunk.rest_factor
                grad_v = (rest * chunk.rest_factor).to(value.dtype).transpose(1, 2) @ grad_rest_values
            else:
                grad_v = rest.to(value.dtype).transpose(1, 2) @ grad_rest_values
            grad_attention.scatter_(2, chunk.top, grad_mass.expand(-1, -1, chunk.top.shape[2]))
            attention = chunk.attention.scatter_(2, chunk.top, chunk.top_attention)
            grad_centroids, grad_k = centroid_backward(attention, grad_attention, chunk.centroids, chunk.key, scale)

            grad_q += (grad_centroids / chunk.sizes).flatten(0, 1).index_select(0, chunk.index).view_as(grad_q)
            part.store_queries(grad_query, grad_q)
            rows = chunk.top_rows.flatten()
            for grad, target, top_grad in ((grad_k, grad_key, grad_top_keys), (grad_v, grad_value, grad_top_values)):
                summed = grad.to(dtype).flatten(0, 1)
                summed.index_add_(0, rows, top_grad.flatten(0, 1).to(dtype))
                part.store_keys(target, summed.view(chunk.P, chunk.M, -1))
    return grad_query, grad_key, grad_value


@improved_clustered_attention_backward.register_fake
def _(grad_output, query, key, value, *settings):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, labels, clusters, topk, key_mask, query_mask, scale, dropout_p, dropout_seed = inputs
    ctx.save_for_backward(query, key, value, labels, key_mask, query_mask, dropout_seed)
    ctx.settings = clusters, topk, scale, dropout_p


def _backward(ctx, grad_output):
    query, key, value, labels, key_mask, query_mask, dropout_seed = ctx.saved_tensors
    clusters, topk, scale, dropout_p = ctx.settings
    grads = improved_clustered_attention_backward(
        grad_output, query, key, value, labels, clusters, topk, key_mask, query_mask, scale, dropout_p, dropout_seed
    )
    return (*grads, *[None] * 8)


improved_clustered_attention.register_autograd(_backward, setup_context=_setup_context)
