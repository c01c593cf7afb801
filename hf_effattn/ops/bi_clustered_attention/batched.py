"""First-order bi-clustered attention for a CPU: keys and queries sorted by cluster, in blocks, batched products.

Of every query cluster a table is made, its exact keys and the tangents of the key clusters, to which its queries then
attend (`shared.cluster_table`). The backward pass gets the tables where they are small beside the inputs, else which
keys are exact, and makes them again; of heads that attend exactly it gets output and log-sum-exp. To `torch.compile`
each pass is one op, which keeps no tables. Sums and softmax
are in float32, or float64 for float64 inputs; of bfloat16 the products are in bfloat16.

Sizes: `P` key/value heads of a chunk, `N` queries, `M` keys, `T` exact keys, `C` query clusters of all the query heads
that share a key/value head, `G` key clusters, `nb` blocks of `L` keys per head.
"""

from typing import Any, cast

import torch

from ..shared.cluster_blocks import ClusterBlocks, block_length
from ..shared.cluster_table import ClusterTable, Dipole, attend, attend_backward
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS
from ..shared.gradients import register_gradients
from ..shared.head_threads import for_every_chunk
from ..shared.kept_objects import as_tensors, from_tensors
from ..shared.key_summaries import KeyClusters, Summaries
from ..shared.precision import accumulation_dtype, in_products, product_dtype, split_scale
from ..shared.row_chunks import RowChunk
from ..shared.tables import (
    chunks_of,
    cluster_sizes,
    draw_dropout,
    empty_output,
    gradients_of_chunks,
    output_of_chunks,
    table_rows,
)
from .exact_heads import ExactPart, KeyGradients, attend_exactly, exact_backward, exact_parts
from .reference import LARGEST_LIFT

Counts = tuple[int, int, int]  # query clusters, key clusters, exact keys
# What the backward pass is left beside queries, keys, values and output, at most, as a multiple of them.
MOST_KEPT = 2


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


def _is_kept(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counts: Counts) -> bool:
    """Whether what a chunk computes is small enough to be left to the backward pass."""
    (N, D), (M, Dv), (clusters, key_clusters, topk) = query.shape[2:], value.shape[2:], counts
    rows = N * D + M * (D + Dv)
    tables = clusters * (M + (topk + 2 * key_clusters) * (D + Dv)) + (clusters + key_clusters) * D * Dv
    return rows + tables <= MOST_KEPT * (rows + N * Dv)


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
        top: torch.Tensor | None = None,
    ) -> None:
        """`top`: places of the exact keys, `(B, heads, group · C, T)`, as the forward pass has found them."""
        dtype, products = accumulation_dtype(query.dtype), product_dtype(query.dtype)
        self.of_queries, self.of_keys = split_scale(scale, products)
        scaled_keys, values = in_products(chunk.keys(key), self.of_keys), chunk.keys(value).to(products)
        keys = KeyClusters(scaled_keys, values, chunk.keys(key_labels), key_clusters)
        self.keys, self.P, self.G, self.D, self.Dv = keys, keys.P, keys.G, keys.D, keys.Dv
        self.T, self.C = min(topk, keys.M), chunk.group * clusters
        self.index = table_rows(chunk, labels, clusters)
        sizes = cluster_sizes(self.index, self.P, self.C)
        self.sizes = sizes.clamp(min=1)[..., None]  # (P, C, 1)
        self.blocks = ClusterBlocks.of(self.index, sizes)
        queries = chunk.queries(query).to(dtype) * self.of_queries
        # Behind the scaled query a 1, for the biases of the table.
        ones = torch.ones(1, 1, 1, dtype=products, device=queries.device).expand(*queries.shape[:2], 1)
        self.packed_query = self.blocks.pack(queries.to(products), ones)
        sums = self.blocks.sum(self.packed_query[..., :-1].sum(dim=1, dtype=dtype), self.P * self.C)
        sums = sums.view(self.P, self.C, -1)
        centroids = sums / self.sizes  # Q̄
        covariance = (queries.transpose(1, 2) @ queries).sub_((centroids * self.sizes).transpose(1, 2) @ centroids)
        covariance /= queries.shape[1]  # Σ_η
        self.summaries = Summaries(
            keys, centroids, self.T, covariance, largest_lift=LARGEST_LIFT, in_order=dropout_seed is not None,
            top=None if top is None else chunk.of_heads(top)[:, : self.C, : self.T],
        )  # fmt: skip
        self.table = self._make_dipole()

        self.factor = None
        if dropout_seed is not None:
            shape = query.shape[2], min(topk, key.shape[2]) + self.G
            factor = draw_dropout(chunk, shape, self.packed_query, dropout_p, dropout_seed, TOPK_AND_SUMMARY_WEIGHTS)
            if chunk.query_rows is not None:
                factor = factor.index_select(1, chunk.query_rows)
            factor = torch.cat([factor[..., : self.T], factor[..., -self.G :]], dim=2)
            self.factor = self.blocks.pack(factor.view(self.P, -1, self.T + self.G))

    def _make_dipole(self) -> ClusterTable:
        """The table, with `M_j` of every query cluster.

        `p̄_jc` of the clusters alone: `r_i M_j` is the query's weight on clusters times `Σ_c p̄_jc Cov_c / Σ_c p̄_jc`,
        finite where exact keys take all of the centroid's weight.
        """
        keys, D, table = self.keys, self.D, self.summaries.table
        self.at_centroid = self.summaries.log_mass.softmax(dim=2)  # (P, C, G)
        rows = keys.by_cluster()
        of_blocks = torch.bmm(rows[..., :D].transpose(1, 2), rows[..., D:-1]).to(keys.means.dtype)
        covariances = keys.blocks.sum(of_blocks, self.P * self.G)
        self.covariances = covariances.div_(keys.sizes[..., None]).view(self.P, self.G, -1)
        matrices = (self.at_centroid @ self.covariances).view(-1, D, self.Dv).to(table.values.dtype)
        dipole = Dipole(self.summaries.centroids.flatten(0, 1), matrices, self.T)
        return ClusterTable(table.keys, table.values, dipole=dipole)

    def backward(self, packed_grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the queries `(P, N, D)`, and of keys and values side by side, `(P, M, D + Dv)`."""
        keys, D = self.keys, self.D
        grad_query, grad = attend_backward(self.table, self.blocks, self.packed_query, self.factor, packed_grad)
        dipole = cast("Dipole", grad.dipole)
        # The dipole's matrices: means of the clusters' covariances, weighed by a softmax.
        by_head = dipole.matrices.view(self.P, self.C, -1)
        grad_covariances = (self.at_centroid.transpose(1, 2) @ by_head).view(-1, D, self.Dv) / keys.sizes[..., None]
        grad_logits = by_head @ self.covariances.transpose(1, 2)
        grad_logits -= torch.linalg.vecdot(self.at_centroid, grad_logits)[..., None]
        grad_logits *= self.at_centroid
        grad_centroids, grad_rows = self.summaries.backward(grad, grad_logits)
        rows = keys.by_cluster()
        turn = keys.blocks.of_cluster(grad_covariances.to(rows.dtype))
        grad_rows[..., :D] += torch.bmm(rows[..., D:-1], turn.transpose(1, 2))
        grad_rows[..., D:] += torch.bmm(rows[..., :D], turn)

        grad_query = self.blocks.unpack(grad_query[..., :-1], self.P)
        grad_centroids = (grad_centroids + dipole.centroids) / self.sizes.flatten(0, 1)
        grad_query += grad_centroids.index_select(0, self.index).view_as(grad_query)
        if self.of_keys != 1:
            grad_rows[..., :D] *= self.of_keys
        return grad_query.mul_(self.of_queries), keys.blocks.unpack(grad_rows, self.P)


@torch.library.custom_op("hf_effattn::bi_clustered_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    clusters: list[int],
    key_clusters: list[int],
    topk: list[int],
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    exact_heads: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    keep: bool,
) -> list[torch.Tensor]:
    """The output, what `_kept` says, and with `keep` the chunks as tensors; counts by key/value head."""
    output = output_of_chunks(query, key, value, key_mask, query_mask)
    log_sum, top = _kept(query, key, clusters, topk, exact_heads)
    counts = list(zip(clusters, key_clusters, topk, strict=True))
    computed: dict[tuple[int, int, int], _Chunk] = {}

    def attend_chunk(part: RowChunk | ExactPart) -> None:
        if isinstance(part, ExactPart):
            values, of_scores = attend_exactly(part, query, key, value, scale, dropout_p, dropout_seed)
            part.chunk.store_queries(output, values, part.rows)
            if of_scores is not None:
                part.chunk.store_queries(log_sum, of_scores, part.rows)
            return
        of_heads = *counts[part.first_head], scale, dropout_p, dropout_seed
        chunk = _Chunk(part, query, key, value, labels, key_labels, *of_heads)
        values = attend(chunk.table, chunk.blocks, chunk.packed_query, chunk.factor)
        part.store_queries(output, chunk.blocks.unpack(values, chunk.P))
        part.of_heads(top)[:, : chunk.C, : chunk.T] = chunk.summaries.top
        if keep and _is_kept(query, key, value, counts[part.first_head]):
            computed[_place(part)] = chunk

    exact = exact_parts(query, key, value, key_mask, query_mask, exact_heads, dropout_seed)
    chunks = _chunks(query, key, value, key_mask, query_mask, exact_heads, counts)
    parts: list[RowChunk | ExactPart] = [*exact, *chunks]
    for_every_chunk(attend_chunk, parts, query.device)
    return [output, log_sum, top, *(as_tensors(computed) if keep else [])]


def _place(part: RowChunk) -> tuple[int, int, int]:
    return part.batch, part.first_head, part.last_head


def _chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    exact_heads: torch.Tensor | None,
    counts: list[Counts],
) -> list[RowChunk]:
    """Chunks of heads with the same counts, the dearest first, so that no thread waits long for the last."""
    found = []
    for one in sorted(set(counts), key=sum, reverse=True):
        skip = exact_heads
        if len(set(counts)) > 1:
            others = torch.tensor([own != one for own in counts]).expand(key.shape[:2])
            skip = others if exact_heads is None else others | exact_heads
        found += chunks_of(query, key, key_mask, query_mask, largest_buffer(query, key, value, *one), skip)
    return found


def _kept(
    query: torch.Tensor, key: torch.Tensor, clusters: list[int], topk: list[int], exact_heads: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for what the forward pass leaves to the backward pass.

    Log-sum-exp of the queries of exact heads `(B, H, N, 1)`, and the places of exact keys `(B, heads, group · C, T)`.
    """
    (B, H, N, _), heads = query.shape, key.shape[1]
    dtype = accumulation_dtype(query.dtype)
    log_sum = query.new_zeros(B, H, 0 if exact_heads is None else N, 1, dtype=dtype)
    return log_sum, query.new_zeros(B, heads, H // max(1, heads) * max(clusters), max(topk), dtype=torch.int64)


def gradients(
    grad_output, forward, query, key, value, labels, key_labels, clusters, key_clusters, topk, key_mask, query_mask,
    exact_heads, scale, dropout_p, dropout_seed, keep,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value, labels and sets `T_j` held fixed; `forward` is what the forward op gave."""
    output, log_sum, top, *kept = forward
    computed: dict[tuple[int, int, int], _Chunk] = from_tensors(kept) if kept else {}
    grad_query, grad_key, grad_value = gradients_of_chunks(query, key, value, key_mask, query_mask)
    counts = list(zip(clusters, key_clusters, topk, strict=True))

    def attend_chunk(part: RowChunk | ExactPart) -> None:
        if isinstance(part, ExactPart):
            of_inputs = query, key, value, scale, dropout_p, dropout_seed
            of_query, *of_keys = exact_backward(part, grad_output, output, log_sum, *of_inputs)
            part.chunk.store_queries(grad_query, of_query, part.rows)
            for target, total in zip((grad_key, grad_value), sums.add(part, of_keys), strict=False):
                part.chunk.store_keys(target, total)
            return
        of_heads = *counts[part.first_head], scale, dropout_p, dropout_seed
        # With another number of threads the chunks are others.
        chunk = computed.get(_place(part)) or _Chunk(part, query, key, value, labels, key_labels, *of_heads, top)
        packed_grad = chunk.blocks.pack(part.queries(grad_output).to(chunk.packed_query.dtype))
        of_query, of_rows = chunk.backward(packed_grad)
        part.store_queries(grad_query, of_query)
        part.store_keys(grad_key, of_rows[..., : chunk.D])
        part.store_keys(grad_value, of_rows[..., chunk.D :])

    exact = exact_parts(query, key, value, key_mask, query_mask, exact_heads, dropout_seed)
    chunks = _chunks(query, key, value, key_mask, query_mask, exact_heads, counts)
    parts: list[RowChunk | ExactPart] = [*exact, *chunks]
    sums = KeyGradients(exact)
    for_every_chunk(attend_chunk, parts, query.device)
    return grad_query, grad_key, grad_value


@_forward.register_fake
def _(query, key, value, labels, key_labels, clusters, key_clusters, topk, key_mask, query_mask, exact_heads, *rest):
    return [empty_output(query, value), *_kept(query, key, clusters, topk, exact_heads)]


register_gradients("bi_clustered_attention", gradients, ("query", "key", "value"), keeps=slice(None))


def bi_clustered_attention(*arguments: Any) -> torch.Tensor:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic Ṽ_jc + r_i η^T M_j` with `T = T_j`, `j = l(i)`; arguments of `_forward`."""
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in arguments[:3])
    return _forward(*arguments, learns and not torch.compiler.is_compiling())[0]
