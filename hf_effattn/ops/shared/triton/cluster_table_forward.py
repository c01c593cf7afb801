"""The forward kernel of `cluster_table`: blocks of queries of a cluster attend to what their table holds."""

from typing import Any

import torch
import triton
import triton.language as tl

from .chips import block_width
from .cluster_table import dipole_part, is_exact, load_offsets, load_top
from .dropout import dropout_factor
from .launch import kernel
from .softmax import KIND, KINDS, attend, dot_rows, softmax_weights
from .tiles import LOWEST, load_operand, load_rows, store_rows

MOST_TILES = 8  # of queries that one program takes, so that a few large clusters are split over many programs
MOST_SUMMARIES = 32  # of short rows that a program can hold


@triton.jit
def load_exact_keys(
    key_ptr, value_ptr, top_ptr, o_t, topk, stride_key_m, stride_key_d, stride_value_m, stride_value_d, D, Dv,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Exact keys at places `o_t < topk`, an operand, and their values `(places, ·)`."""
    b_top, m_top = load_top(top_ptr, o_t, topk)
    b_value = load_rows(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
    return load_operand(key_ptr + b_top * stride_key_m, m_top, stride_key_d, D, BLOCK_D), b_value


@triton.jit
def load_summaries(
    table_key_ptr, table_value_ptr, bias_ptr, i_row, o_g, key_clusters, D, Dv,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`K̃`, an operand, `Ṽ` and `b` of some key clusters of a table."""
    m_g, o_table = o_g < key_clusters, i_row * key_clusters + o_g
    b_bias = tl.load(bias_ptr + o_table, mask=m_g, other=float("-inf"))
    b_value = load_rows(table_value_ptr + o_table * Dv, m_g, 1, Dv, BLOCK_V)
    return load_operand(table_key_ptr + o_table * D, m_g, 1, D, BLOCK_D), b_value, b_bias


@kernel
def _cluster_table_fwd_kernel(
    query_ptr, key_ptr, value_ptr, seed_ptr, exact_heads_ptr, order_ptr, starts_ptr, top_ptr,
    mass_ptr, rest_ptr, table_key_ptr, table_value_ptr, bias_ptr, centroid_ptr, dipole_ptr,
    output_ptr, lse_ptr, share_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, group, N, D, Dv, clusters, key_clusters, blocks, block_rows, topk, scale, scale_log2,
    dropout_p,
    HAS_SUMMARIES: tl.constexpr, HAS_REST: tl.constexpr, ONCE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`O_i` of up to `block_rows` queries of a cluster, and of each the base-2 log-sum-exp and `s_i`; 0 in no cluster.

    With `ONCE` the exact keys are one block, and so are the summaries: loaded once for all tiles of these queries.
    """
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_block = tl.program_id(0) % blocks
    starts_ptr += i_p * (clusters + 2)
    # Every cluster begins with a block of its own, numbered as the tiles of `SortedRows` are.
    cluster = -1
    for first in range(0, clusters + 1, BLOCK_C):
        o_c = first + tl.arange(0, BLOCK_C)
        b_block = tl.load(starts_ptr + o_c, mask=o_c <= clusters, other=0) // block_rows + o_c
        cluster += tl.sum(((b_block <= i_block) & (o_c <= clusters)).to(tl.int32), 0)
    begin = tl.load(starts_ptr + cluster)
    end = tl.load(starts_ptr + cluster + 1)
    begin += (i_block - begin // block_rows - cluster) * block_rows
    if (begin >= end) | is_exact(exact_heads_ptr, i_p // group):
        return
    i_b, i_h = i_p // H, i_p % H
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    order_ptr += i_p * N
    lse_ptr += i_p * N
    if HAS_SUMMARIES:
        share_ptr += i_p * N
    output_ptr += i_b * stride_output_b + i_h * stride_output_h
    in_cluster = cluster < clusters
    i_row = i_p * clusters + tl.where(in_cluster, cluster, 0)
    top_ptr += i_row * topk
    columns = topk + key_clusters
    # A query in no cluster sees nothing.
    topk, key_clusters = tl.where(in_cluster, topk, 0), tl.where(in_cluster, key_clusters, 0)
    o_t, o_g = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_G)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    if ONCE:
        key, b_value = load_exact_keys(
            key_ptr, value_ptr, top_ptr, o_t, topk, stride_key_m, stride_key_d, stride_value_m, stride_value_d, D, Dv,
            BLOCK_D, BLOCK_V,
        )  # fmt: skip
        if HAS_SUMMARIES:
            mean, b_mean_value, b_bias = load_summaries(
                table_key_ptr, table_value_ptr, bias_ptr, i_row, o_g, key_clusters, D, Dv, BLOCK_D, BLOCK_V
            )
            if PART == BLOCK_D:
                b_matrix = load_rows(dipole_ptr + (i_row * D + o_d) * Dv, (o_d < D) & in_cluster, 1, Dv, BLOCK_V)
    end = tl.minimum(end, begin + block_rows)
    for i_tile in range(0, tl.cdiv(end - begin, ROWS) if ONCE else 1):
        o_place = begin + i_tile * ROWS + tl.arange(0, ROWS)
        m_row = o_place < end
        m_query = m_row & in_cluster
        b_row = tl.load(order_ptr + o_place, mask=m_row, other=0).to(tl.int64)
        p_query = query_ptr + b_row * stride_query_n
        o_row = i_p * N + b_row
        # [ROWS, BLOCK_D]
        query = load_operand(p_query, m_query, stride_query_d, D, BLOCK_D)
        b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
        b_highest = tl.full([ROWS], LOWEST, tl.float32)
        b_total = tl.zeros([ROWS], tl.float32)
        for first in range(0, COLUMNS if ONCE else topk, COLUMNS):
            if not ONCE:
                key, b_value = load_exact_keys(
                    key_ptr, value_ptr, top_ptr, first + o_t, topk, stride_key_m, stride_key_d, stride_value_m,
                    stride_value_d, D, Dv, BLOCK_D, BLOCK_V,
                )  # fmt: skip
            b_output, b_highest, b_total = attend(
                query, key, b_value, key[2][None, :], b_output, b_highest, b_total, D, scale_log2,
                seed_ptr, o_row, first + o_t, columns, dropout_p, KIND, BY_PARTS, PRECISION,
            )  # fmt: skip

        if HAS_SUMMARIES:
            b_share = tl.zeros([ROWS], tl.float32)
            for first in range(0, BLOCK_G if ONCE else key_clusters, BLOCK_G):
                if not ONCE:
                    mean, b_mean_value, b_bias = load_summaries(
                        table_key_ptr, table_value_ptr, bias_ptr, i_row, first + o_g, key_clusters, D, Dv,
                        BLOCK_D, BLOCK_V,
                    )  # fmt: skip
                b_scores = dot_rows(query, mean, D, BY_PARTS, PRECISION) * scale_log2 + b_bias[None, :]
                b_weights, b_kept, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
                if seed_ptr is not None:
                    o_column = topk + first + o_g
                    b_weights *= dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
                b_share = b_share * b_kept + tl.sum(b_weights, 1)
                b_weights = b_weights.to(b_mean_value.dtype)
                b_output = tl.dot(b_weights, b_mean_value, b_output * b_kept[:, None], input_precision=PRECISION)
        b_divisor = tl.where(b_total > 0, b_total, 1.0)
        b_factor = 1.0 / b_divisor
        if HAS_REST:
            b_factor *= tl.load(mass_ptr + i_row)
        b_output = b_output * b_factor[:, None]
        if HAS_SUMMARIES:
            # A part of 1: an offset in float16 times it stays in range.
            b_share *= b_factor
            b_share_scale = (b_share * scale)[:, None]
            if ONCE and PART == BLOCK_D:
                b_centroid = tl.load(centroid_ptr + i_row * D + o_d, mask=o_d < D, other=0.0)
                b_eta = (query[0].to(tl.float32) - b_centroid.to(tl.float32)[None, :]) * b_share_scale
                b_output = tl.dot(b_eta.to(b_matrix.dtype), b_matrix, b_output, input_precision=PRECISION)
            else:
                for first in range(0, tl.where(in_cluster, D, 0), PART):
                    o_part = first + tl.arange(0, PART)
                    b_eta = load_offsets(p_query, m_query, stride_query_d, centroid_ptr + i_row * D, o_part, D)
                    # [PART, BLOCK_V]
                    b_part = load_rows(dipole_ptr + (i_row * D + o_part) * Dv, o_part < D, 1, Dv, BLOCK_V)
                    b_eta = (b_eta * b_share_scale).to(b_part.dtype)
                    b_output = tl.dot(b_eta, b_part, b_output, input_precision=PRECISION)
            tl.store(share_ptr + b_row, b_share, mask=m_row)
        tl.store(lse_ptr + b_row, b_highest + tl.log2(b_divisor), mask=m_row)
        if HAS_REST:
            b_output += tl.load(rest_ptr + i_row * Dv + o_v, mask=(o_v < Dv) & in_cluster, other=0.0)[None, :]
        store_rows(output_ptr + b_row * stride_output_n, b_output, m_row, stride_output_d, Dv, BLOCK_V)


def blocks_of_queries(
    query: torch.Tensor, clusters: int, topk: int, key_clusters: int, config: dict[str, Any]
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs of a head and queries of each that the forward kernel takes, and its constants that depend on sizes."""
    rows, N = config["ROWS"], query.shape[2]
    block_g = min(config["COLUMNS"], block_width(key_clusters))
    narrow = max(config["BLOCK_D"], config["BLOCK_V"]) * query.element_size() <= 128
    once = topk <= config["COLUMNS"] and key_clusters <= (min(config["COLUMNS"], MOST_SUMMARIES) if narrow else 0)
    tiles = min(MOST_TILES, max(MOST_TILES // 2, 2 * -(-N // (clusters * rows)))) if once else 1
    part = dipole_part(query, config["BLOCK_D"])
    sizes = {"ONCE": once, "BLOCK_C": 128, "BLOCK_G": block_g, "PART": part if once else min(part, 32)}
    return (N // (tiles * rows) + clusters + 1, tiles * rows), sizes
