"""Kernels of the backward pass: weights are computed again, every gradient has one writer, so that runs repeat."""

import triton.language as tl

from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.tiles import load_rows
from .windows import load_partners, load_text, meet, products, shared_membership, walk_of_keys, walk_of_queries


@kernel
def _sorted_block_attention_bwd_query_kernel(
    query_ptr, key_ptr, value_ptr, output_ptr, grad_output_ptr, order_ptr, labels_ptr, membership_ptr,
    lengths_ptr, words_ptr, seed_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d,
    stride_gq_b, stride_gq_h, stride_gq_n, stride_gq_d,
    stride_membership_b, stride_membership_n, stride_membership_c,
    H, group, N, D, Dv, clusters, tiles, window, scale, scale_log2, dropout_p,
    CAUSAL: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_MEMBERSHIP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`dQ_i = scale · Σ_j dS_ij K_j`, with `dS = A (dA - δ)` and `δ_i = O_i · dO_i`, which is kept."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    i_b, i_h = i_p // H, i_p % H
    w, n, used, seen = load_text(lengths_ptr, words_ptr, i_b, window)
    reach = (tl.minimum(window, used + 1) - 1) * w
    order_ptr += i_b * N
    if HAS_LABELS:
        labels_ptr += i_b * N
    if HAS_MEMBERSHIP:
        membership_ptr += i_b * stride_membership_b
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h

    o_q = first + tl.arange(0, ROWS)
    begin, end = walk_of_queries(first, w, n, seen, ROWS)
    rank_q, block_q, index_q, label_q, m_q = load_partners(order_ptr, labels_ptr, o_q, n, w, n, used, HAS_LABELS)
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + index_q.to(tl.int64) * stride_query_n
    p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h + index_q.to(tl.int64) * stride_go_n
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h + index_q.to(tl.int64) * stride_output_n
    # [ROWS, BLOCK_V]
    b_output = load_rows(p_output, m_q, stride_output_d, Dv, BLOCK_V).to(tl.float32)
    b_delta = tl.sum(b_output * load_rows(p_grad, m_q, stride_go_d, Dv, BLOCK_V).to(tl.float32), 1)
    m_row = o_q < N
    tl.store(delta_ptr + i_p * N + o_q, b_delta, mask=m_row)
    b_lse = tl.load(lse_ptr + i_p * N + o_q, mask=m_row, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)

    for start in range(begin, end, COLUMNS):
        o_k = start + tl.arange(0, COLUMNS)
        rank_k, block_k, index_k, label_k, m_k = load_partners(order_ptr, labels_ptr, o_k, end, w, n, used, HAS_LABELS)
        p_key = key_ptr + index_k.to(tl.int64) * stride_key_n
        p_value = value_ptr + index_k.to(tl.int64) * stride_value_n
        b_scores = scale_log2 * products(
            p_query, m_q, stride_query_d, p_key, m_k, stride_key_d, D, BLOCK_D, BY_PARTS, PRECISION
        )
        if HAS_MEMBERSHIP:
            b_scores += tl.log2(shared_membership(
                membership_ptr, index_q, m_q, index_k, m_k, stride_membership_n, stride_membership_c, clusters,
                PRECISION,
            ))  # fmt: skip
        visible = meet(
            rank_q[:, None], block_q[:, None], index_q[:, None], label_q[:, None], m_q[:, None],
            rank_k[None, :], block_k[None, :], index_k[None, :], label_k[None, :], m_k[None, :],
            seen, reach, CAUSAL, HAS_LABELS,
        )  # fmt: skip
        b_weights = tl.exp2(tl.where(visible, b_scores - b_lse[:, None], float("-inf")))
        b_grad = products(p_grad, m_q, stride_go_d, p_value, m_k, stride_value_d, Dv, BLOCK_V, BY_PARTS, PRECISION)
        if seed_ptr is not None:
            b_grad *= dropout_factor(seed_ptr, i_p * N + rank_q, rank_k, N, dropout_p, KINDS, KIND)
        b_grad = b_weights * (b_grad - b_delta[:, None])
        # [COLUMNS, BLOCK_D]
        b_key = load_rows(p_key, m_k, stride_key_d, D, BLOCK_D)
        b_grad_query += tl.dot(b_grad.to(b_key.dtype), b_key, input_precision=PRECISION)

    b_row = tl.load(order_ptr + o_q, mask=m_row, other=0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    p_grad_query = grad_query_ptr + i_b * stride_gq_b + i_h * stride_gq_h
    p_grad_query += b_row[:, None] * stride_gq_n + o_d[None, :] * stride_gq_d
    b_grad_query = (b_grad_query * scale).to(grad_query_ptr.dtype.element_ty)
    tl.store(p_grad_query, b_grad_query, mask=m_row[:, None] & (o_d < D)[None, :])


@kernel
def _sorted_block_attention_bwd_key_kernel(
    query_ptr, key_ptr, value_ptr, grad_output_ptr, order_ptr, labels_ptr, membership_ptr,
    lengths_ptr, words_ptr, seed_ptr, lse_ptr, delta_ptr, grad_key_ptr, grad_value_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d,
    stride_gk_b, stride_gk_h, stride_gk_n, stride_gk_d,
    stride_gv_b, stride_gv_h, stride_gv_n, stride_gv_d,
    stride_membership_b, stride_membership_n, stride_membership_c,
    H, group, N, D, Dv, clusters, tiles, window, scale, scale_log2, dropout_p,
    CAUSAL: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_MEMBERSHIP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`dV_j = Σ_i A_ij dO_i` and `dK_j = scale · Σ_i dS_ij Q_i` of a tile of keys, over the heads that share it."""
    heads = H // group
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    i_b, i_h = i_p // heads, i_p % heads
    w, n, used, seen = load_text(lengths_ptr, words_ptr, i_b, window)
    reach = (tl.minimum(window, used + 1) - 1) * w
    order_ptr += i_b * N
    if HAS_LABELS:
        labels_ptr += i_b * N
    if HAS_MEMBERSHIP:
        membership_ptr += i_b * stride_membership_b

    o_k = first + tl.arange(0, ROWS)
    begin, end = walk_of_keys(first, w, n, seen, ROWS)
    rank_k, block_k, index_k, label_k, m_k = load_partners(order_ptr, labels_ptr, o_k, n, w, n, used, HAS_LABELS)
    p_key = key_ptr + i_b * stride_key_b + i_h * stride_key_h + index_k.to(tl.int64) * stride_key_n
    p_value = value_ptr + i_b * stride_value_b + i_h * stride_value_h + index_k.to(tl.int64) * stride_value_n
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)

    for start in range(begin, end, COLUMNS):
        o_q = start + tl.arange(0, COLUMNS)
        rank_q, block_q, index_q, label_q, m_q = load_partners(order_ptr, labels_ptr, o_q, end, w, n, used, HAS_LABELS)
        visible = meet(
            rank_q[None, :], block_q[None, :], index_q[None, :], label_q[None, :], m_q[None, :],
            rank_k[:, None], block_k[:, None], index_k[:, None], label_k[:, None], m_k[:, None],
            seen, reach, CAUSAL, HAS_LABELS,
        )  # fmt: skip
        b_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
        if HAS_MEMBERSHIP:
            b_bias = tl.log2(shared_membership(
                membership_ptr, index_k, m_k, index_q, m_q, stride_membership_n, stride_membership_c, clusters,
                PRECISION,
            ))  # fmt: skip
        for member in range(0, group):
            i_head = i_h * group + member
            i_row = (i_b * H + i_head) * N
            p_query = (
                query_ptr + i_b * stride_query_b + i_head * stride_query_h + index_q.to(tl.int64) * stride_query_n
            )
            p_grad = grad_output_ptr + i_b * stride_go_b + i_head * stride_go_h + index_q.to(tl.int64) * stride_go_n
            b_lse = tl.load(lse_ptr + i_row + rank_q, mask=m_q, other=0.0)
            b_delta = tl.load(delta_ptr + i_row + rank_q, mask=m_q, other=0.0)
            b_scores = b_bias + scale_log2 * products(
                p_key, m_k, stride_key_d, p_query, m_q, stride_query_d,
                D, BLOCK_D, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_weights = tl.exp2(tl.where(visible, b_scores - b_lse[None, :], float("-inf")))
            b_grad = products(
                p_value, m_k, stride_value_d, p_grad, m_q, stride_go_d,
                Dv, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_dropped = b_weights
            if seed_ptr is not None:
                factor = tl.trans(dropout_factor(seed_ptr, i_row + rank_q, rank_k, N, dropout_p, KINDS, KIND))
                b_dropped = b_weights * factor
                b_grad *= factor
            # [COLUMNS, BLOCK_V]
            b_grad_output = load_rows(p_grad, m_q, stride_go_d, Dv, BLOCK_V)
            b_grad_value += tl.dot(b_dropped.to(b_grad_output.dtype), b_grad_output, input_precision=PRECISION)
            b_grad = b_weights * (b_grad - b_delta[None, :])
            # [COLUMNS, BLOCK_D]
            b_query = load_rows(p_query, m_q, stride_query_d, D, BLOCK_D)
            b_grad_key += tl.dot(b_grad.to(b_query.dtype), b_query, input_precision=PRECISION)

    m_row = o_k < N
    b_row = tl.load(order_ptr + o_k, mask=m_row, other=0).to(tl.int64)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_grad_key = grad_key_ptr + i_b * stride_gk_b + i_h * stride_gk_h
    p_grad_key += b_row[:, None] * stride_gk_n + o_d[None, :] * stride_gk_d
    b_grad_key = (b_grad_key * scale).to(grad_key_ptr.dtype.element_ty)
    tl.store(p_grad_key, b_grad_key, mask=m_row[:, None] & (o_d < D)[None, :])
    p_grad_value = grad_value_ptr + i_b * stride_gv_b + i_h * stride_gv_h
    p_grad_value += b_row[:, None] * stride_gv_n + o_v[None, :] * stride_gv_d
    b_grad_value = b_grad_value.to(grad_value_ptr.dtype.element_ty)
    tl.store(p_grad_value, b_grad_value, mask=m_row[:, None] & (o_v < Dv)[None, :])


@kernel
def _sorted_block_attention_bwd_membership_kernel(
    query_ptr, key_ptr, value_ptr, grad_output_ptr, order_ptr, labels_ptr, membership_ptr,
    lengths_ptr, words_ptr, seed_ptr, lse_ptr, delta_ptr, grad_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d,
    stride_membership_b, stride_membership_n, stride_membership_c,
    H, group, N, D, Dv, clusters, tiles, window, scale_log2, dropout_p,
    AS_KEY: tl.constexpr, CAUSAL: tl.constexpr, HAS_LABELS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`dP_i` of a tile of words as queries, or (`AS_KEY`) added to it what they get as keys: `Σ_j G_ij P_j`.

    `G = Σ_heads dS / (P_i · P_j + 1e-4)`, for some of the columns of `P`.
    """
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    w, n, used, seen = load_text(lengths_ptr, words_ptr, i_b, window)
    reach = (tl.minimum(window, used + 1) - 1) * w
    order_ptr += i_b * N
    if HAS_LABELS:
        labels_ptr += i_b * N
    membership_ptr += i_b * stride_membership_b
    o_row = first + tl.arange(0, ROWS)
    rank_a, block_a, index_a, label_a, m_a = load_partners(order_ptr, labels_ptr, o_row, n, w, n, used, HAS_LABELS)
    if AS_KEY:
        begin, end = walk_of_keys(first, w, n, seen, ROWS)
    else:
        begin, end = walk_of_queries(first, w, n, seen, ROWS)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    b_grad_membership = tl.zeros([ROWS, BLOCK_C], tl.float32)

    for start in range(begin, end, COLUMNS):
        o_b = start + tl.arange(0, COLUMNS)
        rank_b, block_b, index_b, label_b, m_b = load_partners(order_ptr, labels_ptr, o_b, end, w, n, used, HAS_LABELS)
        if AS_KEY:
            visible = meet(
                rank_b[None, :], block_b[None, :], index_b[None, :], label_b[None, :], m_b[None, :],
                rank_a[:, None], block_a[:, None], index_a[:, None], label_a[:, None], m_a[:, None],
                seen, reach, CAUSAL, HAS_LABELS,
            )  # fmt: skip
        else:
            visible = meet(
                rank_a[:, None], block_a[:, None], index_a[:, None], label_a[:, None], m_a[:, None],
                rank_b[None, :], block_b[None, :], index_b[None, :], label_b[None, :], m_b[None, :],
                seen, reach, CAUSAL, HAS_LABELS,
            )  # fmt: skip
        b_shared = shared_membership(
            membership_ptr, index_a, m_a, index_b, m_b, stride_membership_n, stride_membership_c, clusters,
            PRECISION,
        )  # fmt: skip
        b_bias = tl.log2(b_shared)
        b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i_h in range(0, H):
            i_row = (i_b * H + i_h) * N
            p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h
            p_key = key_ptr + i_b * stride_key_b + i_h // group * stride_key_h
            p_value = value_ptr + i_b * stride_value_b + i_h // group * stride_value_h
            p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h
            if AS_KEY:
                b_scores = products(
                    p_key + index_a.to(tl.int64) * stride_key_n, m_a, stride_key_d,
                    p_query + index_b.to(tl.int64) * stride_query_n, m_b, stride_query_d,
                    D, BLOCK_D, BY_PARTS, PRECISION,
                )  # fmt: skip
                b_grad = products(
                    p_value + index_a.to(tl.int64) * stride_value_n, m_a, stride_value_d,
                    p_grad + index_b.to(tl.int64) * stride_go_n, m_b, stride_go_d,
                    Dv, BLOCK_V, BY_PARTS, PRECISION,
                )  # fmt: skip
                b_lse = tl.load(lse_ptr + i_row + rank_b, mask=m_b, other=0.0)[None, :]
                b_delta = tl.load(delta_ptr + i_row + rank_b, mask=m_b, other=0.0)[None, :]
            else:
                b_scores = products(
                    p_query + index_a.to(tl.int64) * stride_query_n, m_a, stride_query_d,
                    p_key + index_b.to(tl.int64) * stride_key_n, m_b, stride_key_d,
                    D, BLOCK_D, BY_PARTS, PRECISION,
                )  # fmt: skip
                b_grad = products(
                    p_grad + index_a.to(tl.int64) * stride_go_n, m_a, stride_go_d,
                    p_value + index_b.to(tl.int64) * stride_value_n, m_b, stride_value_d,
                    Dv, BLOCK_V, BY_PARTS, PRECISION,
                )  # fmt: skip
                b_lse = tl.load(lse_ptr + i_row + rank_a, mask=m_a, other=0.0)[:, None]
                b_delta = tl.load(delta_ptr + i_row + rank_a, mask=m_a, other=0.0)[:, None]
            if seed_ptr is not None:
                if AS_KEY:
                    b_grad *= tl.trans(dropout_factor(seed_ptr, i_row + rank_b, rank_a, N, dropout_p, KINDS, KIND))
                else:
                    b_grad *= dropout_factor(seed_ptr, i_row + rank_a, rank_b, N, dropout_p, KINDS, KIND)
            b_weights = tl.exp2(tl.where(visible, b_scores * scale_log2 + b_bias - b_lse, float("-inf")))
            b_sum += b_weights * (b_grad - b_delta)
        p_membership = (
            membership_ptr + index_b.to(tl.int64)[:, None] * stride_membership_n + o_c[None, :] * stride_membership_c
        )
        # [COLUMNS, BLOCK_C]
        b_membership = tl.load(p_membership, mask=m_b[:, None] & (o_c < clusters)[None, :], other=0.0)
        b_sum = (b_sum / b_shared).to(b_membership.dtype)
        b_grad_membership += tl.dot(b_sum, b_membership, input_precision=PRECISION)

    m_row = o_row < N
    b_row = tl.load(order_ptr + o_row, mask=m_row, other=0).to(tl.int64)
    # [ROWS, BLOCK_C]
    p_grad_membership = grad_ptr + (i_b * N + b_row[:, None]) * clusters + o_c[None, :]
    m_grad = m_row[:, None] & (o_c < clusters)[None, :]
    if AS_KEY:
        b_grad_membership += tl.load(p_grad_membership, mask=m_grad, other=0.0)
    tl.store(p_grad_membership, b_grad_membership, mask=m_grad)
