"""Kernels of the backward pass of causal attention over clusters on a GPU, labels and exact keys held fixed.

Of a query's softmax `p` over local keys, exact keys and summaries: `dS = p (dO·V - δ)`, of which local and exact keys
get what exact attention gives them. A summary of cluster `c` at centroid `j` gets `dK̃_jc = Σ_i dS_ic (Q_i - Q̄_j)`,
`dṼ_jc` and `db_jc`; with `a_jt` the share of key `t` in it, `ds_jt = a_jt (db_jc + dK̃_jc·(K_t - K̃_jc) +
dṼ_jc·(V_t - Ṽ_jc))`, and then `dK_t = Σ_j a_jt dK̃_jc + ds_jt Q̄_j`, `dV_t = Σ_j a_jt dṼ_jc` and `dQ̄_j = Σ_t ds_jt K_t -
Σ_c db_jc K̃_jc`.

Gradients of tables are kept over the queries that read them, in range in float16. All sums are in float32.
"""

import triton
import triton.language as tl

from ...shared.triton.cluster_table import is_exact, load_top, score_gradients
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import KIND, KINDS, dot_rows
from ...shared.triton.tiles import load_rows, load_tile
from .local import NEAR_KIND
from .older import load_bits


@triton.jit
def add_of_keys(
    b_query, p_query, b_grad, p_grad, m_row, b_lse, b_delta, key_ptr, value_ptr, seed_ptr, o_row, b_place, m_key,
    m_pair, b_grad_query, D, Dv, rows_of_keys, scale_log2, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What queries get from rows of contiguous keys and values, added to their gradient without the scale."""
    p_key, p_value = key_ptr + b_place * D, value_ptr + b_place * Dv
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    b_key = load_rows(p_key, m_key, 1, D, BLOCK_D)
    b_value = load_rows(p_value, m_key, 1, Dv, BLOCK_V)
    b_scores = dot_rows(
        b_query, b_key, p_query, m_row, 1, p_key, m_key, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
    )  # fmt: skip
    b_grad_weights = dot_rows(
        b_grad, b_value, p_grad, m_row, 1, p_value, m_key, 1, Dv, ROWS, COLUMNS, BY_PARTS, PRECISION
    )  # fmt: skip
    b_factor = b_delta[:, None]
    if HAS_DROPOUT:
        b_factor = dropout_factor(seed_ptr, o_row, b_place, rows_of_keys, dropout_p, KINDS, NEAR_KIND)
    b_grad_scores, _ = score_gradients(
        b_scores * scale_log2, m_pair, b_lse[:, None], b_delta[:, None], b_grad_weights, b_factor, HAS_DROPOUT
    )
    return tl.dot(b_grad_scores.to(b_key.dtype), b_key, b_grad_query, input_precision=PRECISION)


@triton.jit
def add_of_queries(
    b_key, p_key, b_value, p_value, m_key, query_ptr, grad_ptr, lse_ptr, delta_ptr, seed_ptr, o_row, b_place, m_query,
    m_pair, b_grad_key, b_grad_value, D, Dv, rows_of_keys, scale_log2, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What keys and values get from contiguous rows of queries, added to their gradients without the scale."""
    p_query, p_grad = query_ptr + o_row * D, grad_ptr + o_row * Dv
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    b_query = load_rows(p_query, m_query, 1, D, BLOCK_D)
    b_grad = load_rows(p_grad, m_query, 1, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + o_row, mask=m_query, other=float("inf"))
    b_delta = tl.load(delta_ptr + o_row, mask=m_query, other=0.0)
    b_scores = dot_rows(
        b_key, b_query, p_key, m_key, 1, p_query, m_query, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
    )  # fmt: skip
    b_grad_weights = dot_rows(
        b_value, b_grad, p_value, m_key, 1, p_grad, m_query, 1, Dv, ROWS, COLUMNS, BY_PARTS, PRECISION
    )  # fmt: skip
    b_factor = b_delta[None, :]
    if HAS_DROPOUT:
        b_factor = tl.trans(dropout_factor(seed_ptr, o_row, b_place, rows_of_keys, dropout_p, KINDS, NEAR_KIND))
    b_grad_scores, b_weights = score_gradients(
        b_scores * scale_log2, m_pair, b_lse[None, :], b_delta[None, :], b_grad_weights, b_factor, HAS_DROPOUT
    )
    b_grad_value = tl.dot(b_weights.to(b_grad.dtype), b_grad, b_grad_value, input_precision=PRECISION)
    b_grad_key = tl.dot(b_grad_scores.to(b_query.dtype), b_query, b_grad_key, input_precision=PRECISION)
    return b_grad_key, b_grad_value


@kernel
def _causal_attention_bwd_near_query_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, seed_ptr, top_ptr, exact_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    group, N, rows_of_queries, rows_of_keys, D, Dv, first_segment, segment_length, window, shift, topk, segments,
    tiles, scale, scale_log2, dropout_p,
    HAS_TOP: tl.constexpr, HAS_EXACT: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What `ROWS` queries of a segment get from the keys that they attend to one by one."""
    i_tile = tiles - 1 - tl.program_id(0) % tiles
    i_late = tl.program_id(0) // tiles % segments
    i_p = (tl.program_id(0) // (tiles * segments)).to(tl.int64)
    start = (first_segment + i_late) * segment_length
    o_own = i_tile * ROWS + tl.arange(0, ROWS)
    o_token = start + o_own
    m_row = (o_own < segment_length) & (o_token < N)
    first = tl.maximum(0, start - window)
    heads = tl.num_programs(0) // (tiles * segments)
    exact = False
    if HAS_EXACT:
        exact = tl.load(exact_ptr + i_late * (heads // group) + i_p // group) != 0
        first = tl.where(exact, 0, first)
    last = tl.minimum(N, start + tl.minimum(segment_length, (i_tile + 1) * ROWS))
    key_ptr += i_p // group * rows_of_keys * D
    value_ptr += i_p // group * rows_of_keys * Dv
    o_row = i_p * rows_of_queries + o_token
    p_query, p_grad = query_ptr + o_row * D, grad_ptr + o_row * Dv
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_query = load_rows(p_query, m_row, 1, D, BLOCK_D)
    b_grad = load_rows(p_grad, m_row, 1, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + o_row, mask=m_row, other=float("inf"))
    b_delta = tl.load(delta_ptr + o_row, mask=m_row, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for begin in range(first, last, COLUMNS):
        o_key = begin + tl.arange(0, COLUMNS)
        b_grad_query = add_of_keys(
            b_query, p_query, b_grad, p_grad, m_row, b_lse, b_delta, key_ptr, value_ptr, seed_ptr, o_row,
            (shift + o_key).to(tl.int64), o_key < last, o_key[None, :] <= o_token[:, None], b_grad_query, D, Dv,
            rows_of_keys, scale_log2, dropout_p, HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
        )  # fmt: skip
    if HAS_TOP:
        top_ptr += (i_late.to(tl.int64) * heads + i_p) * topk
        for begin in range(0, tl.where(exact, 0, topk), COLUMNS):
            b_top, m_top = load_top(top_ptr, begin + tl.arange(0, COLUMNS), topk)
            b_grad_query = add_of_keys(
                b_query, p_query, b_grad, p_grad, m_row, b_lse, b_delta, key_ptr, value_ptr, seed_ptr, o_row, b_top,
                m_top, m_top[None, :], b_grad_query, D, Dv, rows_of_keys, scale_log2, dropout_p,
                HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
    o_d = tl.arange(0, BLOCK_D)
    p_out = grad_query_ptr + o_row[:, None] * D + o_d[None, :]
    tl.store(p_out, b_grad_query * scale, mask=m_row[:, None] & (o_d < D)[None, :])


@kernel
def _causal_attention_bwd_near_key_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, seed_ptr, exact_ptr, lse_ptr, delta_ptr, grads_ptr,
    group, N, rows_of_queries, rows_of_keys, D, Dv, first_late, segment_length, window, shift, tiles, scale,
    scale_log2, dropout_p,
    HAS_EXACT: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t`, `dV_t` of `ROWS` keys, from the queries of their segment and of those in whose window they are.

    And from all later ones of segments that are exact.
    """
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    key_heads = tl.num_programs(0) // tiles
    start = tl.program_id(0) % tiles * ROWS
    o_key = start + tl.arange(0, ROWS)
    m_key = o_key < N
    o_place = i_p * rows_of_keys + shift + o_key
    p_key, p_value = key_ptr + o_place * D, value_ptr + o_place * Dv
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_key = load_rows(p_key, m_key, 1, D, BLOCK_D)
    b_value = load_rows(p_value, m_key, 1, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    segments = tl.cdiv(N, segment_length)
    if not HAS_EXACT:  # the last one in whose window the last of the keys is
        segments = tl.minimum(segments, (start + ROWS - 1 + window) // segment_length + 1)
    for head in range(0, group):
        o_head = (i_p * group + head) * rows_of_queries
        for segment in range(start // segment_length, segments):
            first = segment * segment_length
            last = tl.minimum(N, first + segment_length)
            exact = False
            if HAS_EXACT:
                p_exact = exact_ptr + (segment - first_late) * key_heads + i_p
                exact = tl.load(p_exact, mask=segment >= first_late, other=0) != 0
                last = tl.where(exact | (first - window < start + ROWS), last, first)
            for begin in range(tl.maximum(first, start), last, COLUMNS):
                o_query = begin + tl.arange(0, COLUMNS)
                m_query = o_query < last
                m_seen = ((first - window <= o_key) | exact)[:, None]
                m_pair = m_seen & m_query[None, :] & (o_key[:, None] <= o_query[None, :])
                b_grad_key, b_grad_value = add_of_queries(
                    b_key, p_key, b_value, p_value, m_key, query_ptr, grad_ptr, lse_ptr, delta_ptr, seed_ptr,
                    o_head + o_query, (shift + o_key).to(tl.int64), m_query, m_pair, b_grad_key, b_grad_value, D, Dv,
                    rows_of_keys, scale_log2, dropout_p,
                    HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
                )  # fmt: skip
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_out = grads_ptr + o_place[:, None] * (D + Dv)
    tl.store(p_out + o_d[None, :], b_grad_key * scale, mask=m_key[:, None] & (o_d < D)[None, :])
    tl.store(p_out + D + o_v[None, :], b_grad_value, mask=m_key[:, None] & (o_v < Dv)[None, :])


@kernel
def _causal_attention_bwd_top_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, seed_ptr, top_ptr, exact_ptr, lse_ptr, delta_ptr, shares_ptr,
    heads, group, N, rows_of_queries, rows_of_keys, D, Dv, first_segment, segment_length, topk, blocks, scale,
    scale_log2, dropout_p,
    HAS_EXACT: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t` and `dV_t` side by side of `ROWS` exact keys of a query head of a segment, from all its queries."""
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_head = i_p % heads
    o_t = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    b_top, m_top = load_top(top_ptr + i_p * topk, o_t, topk)
    p_key = key_ptr + (i_head // group * rows_of_keys + b_top) * D
    p_value = value_ptr + (i_head // group * rows_of_keys + b_top) * Dv
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_key = load_rows(p_key, m_top, 1, D, BLOCK_D)
    b_value = load_rows(p_value, m_top, 1, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    first = ((first_segment + i_p // heads) * segment_length).to(tl.int32)
    last = tl.minimum(N, first + segment_length)
    last = tl.where(is_exact(exact_ptr, i_p // group, HAS_EXACT), first, last)
    o_head = i_head * rows_of_queries
    for begin in range(first, last, COLUMNS):
        o_query = begin + tl.arange(0, COLUMNS)
        m_query = o_query < last
        b_grad_key, b_grad_value = add_of_queries(
            b_key, p_key, b_value, p_value, m_top, query_ptr, grad_ptr, lse_ptr, delta_ptr, seed_ptr, o_head + o_query,
            b_top, m_query, m_top[:, None] & m_query[None, :], b_grad_key, b_grad_value, D, Dv, rows_of_keys,
            scale_log2, dropout_p, HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
        )  # fmt: skip
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_out, m_out = shares_ptr + (i_p * topk + o_t)[:, None] * (D + Dv), (o_t < topk)[:, None]
    tl.store(p_out + o_d[None, :], b_grad_key * scale, mask=m_out & (o_d < D)[None, :])
    tl.store(p_out + D + o_v[None, :], b_grad_value, mask=m_out & (o_v < Dv)[None, :])


@kernel
def _causal_attention_bwd_older_query_kernel(
    query_ptr, grad_ptr, seed_ptr, exact_ptr, order_ptr, starts_ptr, tiles_ptr, table_key_ptr, table_value_ptr,
    bias_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    heads, group, N, rows_of_queries, D, Dv, clusters, key_clusters, first_late, first_segment, segment_length,
    columns, tiles, scale, scale_log2, dropout_p,
    HAS_EXACT: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of a tile of queries of one cluster what they get from the summaries."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _place, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, segment_length, clusters, tiles, ROWS
    )  # fmt: skip
    i_late = i_p // heads
    b_token = (first_segment + i_late) * segment_length + b_row
    m_row = m_row & (b_token < N) & (cluster < clusters)
    if (tl.max(m_row.to(tl.int32), 0) == 0) | is_exact(exact_ptr, i_p // group, HAS_EXACT):
        return
    o_row = i_p % heads * rows_of_queries + b_token
    p_query, p_grad = query_ptr + o_row * D, grad_ptr + o_row * Dv
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_query = load_rows(p_query, m_row, 1, D, BLOCK_D)
    b_grad = load_rows(p_grad, m_row, 1, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + o_row, mask=m_row, other=float("inf"))
    b_delta = tl.load(delta_ptr + o_row, mask=m_row, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    o_table = (i_p * clusters + tl.minimum(cluster, clusters - 1)) * columns
    seen = (first_late + i_late + 1) * key_clusters
    for first in range(0, seen, COLUMNS):
        o_g = first + tl.arange(0, COLUMNS)
        m_g = o_g < seen
        p_key, p_value = table_key_ptr + (o_table + o_g) * D, table_value_ptr + (o_table + o_g) * Dv
        b_key = load_rows(p_key, m_g, 1, D, BLOCK_D)
        b_value = load_rows(p_value, m_g, 1, Dv, BLOCK_V)
        b_bias = tl.load(bias_ptr + o_table + o_g, mask=m_g, other=float("-inf"))
        b_scores = dot_rows(
            b_query, b_key, p_query, m_row, 1, p_key, m_g, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
        )  # fmt: skip
        b_grad_weights = dot_rows(
            b_grad, b_value, p_grad, m_row, 1, p_value, m_g, 1, Dv, ROWS, COLUMNS, BY_PARTS, PRECISION
        )  # fmt: skip
        b_factor = b_delta[:, None]
        if HAS_DROPOUT:
            o_drawn = i_p * segment_length + b_row
            b_factor = dropout_factor(seed_ptr, o_drawn, o_g, columns, dropout_p, KINDS, KIND)
        b_grad_scores, _ = score_gradients(
            b_scores * scale_log2 + b_bias[None, :], m_g[None, :], b_lse[:, None], b_delta[:, None], b_grad_weights,
            b_factor, HAS_DROPOUT,
        )  # fmt: skip
        b_grad_query = tl.dot(b_grad_scores.to(b_key.dtype), b_key, b_grad_query, input_precision=PRECISION)
    o_d = tl.arange(0, BLOCK_D)
    p_out, m_out = grad_query_ptr + o_row[:, None] * D + o_d[None, :], m_row[:, None] & (o_d < D)[None, :]
    tl.store(p_out, tl.load(p_out, mask=m_out, other=0.0) + b_grad_query * scale, mask=m_out)


@triton.jit
def load_sizes(starts_ptr, i_p, group, o_r, m_r, clusters):
    """How many queries read each of the tables `o_r` of the query heads that share keys, whose starts are apart."""
    p_start = starts_ptr + i_p * group * (clusters + 2) + o_r + o_r // clusters * 2
    return (tl.load(p_start + 1, mask=m_r, other=0) - tl.load(p_start, mask=m_r, other=0)).to(tl.float32)


@kernel
def _causal_attention_bwd_older_key_kernel(
    centroids_ptr, key_ptr, value_ptr, taken_ptr, exact_ptr, starts_ptr, order_ptr, key_starts_ptr, tiles_ptr,
    log_mass_ptr, constant_ptr, table_grad_key_ptr, table_grad_value_ptr, grads_ptr,
    key_heads, group, rows, rows_of_keys, D, Dv, clusters, key_clusters, first_late, segment_length, blocks, segments,
    tiles, mean_size, scale, scale_log2,
    HAS_TAKEN: tl.constexpr, HAS_EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to `dK_t` and `dV_t` of a tile of keys of one cluster what they get from the tables of some segments."""
    i_sorted = (tl.program_id(0) // tiles).to(tl.int64)
    i_block, i_key_head = i_sorted // key_heads, i_sorted % key_heads
    i_c, _, m_key, b_row = load_tile(
        order_ptr, key_starts_ptr, tiles_ptr, i_sorted, tl.program_id(0) % tiles, segment_length, key_clusters, tiles,
        ROWS,
    )  # fmt: skip
    m_key = m_key & (i_c < key_clusters)
    if tl.max(m_key.to(tl.int32), 0) == 0:
        return
    b_place = i_block * segment_length + b_row
    o_key = i_key_head * rows_of_keys + b_place
    p_key, p_value = key_ptr + o_key * D, value_ptr + o_key * Dv
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_key = load_rows(p_key, m_key, 1, D, BLOCK_D)
    b_value = load_rows(p_value, m_key, 1, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    i_cluster = i_block * key_clusters + tl.minimum(i_c, key_clusters - 1)
    for i_late in range(tl.maximum(0, i_block - first_late), segments):
        i_p = i_late * key_heads + i_key_head
        for first in range(0, tl.where(is_exact(exact_ptr, i_p, HAS_EXACT), 0, rows), COLUMNS):
            o_r = first + tl.arange(0, COLUMNS)
            m_r = o_r < rows
            o_row = i_p * rows + o_r
            o_table = o_row * (blocks * key_clusters) + i_cluster
            p_centroid = centroids_ptr + o_row * D
            p_grad_key, p_grad_value = table_grad_key_ptr + o_table * D, table_grad_value_ptr + o_table * Dv
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            b_centroid = load_rows(p_centroid, m_r, 1, D, BLOCK_D)
            b_table_key = load_rows(p_grad_key, m_r, 1, D, BLOCK_D)
            b_table_value = load_rows(p_grad_value, m_r, 1, Dv, BLOCK_V)
            b_mass = tl.load(log_mass_ptr + o_table, mask=m_r, other=float("-inf"))
            b_size = load_sizes(starts_ptr, i_p, group, o_r, m_r, clusters)
            b_scores = dot_rows(
                b_key, b_centroid, p_key, m_key, 1, p_centroid, m_r, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
            )  # fmt: skip
            b_inner = dot_rows(
                b_key, b_table_key, p_key, m_key, 1, p_grad_key, m_r, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
            )  # fmt: skip
            b_inner += dot_rows(
                b_value, b_table_value, p_value, m_key, 1, p_grad_value, m_r, 1, Dv, ROWS, COLUMNS, BY_PARTS, PRECISION
            )  # fmt: skip
            m_pair = m_key[:, None] & (b_mass > float("-inf"))[None, :]
            if HAS_TAKEN:
                o_word = i_p * blocks * segment_length + b_place
                m_pair = m_pair & ~load_bits(taken_ptr, o_word, m_key, o_r, clusters)
            b_mass = tl.where(b_mass > float("-inf"), b_mass, 0.0)
            b_weights = tl.exp2(
                tl.where(m_pair, tl.minimum(b_scores * scale_log2 - b_mass[None, :], 0.0), float("-inf"))
            )
            # Every reader counted.
            b_weights *= (b_size / mean_size)[None, :]
            b_constant = tl.load(constant_ptr + o_table, mask=m_r, other=0.0) / tl.maximum(b_size, 1.0)
            b_grad_scores = b_weights * (b_inner + b_constant[None, :]) * scale
            b_weights = b_weights.to(b_key.dtype)
            b_grad_value = tl.dot(b_weights, b_table_value, b_grad_value, input_precision=PRECISION)
            b_grad_key = tl.dot(b_weights, b_table_key, b_grad_key, input_precision=PRECISION)
            b_grad_key = tl.dot(b_grad_scores.to(b_key.dtype), b_centroid, b_grad_key, input_precision=PRECISION)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_out = grads_ptr + o_key[:, None] * (D + Dv)
    m_d, m_v = m_key[:, None] & (o_d < D)[None, :], m_key[:, None] & (o_v < Dv)[None, :]
    p_key_out, p_value_out = p_out + o_d[None, :], p_out + D + o_v[None, :]
    tl.store(p_key_out, tl.load(p_key_out, mask=m_d, other=0.0) + b_grad_key * mean_size, mask=m_d)
    tl.store(p_value_out, tl.load(p_value_out, mask=m_v, other=0.0) + b_grad_value * mean_size, mask=m_v)


@kernel
def _causal_attention_bwd_centroid_kernel(
    centroids_ptr, key_ptr, value_ptr, taken_ptr, exact_ptr, starts_ptr, order_ptr, key_starts_ptr, table_key_ptr,
    log_mass_ptr, constant_ptr, table_grad_key_ptr, table_grad_value_ptr, grad_bias_ptr, grad_centroids_ptr,
    key_heads, group, rows, rows_of_keys, D, Dv, clusters, key_clusters, first_late, segment_length, blocks,
    row_blocks, scale, scale_log2,
    HAS_TAKEN: tl.constexpr, HAS_EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dQ̄_j` of `ROWS` centroids of a segment, over the key clusters of one block."""
    i_rows = tl.program_id(0) % row_blocks
    i_block = tl.program_id(0) // row_blocks % blocks
    i_p = (tl.program_id(0) // (row_blocks * blocks)).to(tl.int64)
    i_key_head = i_p % key_heads
    i_sorted = i_block * key_heads + i_key_head
    order_ptr += i_sorted * segment_length
    key_starts_ptr += i_sorted * (key_clusters + 2)
    key_ptr += (i_key_head * rows_of_keys + i_block * segment_length) * D
    value_ptr += (i_key_head * rows_of_keys + i_block * segment_length) * Dv
    o_r = i_rows * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_row = i_p * rows + o_r
    p_centroid = centroids_ptr + o_row * D
    b_size = load_sizes(starts_ptr, i_p, group, o_r, m_r, clusters)
    # [ROWS, BLOCK_D]
    b_centroid = load_rows(p_centroid, m_r, 1, D, BLOCK_D)
    b_grad_centroid = tl.zeros([ROWS, BLOCK_D], tl.float32)
    sees = (i_block <= first_late + i_p // key_heads) & ~is_exact(exact_ptr, i_p, HAS_EXACT)
    for i_c in range(0, tl.where(sees, key_clusters, 0)):
        first, last = tl.load(key_starts_ptr + i_c), tl.load(key_starts_ptr + i_c + 1)
        o_table = (o_row * blocks + i_block) * key_clusters + i_c
        p_grad_key, p_grad_value = table_grad_key_ptr + o_table * D, table_grad_value_ptr + o_table * Dv
        # [ROWS, BLOCK_D], [ROWS, BLOCK_D], [ROWS, BLOCK_V]
        b_tilted = load_rows(table_key_ptr + o_table * D, m_r, 1, D, BLOCK_D).to(tl.float32)
        b_table_key = load_rows(p_grad_key, m_r, 1, D, BLOCK_D)
        b_table_value = load_rows(p_grad_value, m_r, 1, Dv, BLOCK_V)
        b_mass = tl.load(log_mass_ptr + o_table, mask=m_r, other=float("-inf"))
        m_table = b_mass > float("-inf")
        b_mass = tl.where(m_table, b_mass, 0.0)
        b_constant = tl.load(constant_ptr + o_table, mask=m_r, other=0.0) / tl.maximum(b_size, 1.0)
        b_grad_centroid -= tl.load(grad_bias_ptr + o_table, mask=m_r, other=0.0)[:, None] * b_tilted
        for begin in range(first, last, COLUMNS):
            o_place = begin + tl.arange(0, COLUMNS)
            m_key = o_place < last
            b_row = tl.load(order_ptr + o_place, mask=m_key, other=0).to(tl.int64)
            p_key, p_value = key_ptr + b_row * D, value_ptr + b_row * Dv
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            b_key = load_rows(p_key, m_key, 1, D, BLOCK_D)
            b_value = load_rows(p_value, m_key, 1, Dv, BLOCK_V)
            b_scores = dot_rows(
                b_centroid, b_key, p_centroid, m_r, 1, p_key, m_key, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
            )  # fmt: skip
            b_inner = dot_rows(
                b_table_key, b_key, p_grad_key, m_r, 1, p_key, m_key, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
            )  # fmt: skip
            b_inner += dot_rows(
                b_table_value, b_value, p_grad_value, m_r, 1, p_value, m_key, 1, Dv, ROWS, COLUMNS, BY_PARTS, PRECISION
            )  # fmt: skip
            m_pair = m_table[:, None] & m_key[None, :]
            if HAS_TAKEN:
                o_word = (i_p * blocks + i_block) * segment_length + b_row
                m_pair = m_pair & ~tl.trans(load_bits(taken_ptr, o_word, m_key, o_r, clusters))
            b_weights = tl.exp2(
                tl.where(m_pair, tl.minimum(b_scores * scale_log2 - b_mass[:, None], 0.0), float("-inf"))
            )
            b_grad_scores = (b_weights * (b_inner + b_constant[:, None])).to(b_key.dtype)
            b_grad_centroid = tl.dot(b_grad_scores, b_key, b_grad_centroid, input_precision=PRECISION)
    o_d = tl.arange(0, BLOCK_D)
    p_out = grad_centroids_ptr + (o_row * blocks + i_block)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_grad_centroid * (b_size * scale)[:, None], mask=m_r[:, None] & (o_d < D)[None, :])
