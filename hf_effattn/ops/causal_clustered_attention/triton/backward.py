"""Kernels of the backward pass of causal attention over clusters, clusters and top keys held fixed.

With `p_ix` the weight of query `i` on column `x`, a key, a mean of keys or a remainder, `K_x`, `V_x` its key and value
and `δ_i = dV_i · V_i`: `dS_ix = p_ix (dV_i · V_x − δ_i)`, `dQ_i = scale Σ_x dS_ix K_x`, `dK_x = scale Σ_i dS_ix Q_i`
and `dV_x = Σ_i p_ix dV_i`. Weights are computed again from the log-sum-exp of the forward pass. Sizes and numbers of
columns as in `steps.py`.
"""

import triton
import triton.language as tl

from ...shared.triton.dropout import dropout_factor
from ...shared.triton.softmax import KIND, KINDS, column_step, dot_rows, query_step
from ...shared.triton.tiles import load_rows
from .steps import LENGTHS, blocks_of_level, clusters_of_block, load_count, load_group, load_summaries


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_bwd_query_kernel(
    grad_ptr, output_ptr, query_ptr, key_ptr, value_ptr, mean_key_ptr, mean_value_ptr, sizes_ptr, counts_ptr, seed_ptr,
    lse_ptr, delta_ptr, grad_query_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    H, group, N, D, Dv, segment_length, window_segments, served, levels, means, keys_per_cluster, key_clusters,
    segments, tiles, columns, scale, scale_log2, dropout_p,
    HAS_COUNTS: tl.constexpr, HAS_MEANS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`δ_i`, and `dQ_i` through local keys and means of key clusters, for queries of one segment."""
    i_tile = tl.program_id(0) % tiles
    i_segment = tl.program_id(0) // tiles % segments
    i_p = (tl.program_id(0) // tiles // segments).to(tl.int64)
    i_b, i_h, i_kh, i_pk = i_p // H, i_p % H, i_p % H // group, i_p // group
    first_row = i_segment * segment_length + i_tile * ROWS
    last_segment_row = tl.minimum((i_segment + 1) * segment_length, N)
    o_row = first_row + tl.arange(0, ROWS)
    b_row = o_row.to(tl.int64)
    o_state = i_p * N + b_row
    o_n, o_d = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D)
    last_row = tl.minimum(last_segment_row, load_count(counts_ptr, i_b, N, HAS_COUNTS))
    last_row = tl.minimum(last_row, first_row + ROWS)
    m_row = o_row < last_row
    older = tl.maximum(i_segment - window_segments, 0)
    grad_ptr += i_b * stride_grad_b + i_h * stride_grad_h
    output_ptr += i_b * stride_output_b + i_h * stride_output_h
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    p_query, p_grad = query_ptr + b_row * stride_query_n, grad_ptr + b_row * stride_grad_n
    # [ROWS, BLOCK_V]
    b_grad = load_rows(p_grad, m_row, stride_grad_d, Dv, BLOCK_V)
    b_output = load_rows(output_ptr + b_row * stride_output_n, m_row, stride_output_d, Dv, BLOCK_V)
    b_delta = tl.sum(b_grad.to(tl.float32) * b_output.to(tl.float32), 1)
    tl.store(delta_ptr + o_state, b_delta, mask=m_row)
    b_lse = tl.load(lse_ptr + o_state, mask=m_row, other=0.0)
    # [ROWS, BLOCK_D]
    b_query = load_rows(p_query, m_row, stride_query_d, D, BLOCK_D)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(older * segment_length, last_row, COLUMNS):
        o_m = start + o_n
        m_key = o_m < last_row
        b_m = o_m.to(tl.int64)
        b_grad_query = query_step(
            key_ptr + b_m * stride_key_m, stride_key_d, value_ptr + b_m * stride_value_m, stride_value_d,
            m_key, tl.zeros([COLUMNS], tl.float32), o_m[None, :] <= o_row[:, None], b_grad_query,
            b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
            D, Dv, scale_log2, seed_ptr, o_state, o_m, columns, dropout_p,
            HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
        )  # fmt: skip
    if HAS_MEANS:
        base = 0
        first_column = 0
        for level in range(levels):
            G = clusters_of_block(level, segment_length, keys_per_cluster, key_clusters)
            o_block = i_pk * means + base + (older >> (level + 1)) * G
            for start in range(0, ((older >> level) & 1) * G, COLUMNS):
                o_g = start + o_n
                m_g = o_g < G
                b_size = tl.load(sizes_ptr + o_block + o_g, mask=m_g, other=0)
                m_pair = m_row[:, None] & (b_size > 0)[None, :]
                b_grad_query = query_step(
                    mean_key_ptr + (o_block + o_g) * D, 1, mean_value_ptr + (o_block + o_g) * Dv, 1,
                    m_g, tl.log2(tl.maximum(b_size, 1).to(tl.float32)), m_pair, b_grad_query,
                    b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
                    D, Dv, scale_log2, seed_ptr, o_state, N + first_column + o_g, columns, dropout_p,
                    HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
                )  # fmt: skip
            base += blocks_of_level(level, served) * G
            first_column += G
    m_query = (o_row < tl.minimum(last_segment_row, first_row + ROWS))[:, None] & (o_d < D)[None, :]
    tl.store(grad_query_ptr + o_state[:, None] * D + o_d[None, :], b_grad_query * scale, mask=m_query)


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_bwd_key_kernel(
    grad_ptr, query_ptr, key_ptr, value_ptr, counts_ptr, seed_ptr, lse_ptr, delta_ptr, grad_key_ptr, grad_value_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    H, group, N, D, Dv, segment_length, window_segments, segments, tiles, columns, scale, scale_log2, dropout_p,
    HAS_COUNTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t` and `dV_t` of keys of one segment, from the queries that see them exactly by their place."""
    i_tile = tl.program_id(0) % tiles
    i_segment = tl.program_id(0) // tiles % segments
    i_pk = (tl.program_id(0) // tiles // segments).to(tl.int64)
    key_heads = H // group
    i_b, i_kh = i_pk // key_heads, i_pk % key_heads
    count = load_count(counts_ptr, i_b, N, HAS_COUNTS)
    first_key = i_segment * segment_length + i_tile * COLUMNS
    last_key = tl.minimum(tl.minimum((i_segment + 1) * segment_length, first_key + COLUMNS), N)
    o_m = first_key + tl.arange(0, COLUMNS)
    m_key = o_m < tl.minimum(last_key, count)
    b_m = o_m.to(tl.int64)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_key = key_ptr + i_b * stride_key_b + i_kh * stride_key_h + b_m * stride_key_m
    p_value = value_ptr + i_b * stride_value_b + i_kh * stride_value_h + b_m * stride_value_m
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
    b_value = load_rows(p_value, m_key, stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    b_bias = tl.zeros([COLUMNS], tl.float32)
    last_row = tl.minimum((i_segment + window_segments + 1) * segment_length, count)
    for i_p in range(i_pk * group, (i_pk + 1) * group):
        grad_head_ptr = grad_ptr + i_b * stride_grad_b + i_p % H * stride_grad_h
        query_head_ptr = query_ptr + i_b * stride_query_b + i_p % H * stride_query_h
        for start in range(first_key, last_row, ROWS):
            o_row = start + tl.arange(0, ROWS)
            m_row = o_row < last_row
            b_row = o_row.to(tl.int64)
            o_state = i_p * N + b_row
            m_pair = m_key[:, None] & m_row[None, :] & (o_m[:, None] <= o_row[None, :])
            b_grad_key, b_grad_value = column_step(
                b_key, p_key, stride_key_d, b_value, p_value, stride_value_d, m_key, b_bias, m_pair,
                b_grad_key, b_grad_value, query_head_ptr + b_row * stride_query_n, stride_query_d,
                grad_head_ptr + b_row * stride_grad_n, stride_grad_d, m_row, lse_ptr + o_state, delta_ptr + o_state,
                D, Dv, scale_log2, seed_ptr, o_state, o_m, columns, dropout_p,
                HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
    m_store = (o_m < last_key)[:, None]
    o_key = i_pk * N + b_m
    p_grad_key, p_grad_value = grad_key_ptr + o_key[:, None] * D, grad_value_ptr + o_key[:, None] * Dv
    tl.store(p_grad_key + o_d[None, :], b_grad_key * scale, mask=m_store & (o_d < D)[None, :])
    tl.store(p_grad_value + o_v[None, :], b_grad_value, mask=m_store & (o_v < Dv)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_bwd_means_kernel(
    grad_ptr, query_ptr, mean_key_ptr, mean_value_ptr, sizes_ptr, counts_ptr, seed_ptr, lse_ptr, delta_ptr,
    grad_mean_key_ptr, grad_mean_value_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    H, group, N, D, Dv, segment_length, window_segments, means, clusters, base, first_column, readers, blocks, tiles,
    splits, split_rows, columns, scale, scale_log2, dropout_p,
    HAS_COUNTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `dK̄_c` and `dV̄_c` of some key clusters of a block, from some of the `readers` queries that see the block.

    They stand together: those of as many segments as the block has, which begin a window behind its end.
    """
    i_split = tl.program_id(0) % splits
    i_tile = tl.program_id(0) // splits % tiles
    i_block = tl.program_id(0) // splits // tiles % blocks
    i_pk = (tl.program_id(0) // splits // tiles // blocks).to(tl.int64)
    i_b = i_pk // (H // group)
    o_g = i_tile * COLUMNS + tl.arange(0, COLUMNS)
    m_g = o_g < clusters
    o_mean = i_pk * means + base + i_block * clusters + o_g
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    first_reader = window_segments * segment_length + (2 * i_block + 1) * readers
    last_row = tl.minimum(first_reader + readers, load_count(counts_ptr, i_b, N, HAS_COUNTS))
    first_row = first_reader + i_split * split_rows
    last_row = tl.minimum(last_row, first_row + split_rows)
    if first_row >= last_row:
        return
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    p_key, p_value = mean_key_ptr + o_mean * D, mean_value_ptr + o_mean * Dv
    b_key = load_rows(p_key, m_g, 1, D, BLOCK_D)
    b_value = load_rows(p_value, m_g, 1, Dv, BLOCK_V)
    b_size = tl.load(sizes_ptr + o_mean, mask=m_g, other=0)
    b_bias = tl.log2(tl.maximum(b_size, 1).to(tl.float32))
    b_grad_key = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    for i_p in range(i_pk * group, (i_pk + 1) * group):
        grad_head_ptr = grad_ptr + i_b * stride_grad_b + i_p % H * stride_grad_h
        query_head_ptr = query_ptr + i_b * stride_query_b + i_p % H * stride_query_h
        for start in range(first_row, last_row, ROWS):
            o_row = start + tl.arange(0, ROWS)
            m_row = o_row < last_row
            b_row = o_row.to(tl.int64)
            o_state = i_p * N + b_row
            b_grad_key, b_grad_value = column_step(
                b_key, p_key, 1, b_value, p_value, 1, m_g, b_bias, (b_size > 0)[:, None] & m_row[None, :],
                b_grad_key, b_grad_value, query_head_ptr + b_row * stride_query_n, stride_query_d,
                grad_head_ptr + b_row * stride_grad_n, stride_grad_d, m_row, lse_ptr + o_state, delta_ptr + o_state,
                D, Dv, scale_log2, seed_ptr, o_state, N + first_column + o_g, columns, dropout_p,
                HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
    p_grad_key = grad_mean_key_ptr + o_mean[:, None] * D + o_d[None, :]
    p_grad_value = grad_mean_value_ptr + o_mean[:, None] * Dv + o_v[None, :]
    tl.atomic_add(p_grad_key, b_grad_key * scale, mask=m_g[:, None] & (o_d < D)[None, :], sem="relaxed")
    tl.atomic_add(p_grad_value, b_grad_value, mask=m_g[:, None] & (o_v < Dv)[None, :], sem="relaxed")


@triton.jit
def _group_step(
    p_key, stride_key_d, p_value, stride_value_d, m_column, p_grad_key, p_grad_value, b_grad_query,
    b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
    D, Dv, scale, scale_log2, seed_ptr, o_row, o_column, columns, dropout_p,
    TAKEN: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `Σ_x dS_ix K_x` over columns `x` at the pointers, and theirs to the gradients at the pointers.

    With `TAKEN` the columns were taken out of the softmax: their weights are negative.
    """
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    b_key = load_rows(p_key, m_column, stride_key_d, D, BLOCK_D)
    b_value = load_rows(p_value, m_column, stride_value_d, Dv, BLOCK_V)
    b_scores = dot_rows(
        b_query, b_key, p_query, m_row, stride_query_d, p_key, m_column, stride_key_d, D,
        ROWS, COLUMNS, BY_PARTS, PRECISION,
    )  # fmt: skip
    m_pair = m_row[:, None] & m_column[None, :]
    b_weights = tl.exp2(tl.where(m_pair, b_scores * scale_log2 - b_lse[:, None], float("-inf")))
    if TAKEN:
        b_weights = -b_weights
    b_grad_weights = dot_rows(
        b_grad, b_value, p_grad, m_row, stride_grad_d, p_value, m_column, stride_value_d, Dv,
        ROWS, COLUMNS, BY_PARTS, PRECISION,
    )  # fmt: skip
    b_dropped = b_weights
    if HAS_DROPOUT:
        b_factor = dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
        b_dropped = b_weights * b_factor
        b_grad_weights *= b_factor
    b_grad_scores = (b_weights * (b_grad_weights - b_delta[:, None])).to(b_key.dtype)
    b_grad_query += tl.dot(b_grad_scores, b_key, input_precision=PRECISION)
    b_grad_value = tl.dot(tl.trans(b_dropped.to(b_grad.dtype)), b_grad, input_precision=PRECISION)
    m_column_v = m_column[:, None] & (o_v < Dv)[None, :]
    tl.atomic_add(p_grad_value[:, None] + o_v[None, :], b_grad_value, mask=m_column_v, sem="relaxed")
    b_grad_key = tl.dot(tl.trans(b_grad_scores), b_query, input_precision=PRECISION) * scale
    m_column_d = m_column[:, None] & (o_d < D)[None, :]
    tl.atomic_add(p_grad_key[:, None] + o_d[None, :], b_grad_key, mask=m_column_d, sem="relaxed")
    return b_grad_query


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_bwd_group_kernel(
    grad_ptr, query_ptr, key_ptr, value_ptr, mean_key_ptr, mean_value_ptr, rest_lse_ptr, rest_mean_ptr, top_ptr,
    labels_ptr, members_ptr, counts_ptr, seed_ptr, lse_ptr, delta_ptr,
    grad_query_ptr, grad_key_ptr, grad_value_ptr, grad_mean_key_ptr, grad_mean_value_ptr, alpha_ptr, beta_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    H, group, N, D, Dv, segment_length, window_segments, served, levels, means, keys_per_cluster, key_clusters,
    clusters, topk, columns, scale, scale_log2, dropout_p,
    HAS_COUNTS: tl.constexpr, HAS_MEANS: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients through the top keys of queries of one cluster and segment, and what goes with these keys.

    That are the means they are part of, with `HAS_MEANS`, or else `α` and `β` of the cluster's remainder, see
    `triton_walk`.
    """
    s = tl.program_id(0) % segment_length
    i_u = tl.program_id(0) // segment_length % served
    i_p = (tl.program_id(0) // segment_length // served).to(tl.int64)
    i_b, i_h, i_kh, i_pk = i_p // H, i_p % H, i_p % H // group, i_p // group
    first_row = (i_u + window_segments + 1) * segment_length
    rows = tl.minimum(segment_length, load_count(counts_ptr, i_b, N, HAS_COUNTS) - first_row)
    if s >= rows:
        return
    is_opener, label, b_place, m_row = load_group(labels_ptr + i_p * N + first_row, s, rows, ROWS, BLOCK_S)
    if not is_opener:
        return
    b_row = (first_row + b_place).to(tl.int64)
    i_table = (i_p * served + i_u) * clusters + label
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    top_ptr += i_table * topk
    o_n, o_d, o_v = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    o_row = i_p * N + b_row
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + b_row * stride_query_n
    p_grad = grad_ptr + i_b * stride_grad_b + i_h * stride_grad_h + b_row * stride_grad_n
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_query = load_rows(p_query, m_row, stride_query_d, D, BLOCK_D)
    b_grad = load_rows(p_grad, m_row, stride_grad_d, Dv, BLOCK_V)
    # [ROWS]
    b_lse = tl.load(lse_ptr + o_row, mask=m_row, other=0.0)
    b_delta = tl.load(delta_ptr + o_row, mask=m_row, other=0.0)
    if topk > 0:
        b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for start in range(0, topk, COLUMNS):
            # [COLUMNS]
            b_top = tl.load(top_ptr + start + o_n, mask=start + o_n < topk, other=-1).to(tl.int64)
            m_top = b_top >= 0
            o_key = i_pk * N + b_top
            b_grad_query = _group_step(
                key_ptr + b_top * stride_key_m, stride_key_d, value_ptr + b_top * stride_value_m, stride_value_d,
                m_top, grad_key_ptr + o_key * D, grad_value_ptr + o_key * Dv, b_grad_query,
                b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
                D, Dv, scale, scale_log2, seed_ptr, o_row, b_top, columns, dropout_p,
                False, HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
            if HAS_MEANS:
                b_mean, b_column = load_summaries(
                    members_ptr, b_top, m_top, i_pk, i_u + 1, N, levels, served, segment_length, keys_per_cluster,
                    key_clusters,
                )  # fmt: skip
                o_mean = i_pk * means + b_mean
                b_grad_query = _group_step(
                    mean_key_ptr + o_mean * D, 1, mean_value_ptr + o_mean * Dv, 1,
                    m_top, grad_mean_key_ptr + o_mean * D, grad_mean_value_ptr + o_mean * Dv, b_grad_query,
                    b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
                    D, Dv, scale, scale_log2, seed_ptr, o_row, b_column, columns, dropout_p,
                    True, HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
                )  # fmt: skip
        p_grad_query = grad_query_ptr + o_row[:, None] * D + o_d[None, :]
        m_query = m_row[:, None] & (o_d < D)[None, :]
        b_grad_query = b_grad_query * scale + tl.load(p_grad_query, mask=m_query, other=0.0)
        tl.store(p_grad_query, b_grad_query, mask=m_query)
    if not HAS_MEANS:
        rest_lse = tl.load(rest_lse_ptr + i_table)
        # [BLOCK_V]
        b_rest = tl.load(rest_mean_ptr + i_table * Dv + o_v, mask=o_v < Dv, other=0.0)
        b_weight = tl.where(m_row, tl.exp2(rest_lse - b_lse), 0.0)
        b_factor = tl.full([ROWS], 1.0, tl.float32)
        if HAS_DROPOUT:
            o_rest = N + tl.zeros([1], tl.int32)
            b_factor = tl.sum(dropout_factor(seed_ptr, o_row, o_rest, columns, dropout_p, KINDS, KIND), 1)
        # [BLOCK_V]
        b_beta = tl.sum((b_weight * b_factor)[:, None] * b_grad.to(tl.float32), 0)
        b_grad_weight = tl.sum(b_grad.to(tl.float32) * b_rest[None, :], 1) * b_factor
        alpha = tl.sum(b_weight * (b_grad_weight - b_delta), 0) - tl.sum(b_beta * b_rest, 0)
        tl.atomic_add(alpha_ptr + i_table, alpha, sem="relaxed")
        tl.atomic_add(beta_ptr + i_table * Dv + o_v, b_beta, mask=o_v < Dv, sem="relaxed")


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_bwd_spread_kernel(
    sums_ptr, shares_ptr, members_ptr, target_ptr,
    stride_target_b, stride_target_h, stride_target_n, stride_target_d,
    heads, N, D, tables, shares, blocks,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of rows: `sums` `(P, N, D)` and their shares in the gradients of the means they are in.

    `members` `(P, tables, N)` has the row of each mean in `shares` `(P, shares, D)`, -1 for none.
    """
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    o_n = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    m_n = o_n < N
    o_d = tl.arange(0, BLOCK_D)
    b_n = o_n.to(tl.int64)
    # [ROWS, BLOCK_D]
    b_grad = load_rows(sums_ptr + (i_p * N + b_n) * D, m_n, 1, D, BLOCK_D)
    for table in range(tables):
        b_member = tl.load(members_ptr + (i_p * tables + table) * N + b_n, mask=m_n, other=-1)
        b_grad += load_rows(shares_ptr + (i_p * shares + b_member) * D, b_member >= 0, 1, D, BLOCK_D)
    p_target = target_ptr + i_p // heads * stride_target_b + i_p % heads * stride_target_h
    p_target += b_n[:, None] * stride_target_n + o_d[None, :] * stride_target_d
    tl.store(p_target, b_grad, mask=m_n[:, None] & (o_d < D)[None, :])
