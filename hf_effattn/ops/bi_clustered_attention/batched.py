"""First-order bi-clustered attention for a CPU: keys and queries sorted by cluster, in blocks, batched products.

Of every query cluster a table is made, its exact keys and the tangents of the key clusters, to which its queries then
attend (`shared.cluster_table`). Nothing but the inputs is kept for the backward pass, and to `torch.compile` each pass
is one op. All arithmetic is in float32, or float64 for float64 inputs.

Sizes: `P` key/value heads of a chunk, `N` queries, `M` keys, `T` exact keys, `C` query clusters of all the query heads
that share a key/value head, `G` key clusters, `nb` blocks of `L` keys per head.
"""

from functools import partial
from typing import cast

import torch

from ..shared.arguments import check_label_range
from ..shared.cluster_blocks import ClusterBlocks, block_length
from ..shared.cluster_table import ClusterTable, Dipole, attend, attend_backward
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import (
    chunks_of,
    cluster_rows,
    cluster_sizes,
    draw_dropout,
    empty_output,
    gradients_of_chunks,
    output_of_chunks,
    table_rows,
)
from ..shared.topk import largest
from .exact_heads import attend_exactly, exact_backward, exact_chunks
from .reference import LARGEST_LIFT, SMALLEST

# Logarithm of the mass of a cluster without a key: no weight, and finite, as empty places of a block multiply it by 0.
NO_MASS = -1e30
# Of a tilted weight beside its cluster's largest: below, exp and products slow down tenfold with denormal numbers.
LEAST_LOG_WEIGHT = -60.0
# The largest weight of a cluster is 1; what all its keys together stay below, all of them exact, is the least.
LEAST_MASS = 1e-20


def largest_buffer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, clusters: int, key_clusters: int, topk: int
) -> int:
    """Numbers per head in the centroids' scores, the sums over blocks of keys, the tables that query blocks read."""
    length, key_length = block_length(query.shape[2] / clusters), block_length(key.shape[2] / key_clusters)
    blocks, key_blocks = clusters + query.shape[2] // length, key_clusters + key.shape[2] // key_length
    head_dim = max(key.shape[3], value.shape[3])
    columns = min(topk, key.shape[2]) + key_clusters
    return max(
        clusters * key.shape[2], key_blocks * clusters * 2 * head_dim, blocks * max(columns, length) * head_dim,
        blocks * length * columns, (clusters + key_clusters) * head_dim**2,
    )  # fmt: skip


class _Keys:
    """The keys and values of a chunk, sorted by key cluster: their means, and what remains of every row.

    Attributes:
        rows: `(P, nb, L, D + Dv + 1)`: key and value less the means of their cluster, and 1; 0 in empty places.
        clusters: `(P, nb)` cluster of a block, `0 .. G - 1`.
        sizes: `(P · G, 1)`, at least 1.
        means: `(P · G, D + Dv)`.
        empty: `(P, 1, nb · L)`, where no key is.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, labels: torch.Tensor, clusters: int) -> None:
        self.P, self.M, self.D = key.shape
        self.G, self.Dv = clusters, value.shape[2]
        check_label_range(labels, clusters, of="key")
        index = cluster_rows(labels, clusters)
        sizes = cluster_sizes(index, self.P, clusters)
        self.blocks = ClusterBlocks.of(index, sizes, aligned=True)
        self.clusters = self.blocks.clusters.view(self.P, -1) % clusters
        self.sizes = sizes.view(-1, 1).clamp(min=1)
        packed = self.blocks.pack(key, value, key.new_ones(1, 1, 1).expand(self.P, self.M, 1))
        sums = self.blocks.sum(packed.sum(dim=1), self.P * clusters)
        sums[:, :-1] /= self.sizes
        self.means = sums[:, :-1].contiguous()
        full = packed[..., -1:]
        packed[..., :-1].addcmul_(full, self.blocks.of_cluster(self.means)[:, None], value=-1)
        self.empty = (full == 0).view(self.P, 1, -1)
        self.rows = packed.view(self.P, -1, self.blocks.length, self.D + self.Dv + 1)

    def per_block(self, table: torch.Tensor) -> torch.Tensor:
        """Numbers of every cluster `(P, C, G)` for its blocks: `(P, C, nb)`."""
        return table.gather(2, self.clusters[:, None].expand(-1, table.shape[1], -1))

    def keys(self) -> torch.Tensor:
        """`K_t - K̄_g(t)` `(P, nb · L, D)`."""
        return self.rows[..., : self.D].flatten(1, 2)

    def flat(self) -> torch.Tensor:
        """The rows `(P · nb · L, D + Dv + 1)`."""
        return self.rows.flatten(0, 2)

    def by_block(self, scores: torch.Tensor, head: int) -> torch.Tensor:
        """A head's scores, of `(P, C, nb · L)`: `(nb, C, L)`."""
        return scores[head].unflatten(1, (-1, self.blocks.length)).transpose(0, 1)


class _Chunk:
    """What both passes compute of a chunk: the tables of its query clusters."""

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
        dtype = accumulation_dtype(query.dtype)
        keys = _Keys(chunk.keys(key).to(dtype), chunk.keys(value).to(dtype), chunk.keys(key_labels), key_clusters)
        self.keys, self.P, self.G, self.D, self.Dv = keys, keys.P, keys.G, keys.D, keys.Dv
        self.T, self.C = min(topk, keys.M), chunk.group * clusters
        self.index = table_rows(chunk, labels, clusters)
        sizes = cluster_sizes(self.index, self.P, self.C)
        self.sizes = sizes.clamp(min=1)[..., None]  # (P, C, 1)
        self.blocks = ClusterBlocks.of(self.index, sizes)
        queries = chunk.queries(query).to(dtype) * scale
        # Behind the scaled query a 1, for the biases of the table.
        self.packed_query = self.blocks.pack(queries, queries.new_ones(1, 1, 1).expand(*queries.shape[:2], 1))
        sums = self.blocks.sum(self.packed_query[..., :-1].sum(dim=1), self.P * self.C).view(self.P, self.C, -1)
        self.centroids = sums / self.sizes  # Q̄
        self._choose_keys(queries, in_order=dropout_seed is not None)
        self._summarise()
        self._make_table()

        self.factor = None
        if dropout_seed is not None:
            shape = query.shape[2], min(topk, key.shape[2]) + self.G
            factor = draw_dropout(chunk, shape, self.scores, dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            factor = torch.cat([factor[..., : self.T], factor[..., -self.G :]], dim=2)
            self.factor = self.blocks.pack(factor.view(self.P, -1, self.T + self.G))

    def _choose_keys(self, queries: torch.Tensor, *, in_order: bool) -> None:
        """Exact keys `T_j` by weight times squared distance; scores `Q̄_j·(K_t - K̄_g(t))`, and their lifts `b_t`."""
        keys, spread = self.keys, self.keys.keys()
        of_centroids = (self.centroids * self.sizes).transpose(1, 2) @ self.centroids
        covariance = (queries.transpose(1, 2) @ queries).sub_(of_centroids) / queries.shape[1]  # Σ_η
        distances = torch.linalg.vecdot(spread @ covariance, spread).clamp_(min=SMALLEST)
        self.lift = (distances / 2).clamp_(max=LARGEST_LIFT).masked_fill_(keys.empty[:, 0], -torch.inf)
        preference = distances.log_().masked_fill_(keys.empty[:, 0], -torch.inf)
        self.scores = torch.bmm(self.centroids, spread.transpose(1, 2))  # (P, C, nb · L)
        mean_keys = keys.means[:, : self.D].view(self.P, self.G, -1)
        self.mean_scores = self.centroids @ mean_keys.transpose(1, 2)  # Q̄_j·K̄_c: (P, C, G)
        biased = self.scores.unflatten(2, (-1, keys.blocks.length)) + keys.per_block(self.mean_scores)[..., None]
        biased = biased.flatten(2).add_(preference[:, None])
        self.top = largest(biased, self.T, in_order=in_order)  # (P, C, T)
        places = torch.arange(self.P, device=self.top.device)[:, None, None] * biased.shape[2]
        self.top_places = (self.top + places).flatten()

    def _summarise(self) -> None:
        """Tilted weights `w_jt / S_jc` and sums over `c∖T_j`: `log S_jc`, `K̃_jc`, `Ṽ_jc`."""
        keys, scores = self.keys, self.scores
        scores.add_(self.lift[:, None]).scatter_(2, self.top, -torch.inf)
        by_block = scores.unflatten(2, (-1, keys.blocks.length))
        lowest = torch.finfo(scores.dtype).min
        shift = scores.new_full((self.P, self.C, self.G), lowest)
        index = keys.clusters[:, None].expand(-1, self.C, -1)
        shift.scatter_reduce_(2, index, by_block.amax(dim=3), "amax")
        by_block.sub_(keys.per_block(shift)[..., None]).clamp_(min=LEAST_LOG_WEIGHT).exp_()
        self.weights = scores  # w_jt, of the largest of its cluster
        width = self.D + self.Dv + 1
        parts = scores.new_empty(self.P, keys.clusters.shape[1], self.C, width)
        for p in range(self.P):
            torch.bmm(keys.by_block(self.weights, p), keys.rows[p], out=parts[p])
        sums = keys.blocks.sum(parts.flatten(0, 1), self.P * self.G).view(self.P, self.G, self.C, width)
        sums = sums.transpose(1, 2)  # (P, C, G, D + Dv + 1)
        mass = sums[..., -1]
        nobody = mass < LEAST_MASS
        self.inverse_mass = torch.where(nobody, 0.0, 1 / mass)
        self.tilted = sums[..., :-1] * self.inverse_mass[..., None]  # without the means
        log_mass = mass.log() + shift + self.mean_scores
        self.log_mass = log_mass.masked_fill_(nobody, NO_MASS)

    def _make_table(self) -> None:
        """Rows: exact keys without bias, then the tangents `log S_jc + η·K̃_jc = b_jc + Q_i·K̃_jc`."""
        keys, D = self.keys, self.D
        tilted = self.tilted + keys.means.view(self.P, 1, self.G, -1)
        tilted_keys, tilted_values = tilted.split([D, self.Dv], dim=3)
        bias = self.log_mass - torch.linalg.vecdot(self.centroids[:, :, None], tilted_keys)
        exact = keys.flat().index_select(0, self.top_places)
        exact[:, :-1] += keys.means.index_select(0, self._clusters_of_top())
        exact_rows = exact.view(self.P * self.C, self.T, -1)
        table_keys = exact.new_empty(self.P * self.C, self.T + self.G, D + 1)
        table_keys[:, : self.T, :D] = exact_rows[..., :D]
        table_keys[:, : self.T, D] = 0
        table_keys[:, self.T :, :D] = tilted_keys.flatten(0, 1)
        table_keys[:, self.T :, D] = bias.flatten(0, 1)
        values = torch.cat([exact_rows[..., D:-1], tilted_values.flatten(0, 1)], dim=1)

        # `p̄_jc` of the clusters alone: `r_i M_j` is the query's weight on clusters times `Σ_c p̄_jc Cov_c / Σ_c p̄_jc`,
        # finite where exact keys take all of the centroid's weight.
        self.at_centroid = self.log_mass.softmax(dim=2)  # (P, C, G)
        rows = keys.flat().view(len(keys.blocks.clusters), keys.blocks.length, -1)
        covariances = keys.blocks.sum(torch.bmm(rows[..., :D].transpose(1, 2), rows[..., D:-1]), self.P * self.G)
        self.covariances = covariances.div_(keys.sizes[..., None]).view(self.P, self.G, -1)
        matrices = (self.at_centroid @ self.covariances).view(-1, D, self.Dv)
        self.table = ClusterTable(table_keys, values, dipole=Dipole(self.centroids.flatten(0, 1), matrices, self.T))

    def _clusters_of_top(self) -> torch.Tensor:
        """Rows of the means `(P · G, ...)` of the exact keys, flat."""
        return self.keys.blocks.clusters.index_select(0, self.top_places // self.keys.blocks.length)

    def backward(self, packed_grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the scaled queries `(P, N, D)`, and of keys and values side by side, `(P, M, D + Dv)`."""
        keys, D, T = self.keys, self.D, self.T
        grad_query, grad = attend_backward(self.table, self.blocks, self.packed_query, self.factor, packed_grad)
        dipole = cast("Dipole", grad.dipole)
        centroids = self.centroids.flatten(0, 1)
        grad_centroids = dipole.centroids
        grad_bias = grad.keys[:, T:, D]
        # The dipole's matrices: means of the clusters' covariances, weighed by a softmax.
        by_head = dipole.matrices.view(self.P, self.C, -1)
        grad_covariances = (self.at_centroid.transpose(1, 2) @ by_head).view(-1, D, self.Dv) / keys.sizes[..., None]
        grad_logits = by_head @ self.covariances.transpose(1, 2)
        grad_logits -= torch.linalg.vecdot(self.at_centroid, grad_logits)[..., None]
        grad_logits *= self.at_centroid
        grad_exact = torch.cat([grad.keys[:, :T, :D], grad.values[:, :T]], dim=2)

        # Tangents: b_jc = log S_jc - Q̄_j·K̃_jc.
        tilted_keys = self.table.keys[:, T:, :D]
        grad_log_mass = grad_bias + grad_logits.flatten(0, 1)
        grad_tilted = torch.cat([grad.keys[:, T:, :D], grad.values[:, T:]], dim=2)
        grad_tilted[..., :D] -= grad_bias[..., None] * centroids[:, None]
        grad_centroids -= (grad_bias[:, None] @ tilted_keys)[:, 0]

        # Tilted sums: of the clusters' means, and of what remains of every key, weighed by w_jt / S_jc.
        grad_tilted = grad_tilted.view(self.P, self.C, self.G, -1)
        grad_log_mass = grad_log_mass.view(self.P, self.C, self.G)
        # K̃ - K̄ and Ṽ - V̄ are weighted means of the rows; those rows' own means are 0.
        constant = grad_log_mass - torch.linalg.vecdot(grad_tilted, self.tilted)
        grad_rows = torch.cat([grad_tilted, constant[..., None]], dim=3)
        self.weights.unflatten(2, (-1, keys.blocks.length)).mul_(keys.per_block(self.inverse_mass)[..., None])
        grad_packed = torch.empty_like(keys.rows)[..., :-1]
        grad_scores = torch.empty_like(self.weights)
        for p in range(self.P):
            table = grad_rows[p].index_select(1, keys.clusters[p]).transpose(0, 1)  # (nb, C, D + Dv + 1)
            weights = keys.by_block(self.weights, p)
            block_scores = torch.bmm(table, keys.rows[p].transpose(1, 2)).mul_(weights)  # (nb, C, L)
            grad_scores[p] = block_scores.transpose(0, 1).flatten(1)
            grad_packed[p] = torch.bmm(weights.transpose(1, 2), table[..., :-1])
        spread = keys.keys()
        grad_packed[..., :D] += (grad_scores.transpose(1, 2) @ self.centroids).view_as(grad_packed[..., :D])
        # Q̄_j·K_t is the score of what remains of the key, and of its cluster's mean.
        mean_keys = keys.means[:, :D].view(self.P, self.G, -1)
        grad_centroids += (torch.bmm(grad_scores, spread) + grad_log_mass @ mean_keys).flatten(0, 1)
        # Covariances.
        rows = keys.flat().view(len(keys.blocks.clusters), keys.blocks.length, -1)
        turn = keys.blocks.of_cluster(grad_covariances)
        flat = grad_packed.view(len(rows), keys.blocks.length, -1)
        flat[..., :D] += torch.bmm(rows[..., D:-1], turn.transpose(1, 2))
        flat[..., D:] += torch.bmm(rows[..., :D], turn)
        flat.view(-1, flat.shape[2]).index_add_(0, self.top_places, grad_exact.flatten(0, 1))

        grad_query = self.blocks.unpack(grad_query[..., :-1], self.P)
        grad_centroids = grad_centroids / self.sizes.flatten(0, 1)
        grad_query += grad_centroids.index_select(0, self.index).view_as(grad_query)
        return grad_query, keys.blocks.unpack(flat, self.P)


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
    exact_heads: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic Ṽ_jc + r_i η^T M_j` with `T = T_j`, `j = l(i)`."""
    output = output_of_chunks(query, key, value, key_mask, query_mask)
    settings = clusters, key_clusters, topk, scale, dropout_p, dropout_seed
    numbers = largest_buffer(query, key, value, clusters, key_clusters, topk)

    def attend_chunk(part: RowChunk) -> None:
        chunk = _Chunk(part, query, key, value, labels, key_labels, *settings)
        values = attend(chunk.table, chunk.blocks, chunk.packed_query, chunk.factor)
        part.store_queries(output, chunk.blocks.unpack(values, chunk.P))

    for_every_chunk(attend_chunk, chunks_of(query, key, key_mask, query_mask, numbers, exact_heads), query.device)
    with torch.autocast(query.device.type, enabled=False):
        for part in exact_chunks(query, key, key_mask, query_mask, exact_heads):
            part.store_queries(output, attend_exactly(part, query, key, value, scale, dropout_p, dropout_seed))
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
    exact_heads: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and sets `T_j` held fixed."""
    grad_query, grad_key, grad_value = gradients_of_chunks(query, key, value, key_mask, query_mask)
    settings = clusters, key_clusters, topk, scale, dropout_p, dropout_seed
    numbers = largest_buffer(query, key, value, clusters, key_clusters, topk)

    def attend_chunk(part: RowChunk) -> None:
        chunk = _Chunk(part, query, key, value, labels, key_labels, *settings)
        packed_grad = chunk.blocks.pack(part.queries(grad_output).to(chunk.packed_query.dtype))
        of_query, of_rows = chunk.backward(packed_grad)
        part.store_queries(grad_query, of_query.mul_(scale))
        part.store_keys(grad_key, of_rows[..., : chunk.D])
        part.store_keys(grad_value, of_rows[..., chunk.D :])

    def attend_exact_head(part: RowChunk) -> None:
        of_exact = exact_backward(part, grad_output, query, key, value, scale, dropout_p, dropout_seed)
        part.store_queries(grad_query, of_exact[0])
        part.store_keys(grad_key, of_exact[1])
        part.store_keys(grad_value, of_exact[2])

    exact = exact_chunks(query, key, key_mask, query_mask, exact_heads)
    clustered = chunks_of(query, key, key_mask, query_mask, numbers, exact_heads)
    # The longest first: an exact head runs on one thread.
    steps = [partial(attend_exact_head, part) for part in exact] + [partial(attend_chunk, part) for part in clustered]
    for_every_chunk(lambda step: step(), steps, query.device)
    return grad_query, grad_key, grad_value


@bi_clustered_attention_backward.register_fake
def _(grad_output, query, key, value, *settings):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:
    tensors, (clusters, key_clusters, topk, key_mask, query_mask, exact_heads, scale, dropout_p, seed) = (
        inputs[:5],
        inputs[5:],
    )
    ctx.save_for_backward(*tensors, key_mask, query_mask, exact_heads, seed)
    ctx.settings = clusters, key_clusters, topk, scale, dropout_p


def _backward(ctx, grad_output):
    *tensors, key_mask, query_mask, exact_heads, seed = ctx.saved_tensors
    *counts, scale, dropout_p = ctx.settings
    grads = bi_clustered_attention_backward(
        grad_output, *tensors, *counts, key_mask, query_mask, exact_heads, scale, dropout_p, seed
    )
    return (*grads, *[None] * 11)


bi_clustered_attention.register_autograd(_backward, setup_context=_setup_context)
