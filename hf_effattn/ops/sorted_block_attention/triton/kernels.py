"""Kernels of attention within sorted blocks: which sorted ranks meet, their scores, and both passes over them.

Ranks of a window that goes around the end of the row are counted on: virtual ranks below 0 for the keys of a query,
beyond the last block for the queries of a key. So a tile meets its partners in one range, and a pair meets at one
place of it: a window has at most as many blocks as the row. The backward pass computes weights again, and every
gradient has one writer, so that runs repeat.
"""

import triton
import triton.language as tl

from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import dot_rows, score_gradients, softmax_weights
from ...shared.triton.tiles import LOWEST, dot_by_parts, load_operand, load_rows, store_rows
from ..reference import MEMBERSHIP_FLOOR

FLOOR = tl.constexpr(MEMBERSHIP_FLOOR)


@triton.jit
def load_text(lengths_ptr, words_ptr, i_b, window):
    """Block length, words and used blocks of a row, the blocks that a query sees, and how many ranks back."""
    w = tl.load(lengths_ptr + i_b)
    n = tl.load(words_ptr + i_b)
    used = tl.cdiv(n, w)
    return w, n, used, tl.minimum(window, used), (tl.minimum(window, used + 1) - 1) * w


@triton.jit
def walk_of_queries(first, w, n, seen, TILE: tl.constexpr):
    """First and last + 1 virtual rank of the keys that a tile of queries, from rank `first` on, can see."""
    begin = (first // w - seen + 1) * w
    end = (tl.minimum(first + TILE, n) - 1) // w * w + w
    return begin, tl.where(first < n, end, begin)


@triton.jit
def walk_of_keys(first, w, n, seen, TILE: tl.constexpr):
    """First and last + 1 virtual rank of the queries that can see a tile of keys, from rank `first` on."""
    begin = first // w * w
    end = ((tl.minimum(first + TILE, n) - 1) // w + seen) * w
    return begin, tl.where(first < n, end, begin)


@triton.jit
def load_partners(order_ptr, labels_ptr, o_virtual, end, w, n, used):
    """Rank, virtual block, original index and label of virtual ranks, and which of them are words."""
    whole = used * w
    o_rank = tl.where(o_virtual < 0, o_virtual + whole, tl.where(o_virtual >= whole, o_virtual - whole, o_virtual))
    # One row more keeps the division of ranks below 0 exact.
    block = (o_virtual + whole) // w - used
    m_word = (o_virtual < end) & (o_rank < n) & (o_rank >= 0)
    index = tl.load(order_ptr + o_rank, mask=m_word, other=0)
    label = index
    if labels_ptr is not None:
        label = tl.load(labels_ptr + o_rank, mask=m_word, other=0)
    return o_rank, block, index, label, m_word


@triton.jit
def by_query(b_numbers, BY_KEY: tl.constexpr):
    """A number of each query where tiles are queries by keys, or (`BY_KEY`) keys by queries."""
    return b_numbers[None, :] if BY_KEY else b_numbers[:, None]


@triton.jit
def by_key(b_numbers, BY_KEY: tl.constexpr):
    """A number of each key, likewise."""
    return b_numbers[:, None] if BY_KEY else b_numbers[None, :]


@triton.jit
def meet(query, key, seen, reach, CAUSAL: tl.constexpr, HAS_LABELS: tl.constexpr, BY_KEY: tl.constexpr):
    """Which keys which queries see; both are what `load_partners` gave."""
    block_q, block_k = by_query(query[1], BY_KEY), by_key(key[1], BY_KEY)
    visible = by_query(query[4], BY_KEY) & by_key(key[4], BY_KEY) & (block_k <= block_q) & (block_k > block_q - seen)
    if CAUSAL:
        visible &= by_key(key[2], BY_KEY) <= by_query(query[2], BY_KEY)
    if HAS_LABELS:
        visible &= by_query(query[3], BY_KEY) == by_key(key[3], BY_KEY)
        visible &= by_query(query[0], BY_KEY) - by_key(key[0], BY_KEY) <= reach
    return visible


@triton.jit
def shared_membership(membership_ptr, a, b, stride_n, stride_c, clusters, PRECISION: tl.constexpr):
    """`P_a · P_b + 1e-4` of what `load_partners` gave, the many columns of `P` some at a time."""
    p_a, p_b = membership_ptr + a[2].to(tl.int64) * stride_n, membership_ptr + b[2].to(tl.int64) * stride_n
    return dot_by_parts(p_a, a[4], stride_c, p_b, b[4], stride_c, clusters, PRECISION) + FLOOR


@triton.jit
def pair_gradients(
    query, key, value, grad, b_bias, visible, b_lse, b_delta, D, Dv, scale_log2, seed_ptr, o_row, o_rank, N, dropout_p,
    KINDS: tl.constexpr, KIND: tl.constexpr, BY_KEY: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dS = A (dA - δ)` of operands, with a bias or None on their scores, and the weights `A` after dropout.

    For dropout queries `o_row` are numbered through, and keys have ranks.
    """
    if BY_KEY:
        b_scores = dot_rows(key, query, D, BY_PARTS, PRECISION) * scale_log2
        b_grad = dot_rows(value, grad, Dv, BY_PARTS, PRECISION)
    else:
        b_scores = dot_rows(query, key, D, BY_PARTS, PRECISION) * scale_log2
        b_grad = dot_rows(grad, value, Dv, BY_PARTS, PRECISION)
    if b_bias is not None:
        b_scores += b_bias
    b_factor = None
    if seed_ptr is not None:
        b_factor = dropout_factor(seed_ptr, o_row, o_rank, N, dropout_p, KINDS, KIND)
        if BY_KEY:
            b_factor = tl.trans(b_factor)
    b_lse, b_delta = by_query(b_lse, BY_KEY), by_query(b_delta, BY_KEY)
    return score_gradients(b_scores, visible, b_lse, b_delta, b_grad, b_factor)


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
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`dQ_i = scale · Σ_j dS_ij K_j`, with `dS = A (dA - δ)` and `δ_i = O_i · dO_i`, which is kept."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    i_b, i_h = i_p // H, i_p % H
    w, n, used, seen, reach = load_text(lengths_ptr, words_ptr, i_b, window)
    order_ptr += i_b * N
    if labels_ptr is not None:
        labels_ptr += i_b * N
    if membership_ptr is not None:
        membership_ptr += i_b * stride_membership_b
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h

    o_q = first + tl.arange(0, ROWS)
    begin, end = walk_of_queries(first, w, n, seen, ROWS)
    q = load_partners(order_ptr, labels_ptr, o_q, n, w, n, used)
    index_q = q[2].to(tl.int64)
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + index_q * stride_query_n
    p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h + index_q * stride_go_n
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h + index_q * stride_output_n
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    query = load_operand(p_query, q[4], stride_query_d, D, BLOCK_D)
    grad = load_operand(p_grad, q[4], stride_go_d, Dv, BLOCK_V)
    b_output = load_rows(p_output, q[4], stride_output_d, Dv, BLOCK_V).to(tl.float32)
    b_delta = tl.sum(b_output * grad[0].to(tl.float32), 1)
    m_row = o_q < N
    tl.store(delta_ptr + i_p * N + o_q, b_delta, mask=m_row)
    b_lse = tl.load(lse_ptr + i_p * N + o_q, mask=m_row, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)

    for start in range(begin, end, COLUMNS):
        o_k = start + tl.arange(0, COLUMNS)
        k = load_partners(order_ptr, labels_ptr, o_k, end, w, n, used)
        index_k = k[2].to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + index_k * stride_key_n, k[4], stride_key_d, D, BLOCK_D)
        value = load_operand(value_ptr + index_k * stride_value_n, k[4], stride_value_d, Dv, BLOCK_V)
        b_bias = None
        if membership_ptr is not None:
            b_bias = tl.log2(
                shared_membership(membership_ptr, q, k, stride_membership_n, stride_membership_c, clusters, PRECISION)
            )
        visible = meet(q, k, seen, reach, CAUSAL, labels_ptr is not None, False)
        b_grad_scores, _ = pair_gradients(
            query, key, value, grad, b_bias, visible, b_lse, b_delta, D, Dv, scale_log2,
            seed_ptr, i_p * N + q[0], k[0], N, dropout_p, KINDS, KIND, False, BY_PARTS, PRECISION,
        )  # fmt: skip
        # Loaded again: by parts, no row stays in registers meanwhile.
        b_key = load_rows(key[1], key[2], key[3], D, BLOCK_D)
        b_grad_query += tl.dot(b_grad_scores.to(b_key.dtype), b_key, input_precision=PRECISION)

    b_row = tl.load(order_ptr + o_q, mask=m_row, other=0).to(tl.int64)
    p_grad_query = grad_query_ptr + i_b * stride_gq_b + i_h * stride_gq_h + b_row * stride_gq_n
    store_rows(p_grad_query, b_grad_query * scale, m_row, stride_gq_d, D, BLOCK_D)


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
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`dV_j = Σ_i A_ij dO_i` and `dK_j = scale · Σ_i dS_ij Q_i` of a tile of keys, over the heads that share it."""
    heads = H // group
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    i_b, i_h = i_p // heads, i_p % heads
    w, n, used, seen, reach = load_text(lengths_ptr, words_ptr, i_b, window)
    order_ptr += i_b * N
    if labels_ptr is not None:
        labels_ptr += i_b * N
    if membership_ptr is not None:
        membership_ptr += i_b * stride_membership_b

    o_k = first + tl.arange(0, ROWS)
    begin, end = walk_of_keys(first, w, n, seen, ROWS)
    k = load_partners(order_ptr, labels_ptr, o_k, n, w, n, used)
    p_key = key_ptr + i_b * stride_key_b + i_h * stride_key_h + k[2].to(tl.int64) * stride_key_n
    p_value = value_ptr + i_b * stride_value_b + i_h * stride_value_h + k[2].to(tl.int64) * stride_value_n
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(p_key, k[4], stride_key_d, D, BLOCK_D)
    value = load_operand(p_value, k[4], stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)

    for start in range(begin, end, COLUMNS):
        o_q = start + tl.arange(0, COLUMNS)
        q = load_partners(order_ptr, labels_ptr, o_q, end, w, n, used)
        index_q = q[2].to(tl.int64)
        visible = meet(q, k, seen, reach, CAUSAL, labels_ptr is not None, True)
        b_bias = None
        if membership_ptr is not None:
            b_bias = tl.log2(
                shared_membership(membership_ptr, k, q, stride_membership_n, stride_membership_c, clusters, PRECISION)
            )
        for member in range(0, group):
            i_head = i_h * group + member
            i_row = (i_b * H + i_head) * N
            p_query = query_ptr + i_b * stride_query_b + i_head * stride_query_h + index_q * stride_query_n
            p_grad = grad_output_ptr + i_b * stride_go_b + i_head * stride_go_h + index_q * stride_go_n
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            query = load_operand(p_query, q[4], stride_query_d, D, BLOCK_D)
            grad = load_operand(p_grad, q[4], stride_go_d, Dv, BLOCK_V)
            b_lse = tl.load(lse_ptr + i_row + q[0], mask=q[4], other=0.0)
            b_delta = tl.load(delta_ptr + i_row + q[0], mask=q[4], other=0.0)
            b_grad_scores, b_dropped = pair_gradients(
                query, key, value, grad, b_bias, visible, b_lse, b_delta, D, Dv, scale_log2,
                seed_ptr, i_row + q[0], k[0], N, dropout_p, KINDS, KIND, True, BY_PARTS, PRECISION,
            )  # fmt: skip
            # Both loaded again: by parts, no row stays in registers meanwhile.
            b_grad = load_rows(p_grad, q[4], stride_go_d, Dv, BLOCK_V)
            b_grad_value += tl.dot(b_dropped.to(b_grad.dtype), b_grad, input_precision=PRECISION)
            b_query = load_rows(p_query, q[4], stride_query_d, D, BLOCK_D)
            b_grad_key += tl.dot(b_grad_scores.to(b_query.dtype), b_query, input_precision=PRECISION)

    m_row = o_k < N
    b_row = tl.load(order_ptr + o_k, mask=m_row, other=0).to(tl.int64)
    p_grad_key = grad_key_ptr + i_b * stride_gk_b + i_h * stride_gk_h + b_row * stride_gk_n
    store_rows(p_grad_key, b_grad_key * scale, m_row, stride_gk_d, D, BLOCK_D)
    p_grad_value = grad_value_ptr + i_b * stride_gv_b + i_h * stride_gv_h + b_row * stride_gv_n
    store_rows(p_grad_value, b_grad_value, m_row, stride_gv_d, Dv, BLOCK_V)


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
    AS_KEY: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`dP_i` of a tile of words as queries, or (`AS_KEY`) added to it what they get as keys: `Σ_j G_ij P_j`.

    `G = Σ_heads dS / (P_i · P_j + 1e-4)`, for some of the columns of `P`.
    """
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    w, n, used, seen, reach = load_text(lengths_ptr, words_ptr, i_b, window)
    order_ptr += i_b * N
    if labels_ptr is not None:
        labels_ptr += i_b * N
    membership_ptr += i_b * stride_membership_b
    o_row = first + tl.arange(0, ROWS)
    a = load_partners(order_ptr, labels_ptr, o_row, n, w, n, used)
    if AS_KEY:
        begin, end = walk_of_keys(first, w, n, seen, ROWS)
    else:
        begin, end = walk_of_queries(first, w, n, seen, ROWS)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    b_grad_membership = tl.zeros([ROWS, BLOCK_C], tl.float32)

    for start in range(begin, end, COLUMNS):
        o_b = start + tl.arange(0, COLUMNS)
        b = load_partners(order_ptr, labels_ptr, o_b, end, w, n, used)
        if AS_KEY:
            q, k = b, a
        else:
            q, k = a, b
        visible = meet(q, k, seen, reach, CAUSAL, labels_ptr is not None, AS_KEY)
        b_shared = shared_membership(
            membership_ptr, a, b, stride_membership_n, stride_membership_c, clusters, PRECISION
        )
        b_bias = tl.log2(b_shared)
        b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i_h in range(0, H):
            i_row = (i_b * H + i_h) * N
            p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h
            p_key = key_ptr + i_b * stride_key_b + i_h // group * stride_key_h
            p_value = value_ptr + i_b * stride_value_b + i_h // group * stride_value_h
            p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h
            query = load_operand(p_query + q[2].to(tl.int64) * stride_query_n, q[4], stride_query_d, D, BLOCK_D)
            key = load_operand(p_key + k[2].to(tl.int64) * stride_key_n, k[4], stride_key_d, D, BLOCK_D)
            value = load_operand(p_value + k[2].to(tl.int64) * stride_value_n, k[4], stride_value_d, Dv, BLOCK_V)
            grad = load_operand(p_grad + q[2].to(tl.int64) * stride_go_n, q[4], stride_go_d, Dv, BLOCK_V)
            b_lse = tl.load(lse_ptr + i_row + q[0], mask=q[4], other=0.0)
            b_delta = tl.load(delta_ptr + i_row + q[0], mask=q[4], other=0.0)
            b_grad_scores, _ = pair_gradients(
                query, key, value, grad, b_bias, visible, b_lse, b_delta, D, Dv, scale_log2,
                seed_ptr, i_row + q[0], k[0], N, dropout_p, KINDS, KIND, AS_KEY, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_sum += b_grad_scores
        p_membership = membership_ptr + b[2].to(tl.int64)[:, None] * stride_membership_n
        p_membership += o_c[None, :] * stride_membership_c
        # [COLUMNS, BLOCK_C]
        b_membership = tl.load(p_membership, mask=b[4][:, None] & (o_c < clusters)[None, :], other=0.0)
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
