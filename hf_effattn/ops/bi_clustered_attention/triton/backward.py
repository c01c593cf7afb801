"""Backward pass of bi-clustered attention on a GPU, labels and sets `T_j` held fixed.

The tile kernels leave, of every entry of a table, `dK̃_jc`, `dṼ_jc` and `db_jc`. With `a_jt = w_jt / S_jc`:
`ds_jt = a_jt (dlog S_jc + dK̃_jc·(K_t - K̃_jc) + dṼ_jc·(V_t - Ṽ_jc))`, then `dK_t = Σ_j a_jt dK̃_jc + ds_jt Q̄_j`,
`dV_t = Σ_j a_jt dṼ_jc` and `dQ̄_j = Σ_t ds_jt K_t - Σ_c db_jc K̃_jc`. The dipoles give `dM_j = Σ_i s_i η_i^T dO_i`, from
it `dCov_c = Σ_j p̄_jc dM_j` and what `log S_jc` gets through `p̄_j`.

Gradients of tables are kept over the `n_j` queries of a cluster, as in `clustered_attention`: in range in float16.
"""

import torch
import triton.language as tl

from ...shared.torch_internals import softmax_backward
from ...shared.triton.cluster_table import (
    _cluster_table_bwd_delta_kernel,
    _cluster_table_bwd_query_kernel,
    _cluster_table_bwd_summary_kernel,
    add_exact_keys,
    dipole_part,
    is_exact,
    load_sizes,
    table_config,
)
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import dot_rows
from ...shared.triton.sort import SortedRows
from ...shared.triton.tiles import LOG2_E, PART, load_operand, load_rows, load_tile, store_rows, tile_config
from ..reference import Inputs
from .forward import Saved, load_lift, load_spread, load_taken
from .products import cluster_products

CENTROID_PROGRAMS = 264  # so many programs keep a large chip busy


@kernel
def _bi_clustered_attention_bwd_key_kernel(
    centroids_ptr, key_ptr, value_ptr, log_square_ptr, taken_ptr, exact_heads_ptr, starts_ptr, order_ptr,
    key_starts_ptr, tiles_ptr, log_mass_ptr, constant_ptr, table_grad_key_ptr, table_grad_value_ptr,
    mean_key_ptr, mean_value_ptr, grad_covariance_ptr, sums_ptr, grad_key_ptr, grad_value_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_gk_b, stride_gk_h, stride_gk_m, stride_gk_d, stride_gv_b, stride_gv_h, stride_gv_m, stride_gv_d,
    key_heads, rows, M, D, Dv, clusters, key_clusters, words, tiles, mean_size, scale, scale_log2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t` and `dV_t` of a tile of keys of one cluster: through the tables, the covariances, and as exact keys."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    i_c, _, m_key, b_row = load_tile(
        order_ptr, key_starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, M, key_clusters, tiles, ROWS
    )
    if (tl.max(m_key.to(tl.int32), 0) == 0) | is_exact(exact_heads_ptr, i_p):
        return
    in_cluster = i_c < key_clusters
    i_c = tl.where(in_cluster, i_c, 0)
    m_member = m_key & in_cluster
    i_b, i_h = i_p // key_heads, i_p % key_heads
    p_key = key_ptr + i_b * stride_key_b + i_h * stride_key_h + b_row * stride_key_m
    p_value = value_ptr + i_b * stride_value_b + i_h * stride_value_h + b_row * stride_value_m
    o_d = tl.arange(0, BLOCK_D)
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(p_key, m_member, stride_key_d, D, BLOCK_D)
    value = load_operand(p_value, m_member, stride_value_d, Dv, BLOCK_V)
    b_lift = load_lift(log_square_ptr + i_p * M, b_row, m_member)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for first in range(0, tl.where(in_cluster, rows, 0), COLUMNS):
        o_r = first + tl.arange(0, COLUMNS)
        m_r = o_r < rows
        o_row = i_p * rows + o_r
        o_table = o_row * key_clusters + i_c
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        centroid = load_operand(centroids_ptr + o_row * D, m_r, 1, D, BLOCK_D)
        table_key = load_operand(table_grad_key_ptr + o_table * D, m_r, 1, D, BLOCK_D)
        table_value = load_operand(table_grad_value_ptr + o_table * Dv, m_r, 1, Dv, BLOCK_V)
        b_mass = tl.load(log_mass_ptr + o_table, mask=m_r, other=float("-inf"))
        b_size = load_sizes(starts_ptr, i_p * (rows // clusters), o_r, m_r, clusters)
        b_scores = dot_rows(key, centroid, D, BY_PARTS, PRECISION)
        m_pair = m_member[:, None] & (b_mass > float("-inf"))[None, :]
        # One word of a key holds all columns, of which there are 32 at most.
        b_word = tl.load(taken_ptr + (i_p * M + b_row) * words + first // 32, mask=m_member, other=0)
        m_pair &= ((b_word[:, None] >> (first % 32 + tl.arange(0, COLUMNS))[None, :]) & 1) == 0
        b_scores = b_scores * scale_log2 + b_lift[:, None] - tl.where(b_mass > float("-inf"), b_mass, 0.0)[None, :]
        b_weights = tl.exp2(tl.where(m_pair, b_scores, float("-inf")))
        # Every member of a cluster counted.
        b_weights *= (b_size / mean_size)[None, :]
        b_inner = dot_rows(key, table_key, D, BY_PARTS, PRECISION)
        b_inner += dot_rows(value, table_value, Dv, BY_PARTS, PRECISION)
        b_constant = tl.load(constant_ptr + o_table, mask=m_r, other=0.0) / tl.maximum(b_size, 1.0)
        b_grad_scores = b_weights * (b_inner + b_constant[None, :]) * scale
        b_weights = b_weights.to(key[0].dtype)
        b_grad_value += tl.dot(b_weights, table_value[0], input_precision=PRECISION)
        b_grad_key += tl.dot(b_weights, table_key[0], input_precision=PRECISION)
        b_grad_key += tl.dot(b_grad_scores.to(b_weights.dtype), centroid[0], input_precision=PRECISION)

    p_start = key_starts_ptr + i_p * (key_clusters + 2) + i_c
    divisor = tl.maximum(tl.load(p_start + 1) - tl.load(p_start), 1).to(tl.float32)
    i_row = i_p * key_clusters + i_c
    grad_covariance_ptr += i_row * D * Dv
    b_grad_key *= mean_size
    b_grad_value *= mean_size
    for first in range(0, tl.where(in_cluster, Dv, 0), PART):
        o_part = first + tl.arange(0, PART)
        # [ROWS, PART], [PART, BLOCK_D]
        b_spread = load_spread(p_value, m_member, stride_value_d, mean_value_ptr + i_row * Dv, o_part, Dv) / divisor
        m_part = (o_part < Dv)[:, None] & (o_d < D)[None, :]
        b_turn = tl.load(grad_covariance_ptr + o_d[None, :] * Dv + o_part[:, None], mask=m_part, other=0.0)
        b_grad_key = tl.dot(b_spread, b_turn, b_grad_key, input_precision=PRECISION)
    for first in range(0, tl.where(in_cluster, D, 0), PART):
        o_part = first + tl.arange(0, PART)
        # [ROWS, PART], [PART, BLOCK_V]
        b_spread = load_spread(p_key, m_member, stride_key_d, mean_key_ptr + i_row * D, o_part, D) / divisor
        b_turn = load_rows(grad_covariance_ptr + o_part * Dv, o_part < D, 1, Dv, BLOCK_V)
        b_grad_value = tl.dot(b_spread, b_turn, b_grad_value, input_precision=PRECISION)

    p_sums = sums_ptr + (i_p * M + b_row) * (D + Dv)
    b_grad_key += load_rows(p_sums, m_member, 1, D, BLOCK_D)
    b_grad_value += load_rows(p_sums + D, m_member, 1, Dv, BLOCK_V)
    p_gk = grad_key_ptr + i_b * stride_gk_b + i_h * stride_gk_h + b_row * stride_gk_m
    p_gv = grad_value_ptr + i_b * stride_gv_b + i_h * stride_gv_h + b_row * stride_gv_m
    store_rows(p_gk, tl.where(m_member[:, None], b_grad_key, 0.0), m_key, stride_gk_d, D, BLOCK_D)
    store_rows(p_gv, tl.where(m_member[:, None], b_grad_value, 0.0), m_key, stride_gv_d, Dv, BLOCK_V)


@kernel
def _bi_clustered_attention_bwd_centroid_kernel(
    centroids_ptr, key_ptr, value_ptr, log_square_ptr, taken_ptr, exact_heads_ptr, starts_ptr, order_ptr,
    key_starts_ptr, table_key_ptr, log_mass_ptr, constant_ptr, table_grad_key_ptr, table_grad_value_ptr, grad_bias_ptr,
    grad_centroids_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    key_heads, rows, M, D, Dv, clusters, key_clusters, words, blocks, splits, split_length, scale, scale_log2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dQ̄_j / n_j`, what each query gets from the tables of its centroid, over one part of the key clusters."""
    i_block = tl.program_id(0) % blocks
    i_split = tl.program_id(0) // blocks % splits
    i_p = (tl.program_id(0) // (blocks * splits)).to(tl.int64)
    if is_exact(exact_heads_ptr, i_p):
        return
    key_starts_ptr += i_p * (key_clusters + 2)
    key_ptr += i_p // key_heads * stride_key_b + i_p % key_heads * stride_key_h
    value_ptr += i_p // key_heads * stride_value_b + i_p % key_heads * stride_value_h
    o_r = i_block * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_row = i_p * rows + o_r
    b_size = tl.maximum(load_sizes(starts_ptr, i_p * (rows // clusters), o_r, m_r, clusters), 1.0)
    # [ROWS, BLOCK_D]
    centroid = load_operand(centroids_ptr + o_row * D, m_r, 1, D, BLOCK_D)
    b_grad_centroid = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i_c in range(i_split * split_length, tl.minimum(key_clusters, (i_split + 1) * split_length)):
        first, last = tl.load(key_starts_ptr + i_c), tl.load(key_starts_ptr + i_c + 1)
        o_table = o_row * key_clusters + i_c
        # [ROWS, BLOCK_D], [ROWS, BLOCK_D], [ROWS, BLOCK_V]
        b_tilted = load_rows(table_key_ptr + o_table * D, m_r, 1, D, BLOCK_D).to(tl.float32)
        table_key = load_operand(table_grad_key_ptr + o_table * D, m_r, 1, D, BLOCK_D)
        table_value = load_operand(table_grad_value_ptr + o_table * Dv, m_r, 1, Dv, BLOCK_V)
        b_mass = tl.load(log_mass_ptr + o_table, mask=m_r, other=float("-inf"))
        m_table = b_mass > float("-inf")
        b_mass = tl.where(m_table, b_mass, 0.0)
        b_constant = tl.load(constant_ptr + o_table, mask=m_r, other=0.0) / b_size
        b_grad_centroid -= tl.load(grad_bias_ptr + o_table, mask=m_r, other=0.0)[:, None] * b_tilted
        for place in range(first, last, COLUMNS):
            o_place = place + tl.arange(0, COLUMNS)
            m_key = o_place < last
            b_row = tl.load(order_ptr + i_p * M + o_place, mask=m_key, other=0).to(tl.int64)
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            key = load_operand(key_ptr + b_row * stride_key_m, m_key, stride_key_d, D, BLOCK_D)
            value = load_operand(value_ptr + b_row * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
            b_scores = dot_rows(centroid, key, D, BY_PARTS, PRECISION)
            b_inner = dot_rows(table_key, key, D, BY_PARTS, PRECISION)
            b_inner += dot_rows(table_value, value, Dv, BY_PARTS, PRECISION)
            m_taken = load_taken(taken_ptr + i_p * M * words, b_row, m_key, i_block * ROWS, words, ROWS)
            b_lift = load_lift(log_square_ptr + i_p * M, b_row, m_key)
            b_scores = b_scores * scale_log2 + b_lift[None, :] - b_mass[:, None]
            b_weights = tl.exp2(tl.where(m_taken, float("-inf"), b_scores))
            b_grad_scores = b_weights * (b_inner + b_constant[:, None])
            b_grad_centroid += tl.dot(b_grad_scores.to(key[0].dtype), key[0], input_precision=PRECISION)
    store_rows(grad_centroids_ptr + (o_row * splits + i_split) * D, b_grad_centroid * scale, m_r, 1, D, BLOCK_D)


def attend_backward(
    x: Inputs, exact_heads: torch.Tensor | None, grad_output: torch.Tensor, output: torch.Tensor, saved: Saved,
    queries: SortedRows, keys: SortedRows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value, unwritten in exact heads, and `δ_i` of all queries `(B · H, N)`."""
    (query, key, value), scale, dropout_p, dropout_seed = x[:3], x.scale, x.dropout_p, x.dropout_seed
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    clusters, key_clusters, topk = queries.clusters, keys.clusters, saved.top.shape[2]
    P, rows, words, group = B * Hk, H // Hk * clusters, saved.taken.shape[2], H // Hk
    config = tile_config(query, D, Dv, backward=True)
    sums_config = tile_config(query, D, Dv, backward=True, two_sums=True)
    # A program holds three sums, and tables seldom have more than 32 key clusters.
    summary_config = sums_config | {"ROWS": min(sums_config["ROWS"], 64 // query.element_size())}
    key_config = table_config(query, D, Dv)
    tiles = queries.tiles.shape[1]
    of_queries = queries.order, queries.starts, queries.tiles
    scales = scale, scale * LOG2_E
    delta, turn = torch.empty_like(saved.lse), torch.empty_like(saved.lse)
    table_grad_keys, table_grad_values = torch.empty_like(saved.table_keys), torch.empty_like(saved.table_values)
    grad_bias, constant = torch.empty_like(saved.bias), torch.empty_like(saved.bias)
    grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    sums = query.new_zeros(P * M, D + Dv, dtype=torch.float32)
    strides = query.stride(), key.stride(), value.stride(), grad_output.stride()
    _cluster_table_bwd_delta_kernel[(B * H * tiles,)](
        query, output, grad_output, exact_heads, *of_queries, saved.centroids, saved.dipoles, delta, turn,
        *strides[0], *output.stride(), *strides[3], H, group, N, D, Dv, clusters, tiles, scale,
        PART=dipole_part(query, config["BLOCK_D"]), ROWS=queries.tile,
        **{name: config[name] for name in ("BLOCK_V", "BY_PARTS", "PRECISION")},
    )  # fmt: skip
    add_exact_keys(
        x, grad_output, queries, saved.top, saved.lse, delta, sums, columns=topk + key_clusters,
        exact_heads=exact_heads,
    )  # fmt: skip
    blocks = -(-key_clusters // summary_config["ROWS"])
    _cluster_table_bwd_summary_kernel[(P * rows * blocks,)](
        query, grad_output, dropout_seed, exact_heads, *of_queries[:2], saved.lse, delta, turn, saved.table_keys,
        saved.table_values, saved.bias, saved.centroids, table_grad_keys, table_grad_values, grad_bias, constant,
        *strides[0], *strides[3], H, group, N, D, Dv, clusters, key_clusters, topk, blocks, *scales, dropout_p,
        **summary_config,
    )  # fmt: skip
    grad_dipoles, share_grads = cluster_products(
        query, grad_output, queries, saved.centroids, None, exact_heads,
        weights=saved.share, factor=scale, parts=clusters,
    )  # fmt: skip
    by_head = grad_dipoles.view(P, rows, -1)
    at_centroid = saved.at_centroid.view(P, rows, -1)
    grad_covariances = at_centroid.mT @ by_head
    grad_logits = by_head @ saved.covariances.view(P, key_clusters, -1).mT
    grad_logits = softmax_backward(grad_logits, at_centroid, 2)
    constant += grad_logits.view_as(constant)
    _bi_clustered_attention_bwd_key_kernel[(P * keys.tiles.shape[1],)](
        saved.centroids, key, value, saved.log_squares, saved.taken, exact_heads, queries.starts, keys.order,
        keys.starts, keys.tiles, saved.log_mass, constant, table_grad_keys, table_grad_values,
        saved.mean_keys, saved.mean_values, grad_covariances, sums, grad_key, grad_value, *strides[1], *strides[2],
        *grad_key.stride(), *grad_value.stride(), Hk, rows, M, D, Dv, clusters, key_clusters, words,
        keys.tiles.shape[1], max(1.0, N / clusters), *scales, **key_config,
    )  # fmt: skip
    blocks = -(-rows // key_config["ROWS"])
    splits = max(1, min(CENTROID_PROGRAMS // (P * blocks), key_clusters))
    split_length = -(-key_clusters // splits)
    splits = -(-key_clusters // split_length)
    grad_centroids = query.new_empty(P * rows, splits, D, dtype=torch.float32)
    _bi_clustered_attention_bwd_centroid_kernel[(P * blocks * splits,)](
        saved.centroids, key, value, saved.log_squares, saved.taken, exact_heads, queries.starts, keys.order,
        keys.starts, saved.table_keys, saved.log_mass, constant, table_grad_keys, table_grad_values, grad_bias,
        grad_centroids, *strides[1], *strides[2], Hk, rows, M, D, Dv, clusters, key_clusters, words, blocks,
        splits, split_length, *scales, **key_config | ({"num_stages": 1} if query.element_size() == 4 else {}),
    )  # fmt: skip
    _cluster_table_bwd_query_kernel[(B * H * tiles,)](
        query, key, value, grad_output, dropout_seed, exact_heads, *of_queries, saved.top, saved.lse, delta,
        None, None, saved.table_keys, saved.table_values, saved.bias, saved.dipoles, saved.share, share_grads,
        turn, grad_centroids, grad_query, *strides[0], *strides[1], *strides[2], *strides[3], *grad_query.stride(),
        H, group, N, D, Dv, clusters, key_clusters, tiles, topk, splits, *scales, dropout_p,
        HAS_SUMMARIES=True, HAS_REST=False, PART=16, **config,
    )  # fmt: skip
    return grad_query, grad_key, grad_value, delta
