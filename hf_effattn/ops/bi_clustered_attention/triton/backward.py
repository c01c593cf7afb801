"""Kernels of the backward pass of bi-clustered attention, labels and top keys held fixed.

With `p_ix` the weight of query `i` on column `x`, a top key or a key cluster, `K_x`, `V_x` its key and value and
`δ_i = dV_i · V_i`: `dS_ix = p_ix (dV_i · V_x − δ_i)`, `dQ_i = scale Σ_x dS_ix K_x`, `dK_x = scale Σ_i dS_ix Q_i` and
`dV_x = Σ_i p_ix dV_i`. Every key of a key cluster of `n` keys takes `1 / n` of the gradient of its mean. Weights are
computed again from the log-sum-exp of the forward pass. Sizes and numbers of columns as in `forward.py`.
"""

import torch
import triton
import triton.language as tl

from ...shared.triton.centroids import split_count
from ...shared.triton.chips import LENGTHS, chip_of, on_device_of
from ...shared.triton.softmax import column_step, query_step
from ...shared.triton.sort import SortedRows, cluster_means, sort_by_cluster
from ...shared.triton.tiles import LOG2_E, load_rows, load_tile
from .blocks import bi_clustered_config
from .forward import count_chosen, load_rest, problem_chunks

ROWS_OF_A_SPLIT = 512  # queries of a cluster that one program walks before a large cluster is split
LARGEST_SPLIT = 4


@triton.jit(do_not_specialize=LENGTHS)
def _bi_clustered_attention_bwd_query_kernel(
    grad_ptr, output_ptr, query_ptr, key_ptr, value_ptr, mean_key_ptr, mean_value_ptr, top_ptr, chosen_ptr, seed_ptr,
    order_ptr, starts_ptr, tiles_ptr, key_starts_ptr, lse_ptr, delta_ptr, grad_query_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_grad_query_b, stride_grad_query_h, stride_grad_query_n, stride_grad_query_d,
    H, group, N, D, Dv, clusters, key_clusters, topk, tiles, first_problem, scale, scale_log2, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`δ_i` and `dQ_i` for queries of one cluster."""
    i_local = (tl.program_id(0) // tiles).to(tl.int64)
    i_tile = tl.program_id(0) % tiles
    i_p = i_local + first_problem
    i_pk = i_p // group
    i_c, o_place, m_row, b_row = load_tile(order_ptr, starts_ptr, tiles_ptr, i_p, i_tile, N, clusters, tiles, ROWS)
    if tl.max(m_row.to(tl.int32), 0) == 0:
        return
    i_b, i_h, i_kh = i_p // H, i_p % H, i_p % H // group
    o_d = tl.arange(0, BLOCK_D)
    p_grad_query = grad_query_ptr + i_b * stride_grad_query_b + i_h * stride_grad_query_h
    p_grad_query += b_row[:, None] * stride_grad_query_n + o_d[None, :] * stride_grad_query_d
    m_query = m_row[:, None] & (o_d < D)[None, :]
    if i_c == clusters:
        tl.store(p_grad_query, tl.zeros([ROWS, BLOCK_D], tl.float32), mask=m_query)
        return
    grad_ptr += i_b * stride_grad_b + i_h * stride_grad_h
    output_ptr += i_b * stride_output_b + i_h * stride_output_h
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    top_ptr += (i_p * clusters + i_c) * topk
    mean_key_ptr += i_pk * key_clusters * D
    mean_value_ptr += i_pk * key_clusters * Dv
    o_n = tl.arange(0, COLUMNS)
    o_row, columns = i_p * N + b_row, topk + key_clusters

    p_query, p_grad = query_ptr + b_row * stride_query_n, grad_ptr + b_row * stride_grad_n
    # [ROWS, BLOCK_V]
    b_grad = load_rows(p_grad, m_row, stride_grad_d, Dv, BLOCK_V)
    b_output = load_rows(output_ptr + b_row * stride_output_n, m_row, stride_output_d, Dv, BLOCK_V)
    b_delta = tl.sum(b_grad.to(tl.float32) * b_output.to(tl.float32), 1)
    tl.store(delta_ptr + i_p * N + o_place, b_delta, mask=m_row)
    b_lse = tl.load(lse_ptr + i_p * N + o_place, mask=m_row, other=0.0)
    # [ROWS, BLOCK_D]
    b_query = load_rows(p_query, m_row, stride_query_d, D, BLOCK_D)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, topk, COLUMNS):
        # [COLUMNS]
        b_top = tl.load(top_ptr + start + o_n, mask=start + o_n < topk, other=-1).to(tl.int64)
        m_key = b_top >= 0
        b_grad_query = query_step(
            key_ptr + b_top * stride_key_m, stride_key_d, value_ptr + b_top * stride_value_m, stride_value_d,
            m_key, tl.zeros([COLUMNS], tl.float32), m_key[None, :], b_grad_query,
            b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
            D, Dv, scale_log2, seed_ptr, o_row, start + o_n, columns, dropout_p,
            HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
        )  # fmt: skip
    for start in range(0, key_clusters, COLUMNS):
        o_g = start + o_n
        b_rest = load_rest(key_starts_ptr, chosen_ptr, i_pk, i_local * clusters + i_c, o_g, key_clusters)
        b_grad_query = query_step(
            mean_key_ptr + o_g * D, 1, mean_value_ptr + o_g * Dv, 1,
            o_g < key_clusters, tl.log2(tl.maximum(b_rest, 1).to(tl.float32)), (b_rest > 0)[None, :], b_grad_query,
            b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
            D, Dv, scale_log2, seed_ptr, o_row, topk + o_g, columns, dropout_p,
            HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
        )  # fmt: skip
    tl.store(p_grad_query, b_grad_query * scale, mask=m_query)


@triton.jit(do_not_specialize=LENGTHS)
def _bi_clustered_attention_bwd_top_kernel(
    grad_ptr, query_ptr, key_ptr, value_ptr, top_ptr, seed_ptr, order_ptr, starts_ptr, lse_ptr, delta_ptr,
    grad_key_ptr, grad_value_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    H, group, N, M, D, Dv, clusters, key_clusters, topk, first_problem, blocks, splits, split_rows,
    scale, scale_log2, dropout_p,
    ADD: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t` and `dV_t` of a block of one cluster's top keys, from the queries of that cluster or a part of them.

    With `ADD` they are added to `(B · Hk, M, ·)`: clusters share keys, and the order in which theirs arrive is not
    fixed. Otherwise they are stored as `(problems of this launch, C, T, ·)`, and `splits` is 1.
    """
    i_split = tl.program_id(0) % splits
    i_block = tl.program_id(0) // splits % blocks
    i_c = tl.program_id(0) // (splits * blocks) % clusters
    i_local = (tl.program_id(0) // (splits * blocks) // clusters).to(tl.int64)
    i_p = i_local + first_problem
    first = tl.load(starts_ptr + i_p * (clusters + 2) + i_c)
    last = tl.load(starts_ptr + i_p * (clusters + 2) + i_c + 1)
    length = tl.maximum(split_rows, tl.cdiv(last - first, splits))
    first += i_split * length
    if ADD and first >= last:
        return
    last = tl.minimum(last, first + length)

    i_b, i_h, i_kh = i_p // H, i_p % H, i_p % H // group
    grad_ptr += i_b * stride_grad_b + i_h * stride_grad_h
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    order_ptr += i_p * N
    o_column = i_block * COLUMNS + tl.arange(0, COLUMNS)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    # [COLUMNS]
    b_top = tl.load(top_ptr + (i_p * clusters + i_c) * topk + o_column, mask=o_column < topk, other=-1).to(tl.int64)
    m_key = b_top >= 0
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    p_key, p_value = key_ptr + b_top * stride_key_m, value_ptr + b_top * stride_value_m
    b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
    b_value = load_rows(p_value, m_key, stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    b_bias = tl.zeros([COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        o_place = start + tl.arange(0, ROWS)
        m_row = o_place < last
        b_row = tl.load(order_ptr + o_place, mask=m_row, other=0).to(tl.int64)
        b_grad_key, b_grad_value = column_step(
            b_key, p_key, stride_key_d, b_value, p_value, stride_value_d, m_key, b_bias,
            m_key[:, None] & m_row[None, :], b_grad_key, b_grad_value,
            query_ptr + b_row * stride_query_n, stride_query_d, grad_ptr + b_row * stride_grad_n, stride_grad_d, m_row,
            lse_ptr + i_p * N + o_place, delta_ptr + i_p * N + o_place,
            D, Dv, scale_log2, seed_ptr, i_p * N + b_row, o_column, topk + key_clusters, dropout_p,
            HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
        )  # fmt: skip

    m_key_d, m_key_v = m_key[:, None] & (o_d < D)[None, :], m_key[:, None] & (o_v < Dv)[None, :]
    if ADD:
        o_key = i_p // group * M + b_top
        p_grad_key = grad_key_ptr + o_key[:, None] * D + o_d[None, :]
        p_grad_value = grad_value_ptr + o_key[:, None] * Dv + o_v[None, :]
        tl.atomic_add(p_grad_key, b_grad_key * scale, mask=m_key_d, sem="relaxed")
        tl.atomic_add(p_grad_value, b_grad_value, mask=m_key_v, sem="relaxed")
    else:
        o_out = (i_local * clusters + i_c) * topk + o_column
        p_grad_key = grad_key_ptr + o_out[:, None] * D + o_d[None, :]
        p_grad_value = grad_value_ptr + o_out[:, None] * Dv + o_v[None, :]
        tl.store(p_grad_key, b_grad_key * scale, mask=m_key_d)
        tl.store(p_grad_value, b_grad_value, mask=m_key_v)


@triton.jit(do_not_specialize=LENGTHS)
def _bi_clustered_attention_bwd_means_kernel(
    grad_ptr, query_ptr, mean_key_ptr, mean_value_ptr, chosen_ptr, seed_ptr,
    order_ptr, starts_ptr, tiles_ptr, key_starts_ptr, lse_ptr, delta_ptr, grad_mean_key_ptr, grad_mean_value_ptr,
    stride_grad_b, stride_grad_h, stride_grad_n, stride_grad_d,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    H, group, N, D, Dv, clusters, key_clusters, topk, tiles, first_problem, blocks, splits,
    scale, scale_log2, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK̄_c` and `dV̄_c` of a block of key clusters, from a part of the tiles of each query head of their key head."""
    i_split = tl.program_id(0) % splits
    i_block = tl.program_id(0) // splits % blocks
    i_pk = (tl.program_id(0) // (splits * blocks)).to(tl.int64) + first_problem // group
    o_g = i_block * COLUMNS + tl.arange(0, COLUMNS)
    m_g = o_g < key_clusters
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    o_mean = i_pk * key_clusters + o_g
    p_key, p_value = mean_key_ptr + o_mean * D, mean_value_ptr + o_mean * Dv
    b_key = load_rows(p_key, m_g, 1, D, BLOCK_D)
    b_value = load_rows(p_value, m_g, 1, Dv, BLOCK_V)
    b_grad_key = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    for i_p in range(i_pk * group, (i_pk + 1) * group):
        grad_head_ptr = grad_ptr + i_p // H * stride_grad_b + i_p % H * stride_grad_h
        query_head_ptr = query_ptr + i_p // H * stride_query_b + i_p % H * stride_query_h
        # Behind the last tile of a cluster stand the tiles of rows in none.
        used = tl.load(starts_ptr + i_p * (clusters + 2) + clusters) // ROWS + clusters
        length = tl.cdiv(used, splits)
        for i_tile in range(i_split * length, tl.minimum(used, (i_split + 1) * length)):
            i_c, o_place, m_row, b_row = load_tile(
                order_ptr, starts_ptr, tiles_ptr, i_p, i_tile, N, clusters, tiles, ROWS
            )
            b_rest = load_rest(
                key_starts_ptr, chosen_ptr, i_pk, (i_p - first_problem) * clusters + i_c, o_g, key_clusters
            )
            b_bias = tl.log2(tl.maximum(b_rest, 1).to(tl.float32))
            b_grad_key, b_grad_value = column_step(
                b_key, p_key, 1, b_value, p_value, 1, m_g, b_bias,
                (b_rest > 0)[:, None] & m_row[None, :], b_grad_key, b_grad_value,
                query_head_ptr + b_row * stride_query_n, stride_query_d,
                grad_head_ptr + b_row * stride_grad_n, stride_grad_d, m_row,
                lse_ptr + i_p * N + o_place, delta_ptr + i_p * N + o_place,
                D, Dv, scale_log2, seed_ptr, i_p * N + b_row, topk + o_g, topk + key_clusters, dropout_p,
                HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
    o_out = (i_pk * splits + i_split) * key_clusters + o_g
    p_grad_key = grad_mean_key_ptr + o_out[:, None] * D + o_d[None, :]
    p_grad_value = grad_mean_value_ptr + o_out[:, None] * Dv + o_v[None, :]
    tl.store(p_grad_key, b_grad_key * scale, mask=m_g[:, None] & (o_d < D)[None, :])
    tl.store(p_grad_value, b_grad_value, mask=m_g[:, None] & (o_v < Dv)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _bi_clustered_attention_bwd_keys_kernel(
    grad_top_ptr, grad_means_ptr, order_ptr, starts_ptr, tiles_ptr, grad_rows_ptr,
    stride_rows_b, stride_rows_h, stride_rows_m, stride_rows_d,
    key_heads, M, D, key_clusters, tiles, splits,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of keys, or values, of one key cluster: as top keys, and their share of the mean's.

    The parts of the mean's gradient are summed in a fixed order.
    """
    i_pk = (tl.program_id(0) // tiles).to(tl.int64)
    i_c, _, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_pk, tl.program_id(0) % tiles, M, key_clusters, tiles, TILE
    )
    if tl.max(m_row.to(tl.int32), 0) == 0:
        return
    o_d = tl.arange(0, BLOCK_D)
    # [BLOCK_D]
    b_share = tl.zeros([BLOCK_D], tl.float32)
    if i_c < key_clusters:
        for split in range(splits):
            i_row = (i_pk * splits + split) * key_clusters + i_c
            b_share += tl.load(grad_means_ptr + i_row * D + o_d, mask=o_d < D, other=0.0)
        starts_ptr += i_pk * (key_clusters + 2) + i_c
        b_share /= (tl.load(starts_ptr + 1) - tl.load(starts_ptr)).to(tl.float32)
    # [TILE, BLOCK_D]
    b_grad = load_rows(grad_top_ptr + (i_pk * M + b_row) * D, m_row, 1, D, BLOCK_D) + b_share[None, :]
    p_rows = grad_rows_ptr + i_pk // key_heads * stride_rows_b + i_pk % key_heads * stride_rows_h
    p_rows += b_row[:, None] * stride_rows_m + o_d[None, :] * stride_rows_d
    tl.store(p_rows, b_grad, mask=m_row[:, None] & (o_d < D)[None, :])


def sum_by_key(parts: torch.Tensor, top: torch.Tensor, key_heads: int, M: int) -> torch.Tensor:
    """Sums the gradients `(P, C, T, D)` of top keys for each key, `(key heads, M, D)`, in a fixed order."""
    by_key = sort_by_cluster(top.view(1, key_heads, -1), None, M, tile=64)
    sizes = by_key.starts[:, 1:-1] - by_key.starts[:, :-2]
    return cluster_means(parts.view(1, key_heads, -1, parts.shape[3]), by_key) * sizes[..., None]


def attend_backward(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_labels: torch.Tensor,
    queries: SortedRows,
    keys: SortedRows,
    top: torch.Tensor,
    mean_keys: torch.Tensor,
    mean_values: torch.Tensor,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; where torch is told to be deterministic, so are they."""
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    group, C, G, T = H // Hk, queries.clusters, keys.clusters, top.shape[2]
    grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    add = not torch.are_deterministic_algorithms_enabled()
    tile = queries.tile, dropout_seed is not None
    of_query, of_columns = (bi_clustered_config(query, Dv, *tile, computes) for computes in ("query", "key"))
    tiles = queries.tiles.shape[1]
    strides = *grad_output.stride(), *query.stride()
    factors = scale, scale * LOG2_E, dropout_p

    delta = torch.empty_like(lse)
    top_grads = [lse.new_zeros(B * Hk, M, dim) for dim in (D, Dv)]
    top_blocks, mean_blocks = triton.cdiv(T, of_columns["COLUMNS"]), triton.cdiv(G, of_columns["COLUMNS"])
    top_splits = min(LARGEST_SPLIT, triton.cdiv(N, ROWS_OF_A_SPLIT)) if add else 1
    mean_splits = split_count(B * Hk * mean_blocks, tiles * queries.tile, queries.tile)
    mean_grads = [lse.new_empty(B * Hk, mean_splits, G, dim) for dim in (D, Dv)]
    with on_device_of(query):
        for first, last in problem_chunks(B * H, group, 4 * C * (G + (0 if add else T * (D + Dv)))):
            chosen = count_chosen(top, key_labels, G, first, last)
            _bi_clustered_attention_bwd_query_kernel[((last - first) * tiles,)](
                grad_output, output, query, key, value, mean_keys, mean_values, top, chosen, dropout_seed,
                queries.order, queries.starts, queries.tiles, keys.starts, lse, delta, grad_query,
                *grad_output.stride(), *output.stride(), *query.stride(), *key.stride(), *value.stride(),
                *grad_query.stride(), H, group, N, D, Dv, C, G, T, tiles, first, *factors,
                **of_query,
            )  # fmt: skip
            of_chunk = top_grads if add else [lse.new_empty(last - first, C, T, dim) for dim in (D, Dv)]
            _bi_clustered_attention_bwd_top_kernel[((last - first) * C * top_blocks * top_splits,)](
                grad_output, query, key, value, top, dropout_seed, queries.order, queries.starts, lse, delta,
                *of_chunk, *strides, *key.stride(), *value.stride(),
                H, group, N, M, D, Dv, C, G, T, first, top_blocks, top_splits, ROWS_OF_A_SPLIT, *factors,
                ADD=add, **of_columns,
            )  # fmt: skip
            if not add:
                of_keys = slice(first // group, last // group)
                for target, of_top in zip(top_grads, of_chunk, strict=True):
                    target[of_keys] = sum_by_key(of_top, top[first:last], (last - first) // group, M)
            _bi_clustered_attention_bwd_means_kernel[((last - first) // group * mean_blocks * mean_splits,)](
                grad_output, query, mean_keys, mean_values, chosen, dropout_seed,
                queries.order, queries.starts, queries.tiles, keys.starts, lse, delta, *mean_grads, *strides,
                H, group, N, D, Dv, C, G, T, tiles, first, mean_blocks, mean_splits, *factors,
                **of_columns,
            )  # fmt: skip
        for of_top, of_means, grad in zip(top_grads, mean_grads, (grad_key, grad_value), strict=True):
            dim, key_tiles = grad.shape[3], keys.tiles.shape[1]
            _bi_clustered_attention_bwd_keys_kernel[(B * Hk * key_tiles,)](
                of_top, of_means, keys.order, keys.starts, keys.tiles, grad, *grad.stride(),
                Hk, M, dim, G, key_tiles, mean_splits, TILE=keys.tile, BLOCK_D=triton.next_power_of_2(dim),
                **chip_of(query).all_registers,
            )  # fmt: skip
    return grad_query, grad_key, grad_value
