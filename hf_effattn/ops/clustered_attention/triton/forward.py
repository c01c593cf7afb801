"""Kernels of the forward pass: what the centroids leave beside their top keys, and a copy of it to the members.

`T` below are a cluster's `topk` keys, `m_j` the centroid's mass on them; places of `T` without a key have weight 0.
"""

import triton.language as tl

from ...shared.triton.centroids import merge_splits
from ...shared.triton.cluster_table import load_top, load_top_weights, row_dropout
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import CENTROID_KIND, KINDS
from ...shared.triton.tiles import load_rows, load_tile, store_rows


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
