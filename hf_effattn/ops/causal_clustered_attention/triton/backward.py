"""Kernels of the backward pass of causal attention over clusters on a GPU, labels and exact keys held fixed.

Of a query's softmax `p` over local keys, exact keys and summaries: `dS = p (dO·V - δ)`, of which local and exact keys
get what exact attention gives them. A summary of cluster `c` at centroid `j` gets `dK̃_jc = Σ_i dS_ic (Q_i - Q̄_j)`,
`dṼ_jc` and `db_jc`; with `a_jt` the share of key `t` in it, `ds_jt = a_jt (db_jc + dK̃_jc·(K_t - K̃_jc) +
dṼ_jc·(V_t - Ṽ_jc))`, and then `dK_t = Σ_j a_jt dK̃_jc + ds_jt Q̄_j`, `dV_t = Σ_j a_jt dṼ_jc` and `dQ̄_j = Σ_t ds_jt K_t -
Σ_c db_jc K̃_jc`.

Gradients of tables are kept over the queries that read them, in range in float16. All sums are in float32.
"""

import triton.language as tl

from ...shared.triton.cluster_table import is_exact, load_sizes, load_top
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import KIND, add_to_keys, add_to_queries, dot_rows
from ...shared.triton.tiles import load_operand, load_rows, load_tile, store_rows
from .distant_keys import load_bits
from .local import NEAR_KIND


@kernel
def _causal_attention_bwd_near_query_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, seed_ptr, top_ptr, exact_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    group, N, rows_of_queries, rows_of_keys, D, Dv, first_segment, segment_length, window, shift, topk, segments,
    tiles, scale, scale_log2, dropout_p,
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
    exact = is_exact(exact_ptr, i_late * (heads // group) + i_p // group)
    first = tl.where(exact, 0, first)
    last = tl.minimum(N, start + tl.minimum(segment_length, (i_tile + 1) * ROWS))
    key_ptr += i_p // group * rows_of_keys * D
    value_ptr += i_p // group * rows_of_keys * Dv
    o_row = i_p * rows_of_queries + o_token
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    query = load_operand(query_ptr + o_row * D, m_row, 1, D, BLOCK_D)
    grad = load_operand(grad_ptr + o_row * Dv, m_row, 1, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + o_row, mask=m_row, other=float("inf"))
    b_delta = tl.load(delta_ptr + o_row, mask=m_row, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for begin in range(first, last, COLUMNS):
        o_key = begin + tl.arange(0, COLUMNS)
        b_place = (shift + o_key).to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + b_place * D, o_key < last, 1, D, BLOCK_D)
        value = load_operand(value_ptr + b_place * Dv, o_key < last, 1, Dv, BLOCK_V)
        m_pair = o_key[None, :] <= o_token[:, None]
        b_grad_query = add_to_queries(
            query, grad, b_lse, b_delta, key, value, m_pair, None, None, b_grad_query, D, Dv, scale_log2,
            seed_ptr, o_row, b_place, rows_of_keys, dropout_p, NEAR_KIND, BY_PARTS, PRECISION,
        )  # fmt: skip
    if top_ptr is not None:
        top_ptr += (i_late.to(tl.int64) * heads + i_p) * topk
        for begin in range(0, tl.where(exact, 0, topk), COLUMNS):
            b_top, m_top = load_top(top_ptr, begin + tl.arange(0, COLUMNS), topk)
            key = load_operand(key_ptr + b_top * D, m_top, 1, D, BLOCK_D)
            value = load_operand(value_ptr + b_top * Dv, m_top, 1, Dv, BLOCK_V)
            b_grad_query = add_to_queries(
                query, grad, b_lse, b_delta, key, value, m_top[None, :], None, None, b_grad_query, D, Dv, scale_log2,
                seed_ptr, o_row, b_top, rows_of_keys, dropout_p, NEAR_KIND, BY_PARTS, PRECISION,
            )  # fmt: skip
    store_rows(grad_query_ptr + o_row * D, b_grad_query * scale, m_row, 1, D, BLOCK_D)


@kernel
def _causal_attention_bwd_near_key_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, seed_ptr, exact_ptr, lse_ptr, delta_ptr, grads_ptr,
    group, N, rows_of_queries, rows_of_keys, D, Dv, first_late, segment_length, window, shift, tiles, scale,
    scale_log2, dropout_p,
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
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(key_ptr + o_place * D, m_key, 1, D, BLOCK_D)
    value = load_operand(value_ptr + o_place * Dv, m_key, 1, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    segments = tl.cdiv(N, segment_length)
    if exact_ptr is None:  # the last one in whose window the last of the keys is
        segments = tl.minimum(segments, (start + ROWS - 1 + window) // segment_length + 1)
    for head in range(0, group):
        o_head = (i_p * group + head) * rows_of_queries
        for segment in range(start // segment_length, segments):
            first = segment * segment_length
            last = tl.minimum(N, first + segment_length)
            exact = False
            if exact_ptr is not None:
                p_exact = exact_ptr + (segment - first_late) * key_heads + i_p
                exact = tl.load(p_exact, mask=segment >= first_late, other=0) != 0
                last = tl.where(exact | (first - window < start + ROWS), last, first)
            for begin in range(tl.maximum(first, start), last, COLUMNS):
                o_query = begin + tl.arange(0, COLUMNS)
                m_query = o_query < last
                m_seen = ((first - window <= o_key) | exact)[:, None]
                m_pair = m_seen & m_query[None, :] & (o_key[:, None] <= o_query[None, :])
                o_row = o_head + o_query
                # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
                query = load_operand(query_ptr + o_row * D, m_query, 1, D, BLOCK_D)
                grad = load_operand(grad_ptr + o_row * Dv, m_query, 1, Dv, BLOCK_V)
                b_grad_key, b_grad_value = add_to_keys(
                    key, value, query, grad, lse_ptr, delta_ptr, m_pair, b_grad_key, b_grad_value, D, Dv, scale_log2,
                    seed_ptr, o_row, (shift + o_key).to(tl.int64), rows_of_keys, dropout_p,
                    NEAR_KIND, BY_PARTS, PRECISION,
                )  # fmt: skip
    p_out = grads_ptr + o_place * (D + Dv)
    store_rows(p_out, b_grad_key * scale, m_key, 1, D, BLOCK_D)
    store_rows(p_out + D, b_grad_value, m_key, 1, Dv, BLOCK_V)


@kernel
def _causal_attention_bwd_top_kernel(
    query_ptr, key_ptr, value_ptr, grad_ptr, seed_ptr, top_ptr, exact_ptr, lse_ptr, delta_ptr, shares_ptr,
    heads, group, N, rows_of_queries, rows_of_keys, D, Dv, first_segment, segment_length, topk, blocks, scale,
    scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t` and `dV_t` side by side of `ROWS` exact keys of a query head of a segment, from all its queries."""
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_head = i_p % heads
    o_t = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    b_top, m_top = load_top(top_ptr + i_p * topk, o_t, topk)
    o_key = i_head // group * rows_of_keys + b_top
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(key_ptr + o_key * D, m_top, 1, D, BLOCK_D)
    value = load_operand(value_ptr + o_key * Dv, m_top, 1, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    first = ((first_segment + i_p // heads) * segment_length).to(tl.int32)
    last = tl.minimum(N, first + segment_length)
    last = tl.where(is_exact(exact_ptr, i_p // group), first, last)
    o_head = i_head * rows_of_queries
    for begin in range(first, last, COLUMNS):
        o_query = begin + tl.arange(0, COLUMNS)
        m_query = o_query < last
        o_row = o_head + o_query
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        query = load_operand(query_ptr + o_row * D, m_query, 1, D, BLOCK_D)
        grad = load_operand(grad_ptr + o_row * Dv, m_query, 1, Dv, BLOCK_V)
        b_grad_key, b_grad_value = add_to_keys(
            key, value, query, grad, lse_ptr, delta_ptr, m_top[:, None] & m_query[None, :], b_grad_key, b_grad_value,
            D, Dv, scale_log2, seed_ptr, o_row, b_top, rows_of_keys, dropout_p, NEAR_KIND, BY_PARTS, PRECISION,
        )  # fmt: skip
    p_out = shares_ptr + (i_p * topk + o_t) * (D + Dv)
    store_rows(p_out, b_grad_key * scale, o_t < topk, 1, D, BLOCK_D)
    store_rows(p_out + D, b_grad_value, o_t < topk, 1, Dv, BLOCK_V)


@kernel
def _causal_attention_bwd_older_query_kernel(
    query_ptr, grad_ptr, seed_ptr, exact_ptr, order_ptr, starts_ptr, tiles_ptr, table_key_ptr, table_value_ptr,
    bias_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    heads, group, N, rows_of_queries, D, Dv, clusters, key_clusters, first_late, first_segment, segment_length,
    columns, tiles, scale, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of a tile of queries of one cluster what they get from the summaries."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _place, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, segment_length, clusters, tiles, ROWS
    )  # fmt: skip
    i_late = i_p // heads
    b_token = (first_segment + i_late) * segment_length + b_row
    m_row = m_row & (b_token < N) & (cluster < clusters)
    if (tl.max(m_row.to(tl.int32), 0) == 0) | is_exact(exact_ptr, i_p // group):
        return
    o_row = i_p % heads * rows_of_queries + b_token
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    query = load_operand(query_ptr + o_row * D, m_row, 1, D, BLOCK_D)
    grad = load_operand(grad_ptr + o_row * Dv, m_row, 1, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + o_row, mask=m_row, other=float("inf"))
    b_delta = tl.load(delta_ptr + o_row, mask=m_row, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    o_table = (i_p * clusters + tl.minimum(cluster, clusters - 1)) * columns
    seen = (first_late + i_late + 1) * key_clusters
    for first in range(0, seen, COLUMNS):
        o_g = first + tl.arange(0, COLUMNS)
        m_g = o_g < seen
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(table_key_ptr + (o_table + o_g) * D, m_g, 1, D, BLOCK_D)
        value = load_operand(table_value_ptr + (o_table + o_g) * Dv, m_g, 1, Dv, BLOCK_V)
        b_bias = tl.load(bias_ptr + o_table + o_g, mask=m_g, other=float("-inf"))
        b_grad_query = add_to_queries(
            query, grad, b_lse, b_delta, key, value, m_g[None, :], b_bias, None, b_grad_query, D, Dv, scale_log2,
            seed_ptr, i_p * segment_length + b_row, o_g, columns, dropout_p, KIND, BY_PARTS, PRECISION,
        )  # fmt: skip
    p_out = grad_query_ptr + o_row * D
    b_grad_query = load_rows(p_out, m_row, 1, D, BLOCK_D) + b_grad_query * scale
    store_rows(p_out, b_grad_query, m_row, 1, D, BLOCK_D)


@kernel
def _causal_attention_bwd_older_key_kernel(
    centroids_ptr, key_ptr, value_ptr, taken_ptr, exact_ptr, starts_ptr, order_ptr, key_starts_ptr, tiles_ptr,
    log_mass_ptr, constant_ptr, table_grad_key_ptr, table_grad_value_ptr, grads_ptr,
    key_heads, group, rows, rows_of_keys, D, Dv, clusters, key_clusters, first_late, segment_length, blocks, segments,
    tiles, mean_size, scale, scale_log2,
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
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(key_ptr + o_key * D, m_key, 1, D, BLOCK_D)
    value = load_operand(value_ptr + o_key * Dv, m_key, 1, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    i_cluster = i_block * key_clusters + tl.minimum(i_c, key_clusters - 1)
    for i_late in range(tl.maximum(0, i_block - first_late), segments):
        i_p = i_late * key_heads + i_key_head
        for first in range(0, tl.where(is_exact(exact_ptr, i_p), 0, rows), COLUMNS):
            o_r = first + tl.arange(0, COLUMNS)
            m_r = o_r < rows
            o_row = i_p * rows + o_r
            o_table = o_row * (blocks * key_clusters) + i_cluster
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            centroid = load_operand(centroids_ptr + o_row * D, m_r, 1, D, BLOCK_D)
            table_key = load_operand(table_grad_key_ptr + o_table * D, m_r, 1, D, BLOCK_D)
            table_value = load_operand(table_grad_value_ptr + o_table * Dv, m_r, 1, Dv, BLOCK_V)
            b_mass = tl.load(log_mass_ptr + o_table, mask=m_r, other=float("-inf"))
            b_size = load_sizes(starts_ptr, i_p * group, o_r, m_r, clusters)
            b_scores = dot_rows(key, centroid, D, BY_PARTS, PRECISION)
            b_inner = dot_rows(key, table_key, D, BY_PARTS, PRECISION)
            b_inner += dot_rows(value, table_value, Dv, BY_PARTS, PRECISION)
            m_pair = m_key[:, None] & (b_mass > float("-inf"))[None, :]
            if taken_ptr is not None:
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
            b_weights = b_weights.to(key[0].dtype)
            b_grad_value = tl.dot(b_weights, table_value[0], b_grad_value, input_precision=PRECISION)
            b_grad_key = tl.dot(b_weights, table_key[0], b_grad_key, input_precision=PRECISION)
            b_grad_scores = b_grad_scores.to(b_weights.dtype)
            b_grad_key = tl.dot(b_grad_scores, centroid[0], b_grad_key, input_precision=PRECISION)
    p_out = grads_ptr + o_key * (D + Dv)
    b_grad_key = load_rows(p_out, m_key, 1, D, BLOCK_D) + b_grad_key * mean_size
    store_rows(p_out, b_grad_key, m_key, 1, D, BLOCK_D)
    b_grad_value = load_rows(p_out + D, m_key, 1, Dv, BLOCK_V) + b_grad_value * mean_size
    store_rows(p_out + D, b_grad_value, m_key, 1, Dv, BLOCK_V)


@kernel
def _causal_attention_bwd_centroid_kernel(
    centroids_ptr, key_ptr, value_ptr, taken_ptr, exact_ptr, starts_ptr, order_ptr, key_starts_ptr, table_key_ptr,
    log_mass_ptr, constant_ptr, table_grad_key_ptr, table_grad_value_ptr, grad_bias_ptr, grad_centroids_ptr,
    key_heads, group, rows, rows_of_keys, D, Dv, clusters, key_clusters, first_late, segment_length, blocks,
    row_blocks, scale, scale_log2,
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
    b_size = load_sizes(starts_ptr, i_p * group, o_r, m_r, clusters)
    # [ROWS, BLOCK_D]
    centroid = load_operand(centroids_ptr + o_row * D, m_r, 1, D, BLOCK_D)
    b_grad_centroid = tl.zeros([ROWS, BLOCK_D], tl.float32)
    sees = (i_block <= first_late + i_p // key_heads) & ~is_exact(exact_ptr, i_p)
    for i_c in range(0, tl.where(sees, key_clusters, 0)):
        first, last = tl.load(key_starts_ptr + i_c), tl.load(key_starts_ptr + i_c + 1)
        o_table = (o_row * blocks + i_block) * key_clusters + i_c
        # [ROWS, BLOCK_D], [ROWS, BLOCK_D], [ROWS, BLOCK_V]
        b_tilted = load_rows(table_key_ptr + o_table * D, m_r, 1, D, BLOCK_D).to(tl.float32)
        table_key = load_operand(table_grad_key_ptr + o_table * D, m_r, 1, D, BLOCK_D)
        table_value = load_operand(table_grad_value_ptr + o_table * Dv, m_r, 1, Dv, BLOCK_V)
        b_mass = tl.load(log_mass_ptr + o_table, mask=m_r, other=float("-inf"))
        m_table = b_mass > float("-inf")
        b_mass = tl.where(m_table, b_mass, 0.0)
        b_constant = tl.load(constant_ptr + o_table, mask=m_r, other=0.0) / tl.maximum(b_size, 1.0)
        b_grad_centroid -= tl.load(grad_bias_ptr + o_table, mask=m_r, other=0.0)[:, None] * b_tilted
        for begin in range(first, last, COLUMNS):
            o_place = begin + tl.arange(0, COLUMNS)
            m_key = o_place < last
            b_row = tl.load(order_ptr + o_place, mask=m_key, other=0).to(tl.int64)
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            key = load_operand(key_ptr + b_row * D, m_key, 1, D, BLOCK_D)
            value = load_operand(value_ptr + b_row * Dv, m_key, 1, Dv, BLOCK_V)
            b_scores = dot_rows(centroid, key, D, BY_PARTS, PRECISION)
            b_inner = dot_rows(table_key, key, D, BY_PARTS, PRECISION)
            b_inner += dot_rows(table_value, value, Dv, BY_PARTS, PRECISION)
            m_pair = m_table[:, None] & m_key[None, :]
            if taken_ptr is not None:
                o_word = (i_p * blocks + i_block) * segment_length + b_row
                m_pair = m_pair & ~tl.trans(load_bits(taken_ptr, o_word, m_key, o_r, clusters))
            b_weights = tl.exp2(
                tl.where(m_pair, tl.minimum(b_scores * scale_log2 - b_mass[:, None], 0.0), float("-inf"))
            )
            b_grad_scores = (b_weights * (b_inner + b_constant[:, None])).to(key[0].dtype)
            b_grad_centroid = tl.dot(b_grad_scores, key[0], b_grad_centroid, input_precision=PRECISION)
    p_out = grad_centroids_ptr + (o_row * blocks + i_block) * D
    store_rows(p_out, b_grad_centroid * (b_size * scale)[:, None], m_r, 1, D, BLOCK_D)
