"""Kernels of the forward pass of bi-clustered attention.

Sizes: `P = B · H` problems, `T` top keys, `G` key clusters; `Hk` key heads, of which each serves `H / Hk` query heads.
Columns of a query's softmax are numbered: `0 .. T - 1` the top keys of its cluster, `T .. T + G - 1` the key clusters.
"""

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import LENGTHS, on_device_of
from ...shared.triton.softmax import dot_rows, softmax_step
from ...shared.triton.sort import SortedRows
from ...shared.triton.tiles import LOG2_E, LOWEST, load_rows, load_tile
from .blocks import bi_clustered_config

COUNTS_BYTES = 2**28  # of counts of chosen keys, per query cluster and key cluster, that are in memory at once


@triton.jit
def load_rest(key_starts_ptr, chosen_ptr, i_pk, i_row, o_g, key_clusters):
    """`n_jc`: how many keys of each key cluster the query cluster at `i_row` of the counts did not choose."""
    m_g = o_g < key_clusters
    p_starts = key_starts_ptr + i_pk * (key_clusters + 2) + o_g
    # [BLOCK_G]
    b_size = tl.load(p_starts + 1, mask=m_g, other=0) - tl.load(p_starts, mask=m_g, other=0)
    return b_size - tl.load(chosen_ptr + i_row * key_clusters + o_g, mask=m_g, other=0)


@triton.jit(do_not_specialize=LENGTHS)
def _bi_clustered_attention_fwd_count_kernel(
    top_ptr, labels_ptr, chosen_ptr,
    stride_labels_b, stride_labels_h, stride_labels_m,
    key_heads, group, clusters, key_clusters, topk, first_problem, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the chosen keys of each key cluster; whole numbers, which add up to the same in any order."""
    i_local = (tl.program_id(0) // blocks).to(tl.int64)
    i_pk = (i_local + first_problem) // group
    labels_ptr += i_pk // key_heads * stride_labels_b + i_pk % key_heads * stride_labels_h
    o_place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    m_place = o_place < clusters * topk
    # [BLOCK]
    b_key = tl.load(top_ptr + (i_local + first_problem) * clusters * topk + o_place, mask=m_place, other=-1)
    m_key = b_key >= 0
    b_label = tl.load(labels_ptr + b_key.to(tl.int64) * stride_labels_m, mask=m_key, other=-1).to(tl.int64)
    m_key &= (b_label >= 0) & (b_label < key_clusters)
    i_row = i_local * clusters + o_place // topk
    tl.atomic_add(chosen_ptr + i_row * key_clusters + b_label, tl.full([BLOCK], 1, tl.int32), mask=m_key)


@triton.jit(do_not_specialize=LENGTHS)
def _bi_clustered_attention_fwd_kernel(
    query_ptr, key_ptr, value_ptr, mean_key_ptr, mean_value_ptr, top_ptr, chosen_ptr, seed_ptr,
    order_ptr, starts_ptr, tiles_ptr, key_starts_ptr, output_ptr, lse_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, group, N, D, Dv, clusters, key_clusters, topk, tiles, first_problem, scale_log2, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`V_i = Σ_{t∈T_j} p_it V_t + Σ_c p_ic V̄_c` for queries `i` of one cluster `j`, and the log-sum-exp of each.

    `p_i` is the softmax over `scale · Q_i·K_t` for `t` in `T_j` and `scale · Q_i·K̄_c + log n_jc` for `n_jc > 0`.
    """
    i_local = (tl.program_id(0) // tiles).to(tl.int64)
    i_tile = tl.program_id(0) % tiles
    i_p = i_local + first_problem
    i_pk = i_p // group
    i_c, o_place, m_row, b_row = load_tile(order_ptr, starts_ptr, tiles_ptr, i_p, i_tile, N, clusters, tiles, ROWS)
    if tl.max(m_row.to(tl.int32), 0) == 0:
        return
    i_b, i_h, i_kh = i_p // H, i_p % H, i_p % H // group
    o_v = tl.arange(0, BLOCK_V)
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h
    p_output += b_row[:, None] * stride_output_n + o_v[None, :] * stride_output_d
    m_output = m_row[:, None] & (o_v < Dv)[None, :]
    if i_c == clusters:
        tl.store(p_output, tl.zeros([ROWS, BLOCK_V], tl.float32), mask=m_output)
        tl.store(lse_ptr + i_p * N + o_place, tl.zeros([ROWS], tl.float32), mask=m_row)
        return
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    top_ptr += (i_p * clusters + i_c) * topk
    mean_key_ptr += i_pk * key_clusters * D
    mean_value_ptr += i_pk * key_clusters * Dv
    o_n = tl.arange(0, COLUMNS)
    o_row, columns = i_p * N + b_row, topk + key_clusters

    # [ROWS, BLOCK_D]
    p_query = query_ptr + b_row * stride_query_n
    b_query = load_rows(p_query, m_row, stride_query_d, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for start in range(0, topk, COLUMNS):
        # [COLUMNS]
        b_top = tl.load(top_ptr + start + o_n, mask=start + o_n < topk, other=-1).to(tl.int64)
        m_key = b_top >= 0
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        p_key = key_ptr + b_top * stride_key_m
        b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
        b_value = load_rows(value_ptr + b_top * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
        b_scores = dot_rows(
            b_query, b_key, p_query, m_row, stride_query_d, p_key, m_key, stride_key_d, D,
            ROWS, COLUMNS, BY_PARTS, PRECISION,
        )  # fmt: skip
        b_scores = tl.where(m_key[None, :], b_scores * scale_log2, float("-inf"))
        b_output, b_highest, b_total = softmax_step(
            b_scores, b_value, b_output, b_highest, b_total,
            seed_ptr, o_row, start + o_n, columns, dropout_p, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
    for start in range(0, key_clusters, COLUMNS):
        o_g = start + o_n
        b_rest = load_rest(key_starts_ptr, chosen_ptr, i_pk, i_local * clusters + i_c, o_g, key_clusters)
        m_g = o_g < key_clusters
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        p_key = mean_key_ptr + o_g * D
        b_key = load_rows(p_key, m_g, 1, D, BLOCK_D)
        b_value = load_rows(mean_value_ptr + o_g * Dv, m_g, 1, Dv, BLOCK_V)
        b_scores = dot_rows(
            b_query, b_key, p_query, m_row, stride_query_d, p_key, m_g, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
        )
        b_bias = tl.log2(tl.maximum(b_rest, 1).to(tl.float32))
        b_scores = tl.where((b_rest > 0)[None, :], b_scores * scale_log2 + b_bias[None, :], float("-inf"))
        b_output, b_highest, b_total = softmax_step(
            b_scores, b_value, b_output, b_highest, b_total,
            seed_ptr, o_row, topk + o_g, columns, dropout_p, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip

    b_total = tl.where(b_total > 0, b_total, 1.0)
    tl.store(p_output, b_output / b_total[:, None], mask=m_output)
    tl.store(lse_ptr + i_p * N + o_place, b_highest + tl.log2(b_total), mask=m_row)


def problem_chunks(problems: int, group: int, bytes_per_problem: int) -> list[tuple[int, int]]:
    """Ranges of the problems whose buffers fit into memory; the query heads of a key head stay together."""
    step = max(1, COUNTS_BYTES // max(1, bytes_per_problem * group)) * group
    return [(first, min(first + step, problems)) for first in range(0, problems, step)]


def count_chosen(
    top: torch.Tensor, key_labels: torch.Tensor, key_clusters: int, first: int, last: int
) -> torch.Tensor:
    """How many of the top keys `(P, C, T)` lie in each key cluster, for problems `first .. last - 1`: `(·, C, G)`."""
    P, C, T = top.shape
    B, Hk, _ = key_labels.shape
    chosen = top.new_zeros(last - first, C, key_clusters)
    blocks = triton.cdiv(C * T, 1024)
    _bi_clustered_attention_fwd_count_kernel[((last - first) * blocks,)](
        top, key_labels, chosen, *key_labels.stride(), Hk, P // (B * Hk), C, key_clusters, T, first, blocks, BLOCK=1024
    )
    return chosen


def attend(
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_labels: torch.Tensor,
    queries: SortedRows,
    keys: SortedRows,
    top: torch.Tensor,
    mean_keys: torch.Tensor,
    mean_values: torch.Tensor,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> None:
    """Write every row of `output` `(B, H, N, Dv)`, and the base-2 log-sum-exp of the sorted rows, `lse` `(P, N)`."""
    B, H, N, D = query.shape
    Dv, group = value.shape[3], H // key.shape[1]
    tiles = queries.tiles.shape[1]
    config = bi_clustered_config(query, Dv, queries.tile, dropout_seed is not None, "output")
    with on_device_of(query):
        for first, last in problem_chunks(B * H, group, 4 * queries.clusters * keys.clusters):
            chosen = count_chosen(top, key_labels, keys.clusters, first, last)
            _bi_clustered_attention_fwd_kernel[((last - first) * tiles,)](
                query, key, value, mean_keys, mean_values, top, chosen, dropout_seed,
                queries.order, queries.starts, queries.tiles, keys.starts, output, lse,
                *query.stride(), *key.stride(), *value.stride(), *output.stride(),
                H, group, N, D, Dv, queries.clusters, keys.clusters, top.shape[2], tiles, first,
                scale * LOG2_E, dropout_p,
                **config,
            )  # fmt: skip
