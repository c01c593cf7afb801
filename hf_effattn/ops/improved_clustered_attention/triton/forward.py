"""Forward pass of improved clustered attention on a GPU: the centroids' rest, and the top keys of every query.

`T` below are a cluster's `topk` keys, `m_j` the centroid's mass on them; places of `T` without a key have weight 0.
"""

import triton
import triton.language as tl

from ...shared.triton.centroids import merge_splits
from ...shared.triton.chips import LENGTHS
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.tiles import LOWEST, dot_by_parts, load_rows, load_tile


@triton.jit
def load_top(top_ptr, o_t, topk):
    """The top keys at places `o_t`, 0 where there is none, and where there is one."""
    b_top = tl.load(top_ptr + o_t, mask=o_t < topk, other=-1).to(tl.int64)
    return tl.maximum(b_top, 0), b_top >= 0


@triton.jit
def load_top_weights(top_scores_ptr, o_t, topk, lse):
    """The centroid's weights `A^c_jt` on the top keys at places `o_t`."""
    return tl.exp2(tl.load(top_scores_ptr + o_t, mask=o_t < topk, other=float("-inf")) - lse)


@triton.jit
def row_dropout(seed_ptr, i_row, columns, row_length, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr):
    """Dropout factors of some columns of one row."""
    b_factor = dropout_factor(seed_ptr, tl.full([1], 0, tl.int64) + i_row, columns, row_length, dropout_p, KINDS, KIND)
    return tl.sum(b_factor, 0)


@triton.jit(do_not_specialize=LENGTHS)
def _improved_clustered_attention_fwd_rest_kernel(
    values_ptr, partial_lse_ptr, top_ptr, top_scores_ptr, value_ptr, seed_ptr, rest_ptr, mass_ptr, lse_ptr,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    key_heads, rows, M, Dv, topk, splits, dropout_p,
    HAS_DROPOUT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`O^b_j = O^c_j - Σ_{t∈T} A^c_jt V_t` and `m_j` of one cluster, in float32."""
    i_row = tl.program_id(0).to(tl.int64)
    i_p = i_row // rows
    value_ptr += i_p // key_heads * stride_value_b + i_p % key_heads * stride_value_h
    top_ptr += i_row * topk
    top_scores_ptr += i_row * topk
    b_value, lse = merge_splits(values_ptr, partial_lse_ptr, i_row, splits, Dv, BLOCK_V)
    o_v = tl.arange(0, BLOCK_V)
    b_chosen = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    b_mass = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, topk, BLOCK_T):
        o_t = first + tl.arange(0, BLOCK_T)
        b_top, m_top = load_top(top_ptr, o_t, topk)
        b_weights = load_top_weights(top_scores_ptr, o_t, topk, lse)
        b_mass += b_weights
        if HAS_DROPOUT:
            b_weights *= row_dropout(seed_ptr, i_row, b_top, M, dropout_p, KINDS, KIND)
        # [BLOCK_T, BLOCK_V]
        b_top_value = load_rows(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
        b_chosen += b_weights[:, None] * b_top_value.to(tl.float32)
    tl.store(rest_ptr + i_row * Dv + o_v, b_value - tl.sum(b_chosen, 0), mask=o_v < Dv)
    tl.store(mass_ptr + i_row, tl.sum(b_mass, 0))
    tl.store(lse_ptr + i_row, lse)


@triton.jit(do_not_specialize=LENGTHS)
def _improved_clustered_attention_fwd_kernel(
    query_ptr, key_ptr, value_ptr, seed_ptr, order_ptr, starts_ptr, tiles_ptr, top_ptr, rest_ptr, mass_ptr,
    output_ptr, top_lse_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, group, N, D, Dv, clusters, tiles, topk, scale_log2, dropout_p,
    HAS_DROPOUT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`O_i = m_j softmax(scale · Q_i K_T^T) V_T + O^b_j` for a tile of members of `j` (Vyas 2020, improved clustered).

    Keeps the base-2 log-sum-exp of every query over `T`, at its place in the order.
    """
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, o_place, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, ROWS
    )
    if tl.max(m_row.to(tl.int32), 0) == 0:
        return
    i_b, i_h = i_p // H, i_p % H
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    # Rows in no cluster have no top keys, and get 0.
    in_cluster = cluster < clusters
    i_row = i_p * clusters + tl.where(in_cluster, cluster, 0)
    top_ptr += i_row * topk
    p_query = query_ptr + b_row * stride_query_n
    m_query = m_row & in_cluster
    # [ROWS, BLOCK_D]
    b_query = load_rows(p_query, m_query, stride_query_d, D, BLOCK_D)
    b_values = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, tl.where(in_cluster, topk, 0), COLUMNS):
        o_t = first + tl.arange(0, COLUMNS)
        b_top, m_top = load_top(top_ptr, o_t, topk)
        p_key = key_ptr + b_top * stride_key_m
        if BY_PARTS:
            b_scores = dot_by_parts(
                p_query, m_query, stride_query_d, p_key, m_top, stride_key_d, D, ROWS, COLUMNS, PRECISION
            )
        else:
            # [COLUMNS, BLOCK_D]
            b_key = load_rows(p_key, m_top, stride_key_d, D, BLOCK_D)
            b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION)
        b_scores = tl.where(m_top[None, :], b_scores * scale_log2, float("-inf"))
        b_higher = tl.maximum(b_highest, tl.max(b_scores, 1))
        b_weights = tl.exp2(b_scores - b_higher[:, None])
        b_kept = tl.exp2(b_highest - b_higher)
        b_total = b_total * b_kept + tl.sum(b_weights, 1)
        if HAS_DROPOUT:
            b_weights *= dropout_factor(seed_ptr, i_p * N + b_row, o_t, topk, dropout_p, KINDS, KIND)
        # [COLUMNS, BLOCK_V]
        b_value = load_rows(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
        b_values = b_values * b_kept[:, None]
        b_values += tl.dot(b_weights.to(b_value.dtype), b_value, input_precision=PRECISION)
        b_highest = b_higher

    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    tl.store(top_lse_ptr + i_p * N + o_place, b_highest + tl.log2(b_divisor), mask=m_row)
    mass = tl.load(mass_ptr + i_row)
    o_v = tl.arange(0, BLOCK_V)
    b_rest = tl.load(rest_ptr + i_row * Dv + o_v, mask=(o_v < Dv) & in_cluster, other=0.0)
    b_output = b_values * (mass / b_divisor)[:, None] + b_rest[None, :]
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h
    p_output += b_row[:, None] * stride_output_n + o_v[None, :] * stride_output_d
    tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=m_row[:, None] & (o_v < Dv)[None, :])
