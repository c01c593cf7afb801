"""Kernel of the forward pass: a tile of sorted queries over the keys of its windows."""

import triton.language as tl

from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import dot_rows, softmax_weights
from ...shared.triton.tiles import LOWEST, load_operand, load_rows, store_rows
from .windows import load_partners, load_text, meet, shared_membership, walk_of_queries


@kernel
def _sorted_block_attention_fwd_kernel(
    query_ptr, key_ptr, value_ptr, order_ptr, labels_ptr, membership_ptr, lengths_ptr, words_ptr, seed_ptr,
    output_ptr, lse_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_membership_b, stride_membership_n, stride_membership_c,
    H, group, N, D, Dv, clusters, tiles, window, scale_log2, dropout_p,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`O_i = Σ_j softmax_j(scale · Q_i K_j + log(P_i · P_j + 1e-4)) V_j` over the window of `i`; its log-sum-exp.

    Source: Wang 2022, Eq. 8 to 10, without sorted copies of the words.
    """
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    i_b, i_h = i_p // H, i_p % H
    w, n, used, seen, reach = load_text(lengths_ptr, words_ptr, i_b, window)
    order_ptr += i_b * N
    if labels_ptr is not None:
        labels_ptr += i_b * N
    if membership_ptr is not None:
        membership_ptr += i_b * stride_membership_b
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h

    o_q = first + tl.arange(0, ROWS)
    begin, end = walk_of_queries(first, w, n, seen, ROWS)
    q = load_partners(order_ptr, labels_ptr, o_q, n, w, n, used)
    # [ROWS, BLOCK_D]
    query = load_operand(query_ptr + q[2].to(tl.int64) * stride_query_n, q[4], stride_query_d, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)

    for start in range(begin, end, COLUMNS):
        o_k = start + tl.arange(0, COLUMNS)
        k = load_partners(order_ptr, labels_ptr, o_k, end, w, n, used)
        # [COLUMNS, BLOCK_D]
        key = load_operand(key_ptr + k[2].to(tl.int64) * stride_key_n, k[4], stride_key_d, D, BLOCK_D)
        b_scores = dot_rows(query, key, D, BY_PARTS, PRECISION) * scale_log2
        if membership_ptr is not None:
            b_shared = shared_membership(
                membership_ptr, q, k, stride_membership_n, stride_membership_c, clusters, PRECISION
            )
            b_scores += tl.log2(b_shared)
        visible = meet(q, k, seen, reach, CAUSAL, labels_ptr is not None, False)
        b_scores = tl.where(visible, b_scores, float("-inf"))
        b_weights, b_kept, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
        if seed_ptr is not None:
            b_weights *= dropout_factor(seed_ptr, i_p * N + q[0], k[0], N, dropout_p, KINDS, KIND)
        # [COLUMNS, BLOCK_V]
        b_value = load_rows(value_ptr + k[2].to(tl.int64) * stride_value_n, k[4], stride_value_d, Dv, BLOCK_V)
        b_weights = b_weights.to(b_value.dtype)
        b_output = tl.dot(b_weights, b_value, b_output * b_kept[:, None], input_precision=PRECISION)

    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    # Masked words come last in the order: they get 0 here.
    m_row = o_q < N
    b_row = tl.load(order_ptr + o_q, mask=m_row, other=0).to(tl.int64)
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h + b_row * stride_output_n
    store_rows(p_output, b_output / b_divisor[:, None], m_row, stride_output_d, Dv, BLOCK_V)
    tl.store(lse_ptr + i_p * N + o_q, b_highest + tl.log2(b_divisor), mask=m_row)
