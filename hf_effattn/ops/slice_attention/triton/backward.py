"""The kernels of the backward pass of slice attention.

With `p_it` the weight of query `i` on key `t`, `G_i` the gradient of its output (its own, and its share of that of its
slice's mean) and `δ_i = G_i · Y_i` less the gradient of its log-sum-exp: `dS_it = p_it (G_i · V_t − δ_i)`,
`dQ_i = scale Σ_t dS_it K_t`, `dK_t = scale Σ_i dS_it Q_i` and `dV_t = Σ_i p_it G_i`. Weights are computed again.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ...shared.tables import empty_gradient
from ...shared.triton.chips import block_width
from ...shared.triton.cluster_table import load_split_sum
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.recorded import recorded
from ...shared.triton.softmax import KINDS
from ...shared.triton.tiles import LOG2_E, load_mask, load_rows, store_rows
from ..reference import Inputs
from .forward import Call, strides
from .tiles import (
    KIND,
    dot_with_positions,
    gradients_of_scores,
    load_with_positions,
    part_range,
    part_visible,
    sink_visible,
    tile_config,
    tile_rows,
)

GRADIENT_ROWS = 16
ROWS_OF_A_SINK_SPLIT = 128  # queries that one program reads, before those of a sink are split
LARGEST_SINK_SPLIT = 32


@kernel
def _slice_attention_bwd_gradient_kernel(
    grad_ptr, grad_pooled_ptr, grad_lse_ptr, output_ptr, mask_ptr, inverse_size_ptr, delta_ptr, whole_grad_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_pooled_b, stride_pooled_h, stride_pooled_n, stride_pooled_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_mask_b, stride_mask_n,
    H, N, L, Dv, slices, tiles,
    ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`G_i` and `δ_i` of a tile of rows."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = i_p // H, i_p % H
    o_row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    m_row = o_row < N
    m_token = load_mask(mask_ptr, i_b, o_row, m_row, stride_mask_b, stride_mask_n)
    o_row = o_row.to(tl.int64)
    grad_ptr += i_b * stride_grad_b + i_h * stride_grad_h
    grad_pooled_ptr += i_b * stride_pooled_b + i_h * stride_pooled_h
    output_ptr += i_b * stride_output_b + i_h * stride_output_h
    # [ROWS, BLOCK_V]
    b_grad = load_rows(grad_ptr + o_row * stride_grad_n, m_token, stride_grad_d, Dv, BLOCK_V)
    b_pooled = load_rows(grad_pooled_ptr + o_row // L * stride_pooled_n, m_token, stride_pooled_d, Dv, BLOCK_V)
    b_share = tl.load(inverse_size_ptr + i_b * slices + o_row // L, mask=m_token, other=0.0)
    b_grad = (b_grad.to(tl.float32) + b_pooled.to(tl.float32) * b_share[:, None]).to(b_grad.dtype)
    store_rows(whole_grad_ptr + (i_p * N + o_row) * Dv, b_grad, m_row, 1, Dv, BLOCK_V)
    # [ROWS, BLOCK_V]
    b_output = load_rows(output_ptr + o_row * stride_output_n, m_token, stride_output_d, Dv, BLOCK_V)
    b_delta = tl.sum(b_grad.to(tl.float32) * b_output.to(tl.float32), 1)
    b_delta -= tl.load(grad_lse_ptr + i_p * N + o_row, mask=m_token, other=0.0)
    tl.store(delta_ptr + i_p * N + o_row, b_delta, mask=m_row)


@kernel
def _slice_attention_bwd_query_kernel(
    whole_grad_ptr, lse_ptr, delta_ptr, query_ptr, key_ptr, value_ptr, mask_ptr, query_positions_ptr,
    key_positions_ptr, sink_ptr, sink_count_ptr, seed_ptr, grad_query_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_gq_b, stride_gq_h, stride_gq_n, stride_gq_d,
    stride_mask_b, stride_mask_n,
    H, group, N, L, extension, D, Dv, tiles, tiles_per_slice, last_part, scale, scale_log2, log2_e, dropout_p,
    CAUSAL: tl.constexpr, HAS_QUERY_POSITIONS: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dQ_i` of a tile of rows."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h, i_kh = i_p // H, i_p % H, i_p % H // group
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    key_positions_ptr += i_kh * (L + 2 * extension) * D
    window = L + 2 * extension
    first_slice, o_row, m_row = tile_rows(tl.program_id(0) % tiles, L, N, tiles_per_slice, SLICES, ROWS)
    m_token = load_mask(mask_ptr, i_b, o_row, m_row, stride_mask_b, stride_mask_n)
    p_query = query_ptr + o_row.to(tl.int64) * stride_query_n
    p_place = query_positions_ptr + (i_h * L + o_row % L) * D
    p_whole = whole_grad_ptr + (i_p * N + o_row) * Dv
    o_d, o_n = tl.arange(0, BLOCK_D), tl.arange(0, COLUMNS)
    # [ROWS, BLOCK_V], [ROWS, BLOCK_D]
    b_grad = load_rows(p_whole, m_token, 1, Dv, BLOCK_V)
    b_query = load_with_positions(p_query, m_token, stride_query_d, p_place, m_token, o_d, D, HAS_QUERY_POSITIONS)
    b_delta = tl.load(delta_ptr + i_p * N + o_row, mask=m_token, other=0.0)
    b_lse = tl.load(lse_ptr + i_p * N + o_row, mask=m_token, other=0.0) * log2_e
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(tl.where(extension > 0, -1, 0), last_part + 1):
        begin, end = part_range(part, first_slice, L, extension, N, SLICES)
        if CAUSAL:
            end = tl.minimum(end, tl.max(o_row, 0) + 1)
        for start in range(begin, end, COLUMNS):
            o_key = start + o_n
            m_key = load_mask(mask_ptr, i_b, o_key, o_key < end, stride_mask_b, stride_mask_n)
            m_visible, o_place = part_visible(o_row, m_token, o_key, m_key, part, L, extension, CAUSAL)
            m_place = (o_place >= 0) & (o_place < window)
            p_key = key_ptr + o_key.to(tl.int64) * stride_key_n
            p_key_place = key_positions_ptr + o_place.to(tl.int64) * D
            p_value = value_ptr + o_key.to(tl.int64) * stride_value_n
            # [COLUMNS, BLOCK_D]
            b_key = load_with_positions(p_key, m_key, stride_key_d, p_key_place, m_place, o_d, D, HAS_KEY_POSITIONS)
            b_scores = dot_with_positions(
                b_query, p_query, m_token, stride_query_d, p_place,
                b_key, p_key, m_key, stride_key_d, p_key_place, m_place, D,
                ROWS, COLUMNS, HAS_QUERY_POSITIONS, HAS_KEY_POSITIONS, BY_PARTS, PRECISION,
            )  # fmt: skip
            # [COLUMNS, BLOCK_V]
            b_value = load_rows(p_value, m_key, stride_value_d, Dv, BLOCK_V)
            b_grad_weights = dot_with_positions(
                b_grad, p_whole, m_token, 1, p_whole, b_value, p_value, m_key, stride_value_d, p_value, m_key, Dv,
                ROWS, COLUMNS, False, False, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_grad_scores = gradients_of_scores(
                b_scores, b_grad_weights, m_visible, b_lse, b_delta, scale_log2,
                seed_ptr, i_p * N + o_row, o_place, window + N, dropout_p,
            )  # fmt: skip
            b_grad_query += tl.dot(b_grad_scores.to(b_key.dtype), b_key, input_precision=PRECISION)
    if sink_ptr is not None:
        count = tl.load(sink_count_ptr + i_b)
        for start in range(0, count, COLUMNS):
            m_key = start + o_n < count
            # [COLUMNS]
            o_key = tl.load(sink_ptr + i_b * N + start + o_n, mask=m_key, other=0)
            m_visible = sink_visible(o_row, m_token, o_key, m_key, L, extension, CAUSAL)
            p_key, p_value = key_ptr + o_key * stride_key_n, value_ptr + o_key * stride_value_n
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
            b_value = load_rows(p_value, m_key, stride_value_d, Dv, BLOCK_V)
            b_scores = dot_with_positions(
                b_query, p_query, m_token, stride_query_d, p_place,
                b_key, p_key, m_key, stride_key_d, p_key, m_key, D,
                ROWS, COLUMNS, HAS_QUERY_POSITIONS, False, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_grad_weights = dot_with_positions(
                b_grad, p_whole, m_token, 1, p_whole, b_value, p_value, m_key, stride_value_d, p_value, m_key, Dv,
                ROWS, COLUMNS, False, False, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_grad_scores = gradients_of_scores(
                b_scores, b_grad_weights, m_visible, b_lse, b_delta, scale_log2,
                seed_ptr, i_p * N + o_row, window + o_key, window + N, dropout_p,
            )  # fmt: skip
            b_grad_query += tl.dot(b_grad_scores.to(b_key.dtype), b_key, input_precision=PRECISION)
    p_grad = grad_query_ptr + i_b * stride_gq_b + i_h * stride_gq_h + o_row.to(tl.int64) * stride_gq_n
    store_rows(p_grad, b_grad_query * scale, m_row, stride_gq_d, D, BLOCK_D)


@triton.jit
def key_gradients(
    b_grad_key, b_grad_value, b_key, p_key, m_key, stride_key_d, p_place, m_place, b_value, p_value, stride_value_d,
    o_row, m_token, m_visible, o_column, i_h, i_p, whole_grad_ptr, lse_ptr, delta_ptr, query_ptr, query_positions_ptr,
    seed_ptr, stride_query_n, stride_query_d, N, L, D, Dv, columns, scale_log2, log2_e, dropout_p,
    HAS_QUERY_POSITIONS: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what a tile of queries of one head gives a tile of keys and values; without `scale`."""
    p_query = query_ptr + o_row.to(tl.int64) * stride_query_n
    p_query_place = query_positions_ptr + (i_h * L + o_row % L) * D
    p_whole = whole_grad_ptr + (i_p * N + o_row) * Dv
    o_d = tl.arange(0, BLOCK_D)
    b_query, b_grad = b_key, b_value  # by parts nothing reads them
    if not BY_PARTS:
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        b_query = load_with_positions(
            p_query, m_token, stride_query_d, p_query_place, m_token, o_d, D, HAS_QUERY_POSITIONS
        )  # fmt: skip
        b_grad = load_rows(p_whole, m_token, 1, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + i_p * N + o_row, mask=m_token, other=0.0) * log2_e
    b_delta = tl.load(delta_ptr + i_p * N + o_row, mask=m_token, other=0.0)
    # Keys by queries, as the products below take them.
    b_scores = dot_with_positions(
        b_key, p_key, m_key, stride_key_d, p_place,
        b_query, p_query, m_token, stride_query_d, p_query_place, m_token, D,
        ROWS, COLUMNS, HAS_KEY_POSITIONS, HAS_QUERY_POSITIONS, BY_PARTS, PRECISION,
    )  # fmt: skip
    b_grad_weights = dot_with_positions(
        b_value, p_value, m_key, stride_value_d, p_value, b_grad, p_whole, m_token, 1, p_whole, m_token, Dv,
        ROWS, COLUMNS, False, False, BY_PARTS, PRECISION,
    )  # fmt: skip
    b_weights = tl.exp2(tl.where(tl.trans(m_visible), b_scores * scale_log2 - b_lse[None, :], float("-inf")))
    b_dropped = b_weights
    if seed_ptr is not None:
        b_factor = tl.trans(dropout_factor(seed_ptr, i_p * N + o_row, o_column, columns, dropout_p, KINDS, KIND))
        b_dropped = b_weights * b_factor
        b_grad_weights *= b_factor
    b_grad_scores = b_weights * (b_grad_weights - b_delta[None, :])
    if BY_PARTS:  # not before: whole rows take the registers that the scores need
        b_grad = load_rows(p_whole, m_token, 1, Dv, BLOCK_V)
    b_grad_value += tl.dot(b_dropped.to(b_grad.dtype), b_grad, input_precision=PRECISION)
    if BY_PARTS:
        b_query = load_with_positions(
            p_query, m_token, stride_query_d, p_query_place, m_token, o_d, D, HAS_QUERY_POSITIONS
        )  # fmt: skip
    b_grad_key += tl.dot(b_grad_scores.to(b_query.dtype), b_query, input_precision=PRECISION)
    return b_grad_key, b_grad_value


@kernel
def _slice_attention_bwd_key_kernel(
    whole_grad_ptr, lse_ptr, delta_ptr, query_ptr, key_ptr, value_ptr, mask_ptr,
    query_positions_ptr, key_positions_ptr, seed_ptr, grad_key_ptr, grad_value_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_gk_part, stride_gk_b, stride_gk_h, stride_gk_n, stride_gk_d,
    stride_gv_part, stride_gv_b, stride_gv_h, stride_gv_n, stride_gv_d,
    stride_mask_b, stride_mask_n,
    H, group, N, L, extension, D, Dv, tiles, tiles_per_slice, parts, scale, scale_log2, log2_e, dropout_p,
    CAUSAL: tl.constexpr, HAS_QUERY_POSITIONS: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t` and `dV_t` of a tile of keys, over `parts` parts of the windows from the program's own on."""
    key_heads = H // group
    i_pk = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_kh = i_pk // key_heads, i_pk % key_heads
    key_positions_ptr += i_kh * (L + 2 * extension) * D
    window = L + 2 * extension
    first_slice, o_key, m_row = tile_rows(tl.program_id(0) % tiles, L, N, tiles_per_slice, SLICES, ROWS)
    m_key = load_mask(mask_ptr, i_b, o_key, m_row, stride_mask_b, stride_mask_n)
    p_key = key_ptr + i_b * stride_key_b + i_kh * stride_key_h + o_key.to(tl.int64) * stride_key_n
    p_value = value_ptr + i_b * stride_value_b + i_kh * stride_value_h + o_key.to(tl.int64) * stride_value_n
    # [ROWS, BLOCK_V]
    b_value = load_rows(p_value, m_key, stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    o_d, o_n = tl.arange(0, BLOCK_D), tl.arange(0, COLUMNS)
    first_part = tl.program_id(1) + tl.where(extension > 0, -1, 0)
    for part in range(first_part, first_part + parts):
        o_place = o_key % L + part * L + extension
        m_place = (o_place >= 0) & (o_place < window)
        p_place = key_positions_ptr + o_place.to(tl.int64) * D
        # [ROWS, BLOCK_D]
        b_key = load_with_positions(p_key, m_key, stride_key_d, p_place, m_place, o_d, D, HAS_KEY_POSITIONS)
        begin = tl.maximum((first_slice - part) * L, 0)
        end = tl.minimum((first_slice - part + SLICES) * L, N)
        for i_g in range(0, group):
            i_h = i_kh * group + i_g
            for start in range(begin, end, COLUMNS):
                o_row = start + o_n
                m_token = load_mask(mask_ptr, i_b, o_row, o_row < end, stride_mask_b, stride_mask_n)
                m_visible, _ = part_visible(o_row, m_token, o_key, m_key, part, L, extension, CAUSAL)
                b_grad_key, b_grad_value = key_gradients(
                    b_grad_key, b_grad_value, b_key, p_key, m_key, stride_key_d, p_place, m_place, b_value, p_value,
                    stride_value_d, o_row, m_token, m_visible, o_place, i_h, i_b * H + i_h, whole_grad_ptr, lse_ptr,
                    delta_ptr, query_ptr + i_b * stride_query_b + i_h * stride_query_h, query_positions_ptr, seed_ptr,
                    stride_query_n, stride_query_d, N, L, D, Dv, window + N, scale_log2, log2_e, dropout_p,
                    HAS_QUERY_POSITIONS, HAS_KEY_POSITIONS, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
                )  # fmt: skip
    i_part = tl.program_id(1).to(tl.int64)
    o_key = o_key.to(tl.int64)
    p_grad = grad_key_ptr + i_part * stride_gk_part + i_b * stride_gk_b + i_kh * stride_gk_h + o_key * stride_gk_n
    store_rows(p_grad, b_grad_key * scale, m_row, stride_gk_d, D, BLOCK_D)
    p_grad = grad_value_ptr + i_part * stride_gv_part + i_b * stride_gv_b + i_kh * stride_gv_h + o_key * stride_gv_n
    store_rows(p_grad, b_grad_value, m_row, stride_gv_d, Dv, BLOCK_V)


@triton.jit
def add_in_place(p_grad, m_grad, b_sum):
    """Adds to gradients in their own dtype."""
    b_sum += tl.load(p_grad, mask=m_grad, other=0.0).to(tl.float32)
    tl.store(p_grad, b_sum.to(p_grad.dtype.element_ty), mask=m_grad)


@kernel
def _slice_attention_bwd_sink_kernel(
    whole_grad_ptr, lse_ptr, delta_ptr, query_ptr, key_ptr, value_ptr, mask_ptr,
    query_positions_ptr, sink_ptr, sink_count_ptr, seed_ptr, key_parts_ptr, value_parts_ptr, grad_key_ptr,
    grad_value_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_gk_b, stride_gk_h, stride_gk_n, stride_gk_d,
    stride_gv_b, stride_gv_h, stride_gv_n, stride_gv_d,
    stride_mask_b, stride_mask_n,
    H, group, N, L, extension, D, Dv, splits, scale, scale_log2, log2_e, dropout_p,
    CAUSAL: tl.constexpr, HAS_QUERY_POSITIONS: tl.constexpr, IN_PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to `dK_t` and `dV_t` what a tile of sinks gets from the slices that see them beside their windows.

    With `IN_PARTS` the first tile, and there seldom are more, has `splits` programs: each walks a part of the queries
    and leaves its sum in `(B · Hk, ROWS, splits, D or Dv)`, float32.
    """
    key_heads = H // group
    i_pk = tl.program_id(1).to(tl.int64)
    i_b, i_kh = i_pk // key_heads, i_pk % key_heads
    count = tl.load(sink_count_ptr + i_b)
    i_tile, first, last = tl.program_id(0), 0, N
    if IN_PARTS:
        i_tile = tl.maximum(i_tile - splits + 1, 0)
        length = tl.cdiv(N, splits)
        first = tl.where(i_tile > 0, 0, tl.program_id(0) * length)
        last = tl.where(i_tile > 0, N, tl.minimum(N, first + length))
    o_sink = i_tile * ROWS + tl.arange(0, ROWS)
    # How many sinks there are only the device knows: most programs have none.
    if i_tile * ROWS >= count:
        return
    m_key = o_sink < count
    # [ROWS]
    o_key = tl.load(sink_ptr + i_b * N + o_sink, mask=m_key, other=0)
    p_key = key_ptr + i_b * stride_key_b + i_kh * stride_key_h + o_key * stride_key_n
    p_value = value_ptr + i_b * stride_value_b + i_kh * stride_value_h + o_key * stride_value_n
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
    b_value = load_rows(p_value, m_key, stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    window = L + 2 * extension
    for i_g in range(0, group):
        i_h = i_kh * group + i_g
        for start in range(first, last, COLUMNS):
            o_row = start + tl.arange(0, COLUMNS)
            m_token = load_mask(mask_ptr, i_b, o_row, o_row < last, stride_mask_b, stride_mask_n)
            m_visible = sink_visible(o_row, m_token, o_key, m_key, L, extension, CAUSAL)
            b_grad_key, b_grad_value = key_gradients(
                b_grad_key, b_grad_value, b_key, p_key, m_key, stride_key_d, p_key, m_key, b_value, p_value,
                stride_value_d, o_row, m_token, m_visible, window + o_key, i_h, i_b * H + i_h, whole_grad_ptr, lse_ptr,
                delta_ptr, query_ptr + i_b * stride_query_b + i_h * stride_query_h, query_positions_ptr, seed_ptr,
                stride_query_n, stride_query_d, N, L, D, Dv, window + N, scale_log2, log2_e, dropout_p,
                HAS_QUERY_POSITIONS, False, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
    b_grad_key *= scale
    o_d, o_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    m_d, m_v = m_key[:, None] & (o_d < D), m_key[:, None] & (o_v < Dv)
    p_gk = grad_key_ptr + i_b * stride_gk_b + i_kh * stride_gk_h + o_key[:, None] * stride_gk_n + o_d * stride_gk_d
    p_gv = grad_value_ptr + i_b * stride_gv_b + i_kh * stride_gv_h + o_key[:, None] * stride_gv_n + o_v * stride_gv_d
    if IN_PARTS:
        if i_tile == 0:
            o_part = ((i_pk * ROWS + o_sink) * splits + tl.program_id(0))[:, None]
            tl.store(key_parts_ptr + o_part * D + o_d, b_grad_key, mask=m_d)
            tl.store(value_parts_ptr + o_part * Dv + o_v, b_grad_value, mask=m_v)
        else:
            add_in_place(p_gk, m_d, b_grad_key)
            add_in_place(p_gv, m_v, b_grad_value)
    else:
        add_in_place(p_gk, m_d, b_grad_key)
        add_in_place(p_gv, m_v, b_grad_value)


@kernel
def _slice_attention_bwd_sink_sum_kernel(
    key_parts_ptr, value_parts_ptr, sink_ptr, sink_count_ptr, grad_key_ptr, grad_value_ptr,
    stride_gk_b, stride_gk_h, stride_gk_n, stride_gk_d, stride_gv_b, stride_gv_h, stride_gv_n, stride_gv_d,
    key_heads, N, D, Dv, rows, splits,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds the parts of one sink to its `dK_t` and `dV_t`, always in the same order."""
    i_pk, i_sink = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    i_b, i_kh = i_pk // key_heads, i_pk % key_heads
    if i_sink >= tl.load(sink_count_ptr + i_b):
        return
    i_key = tl.load(sink_ptr + i_b * N + i_sink)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_gk = grad_key_ptr + i_b * stride_gk_b + i_kh * stride_gk_h + i_key * stride_gk_n + o_d * stride_gk_d
    p_gv = grad_value_ptr + i_b * stride_gv_b + i_kh * stride_gv_h + i_key * stride_gv_n + o_v * stride_gv_d
    add_in_place(p_gk, o_d < D, load_split_sum(key_parts_ptr, i_pk * rows + i_sink, splits, D, BLOCK_D))
    add_in_place(p_gv, o_v < Dv, load_split_sum(value_parts_ptr, i_pk * rows + i_sink, splits, Dv, BLOCK_V))


@recorded
def gradients(
    grad_output: torch.Tensor, grad_pooled: torch.Tensor, grad_lse: torch.Tensor, output: torch.Tensor,
    lse: torch.Tensor, x: Inputs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value, and of both position terms (empty where there are none)."""
    (query, key, value), scale, call, grad_lse = x[:3], x.scale, Call.of(x), grad_lse.contiguous()
    B, H, N, D = query.shape
    Dv, numbers, flags = value.shape[3], dict(call.numbers), dict(call.flags)
    L, extension, slices = numbers["L"], numbers["extension"], numbers.pop("slices")
    last_part = numbers.pop("last_part")
    tensors = dict(call.tensors)
    sinks = {name: tensors.pop(name) for name in ("sink_ptr", "sink_count_ptr")}
    inverse_sizes = tensors.pop("inverse_size_ptr")
    parts = last_part + (2 if extension else 1)
    # A key's position terms differ from part to part: where they need a gradient, the parts stay apart.
    apart = parts if flags["HAS_KEY_POSITIONS"] else 1
    grad_query = empty_gradient(query)
    grad_keys, grad_values = (x.new_empty(apart, *x.transpose(1, 2).shape).transpose(2, 3) for x in (key, value))
    delta, whole_grad = torch.empty_like(lse), query.new_empty(B, H, N, Dv)
    common = {
        "whole_grad_ptr": whole_grad, "lse_ptr": lse, "delta_ptr": delta, "query_ptr": query, "key_ptr": key,
        "value_ptr": value, "Dv": Dv, "scale": scale, "scale_log2": scale * LOG2_E, "log2_e": LOG2_E,
        **numbers, **strides("query", query), **strides("key", key), **strides("value", value),
    }  # fmt: skip
    tiles = -(-N // GRADIENT_ROWS)
    _slice_attention_bwd_gradient_kernel[(B * H * tiles,)](
        grad_output, grad_pooled, grad_lse, output, tensors["mask_ptr"], inverse_sizes, delta, whole_grad,
        H=H, N=N, L=L, Dv=Dv, slices=slices, tiles=tiles, ROWS=GRADIENT_ROWS,
        BLOCK_V=block_width(Dv), stride_mask_b=numbers["stride_mask_b"],
        stride_mask_n=numbers["stride_mask_n"], **strides("grad", grad_output),
        **strides("pooled", grad_pooled), **strides("output", output),
    )  # fmt: skip
    config = tile_config(query, L, D, Dv, computes="query")
    tiling = call.tiling(config)
    _slice_attention_bwd_query_kernel[(B * H * tiling["tiles"],)](
        grad_query_ptr=grad_query, last_part=last_part, **common, **tensors, **sinks,
        **flags, **tiling, **config, **strides("gq", grad_query),
    )  # fmt: skip
    config = tile_config(query, L, D, Dv, computes="key")
    tiling = call.tiling(config)
    _slice_attention_bwd_key_kernel[(B * key.shape[1] * tiling["tiles"], apart)](
        grad_key_ptr=grad_keys, grad_value_ptr=grad_values, stride_gk_part=grad_keys.stride(0),
        stride_gv_part=grad_values.stride(0), parts=parts // apart, **common, **tensors, **flags, **tiling,
        **config, **strides("gk", grad_keys[0]), **strides("gv", grad_values[0]),
    )  # fmt: skip
    # Summed as it lies in memory, words before heads: a sum over (parts, B, H, N, D) would lay out its result anew.
    grad_key, grad_value = (
        x[0] if apart == 1 else x.transpose(2, 3).sum(dim=0).transpose(1, 2) for x in (grad_keys, grad_values)
    )
    if sinks["sink_ptr"] is not None:
        for name in ("HAS_KEY_POSITIONS", "key_positions_ptr", "SLICES"):
            for arguments in (flags, tensors, config):
                arguments.pop(name, None)
        of_batch, rows = B * key.shape[1], config["ROWS"]
        # Float32's widest rows leave no registers for a second kind of store.
        in_parts = query.element_size() * max(config["BLOCK_D"], config["BLOCK_V"]) < 1024
        splits = min(LARGEST_SINK_SPLIT, -(-N // ROWS_OF_A_SINK_SPLIT)) if in_parts else 1
        key_parts, value_parts = (query.new_empty(of_batch * rows, splits, x, dtype=torch.float32) for x in (D, Dv))
        parts_of = {"key_parts_ptr": key_parts, "value_parts_ptr": value_parts, "splits": splits}
        grads: dict[str, Any] = {"grad_key_ptr": grad_key, "grad_value_ptr": grad_value}
        grads |= strides("gk", grad_key) | strides("gv", grad_value)
        _slice_attention_bwd_sink_kernel[(-(-N // rows) + splits - 1, of_batch)](
            **parts_of, **grads, **common, **tensors, **sinks, **flags, **config, IN_PARTS=in_parts
        )
        if in_parts:
            _slice_attention_bwd_sink_sum_kernel[(of_batch * rows,)](
                **parts_of, **grads, **sinks, key_heads=key.shape[1], N=N, D=D, Dv=Dv, rows=rows,
                BLOCK_D=config["BLOCK_D"], BLOCK_V=config["BLOCK_V"], num_warps=1,
            )  # fmt: skip
    of_queries, of_keys = query.new_empty(0), query.new_empty(0)
    if call.flags["HAS_QUERY_POSITIONS"]:
        of_queries = _sum_over_slices(grad_query, L).to(query.dtype)
    if call.flags["HAS_KEY_POSITIONS"]:
        sums = [_sum_over_slices(part, L) for part in grad_keys]
        if extension:
            sums = [sums[0][:, L - extension :], *sums[1:]]
        if len(sums) == 3:
            sums[2] = sums[2][:, :extension]
        unused = L + 2 * extension - sum(part.shape[1] for part in sums)
        of_keys = torch.nn.functional.pad(torch.cat(sums, dim=1), (0, 0, 0, unused)).to(query.dtype)
    return grad_query, grad_key, grad_value, of_queries, of_keys


def _sum_over_slices(grad: torch.Tensor, slice_length: int) -> torch.Tensor:
    """`(B, heads, N, D)` summed over the batch and over the slices: `(heads, L, D)` in float32."""
    missing = -grad.shape[2] % slice_length
    padded = torch.nn.functional.pad(grad, (0, 0, 0, missing)) if missing else grad
    return padded.unflatten(2, (-1, slice_length)).sum(dim=(0, 2), dtype=torch.float32)
