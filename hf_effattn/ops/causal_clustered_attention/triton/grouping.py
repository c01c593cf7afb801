"""What causal attention over clusters decides on a GPU: clusters of past queries and of keys, and top keys.

The decisions are those of `grouping`, of tokens that stand together: the masked ones last, zeros, and not counted.
What these would decide is decided too, and read by no query that counts: shapes must not depend on a mask.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...cluster_queries.triton import cluster_queries, keys_metric
from ...kmeans.sampling import most_fit_rows
from ...kmeans.triton import Centroids, assign, kmeans
from ...kmeans.triton.rows import find_rows
from ...shared.triton.chips import on_device_of
from ...shared.triton.sort import cluster_means, sort_by_cluster
from ..layout import Layout
from ..reference import Settings
from .steps import LENGTHS
from .walk import walk

TILE = 64  # of sorted rows, which are read cluster by cluster here


class Plan(NamedTuple):
    """What the passes share, as tensors.

    Sizes: `P = B · H` problems, `E` epochs, `U` segments that have older ones, `C` query clusters, `T` top keys, `L`
    levels of blocks, `R` key clusters of all blocks that are read.

    Attributes:
        labels: `(P, N)` int32, the past centroid nearest to a query that has older keys.
        past_rows: `(P, E, N)` int32, the row in the tables `(P, E · C, ·)` of every past query's cluster, else -1;
            this and the remainders are empty for bi-clustered attention.
        centroids: `(P, E, C, D)` float32, means of past queries; 0 for an empty cluster.
        sizes: `(P, E, C)` int32.
        top: `(P, U, C, T)` int32, in no order, -1 where there are too few.
        rest_lse, rest_means: `(P, U, C)` and `(P, U, C, Dv)`, the remainders.
        key_members: `(B · Hk, L, N)` int32, the key cluster that every key of a block is in, else -1; this and the
            following are empty but for bi-clustered attention.
        mean_keys, mean_values: `(B · Hk, R, ·)` in the dtype of the inputs.
        mean_sizes: `(B · Hk, R)` int32.
    """

    labels: torch.Tensor
    past_rows: torch.Tensor
    centroids: torch.Tensor
    sizes: torch.Tensor
    top: torch.Tensor
    rest_lse: torch.Tensor
    rest_means: torch.Tensor
    key_members: torch.Tensor
    mean_keys: torch.Tensor
    mean_values: torch.Tensor
    mean_sizes: torch.Tensor


def block_count(level: int, served: int) -> int:
    """How many blocks of a level are read; every other one is."""
    return (served - (1 << level)) // (2 << level) + 1


def mean_count(layout: Layout) -> int:
    """`R`."""
    return sum(block_count(level, layout.served) * layout.clusters_of_block(level) for level in range(layout.levels))


def empty_plan(query: torch.Tensor, value: torch.Tensor, layout: Layout, settings: Settings) -> Plan:
    """A plan of the right sizes, all zeros: what no query that counts reads stays so."""
    B, H, N, D = query.shape
    Hk, Dv = value.shape[1], value.shape[3]
    P, E, U, C = B * H, len(layout.epochs()), layout.served, settings.clusters
    means = mean_count(layout) if settings.method == "bi-clustered" else 0
    levels, rest = (layout.levels, 0) if settings.method == "bi-clustered" else (0, U)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return query.new_zeros(shape, dtype=dtype)

    return Plan(
        labels=empty(P, N),
        past_rows=empty(P, E if rest else 0, N),
        centroids=empty(P, E, C, D, dtype=torch.float32),
        sizes=empty(P, E, C),
        top=empty(P, U, C, settings.topk),
        rest_lse=empty(P, rest, C, dtype=torch.float32),
        rest_means=empty(P, rest, C, Dv, dtype=torch.float32),
        key_members=empty(B * Hk, levels, N),
        mean_keys=empty(B * Hk, means, D, dtype=query.dtype),
        mean_values=empty(B * Hk, means, Dv, dtype=query.dtype),
        mean_sizes=empty(B * Hk, means),
    )


def fill_epochs(
    plan: Plan,
    query: torch.Tensor,
    key: torch.Tensor,
    counts: torch.Tensor | None,
    layout: Layout,
    settings: Settings,
) -> None:
    """Write the clusters of past queries, epoch by epoch, and who reads which of them."""
    B, H, N, D = query.shape
    Hk, C, S = key.shape[1], settings.clusters, layout.segment_length
    chosen, past_rows = plan.labels.view(B, H, N), plan.past_rows.unflatten(0, (B, H))
    # Without `prefill` no query that counts reads clusters of a past that is not there.
    mask = None
    if counts is not None and layout.prefill:
        mask = torch.arange(N, device=query.device) < counts[:, None]
    for number, (first, end, past) in enumerate(layout.epochs()):
        queries, keys = query[:, :, :past], key[:, :, :past]
        fitting = C, "kmeans", settings.iterations, 1, settings.fit_queries, settings.seed
        own = cluster_queries(queries, keys, mask, mask, *fitting)  # (B, H, past)
        members = sort_by_cluster(own, mask, C, TILE)
        centroids = cluster_means(queries, members)  # (P, C, D)
        sizes = members.starts[:, 1:-1] - members.starts[:, :-2]
        rows = find_rows(keys, mask, most_fit_rows(C, settings.fit_queries))
        metric = keys_metric(keys, rows)
        directions = torch.bmm(centroids.view(B * Hk, -1, D), metric).view_as(centroids)
        # No query goes to an empty cluster.
        half_norms = (torch.linalg.vecdot(centroids, directions) / 2).masked_fill_(sizes == 0, torch.inf)
        readers = query[:, :, first * S : end * S]
        nearest = torch.empty(readers.shape[:3], dtype=torch.int32, device=query.device)
        assign(readers, replace(rows, ranks=None), Centroids(None, centroids, directions, half_norms), nearest)
        chosen[:, :, first * S : end * S] = nearest
        if past_rows.shape[2]:
            own = own + number * C
            past_rows[:, :, number, :past] = own if mask is None else own.masked_fill(~mask[:, None], -1)
            past_rows[:, :, number, past:] = -1
        plan.centroids[:, number] = centroids
        plan.sizes[:, number] = sizes


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_fwd_means_kernel(
    key_ptr, value_ptr, order_ptr, starts_ptr, mean_key_ptr, mean_value_ptr, sizes_ptr, members_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    key_heads, N, D, Dv, level, levels, length, blocks, clusters, base, means,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Size, mean key and mean value of one key cluster of one block, summed in the order of the keys."""
    i_c = tl.program_id(0) % clusters
    i_problem = (tl.program_id(0) // clusters).to(tl.int64)  # a block of a key head
    i_pk, i_block = i_problem // blocks, i_problem % blocks
    key_ptr += i_pk // key_heads * stride_key_b + i_pk % key_heads * stride_key_h
    value_ptr += i_pk // key_heads * stride_value_b + i_pk % key_heads * stride_value_h
    starts_ptr += i_problem * (clusters + 2) + i_c
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    i_mean = base + i_block * clusters + i_c
    members_ptr += (i_pk * levels + level) * N
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    b_keys = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_values = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for place in range(first, last, BLOCK_N):
        o_place = place + tl.arange(0, BLOCK_N)
        m_place = o_place < last
        b_row = tl.load(order_ptr + i_problem * length + o_place, mask=m_place, other=0) + 2 * i_block * length
        p_key = key_ptr + b_row[:, None] * stride_key_m + o_d[None, :] * stride_key_d
        p_value = value_ptr + b_row[:, None] * stride_value_m + o_v[None, :] * stride_value_d
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_V]
        b_keys += tl.load(p_key, mask=m_place[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
        b_values += tl.load(p_value, mask=m_place[:, None] & (o_v < Dv)[None, :], other=0.0).to(tl.float32)
        tl.store(members_ptr + b_row, tl.zeros([BLOCK_N], tl.int32) + i_mean.to(tl.int32), mask=m_place)
    size = tl.maximum(last - first, 1)
    tl.store(mean_key_ptr + (i_pk * means + i_mean) * D + o_d, tl.sum(b_keys, 0) / size, mask=o_d < D)
    tl.store(mean_value_ptr + (i_pk * means + i_mean) * Dv + o_v, tl.sum(b_values, 0) / size, mask=o_v < Dv)
    tl.store(sizes_ptr + i_pk * means + i_mean, last - first)


def fill_blocks(plan: Plan, key: torch.Tensor, value: torch.Tensor, layout: Layout, settings: Settings) -> None:
    """Write the key clusters of the blocks, level by level."""
    _, Hk, N, D = key.shape
    Dv = value.shape[3]
    plan.key_members.fill_(-1)
    block_d, block_v = triton.next_power_of_2(D), triton.next_power_of_2(Dv)
    base = 0
    for level in range(layout.levels):
        length, G = layout.block_keys(level), layout.clusters_of_block(level)
        blocks = block_count(level, layout.served)
        spans = key[:, :, : (2 * blocks - 1) * length].unfold(2, length, 2 * length).transpose(3, 4)
        points = spans.flatten(0, 1)  # (B · Hk, blocks, length, D)
        labels, _ = kmeans(points, None, G, settings.iterations, settings.fit_queries, settings.seed)
        members = sort_by_cluster(labels, None, G, TILE)
        with on_device_of(key):
            _causal_clustered_attention_fwd_means_kernel[(len(members.order) * G,)](
                key, value, members.order, members.starts, plan.mean_keys, plan.mean_values, plan.mean_sizes,
                plan.key_members, *key.stride(), *value.stride(),
                Hk, N, D, Dv, level, layout.levels, length, blocks, G, base, plan.mean_keys.shape[1],
                BLOCK_N=max(8, min(64, 4096 // max(block_d, block_v))), BLOCK_D=block_d, BLOCK_V=block_v,
            )  # fmt: skip
        base += blocks * G


def make_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor | None,
    layout: Layout,
    settings: Settings,
) -> Plan:
    """Cluster past queries and keys and choose top keys, where there are older keys at all.

    Args:
        query, key, value: `(B, H or Hk, N, ·)`, any strides.
        counts: `(B,)` int32, how many tokens count, which stand first; None = all.
    """
    plan = empty_plan(query, value, layout, settings)
    if not layout.served:
        return plan
    fill_epochs(plan, query, key, counts, layout, settings)
    rests = plan.rest_lse, plan.rest_means
    walk(plan.top, *rests, plan.centroids, key, value, counts, layout, settings)
    if settings.method == "bi-clustered":
        fill_blocks(plan, key, value, layout, settings)
    return plan
