"""Bi-clustered attention of a rank's queries to the keys of all ranks, given the labels of both.

What leaves a rank are sums over its tokens and the exact keys it holds, made into the tables of all query clusters on
every rank; to these its own queries attend.

Sizes: `S` key/value heads of the whole batch, `n` and `m` queries and keys of this rank, `C` query clusters of all the
query heads that share a key/value head, `G` key clusters, `T` exact keys, `nb` blocks of `L` keys of one cluster.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..bi_clustered_attention.reference import LARGEST_LIFT, SMALLEST, Inputs
from ..shared.cluster_blocks import ClusterBlocks
from ..shared.cluster_table import ClusterTable, Dipole, attend, attend_backward
from ..shared.key_summaries import NO_MASS
from ..shared.masking import zero_masked
from ..shared.precision import accumulation_dtype
from ..shared.tables import cluster_rows, cluster_sizes, cluster_sums
from .ranks import Ranks


def attend_to_all_ranks(ranks: Ranks, x: Inputs) -> torch.Tensor:
    """Output `(B, H, n, Dv)` of this rank's queries, for labels `(B, H, n)` and `(B, heads of key, m)`."""
    query, key, value, labels, key_labels, clusters, key_clusters, topk, key_mask, query_mask, *_ = x
    (B, H, n, D), Dv = query.shape, value.shape[3]
    S, C, dtype = B * key.shape[1], H // key.shape[1] * clusters, accumulation_dtype(query.dtype)
    # Query heads that share keys stand one after the other as rows of one problem.
    counted = _counted(query_mask, query).to(dtype).reshape(S, -1, 1)
    queries = zero_masked(query, query_mask).to(dtype).reshape(S, -1, D) * x.scale
    of_head = torch.arange(H, device=query.device) % (H // key.shape[1]) * clusters
    index = cluster_rows((labels + of_head[:, None]).reshape(S, -1), C)
    columns = zero_masked(key, key_mask), zero_masked(value, key_mask), _counted(key_mask, key)[..., None]
    rows = torch.cat([part.to(dtype) for part in columns], dim=3).flatten(0, 1)
    keys = _Keys(rows, key_labels.flatten(0, 1), key_clusters)

    query_sums, key_sums = ranks.sum(
        cluster_sums(torch.cat([queries, counted], dim=2), index, S, C), keys.sum(keys.rows.sum(dim=2))
    )
    centroids = query_sums[..., :-1] / query_sums[..., -1:].clamp(min=1)  # Q̄
    sizes = key_sums[..., -1:].clamp(min=1)
    spread = (keys.rows[..., :-1] - keys.of_block(key_sums[..., :-1] / sizes)) * keys.rows[..., -1:]

    eta = (queries - centroids.flatten(0, 1).index_select(0, index).view_as(queries)).detach() * counted
    products = spread[..., :D].transpose(2, 3) @ spread[..., D:]
    of_offsets, covariances = ranks.sum(eta.transpose(1, 2) @ eta, keys.sum(products))
    of_offsets = of_offsets / query_sums[..., -1].sum(dim=1).clamp(min=1)[:, None, None]  # Σ_η
    covariances = covariances / sizes[..., None]  # Cov_c(K, V)

    apart = spread[..., :D].detach().flatten(1, 2)
    distances = torch.linalg.vecdot(apart @ of_offsets, apart).clamp(min=SMALLEST)  # d_t²
    scores = centroids @ keys.rows[..., :D].flatten(1, 2).transpose(1, 2)  # (S, C, nb · L)
    topk = min(topk, max(1, int(key_sums[..., -1].sum(dim=1).amax())))
    exact, vacant, taken = _exact_keys(ranks, keys, scores.detach() + distances.log()[:, None], topk)
    lift = (distances / 2).clamp(max=LARGEST_LIFT)  # b_t
    lifted = (scores + lift[:, None]).masked_fill(taken, -torch.inf)
    log_mass, tilted = _tilted_summaries(ranks, keys, lifted)

    # Rows of the tables: exact keys, then the tangents log S_jc + η·K̃_jc = bias + Q_i·K̃_jc; the dipole beside them.
    bias = log_mass - torch.linalg.vecdot(centroids[:, :, None], tilted[..., :D])
    bias = torch.cat([torch.zeros_like(exact[..., 0]).masked_fill(vacant, NO_MASS), bias], dim=2)
    table = torch.cat([exact, tilted], dim=2)
    matrices = log_mass.softmax(dim=2) @ covariances.flatten(2)  # M_j
    output = _AttendToTables.apply(
        queries,
        torch.cat([table[..., :D], bias[..., None]], dim=3).flatten(0, 1),
        table[..., D:].flatten(0, 1),
        centroids.flatten(0, 1),
        matrices.view(S * C, D, Dv),
        index,
        topk,
    )
    return zero_masked(output.view(B, H, n, Dv), query_mask).to(query.dtype)


def _counted(mask: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """1 for every row of `(B, heads, n, D)` that counts, else 0: `(B, heads, n)`."""
    counted = torch.ones_like(rows[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
    return counted[:, None].expand(rows.shape[:3])


class _Keys:
    """The keys and values of this rank in blocks of one cluster.

    Attributes:
        rows: `(S, nb, L, D + Dv + 1)`, key, value and 1; 0 in empty places and where no key counts.
        empty: `(S, 1, nb · L)`, where these are.
        clusters: `(S, nb)`, of the blocks.
    """

    def __init__(self, rows: torch.Tensor, labels: torch.Tensor, clusters: int) -> None:
        S, _, width = rows.shape
        index = cluster_rows(labels, clusters)
        self.blocks = ClusterBlocks.of(index, cluster_sizes(index, S, clusters), aligned=True)
        self.clusters = self.blocks.clusters.view(S, -1) % clusters
        self.G = clusters
        # Behind the last row one of zeros, which empty places take.
        packed = F.pad(rows.flatten(0, 1), (0, 0, 0, 1)).index_select(0, self.blocks.sources)
        self.rows = packed.view(S, -1, self.blocks.length, width)
        self.empty = (self.rows[..., -1] == 0).view(S, 1, -1)

    def sum(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """Sums over the blocks of each cluster, `(S, nb, ...)` to `(S, G, ...)`."""
        S = len(self.rows)
        return self.blocks.sum(of_blocks.flatten(0, 1), S * self.G).unflatten(0, (S, self.G))

    def of_block(self, of_clusters: torch.Tensor) -> torch.Tensor:
        """Rows of the clusters, `(S, G, W)`, for the keys of their blocks: `(S, nb, 1, W)`."""
        return self.blocks.of_cluster(of_clusters.flatten(0, 1)).unflatten(0, self.clusters.shape)[:, :, None]


def _exact_keys(
    ranks: Ranks, keys: _Keys, preference: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact keys `T_j`, by `preference` `(S, C, nb · L)`: each rank offers its best, and all choose alike among them.

    Returns their keys and values `(S, C, T, D + Dv)`, where there is none for lack of keys `(S, C, T)`, and which
    places of this rank are not left for summaries, `(S, C, nb · L)`.
    """
    S, C, places = preference.shape
    best = preference.masked_fill(keys.empty, -torch.inf).topk(min(topk, places), dim=2)
    missing = topk - best.values.shape[2]
    offers = ranks.gather(F.pad(best.values, (0, missing), value=-torch.inf))  # (ranks, S, C, T)
    chosen = offers.permute(1, 2, 0, 3).flatten(2).topk(topk, dim=2)
    vacant = chosen.values == -torch.inf
    is_own = (chosen.indices // topk == ranks.rank) & ~vacant
    # The place behind the last one holds nothing.
    offered = F.pad(best.indices, (0, missing), value=places)
    own = torch.where(is_own, offered.gather(2, chosen.indices % topk), places)
    rows = F.pad(keys.rows.flatten(1, 2)[..., :-1], (0, 0, 0, 1))  # (S, nb · L + 1, D + Dv)
    at = own + torch.arange(S, device=own.device)[:, None, None] * (places + 1)
    (exact,) = ranks.sum(rows.flatten(0, 1).index_select(0, at.flatten()).view(S, C, topk, -1))
    taken = torch.zeros(S, C, places + 1, dtype=torch.bool, device=own.device).scatter_(2, own, True)
    return exact, vacant, taken[..., :-1] | keys.empty


def _tilted_summaries(ranks: Ranks, keys: _Keys, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`log S_jc` `(S, C, G)`, and `K̃_jc` and `Ṽ_jc` side by side, of the scores `(S, C, nb · L)` of the keys left."""
    by_block = scores.unflatten(2, keys.rows.shape[1:3])
    in_cluster = keys.clusters[:, None].expand(-1, scores.shape[1], -1)
    own = scores.new_full((*scores.shape[:2], keys.G), -torch.inf)
    shift = ranks.largest(own.scatter_reduce(2, in_cluster, by_block.detach().amax(dim=3), "amax"))
    nobody = shift == -torch.inf
    shift = shift.masked_fill(nobody, 0.0)
    weights = (by_block - shift.gather(2, in_cluster)[..., None]).exp()  # w_jt, of the largest of its cluster
    (sums,) = ranks.sum(keys.sum(weights.transpose(1, 2) @ keys.rows).transpose(1, 2))  # (S, C, G, D + Dv + 1)
    mass = sums[..., -1].masked_fill(nobody, 1.0)
    return (mass.log() + shift).masked_fill(nobody, NO_MASS), sums[..., :-1] / mass[..., None]


class _AttendToTables(torch.autograd.Function):
    """The step of `shared.cluster_table` with its own backward pass, for queries `(S, n, D)`."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        centroids: torch.Tensor,
        matrices: torch.Tensor,
        index: torch.Tensor,
        topk: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(queries, keys, values, centroids, matrices)
        sizes = cluster_sizes(index, len(queries), len(keys) // len(queries))
        ctx.topk, ctx.blocks = topk, ClusterBlocks.of(index, sizes)
        table = ClusterTable(keys, values, dipole=Dipole(centroids, matrices, topk))
        return ctx.blocks.unpack(attend(table, ctx.blocks, ctx.blocks.pack_with_ones(queries), None), len(queries))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, keys, values, centroids, matrices = ctx.saved_tensors
        table = ClusterTable(keys, values, dipole=Dipole(centroids, matrices, ctx.topk))
        packed, packed_grad = ctx.blocks.pack_with_ones(queries), ctx.blocks.pack(grad_output)
        of_queries, grad = attend_backward(table, ctx.blocks, packed, None, packed_grad)
        dipole = cast("Dipole", grad.dipole)
        of_queries = ctx.blocks.unpack(of_queries, len(queries))[..., :-1]
        return of_queries, grad.keys, grad.values, dipole.centroids, dipole.matrices, None, None
