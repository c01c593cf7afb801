"""The step that the attentions over clusters share: a tile of queries attends to what their cluster's table holds.

For the queries `i` of cluster `j`, with `p_i` one softmax over the exact keys `T_j` and, with `HAS_SUMMARIES`, over
the tangents `b_jc + Q_i·K̃_jc` of the key clusters `c`:

- `HAS_REST` (improved clustered): `O_i = m_j Σ_t p_it V_t + O^b_j`.
- `HAS_SUMMARIES` (bi-clustered): `O_i = Σ_t p_it V_t + Σ_c p_ic Ṽ_jc + s_i (Q_i - Q̄_j) M_j`, `s_i` the weight of the
  key clusters.

Columns of a query's softmax are numbered: `0 .. T - 1` the exact keys, `T .. T + G - 1` the key clusters.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .chips import chip_of
from .dropout import dropout_factor
from .launch import kernel
from .softmax import CENTROID_KIND, KIND, KINDS, add_to_keys, add_to_queries, dot_rows, score_gradients
from .sort import SortedRows
from .tiles import LOG2_E, load_operand, load_rows, load_tile, store_rows, tile_config

ROWS_OF_A_SPLIT = 512  # queries of a cluster that one program reads, before a larger cluster is split
LARGEST_SPLIT = 4


@triton.jit
def load_top(top_ptr, o_t, topk):
    """The top keys at places `o_t`, 0 where there is none, and where there is one."""
    b_top = tl.load(top_ptr + o_t, mask=o_t < topk, other=-1).to(tl.int64)
    return tl.maximum(b_top, 0), b_top >= 0


@triton.jit
def load_top_weights(top_scores_ptr, o_t, topk, lse):
    """The centroid's weights `A^c_jt` on the top keys at places `o_t`."""
    return tl.exp2(tl.load(top_scores_ptr + o_t, mask=o_t < topk, other=float("-inf")) - lse)


@triton.jit
def row_dropout(seed_ptr, i_row, columns, row_length, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr):
    """Dropout factors of some columns of one row."""
    b_factor = dropout_factor(seed_ptr, tl.full([1], 0, tl.int64) + i_row, columns, row_length, dropout_p, KINDS, KIND)
    return tl.sum(b_factor, 0)


@triton.jit
def load_split_sum(parts_ptr, i_row, splits, D, BLOCK_D: tl.constexpr):
    """Sum of the parts `(splits, D)` of one row, in their order."""
    o_d = tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([BLOCK_D], tl.float32)
    for split in range(splits):
        # [BLOCK_D]
        b_sum += tl.load(parts_ptr + (i_row * splits + split) * D + o_d, mask=o_d < D, other=0.0)
    return b_sum


@triton.jit
def load_sizes(starts_ptr, i_p, o_r, m_r, clusters):
    """Queries of each of the clusters `o_r` of the problems from `i_p` on, whose starts have two entries more each."""
    p_start = starts_ptr + i_p * (clusters + 2) + o_r + o_r // clusters * 2
    return (tl.load(p_start + 1, mask=m_r, other=0) - tl.load(p_start, mask=m_r, other=0)).to(tl.float32)


@triton.jit
def is_exact(exact_heads_ptr, i_pk):
    """Whether a key head attends exactly: then no table is made for it; None: none does."""
    exact = i_pk < 0
    if exact_heads_ptr is not None:
        exact = tl.load(exact_heads_ptr + i_pk) != 0
    return exact


def dipole_part(query: torch.Tensor, width: int) -> int:
    """Columns of a dipole's matrix, `width` wide, that a program holds at once."""
    return width if width <= 64 and query.element_size() == 2 and chip_of(query).is_large else 16


def table_config(tensor: torch.Tensor, head_dim: int, value_dim: int) -> dict:
    """`tile_config` of a backward kernel that adds up two sums and holds three blocks of columns at once."""
    config = tile_config(tensor, head_dim, value_dim, backward=True, two_sums=True)
    amd = chip_of(tensor).name == "hip"
    if config["num_warps"] == 8 or amd:  # wide rows and AMD's lanes leave no registers for more
        config |= {"COLUMNS": 16, "num_stages": min(1 if amd else 2, config["num_stages"])}
    return config


@triton.jit
def load_offsets(p_query, m_row, stride_query_d, centroid_ptr, o_d, D):
    """Some columns of `q_i - q̄_j` of a tile of queries, in float32."""
    m_d = o_d < D
    # [ROWS, PART]
    b_query = tl.load(p_query[:, None] + o_d[None, :] * stride_query_d, mask=m_row[:, None] & m_d[None, :], other=0.0)
    b_centroid = tl.load(centroid_ptr + o_d, mask=m_d, other=0.0)
    return tl.where(m_row[:, None], b_query.to(tl.float32) - b_centroid.to(tl.float32)[None, :], 0.0)


@kernel
def _cluster_table_bwd_delta_kernel(
    query_ptr, output_ptr, grad_output_ptr, exact_heads_ptr, order_ptr, starts_ptr, tiles_ptr, centroid_ptr,
    dipole_ptr, delta_ptr, turn_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d,
    H, group, N, D, Dv, clusters, tiles, scale,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`δ_i = dO_i·O_i` of a tile of queries, and `(Q_i - Q̄_j) M_j dO_i`, what its dipole gives the weight `s_i`."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, ROWS
    )
    if tl.max(m_row.to(tl.int32), 0) == 0:
        return
    i_b, i_h = i_p // H, i_p % H
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + b_row * stride_query_n
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h + b_row * stride_output_n
    p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h + b_row * stride_go_n
    # [ROWS, BLOCK_V]
    grad = load_operand(p_grad, m_row, stride_go_d, Dv, BLOCK_V)
    b_output = load_rows(p_output, m_row, stride_output_d, Dv, BLOCK_V).to(tl.float32)
    tl.store(delta_ptr + i_p * N + b_row, tl.sum(grad[0].to(tl.float32) * b_output, 1), mask=m_row)
    if (cluster >= clusters) | is_exact(exact_heads_ptr, i_p // group):
        return
    i_row = i_p * clusters + cluster
    b_turn = tl.zeros([ROWS], tl.float32)
    for first in range(0, D, PART):
        o_d = first + tl.arange(0, PART)
        b_eta = load_offsets(p_query, m_row, stride_query_d, centroid_ptr + i_row * D, o_d, D)
        # [PART, BLOCK_V]
        matrix = load_operand(dipole_ptr + (i_row * D + o_d) * Dv, o_d < D, 1, Dv, BLOCK_V)
        b_turn += tl.sum(b_eta * dot_rows(grad, matrix, Dv, BY_PARTS, PRECISION), 1)
    tl.store(turn_ptr + i_p * N + b_row, b_turn * scale, mask=m_row)


@kernel
def _cluster_table_bwd_query_kernel(
    query_ptr, key_ptr, value_ptr, grad_output_ptr, seed_ptr, exact_heads_ptr, order_ptr, starts_ptr, tiles_ptr,
    top_ptr, lse_ptr, delta_ptr, mass_ptr, correction_ptr, table_key_ptr, table_value_ptr, bias_ptr, dipole_ptr,
    share_ptr, share_grad_ptr, turn_ptr, grad_centroids_ptr, grad_query_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d, stride_gq_b, stride_gq_h, stride_gq_n, stride_gq_d,
    H, group, N, D, Dv, clusters, key_clusters, tiles, topk, splits, scale, scale_log2, dropout_p,
    HAS_SUMMARIES: tl.constexpr, HAS_REST: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dQ_i` of a tile of queries: through its scores, its dipole, and what the centroid's gradient gives each."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _place, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, ROWS
    )
    if (tl.max(m_row.to(tl.int32), 0) == 0) | is_exact(exact_heads_ptr, i_p // group):
        return
    i_b, i_h = i_p // H, i_p % H
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    in_cluster = cluster < clusters
    i_row = i_p * clusters + tl.where(in_cluster, cluster, 0)
    m_query = m_row & in_cluster
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + b_row * stride_query_n
    p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h + b_row * stride_go_n
    o_row, columns = i_p * N + b_row, topk + key_clusters
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    query = load_operand(p_query, m_query, stride_query_d, D, BLOCK_D)
    grad = load_operand(p_grad, m_query, stride_go_d, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + o_row, mask=m_query, other=0.0)
    b_delta = tl.load(delta_ptr + o_row, mask=m_query, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, tl.where(in_cluster, topk, 0), COLUMNS):
        o_t = first + tl.arange(0, COLUMNS)
        b_top, m_top = load_top(top_ptr + i_row * topk, o_t, topk)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + b_top * stride_key_m, m_top, stride_key_d, D, BLOCK_D)
        value = load_operand(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
        b_grad_query = add_to_queries(
            query, grad, b_lse, b_delta, key, value, m_top[None, :], None, None, b_grad_query, D, Dv, scale_log2,
            seed_ptr, o_row, o_t, columns, dropout_p, KIND, BY_PARTS, PRECISION,
        )  # fmt: skip

    o_d = tl.arange(0, BLOCK_D)
    if HAS_SUMMARIES:
        b_turn = tl.load(turn_ptr + o_row, mask=m_query, other=0.0)
        for first in range(0, tl.where(in_cluster, key_clusters, 0), COLUMNS):
            o_g = first + tl.arange(0, COLUMNS)
            m_g = o_g < key_clusters
            o_table = i_row * key_clusters + o_g
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            key = load_operand(table_key_ptr + o_table * D, m_g, 1, D, BLOCK_D)
            value = load_operand(table_value_ptr + o_table * Dv, m_g, 1, Dv, BLOCK_V)
            b_bias = tl.load(bias_ptr + o_table, mask=m_g, other=float("-inf"))
            b_grad_query = add_to_queries(
                query, grad, b_lse, b_delta, key, value, m_g[None, :], b_bias, b_turn, b_grad_query, D, Dv, scale_log2,
                seed_ptr, o_row, topk + o_g, columns, dropout_p, KIND, BY_PARTS, PRECISION,
            )  # fmt: skip
        # Less the mean over the cluster's queries: what the dipole's offsets take from their centroid.
        p_start = starts_ptr + i_p * (clusters + 2) + cluster
        size = tl.maximum(tl.load(p_start + 1, mask=in_cluster, other=0) - tl.load(p_start), 1)
        b_share = tl.load(share_ptr + o_row, mask=m_query, other=0.0)
        for first in range(0, tl.where(in_cluster, Dv, 0), PART):
            o_v = first + tl.arange(0, PART)
            m_v = o_v < Dv
            # [ROWS, PART], [PART, BLOCK_D]
            m_part = m_query[:, None] & m_v[None, :]
            b_part = tl.load(p_grad[:, None] + o_v[None, :] * stride_go_d, mask=m_part, other=0.0).to(tl.float32)
            b_mean = tl.load(share_grad_ptr + i_row * Dv + o_v, mask=m_v, other=0.0) / size
            b_part = b_part * b_share[:, None] - b_mean[None, :]
            p_matrix = dipole_ptr + (i_row * D + o_d)[None, :] * Dv + o_v[:, None]
            b_matrix = tl.load(p_matrix, mask=m_v[:, None] & (o_d < D)[None, :], other=0.0)
            b_grad_query = tl.dot(b_part.to(b_matrix.dtype), b_matrix, b_grad_query, input_precision=PRECISION)

    b_shared = load_split_sum(grad_centroids_ptr, i_row, splits, D, BLOCK_D)
    if HAS_REST:
        b_grad_query *= tl.load(mass_ptr + i_row)
        b_shared += tl.load(correction_ptr + i_row * D + o_d, mask=o_d < D, other=0.0)
    b_grad_query = tl.where(m_query[:, None], b_grad_query * scale + b_shared[None, :], 0.0)
    p_out = grad_query_ptr + i_b * stride_gq_b + i_h * stride_gq_h + b_row * stride_gq_n
    store_rows(p_out, b_grad_query, m_row, stride_gq_d, D, BLOCK_D)


@kernel
def _cluster_table_bwd_key_kernel(
    query_ptr, key_ptr, value_ptr, grad_output_ptr, seed_ptr, exact_heads_ptr, order_ptr, starts_ptr, top_ptr,
    lse_ptr, delta_ptr, centroids_ptr, mean_grads_ptr, centroid_lse_ptr, mass_ptr, top_scores_ptr, extra_ptr,
    grads_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d,
    H, group, N, M, D, Dv, clusters, topk, columns, blocks, splits, split_rows, scale, scale_log2, dropout_p,
    HAS_REST: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `ROWS` of a cluster's exact keys get from its queries, or from one of the parts of a large cluster.

    With `HAS_REST` the first part also corrects what the centroid gave them, by `extra_jt`, see `clustered_attention`.
    Clusters share keys: each program adds to the rows `(B · Hk, M, D + Dv)` of `grads`, `dK` and `dV` side by side, in
    no fixed order. With `ORDERED` it stores its share in rows `(B · H · C · topk, D + Dv)` instead, and `splits` is 1.
    """
    i_split = tl.program_id(0) % splits
    i_row = (tl.program_id(0) // (splits * blocks)).to(tl.int64)
    i_p = i_row // clusters
    starts_ptr += i_p * (clusters + 2) + i_row % clusters
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    if HAS_REST:
        size = tl.where(i_split == 0, last - first, 0).to(tl.float32)
    length = tl.maximum(split_rows, tl.cdiv(last - first, splits))
    first += i_split * length
    exact = is_exact(exact_heads_ptr, i_p // group)
    if not ORDERED and (first >= last) | exact:
        return
    last = tl.where(exact, first, tl.minimum(last, first + length))

    i_b, i_h = i_p // H, i_p % H
    o_t = tl.program_id(0) // splits % blocks * ROWS + tl.arange(0, ROWS)
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    grad_output_ptr += i_b * stride_go_b + i_h * stride_go_h
    b_top, m_top = load_top(top_ptr + i_row * topk, o_t, topk)
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(key_ptr + b_top * stride_key_m, m_top, stride_key_d, D, BLOCK_D)
    value = load_operand(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for place in range(first, last, COLUMNS):
        o_place = place + tl.arange(0, COLUMNS)
        m_row = o_place < last
        b_row = tl.load(order_ptr + i_p * N + o_place, mask=m_row, other=0).to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        query = load_operand(query_ptr + b_row * stride_query_n, m_row, stride_query_d, D, BLOCK_D)
        grad = load_operand(grad_output_ptr + b_row * stride_go_n, m_row, stride_go_d, Dv, BLOCK_V)
        b_grad_key, b_grad_value = add_to_keys(
            key, value, query, grad, lse_ptr, delta_ptr, m_top[:, None] & m_row[None, :], b_grad_key, b_grad_value,
            D, Dv, scale_log2, seed_ptr, i_p * N + b_row, o_t, columns, dropout_p, KIND, BY_PARTS, PRECISION,
        )  # fmt: skip

    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    if HAS_REST:
        mass = tl.load(mass_ptr + i_row)
        b_extra = tl.load(extra_ptr + i_row * topk + o_t, mask=o_t < topk, other=0.0) * size
        lse = tl.load(centroid_lse_ptr + i_row)
        b_centroid_weights = load_top_weights(top_scores_ptr + i_row * topk, o_t, topk, lse) * size
        if seed_ptr is not None:
            b_centroid_weights *= row_dropout(seed_ptr, i_row, b_top, M, dropout_p, KINDS, CENTROID_KIND)
        b_centroid = tl.load(centroids_ptr + i_row * D + o_d, mask=o_d < D, other=0.0)
        b_mean_grad = tl.load(mean_grads_ptr + i_row * Dv + o_v, mask=o_v < Dv, other=0.0)
        b_grad_key = b_grad_key * mass + b_extra[:, None] * b_centroid[None, :]
        b_grad_value = b_grad_value * mass - b_centroid_weights[:, None] * b_mean_grad[None, :]
    b_grad_key *= scale
    b_out = (i_row * topk + o_t) if ORDERED else i_p // group * M + b_top
    m_out = (o_t < topk) if ORDERED else m_top
    p_out = grads_ptr + b_out[:, None] * (D + Dv)
    m_d, m_v = m_out[:, None] & (o_d < D)[None, :], m_out[:, None] & (o_v < Dv)[None, :]
    if ORDERED:
        tl.store(p_out + o_d[None, :], b_grad_key, mask=m_d)
        tl.store(p_out + D + o_v[None, :], b_grad_value, mask=m_v)
    else:
        tl.atomic_add(p_out + o_d[None, :], b_grad_key, mask=m_d, sem="relaxed")
        tl.atomic_add(p_out + D + o_v[None, :], b_grad_value, mask=m_v, sem="relaxed")


def add_exact_keys(
    x: Any, grad_output: torch.Tensor, members: SortedRows, top: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    sums: torch.Tensor, *, columns: int, exact_heads: torch.Tensor | None = None,
    rest: tuple[torch.Tensor, ...] | None = None,
) -> None:  # fmt: skip
    """Add what keys and values get as exact ones to `sums` `(B · Hk · M, D + Dv)`, float32.

    Args:
        x: the inputs of the op.
        members: the queries, sorted.
        top: `(B · H, C, topk)` int32, the exact keys.
        lse, delta: of each query's softmax over `columns` columns, `(B · H, N)`.
        exact_heads: `(B, Hk)`, contiguous: heads that are left out; or None.
        rest: of each cluster centroid, mean gradient, log-sum-exp, mass, scores of exact keys and `extra`; or None.
    """
    query, key, value, ordered = x.query, x.key, x.value, torch.are_deterministic_algorithms_enabled()
    (B, H, N, D), (Hk, M, Dv), (_, C, topk) = query.shape, value.shape[1:], top.shape
    config = tile_config(query, D, Dv, backward=True, two_sums=True)
    splits = 1 if ordered else min(LARGEST_SPLIT, -(-N // ROWS_OF_A_SPLIT))
    blocks = -(-topk // config["ROWS"])
    if blocks == 0:
        return
    shares = sums.new_empty(B * H * C * topk, D + Dv) if ordered else sums
    _cluster_table_bwd_key_kernel[(B * H * C * blocks * splits,)](
        query, key, value, grad_output, x.dropout_seed, exact_heads, members.order, members.starts, top, lse,
        delta, *([None] * 6 if rest is None else rest), shares,
        *query.stride(), *key.stride(), *value.stride(), *grad_output.stride(),
        H, H // Hk, N, M, D, Dv, C, topk, columns, blocks, splits, ROWS_OF_A_SPLIT, x.scale, x.scale * LOG2_E,
        x.dropout_p, HAS_REST=rest is not None, ORDERED=ordered, **config,
    )  # fmt: skip
    if ordered:
        # Places without a key hold 0, so they may be added to any row.
        first = torch.arange(B * Hk, device=key.device).repeat_interleave(H // Hk * C * topk) * M
        sums.index_add_(0, top.flatten().clamp(min=0) + first, shares)


@kernel
def _cluster_table_bwd_summary_kernel(
    query_ptr, grad_output_ptr, seed_ptr, exact_heads_ptr, order_ptr, starts_ptr, lse_ptr, delta_ptr, turn_ptr,
    table_key_ptr, table_value_ptr, bias_ptr, centroid_ptr, grad_key_ptr, grad_value_ptr, grad_bias_ptr, constant_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_go_b, stride_go_h, stride_go_n, stride_go_d,
    H, group, N, D, Dv, clusters, key_clusters, topk, blocks, scale, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of `ROWS` summaries of a table, `dK̃_jc = Σ_i dS_ic η_i`, `dṼ_jc`, `db_jc`, each over `n_j` queries.

    Also `db_jc - dK̃_jc·K̃_jc - dṼ_jc·Ṽ_jc`, summed: the part of a key's gradient that is the same for all of `c`.
    """
    i_row = (tl.program_id(0) // blocks).to(tl.int64)
    i_p = i_row // clusters
    if is_exact(exact_heads_ptr, i_p // group):
        return
    starts_ptr += i_p * (clusters + 2) + i_row % clusters
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    i_b, i_h = i_p // H, i_p % H
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    grad_output_ptr += i_b * stride_go_b + i_h * stride_go_h
    o_g = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    m_g = o_g < key_clusters
    o_table = i_row * key_clusters + o_g
    o_d = tl.arange(0, BLOCK_D)
    p_key, p_value = table_key_ptr + o_table * D, table_value_ptr + o_table * Dv
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(p_key, m_g, 1, D, BLOCK_D)
    value = load_operand(p_value, m_g, 1, Dv, BLOCK_V)
    b_bias = tl.load(bias_ptr + o_table, mask=m_g, other=float("-inf"))
    b_centroid = tl.load(centroid_ptr + i_row * D + o_d, mask=o_d < D, other=0.0)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_grad_bias = tl.zeros([ROWS], tl.float32)
    for place in range(first, last, COLUMNS):
        o_place = place + tl.arange(0, COLUMNS)
        m_row = o_place < last
        b_row = tl.load(order_ptr + i_p * N + o_place, mask=m_row, other=0).to(tl.int64)
        o_row = i_p * N + b_row
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        query = load_operand(query_ptr + b_row * stride_query_n, m_row, stride_query_d, D, BLOCK_D)
        grad = load_operand(grad_output_ptr + b_row * stride_go_n, m_row, stride_go_d, Dv, BLOCK_V)
        b_lse = tl.load(lse_ptr + o_row, mask=m_row, other=0.0)
        b_delta = tl.load(delta_ptr + o_row, mask=m_row, other=0.0)
        b_turn = tl.load(turn_ptr + o_row, mask=m_row, other=0.0)
        b_scores = dot_rows(key, query, D, BY_PARTS, PRECISION) * scale_log2 + b_bias[:, None]
        b_grad_weights = b_turn[None, :] + dot_rows(value, grad, Dv, BY_PARTS, PRECISION)
        b_factor = None
        if seed_ptr is not None:
            o_column, columns = topk + o_g, topk + key_clusters
            b_factor = tl.trans(dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND))
        m_pair = m_g[:, None] & m_row[None, :]
        b_grad_scores, b_dropped = score_gradients(
            b_scores, m_pair, b_lse[None, :], b_delta[None, :], b_grad_weights, b_factor
        )
        b_grad_bias += tl.sum(b_grad_scores, 1)
        b_query, b_grad = query[0], grad[0]
        b_eta = tl.where(m_row[:, None], b_query.to(tl.float32) - b_centroid.to(tl.float32)[None, :], 0.0)
        b_eta = b_eta.to(b_query.dtype)
        b_grad_value += tl.dot(b_dropped.to(b_grad.dtype), b_grad, input_precision=PRECISION)
        b_grad_key += tl.dot(b_grad_scores.to(b_query.dtype), b_eta, input_precision=PRECISION)

    # Loaded again: by parts, no row stays in registers while the queries are walked.
    b_key = load_rows(p_key, m_g, 1, D, BLOCK_D)
    b_value = load_rows(p_value, m_g, 1, Dv, BLOCK_V)
    # Means over the queries, not sums, stay in range in float16.
    size = tl.maximum(last - first, 1).to(tl.float32)
    b_grad_key = (b_grad_key * (scale / size)).to(grad_key_ptr.dtype.element_ty)
    b_grad_value = (b_grad_value / size).to(grad_value_ptr.dtype.element_ty)
    store_rows(grad_key_ptr + o_table * D, b_grad_key, m_g, 1, D, BLOCK_D)
    store_rows(grad_value_ptr + o_table * Dv, b_grad_value, m_g, 1, Dv, BLOCK_V)
    tl.store(grad_bias_ptr + o_table, b_grad_bias / size, mask=m_g)
    b_of_keys = tl.sum(b_grad_key.to(tl.float32) * b_key.to(tl.float32), 1)
    b_of_values = tl.sum(b_grad_value.to(tl.float32) * b_value.to(tl.float32), 1)
    tl.store(constant_ptr + o_table, b_grad_bias - (b_of_keys + b_of_values) * size, mask=m_g)
