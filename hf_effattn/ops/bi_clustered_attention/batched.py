"""Bi-clustered attention for a CPU: keys and queries sorted by cluster, in blocks, batched products.

Every query cluster has a table of its exact keys and of the tangents of the key clusters, to which its queries attend
(`shared.cluster_table`). The backward pass gets the tables where they are small beside the inputs. Else it gets the
exact keys and makes the tables again, as it does in a graph. Of heads that attend exactly it gets output and
log-sum-exp. Sums and softmax are in float32, or float64 for float64 inputs. Products of bfloat16 are in bfloat16.

Sizes: `P` key/value heads of a chunk, `N` queries, `M` keys, `T` exact keys, `C` query clusters of all the query heads
that share a key/value head, `G` key clusters, `nb` blocks of `L` keys per head.
"""

from operator import itemgetter
from typing import Any, cast

import torch

from ..shared.cluster_blocks import ClusterBlocks, block_length
from ..shared.cluster_table import ClusterTable, Dipole, attend, attend_backward
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS
from ..shared.gradients import register_op
from ..shared.graphs import in_a_graph
from ..shared.head_threads import for_every_chunk
from ..shared.kept_objects import as_tensors, from_tensors
from ..shared.key_summaries import KeyClusters, Summaries
from ..shared.precision import accumulation_dtype, in_products, product_dtype, split_scale
from ..shared.row_chunks import RowChunk
from ..shared.tables import chunks_of, cluster_sizes, draw_dropout, gradients_of_chunks, output_of_chunks, table_rows
from .exact_heads import ExactPart, KeyGradients, attend_exactly, exact_backward, exact_parts
from .reference import LARGEST_VARIANCE_CORRECTION, Inputs

# The backward pass keeps tables if all it keeps is at most this many times the queries, keys, values and output.
MOST_KEPT = 2


Counts = tuple[int, int, int]  # query clusters, key clusters and exact keys of a head


def largest_buffer(x: Inputs, counts: Counts) -> int:
    """Numbers per head in the centroids' scores, the sums over blocks of keys, the tables that query blocks read."""
    (C, G, topk), N, M = counts, x.query.shape[2], x.key.shape[2]
    length, key_length = block_length(N / C), block_length(M / G)
    blocks, key_blocks = C + N // length, G + M // key_length
    head_dim, columns = max(x.key.shape[3], x.value.shape[3]), min(topk, M) + G
    return max(
        C * M, key_blocks * C * 2 * head_dim, blocks * max(columns, length) * head_dim, blocks * length * columns,
        (C + G) * head_dim**2,
    )  # fmt: skip


def _is_kept(x: Inputs, counts: Counts) -> bool:
    """Whether what a chunk computes is small enough to be left to the backward pass."""
    (C, G, topk), (N, D), (M, Dv) = counts, x.query.shape[2:], x.value.shape[2:]
    rows = N * D + M * (D + Dv)
    tables = C * (M + (topk + 2 * G) * (D + Dv)) + (C + G) * D * Dv
    return rows + tables <= MOST_KEPT * (rows + N * Dv)


class _Chunk:
    """What both passes compute of a chunk: the tables of its query clusters."""

    def __init__(self, chunk: RowChunk, x: Inputs, counts: Counts, top: torch.Tensor | None = None) -> None:
        """`top`: places of the exact keys, `(B, heads, group · C, T)`, as the forward pass has found them."""
        clusters, key_clusters, topk = counts
        dtype, products = accumulation_dtype(x.query.dtype), product_dtype(x.query)
        self.of_queries, self.of_keys = split_scale(x.scale, products)
        scaled_keys, values = in_products(chunk.keys(x.key), self.of_keys), chunk.keys(x.value).to(products)
        keys = KeyClusters(scaled_keys, values, chunk.keys(x.key_labels), key_clusters)
        self.keys, self.P, self.G, self.D, self.Dv = keys, keys.P, keys.G, keys.D, keys.Dv
        self.T, self.C = min(topk, keys.M), chunk.group * clusters
        self.index = table_rows(chunk, x.labels, clusters)
        sizes = cluster_sizes(self.index, self.P, self.C)
        self.sizes = sizes.clamp(min=1)[..., None]  # (P, C, 1)
        self.blocks = ClusterBlocks.of(self.index, sizes)
        queries = chunk.queries(x.query).to(dtype) * self.of_queries
        self.packed_query = self.blocks.pack_with_ones(queries.to(products))
        sums = self.blocks.sum(self.packed_query[..., :-1].sum(dim=1, dtype=dtype), self.P * self.C)
        sums = sums.view(self.P, self.C, -1)
        centroids = sums / self.sizes  # Q̄
        covariance = (queries.transpose(1, 2) @ queries).sub_((centroids * self.sizes).transpose(1, 2) @ centroids)
        covariance /= queries.shape[1]  # Σ_η
        self.summaries = Summaries(
            keys, centroids, self.T, covariance, largest_correction=LARGEST_VARIANCE_CORRECTION,
            in_order=x.dropout_seed is not None,
            top=None if top is None else chunk.of_heads(top)[:, : self.C, : self.T],
        )  # fmt: skip
        self.table = self._make_dipole()

        self.factor = None
        if x.dropout_seed is not None:
            shape, kind = (x.query.shape[2], min(topk, x.key.shape[2]) + self.G), TOPK_AND_SUMMARY_WEIGHTS
            factor = draw_dropout(chunk, shape, self.packed_query, x.dropout_p, x.dropout_seed, kind)
            factor = torch.cat([factor[..., : self.T], factor[..., -self.G :]], dim=2)
            self.factor = self.blocks.pack(factor.view(self.P, -1, self.T + self.G))

    def _make_dipole(self) -> ClusterTable:
        """The table, with `M_j` of every query cluster.

        `p̄_jc` of the clusters alone: `r_i M_j` is the query's weight on clusters times `Σ_c p̄_jc Cov_c / Σ_c p̄_jc`,
        finite where exact keys take all of the centroid's weight.
        """
        keys, D, table = self.keys, self.D, self.summaries.table
        self.at_centroid = self.summaries.log_mass.softmax(dim=2)  # (P, C, G)
        rows = keys.rows.flatten(0, 1)
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
        rows = keys.rows.flatten(0, 1)
        turn = keys.blocks.of_cluster(grad_covariances.to(rows.dtype))
        grad_rows[..., :D] += torch.bmm(rows[..., D:-1], turn.transpose(1, 2))
        grad_rows[..., D:] += torch.bmm(rows[..., :D], turn)

        grad_query = self.blocks.unpack(grad_query[..., :-1], self.P)
        grad_centroids = (grad_centroids + dipole.centroids) / self.sizes.flatten(0, 1)
        grad_query += grad_centroids.index_select(0, self.index).view_as(grad_query)
        if self.of_keys != 1:
            grad_rows[..., :D] *= self.of_keys
        return grad_query.mul_(self.of_queries), keys.blocks.unpack(grad_rows, self.P)


def _parts(x: Inputs) -> list[RowChunk | ExactPart]:
    """Exact heads, then chunks of heads with equal counts, slowest first: no thread waits long for the last."""
    counts = x.counts()
    chunks: list[RowChunk] = []
    for chunk_counts in sorted(set(counts), key=sum, reverse=True):
        skip = x.exact_heads
        if len(set(counts)) > 1:
            others = torch.tensor([head_counts != chunk_counts for head_counts in counts]).expand(x.key.shape[:2])
            skip = others if skip is None else others | skip
        chunks += chunks_of(x.query, x.key, x.key_mask, x.query_mask, largest_buffer(x, chunk_counts), skip)
    return [*exact_parts(x), *chunks]


KEPT = (_Chunk, KeyClusters, Summaries, ClusterBlocks, ClusterTable, Dipole)


def _place(part: RowChunk) -> tuple[int, int, int]:
    return part.batch, part.first_head, part.last_head


def _forward(x: Inputs) -> list[torch.Tensor]:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic Ṽ_jc + r_i η^T M_j` with `T = T_j`, `j = l(i)`, what `_kept` says, tables."""
    output = output_of_chunks(x.query, x.key, x.value, x.key_mask, x.query_mask)
    log_sum, top = _kept(x)
    counts = x.counts()
    computed: dict[tuple[int, int, int], _Chunk] = {}

    def attend_chunk(part: RowChunk | ExactPart) -> None:
        if isinstance(part, ExactPart):
            values, of_scores = attend_exactly(part, x)
            part.chunk.store_queries(output, values, part.rows)
            if of_scores is not None:
                part.chunk.store_queries(log_sum, of_scores, part.rows)
            return
        head_counts = counts[part.first_head]
        chunk = _Chunk(part, x, head_counts)
        values = attend(chunk.table, chunk.blocks, chunk.packed_query, chunk.factor)
        part.store_queries(output, chunk.blocks.unpack(values, chunk.P))
        part.of_heads(top)[:, : chunk.C, : chunk.T] = chunk.summaries.top
        if x.keep and _is_kept(x, head_counts):
            computed[_place(part)] = chunk

    for_every_chunk(attend_chunk, _parts(x), x.query.device)
    # Threads finish in any order, but a checkpoint compares the tensors of its two passes one by one.
    return [output, log_sum, top, *(as_tensors(sorted(computed.items(), key=itemgetter(0))) if x.keep else [])]


def _kept(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for what the forward pass leaves to the backward pass.

    Log-sum-exp of the queries of exact heads `(B, H, N, 1)`, and the places of exact keys `(B, heads, group · C, T)`.
    """
    (B, H, N, _), heads = x.query.shape, x.key.shape[1]
    dtype = accumulation_dtype(x.query.dtype)
    log_sum = x.query.new_zeros(B, H, 0 if x.exact_heads is None else N, 1, dtype=dtype)
    return log_sum, x.query.new_zeros(B, heads, H // max(1, heads) * max(x.clusters), max(x.topk), dtype=torch.int64)


def gradients(
    grad_output: torch.Tensor, forward: list[torch.Tensor], x: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and sets `T_j` held fixed; `forward` is what the forward op gave."""
    output, log_sum, top, *kept = forward
    computed = {tuple(place): chunk for place, chunk in from_tensors(kept, KEPT)} if kept else {}
    counts = x.counts()
    grad_query, grad_key, grad_value = gradients_of_chunks(x.query, x.key, x.value, x.key_mask, x.query_mask)
    parts = _parts(x)
    sums = KeyGradients([part for part in parts if isinstance(part, ExactPart)])

    def attend_chunk(part: RowChunk | ExactPart) -> None:
        if isinstance(part, ExactPart):
            of_query, *of_keys = exact_backward(part, grad_output, output, log_sum, x)
            part.chunk.store_queries(grad_query, of_query, part.rows)
            for target, total in zip((grad_key, grad_value), sums.add(part, of_keys), strict=False):
                part.chunk.store_keys(target, total)
            return
        # Another number of threads makes other chunks.
        chunk = computed.get(_place(part)) or _Chunk(part, x, counts[part.first_head], top)
        packed_grad = chunk.blocks.pack(part.queries(grad_output).to(chunk.packed_query.dtype))
        of_query, of_rows = chunk.backward(packed_grad)
        part.store_queries(grad_query, of_query)
        part.store_keys(grad_key, of_rows[..., : chunk.D])
        part.store_keys(grad_value, of_rows[..., chunk.D :])

    for_every_chunk(attend_chunk, parts, x.query.device)
    return grad_query, grad_key, grad_value


def _fake(x: Inputs) -> list[torch.Tensor]:
    return [output_of_chunks(x.query, x.key, x.value, x.key_mask, x.query_mask), *_kept(x)]


_op = register_op("bi_clustered_attention", Inputs, _forward, gradients, fake=_fake, keeps=slice(None))


def bi_clustered_attention(*arguments: Any) -> torch.Tensor:
    """The op; it keeps tables where autograd follows and no graph is made, which would not know their sizes."""
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments[:3])
    return cast("torch.Tensor", _op(*arguments, learns and not in_a_graph()))
