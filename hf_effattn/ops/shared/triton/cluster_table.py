"""The step that the attentions over clusters share: a tile of queries attends to what their cluster's table holds.

For the queries `i` of cluster `j`, with `p_i` one softmax over the exact keys `T_j` and, with `HAS_SUMMARIES`, over
the tangents `b_jc + Q_i·K̃_jc` of the key clusters `c`:

- `HAS_REST` (improved clustered): `O_i = m_j Σ_t p_it V_t + O^b_j`.
- `HAS_SUMMARIES` (bi-clustered): `O_i = Σ_t p_it V_t + Σ_c p_ic Ṽ_jc + s_i (Q_i - Q̄_j) M_j`, `s_i` the weight of the
  key clusters.

Columns of a query's softmax are numbered: `0 .. T - 1` the exact keys, `T .. T + G - 1` the key clusters.
"""

import triton
import triton.language as tl

from .chips import LENGTHS
from .dropout import dropout_factor
from .softmax import KIND, KINDS, dot_rows, softmax_step, softmax_weights
from .tiles import LOWEST, PART, load_rows, load_tile


@triton.jit
def load_top(top_ptr, o_t, topk):
    """The top keys at places `o_t`, 0 where there is none, and where there is one."""
    b_top = tl.load(top_ptr + o_t, mask=o_t < topk, other=-1).to(tl.int64)
    return tl.maximum(b_top, 0), b_top >= 0


@triton.jit
def is_exact(exact_heads_ptr, i_pk, HAS_EXACT: tl.constexpr):
    """Whether a key head attends exactly: then no table is made for it."""
    exact = i_pk < 0
    if HAS_EXACT:
        exact = tl.load(exact_heads_ptr + i_pk) != 0
    return exact


@triton.jit
def load_offsets(p_query, m_row, stride_query_d, centroid_ptr, o_d, D):
    """Some columns of `q_i - q̄_j` of a tile of queries, in float32."""
    m_d = o_d < D
    # [ROWS, PART]
    b_query = tl.load(p_query[:, None] + o_d[None, :] * stride_query_d, mask=m_row[:, None] & m_d[None, :], other=0.0)
    b_centroid = tl.load(centroid_ptr + o_d, mask=m_d, other=0.0)
    return tl.where(m_row[:, None], b_query.to(tl.float32) - b_centroid.to(tl.float32)[None, :], 0.0)


@triton.jit(do_not_specialize=LENGTHS)
def _cluster_table_fwd_kernel(
    query_ptr, key_ptr, value_ptr, seed_ptr, exact_heads_ptr, order_ptr, starts_ptr, tiles_ptr, top_ptr,
    mass_ptr, rest_ptr, table_key_ptr, table_value_ptr, bias_ptr, centroid_ptr, dipole_ptr,
    output_ptr, lse_ptr, share_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, group, N, D, Dv, clusters, key_clusters, tiles, topk, scale, scale_log2, dropout_p,
    HAS_SUMMARIES: tl.constexpr, HAS_REST: tl.constexpr, HAS_EXACT: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`O_i` of a tile of queries of one cluster, and of each the base-2 log-sum-exp and `s_i`; 0 in no cluster."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, ROWS
    )
    if (tl.max(m_row.to(tl.int32), 0) == 0) | is_exact(exact_heads_ptr, i_p // group, HAS_EXACT):
        return
    i_b, i_h = i_p // H, i_p % H
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    in_cluster = cluster < clusters
    i_row = i_p * clusters + tl.where(in_cluster, cluster, 0)
    m_query = m_row & in_cluster
    p_query = query_ptr + b_row * stride_query_n
    o_row, columns = i_p * N + b_row, topk + key_clusters
    # [ROWS, BLOCK_D]
    b_query = load_rows(p_query, m_query, stride_query_d, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, tl.where(in_cluster, topk, 0), COLUMNS):
        o_t = first + tl.arange(0, COLUMNS)
        b_top, m_top = load_top(top_ptr + i_row * topk, o_t, topk)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        p_key = key_ptr + b_top * stride_key_m
        b_key = load_rows(p_key, m_top, stride_key_d, D, BLOCK_D)
        b_value = load_rows(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
        b_scores = dot_rows(
            b_query, b_key, p_query, m_query, stride_query_d, p_key, m_top, stride_key_d, D,
            ROWS, COLUMNS, BY_PARTS, PRECISION,
        )  # fmt: skip
        b_scores = tl.where(m_top[None, :], b_scores * scale_log2, float("-inf"))
        b_output, b_highest, b_total = softmax_step(
            b_scores, b_value, b_output, b_highest, b_total,
            seed_ptr, o_row, o_t, columns, dropout_p, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip

    o_v = tl.arange(0, BLOCK_V)
    if HAS_SUMMARIES:
        b_share = tl.zeros([ROWS], tl.float32)
        for first in range(0, tl.where(in_cluster, key_clusters, 0), COLUMNS):
            o_g = first + tl.arange(0, COLUMNS)
            m_g = o_g < key_clusters
            o_table = i_row * key_clusters + o_g
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            p_key = table_key_ptr + o_table * D
            b_key = load_rows(p_key, m_g, 1, D, BLOCK_D)
            b_value = load_rows(table_value_ptr + o_table * Dv, m_g, 1, Dv, BLOCK_V)
            b_scores = dot_rows(
                b_query, b_key, p_query, m_query, stride_query_d, p_key, m_g, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
            )
            b_bias = tl.load(bias_ptr + o_table, mask=m_g, other=float("-inf"))
            b_scores = b_scores * scale_log2 + b_bias[None, :]
            b_weights, b_kept, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
            if HAS_DROPOUT:
                b_weights *= dropout_factor(seed_ptr, o_row, topk + o_g, columns, dropout_p, KINDS, KIND)
            b_share = b_share * b_kept + tl.sum(b_weights, 1)
            b_output = b_output * b_kept[:, None]
            b_output += tl.dot(b_weights.to(b_value.dtype), b_value, input_precision=PRECISION)
        b_dipole = tl.zeros([ROWS, BLOCK_V], tl.float32)
        for first in range(0, tl.where(in_cluster, D, 0), PART):
            o_d = first + tl.arange(0, PART)
            b_eta = load_offsets(p_query, m_query, stride_query_d, centroid_ptr + i_row * D, o_d, D)
            # [PART, BLOCK_V]
            b_matrix = load_rows(dipole_ptr + (i_row * D + o_d) * Dv, o_d < D, 1, Dv, BLOCK_V)
            b_dipole = tl.dot(b_eta, b_matrix, b_dipole, input_precision=PRECISION)
        b_output += (b_share * scale)[:, None] * b_dipole

    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    tl.store(lse_ptr + o_row, b_highest + tl.log2(b_divisor), mask=m_row)
    if HAS_SUMMARIES:
        tl.store(share_ptr + o_row, b_share / b_divisor, mask=m_row)
    if HAS_REST:
        b_divisor = b_divisor / tl.load(mass_ptr + i_row)
    b_output = b_output / b_divisor[:, None]
    if HAS_REST:
        b_output += tl.load(rest_ptr + i_row * Dv + o_v, mask=(o_v < Dv) & in_cluster, other=0.0)[None, :]
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h
    p_output += b_row[:, None] * stride_output_n + o_v[None, :] * stride_output_d
    tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=m_row[:, None] & (o_v < Dv)[None, :])
