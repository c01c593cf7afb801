"""Kernels of (improved) clustered attention beside those of the centroids and of the top keys.

`T` below are a cluster's `topk` keys, `m_j` the centroid's mass on them; places of `T` without a key have weight 0.

The backward pass holds labels and top sets fixed. With `P_i = softmax(scale · Q_i K_T^T)` and `dP_it = dO_i · V_t`:
`D_i = Σ_t P_it dP_it` and `dS_it = m_j P_it (dP_it - D_i)` give the gradients of queries, keys and values through the
top keys. The centroid's weights get `dA_jt = ḡ_j · V_t` outside `T` and the mean of `D_i` inside, per query:
`centroid_backward` takes the former for all keys, and what that gets wrong on `T` is put right here, by
`extra_jt = A_jt (mean D - ḡ_j · V_t)`.
"""

import triton.language as tl

from ...shared.triton.centroids import merge_splits
from ...shared.triton.cluster_table import load_split_sum, load_top, load_top_weights, row_dropout
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import CENTROID_KIND, KIND, KINDS, dot_rows
from ...shared.triton.tiles import load_operand, load_rows, load_tile, store_rows


@kernel
def _improved_clustered_attention_fwd_rest_kernel(
    values_ptr, partial_lse_ptr, top_ptr, top_scores_ptr, value_ptr, seed_ptr, rest_ptr, mass_ptr, lse_ptr,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    key_heads, rows, M, Dv, topk, splits, dropout_p,
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
        if seed_ptr is not None:
            b_weights *= row_dropout(seed_ptr, i_row, b_top, M, dropout_p, KINDS, CENTROID_KIND)
        # [BLOCK_T, BLOCK_V]
        b_top_value = load_rows(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
        b_chosen += b_weights[:, None] * b_top_value.to(tl.float32)
    tl.store(rest_ptr + i_row * Dv + o_v, b_value - tl.sum(b_chosen, 0), mask=o_v < Dv)
    tl.store(mass_ptr + i_row, tl.sum(b_mass, 0))
    tl.store(lse_ptr + i_row, lse)


@kernel
def _clustered_attention_fwd_kernel(
    values_ptr, partial_lse_ptr, order_ptr, starts_ptr, tiles_ptr, output_ptr, merged_ptr, lse_ptr,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, N, Dv, clusters, tiles, splits,
    TILE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`O_i = O^c_j` for a tile of members of `j`; the first tile of a cluster keeps `O^c_j` for the backward pass."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, o_place, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, TILE
    )
    o_v = tl.arange(0, BLOCK_V)
    in_cluster = cluster < clusters
    i_row = i_p * clusters + tl.where(in_cluster, cluster, 0)
    b_value, lse = merge_splits(values_ptr, partial_lse_ptr, i_row, splits, Dv, BLOCK_V)
    first = tl.load(starts_ptr + i_p * (clusters + 2) + cluster)
    if in_cluster & (tl.min(o_place, 0) == first):
        tl.store(merged_ptr + i_row * Dv + o_v, b_value, mask=o_v < Dv)
        tl.store(lse_ptr + i_row, lse)
    # Rows in no cluster get 0.
    b_output = tl.zeros([TILE, BLOCK_V], tl.float32) + tl.where(in_cluster, b_value, 0.0)[None, :]
    p_output = output_ptr + i_p // H * stride_output_b + i_p % H * stride_output_h + b_row * stride_output_n
    store_rows(p_output, b_output, m_row, stride_output_d, Dv, BLOCK_V)


@kernel
def _improved_clustered_attention_bwd_dot_kernel(
    query_ptr, key_ptr, value_ptr, grad_output_ptr, seed_ptr, order_ptr, starts_ptr, tiles_ptr, top_ptr, top_lse_ptr,
    row_dot_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d,
    H, group, N, D, Dv, clusters, tiles, topk, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`D_i = Σ_t P_it dP_it` of a tile of queries; unwritten of those in no cluster."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, ROWS
    )
    if (cluster >= clusters) | (tl.max(m_row.to(tl.int32), 0) == 0):
        return
    i_b, i_h = i_p // H, i_p % H
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    top_ptr += (i_p * clusters + cluster) * topk
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + b_row * stride_query_n
    p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h + b_row * stride_go_n
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    query = load_operand(p_query, m_row, stride_query_d, D, BLOCK_D)
    grad = load_operand(p_grad, m_row, stride_go_d, Dv, BLOCK_V)
    b_lse = tl.load(top_lse_ptr + i_p * N + b_row, mask=m_row, other=0.0)
    b_dot = tl.zeros([ROWS], tl.float32)
    for first in range(0, topk, COLUMNS):
        o_t = first + tl.arange(0, COLUMNS)
        b_top, m_top = load_top(top_ptr, o_t, topk)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + b_top * stride_key_m, m_top, stride_key_d, D, BLOCK_D)
        value = load_operand(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
        b_scores = dot_rows(query, key, D, BY_PARTS, PRECISION)
        b_grad_weights = dot_rows(grad, value, Dv, BY_PARTS, PRECISION)
        b_scores = tl.where(m_top[None, :], b_scores * scale_log2, float("-inf"))
        if seed_ptr is not None:
            b_grad_weights *= dropout_factor(seed_ptr, i_p * N + b_row, o_t, topk, dropout_p, KINDS, KIND)
        b_dot += tl.sum(tl.exp2(b_scores - b_lse[:, None]) * b_grad_weights, 1)
    tl.store(row_dot_ptr + i_p * N + b_row, b_dot, mask=m_row)


@kernel
def _improved_clustered_attention_bwd_cluster_kernel(
    key_ptr, value_ptr, seed_ptr, order_ptr, starts_ptr, top_ptr, top_scores_ptr, lse_ptr, rest_ptr, mass_ptr,
    grads_ptr, row_dot_ptr, delta_ptr, extra_ptr, correction_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    key_heads, rows, N, M, D, Dv, clusters, topk, scale, dropout_p,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Of one cluster: `δ_j = ḡ_j · O^b_j + m_j mean D`, `extra_jt`, and what `extra` adds to its queries' gradient."""
    i_row = tl.program_id(0).to(tl.int64)
    i_p = i_row // rows
    key_ptr += i_p // key_heads * stride_key_b + i_p % key_heads * stride_key_h
    value_ptr += i_p // key_heads * stride_value_b + i_p % key_heads * stride_value_h
    top_ptr += i_row * topk
    top_scores_ptr += i_row * topk
    starts_ptr += i_row // clusters * (clusters + 2) + i_row % clusters
    order_ptr += i_row // clusters * N
    row_dot_ptr += i_row // clusters * N
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    b_dot = tl.zeros([BLOCK_N], tl.float32)
    for place in range(first, last, BLOCK_N):
        o_place = place + tl.arange(0, BLOCK_N)
        b_row = tl.load(order_ptr + o_place, mask=o_place < last, other=0)
        b_dot += tl.load(row_dot_ptr + b_row, mask=o_place < last, other=0.0)
    mean_dot = tl.sum(b_dot, 0) / tl.maximum(last - first, 1)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    # [BLOCK_V]
    b_grad = tl.load(grads_ptr + i_row * Dv + o_v, mask=o_v < Dv, other=0.0)
    b_rest = tl.load(rest_ptr + i_row * Dv + o_v, mask=o_v < Dv, other=0.0)
    tl.store(delta_ptr + i_row, tl.sum(b_grad * b_rest, 0) + tl.load(mass_ptr + i_row) * mean_dot)
    lse = tl.load(lse_ptr + i_row)
    b_correction = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, topk, BLOCK_T):
        o_t = start + tl.arange(0, BLOCK_T)
        b_top, m_top = load_top(top_ptr, o_t, topk)
        # [BLOCK_T, BLOCK_V], [BLOCK_T, BLOCK_D]
        b_value = load_rows(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V).to(tl.float32)
        b_key = load_rows(key_ptr + b_top * stride_key_m, m_top, stride_key_d, D, BLOCK_D).to(tl.float32)
        b_grad_weights = tl.sum(b_value * b_grad[None, :], 1)
        if seed_ptr is not None:
            b_grad_weights *= row_dropout(seed_ptr, i_row, b_top, M, dropout_p, KINDS, CENTROID_KIND)
        b_extra = load_top_weights(top_scores_ptr, o_t, topk, lse) * (mean_dot - b_grad_weights)
        tl.store(extra_ptr + i_row * topk + o_t, b_extra, mask=o_t < topk)
        b_correction += b_extra[:, None] * b_key
    tl.store(correction_ptr + i_row * D + o_d, tl.sum(b_correction, 0) * scale, mask=o_d < D)


@kernel
def _clustered_attention_bwd_query_kernel(
    grad_centroids_ptr, order_ptr, starts_ptr, tiles_ptr, grad_query_ptr,
    stride_gq_b, stride_gq_h, stride_gq_n, stride_gq_d,
    H, N, D, clusters, tiles, splits,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dQ_i` of a tile of members of one cluster: the sum over the parts of the keys."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, TILE
    )
    i_row = i_p * clusters + tl.where(cluster < clusters, cluster, 0)
    b_grad = load_split_sum(grad_centroids_ptr, i_row, splits, D, BLOCK_D)
    b_grad = tl.zeros([TILE, BLOCK_D], tl.float32) + tl.where(cluster < clusters, b_grad, 0.0)[None, :]
    p_grad = grad_query_ptr + i_p // H * stride_gq_b + i_p % H * stride_gq_h + b_row * stride_gq_n
    store_rows(p_grad, b_grad, m_row, stride_gq_d, D, BLOCK_D)
