"""Exact attention on a GPU for the heads that `exact_heads` names; programs of all other heads end at once.

Only the GPU knows which heads they are: nothing waits for the host, and a CUDA graph also replays on other heads.
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from ...shared.triton.launch import kernel
from ...shared.triton.softmax import KIND, add_to_keys, add_to_queries, attend
from ...shared.triton.tiles import LOG2_E, LOWEST, load_mask, load_operand, load_rows, store_rows, tile_config
from ..reference import Inputs


@kernel
def _bi_clustered_attention_fwd_exact_kernel(
    query_ptr, key_ptr, value_ptr, key_mask_ptr, query_mask_ptr, exact_heads_ptr, seed_ptr, output_ptr, lse_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_mask_b, stride_mask_m, stride_qm_b, stride_qm_n,
    H, group, N, M, D, Dv, blocks, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`softmax(scale · Q_i K^T) V` of a tile of queries, and their base-2 log-sum-exp; 0 where the query is masked."""
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_b, i_h = i_p // H, i_p % H
    if tl.load(exact_heads_ptr + i_p // group) == 0:
        return
    o_n = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    m_query = load_mask(query_mask_ptr, i_b, o_n, o_n < N, stride_qm_b, stride_qm_n)
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    o_row = i_p * N + o_n
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + o_n.to(tl.int64) * stride_query_n
    # [ROWS, BLOCK_D]
    query = load_operand(p_query, m_query, stride_query_d, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, M, COLUMNS):
        o_m = first + tl.arange(0, COLUMNS)
        m_key = load_mask(key_mask_ptr, i_b, o_m, o_m < M, stride_mask_b, stride_mask_m)
        o_m64 = o_m.to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + o_m64 * stride_key_m, m_key, stride_key_d, D, BLOCK_D)
        b_value = load_rows(value_ptr + o_m64 * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
        b_output, b_highest, b_total = attend(
            query, key, b_value, m_query[:, None] & m_key[None, :], b_output, b_highest, b_total, D, scale_log2,
            seed_ptr, o_row, o_m, M, dropout_p, KIND, BY_PARTS, PRECISION,
        )  # fmt: skip
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    tl.store(lse_ptr + o_row, b_highest + tl.log2(b_divisor), mask=o_n < N)
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h + o_n.to(tl.int64) * stride_output_n
    store_rows(p_output, b_output / b_divisor[:, None], o_n < N, stride_output_d, Dv, BLOCK_V)


def attend_exactly(output: torch.Tensor, lse: torch.Tensor, x: Inputs, exact_heads: torch.Tensor) -> None:
    """Write the exact heads of `output` `(B, H, N, Dv)` and of the base-2 log-sum-exp `lse` `(B · H, N)`."""
    query, key, value, key_mask, query_mask, seed = x.query, x.key, x.value, x.key_mask, x.query_mask, x.dropout_seed
    B, H, N, D = query.shape
    M, Dv = value.shape[2:]
    config = tile_config(query, D, Dv)
    blocks = -(-N // config["ROWS"])
    masks = (stride for mask in (key_mask, query_mask) for stride in ((0, 0) if mask is None else mask.stride()))
    _bi_clustered_attention_fwd_exact_kernel[(B * H * blocks,)](
        query, key, value, key_mask, query_mask, exact_heads, seed, output, lse,
        *query.stride(), *key.stride(), *value.stride(), *output.stride(), *masks,
        H, H // key.shape[1], N, M, D, Dv, blocks, x.scale * LOG2_E, x.dropout_p, **config,
    )  # fmt: skip


@kernel
def _bi_clustered_attention_bwd_exact_query_kernel(
    query_ptr, key_ptr, value_ptr, grad_output_ptr, key_mask_ptr, query_mask_ptr, exact_heads_ptr, seed_ptr, lse_ptr,
    delta_ptr, grad_query_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d, stride_mask_b, stride_mask_m, stride_qm_b, stride_qm_n,
    stride_gq_b, stride_gq_h, stride_gq_n, stride_gq_d,
    H, group, N, M, D, Dv, blocks, scale, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dQ_i = scale Σ_t dS_it K_t` of a tile of queries."""
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_b, i_h = i_p // H, i_p % H
    if tl.load(exact_heads_ptr + i_p // group) == 0:
        return
    o_n = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    m_query = load_mask(query_mask_ptr, i_b, o_n, o_n < N, stride_qm_b, stride_qm_n)
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    o_row, o_n64 = i_p * N + o_n, o_n.to(tl.int64)
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + o_n64 * stride_query_n
    p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h + o_n64 * stride_go_n
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    query = load_operand(p_query, m_query, stride_query_d, D, BLOCK_D)
    grad = load_operand(p_grad, m_query, stride_go_d, Dv, BLOCK_V)
    b_lse = tl.load(lse_ptr + o_row, mask=m_query, other=0.0)
    b_delta = tl.load(delta_ptr + o_row, mask=m_query, other=0.0)
    b_grad_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, M, COLUMNS):
        o_m = first + tl.arange(0, COLUMNS)
        m_key = load_mask(key_mask_ptr, i_b, o_m, o_m < M, stride_mask_b, stride_mask_m)
        o_m64 = o_m.to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + o_m64 * stride_key_m, m_key, stride_key_d, D, BLOCK_D)
        value = load_operand(value_ptr + o_m64 * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
        b_grad_query = add_to_queries(
            query, grad, b_lse, b_delta, key, value, m_query[:, None] & m_key[None, :], None, None, b_grad_query,
            D, Dv, scale_log2, seed_ptr, o_row, o_m, M, dropout_p, KIND, BY_PARTS, PRECISION,
        )  # fmt: skip
    p_out = grad_query_ptr + i_b * stride_gq_b + i_h * stride_gq_h + o_n64 * stride_gq_n
    store_rows(p_out, b_grad_query * scale, o_n < N, stride_gq_d, D, BLOCK_D)


@kernel
def _bi_clustered_attention_bwd_exact_key_kernel(
    query_ptr, key_ptr, value_ptr, grad_output_ptr, key_mask_ptr, query_mask_ptr, exact_heads_ptr, seed_ptr, lse_ptr,
    delta_ptr, grad_key_ptr, grad_value_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_go_b, stride_go_h, stride_go_n, stride_go_d, stride_mask_b, stride_mask_m, stride_qm_b, stride_qm_n,
    stride_gk_b, stride_gk_h, stride_gk_m, stride_gk_d, stride_gv_b, stride_gv_h, stride_gv_m, stride_gv_d,
    H, group, N, M, D, Dv, blocks, scale, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t = scale Σ_i dS_it Q_i` and `dV_t` of a tile of keys, over the queries of all the heads that share them."""
    i_pk = (tl.program_id(0) // blocks).to(tl.int64)
    if tl.load(exact_heads_ptr + i_pk) == 0:
        return
    i_b, i_kh = i_pk // (H // group), i_pk % (H // group)
    o_m = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    m_key = load_mask(key_mask_ptr, i_b, o_m, o_m < M, stride_mask_b, stride_mask_m)
    o_m64 = o_m.to(tl.int64)
    p_key = key_ptr + i_b * stride_key_b + i_kh * stride_key_h + o_m64 * stride_key_m
    p_value = value_ptr + i_b * stride_value_b + i_kh * stride_value_h + o_m64 * stride_value_m
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(p_key, m_key, stride_key_d, D, BLOCK_D)
    value = load_operand(p_value, m_key, stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for i_h in range(i_kh * group, (i_kh + 1) * group):
        for first in range(0, N, COLUMNS):
            o_n = first + tl.arange(0, COLUMNS)
            m_row = load_mask(query_mask_ptr, i_b, o_n, o_n < N, stride_qm_b, stride_qm_n)
            o_row, o_n64 = (i_b * H + i_h) * N + o_n, o_n.to(tl.int64)
            p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + o_n64 * stride_query_n
            p_grad = grad_output_ptr + i_b * stride_go_b + i_h * stride_go_h + o_n64 * stride_go_n
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            query = load_operand(p_query, m_row, stride_query_d, D, BLOCK_D)
            grad = load_operand(p_grad, m_row, stride_go_d, Dv, BLOCK_V)
            b_grad_key, b_grad_value = add_to_keys(
                key, value, query, grad, lse_ptr, delta_ptr, m_key[:, None] & m_row[None, :], b_grad_key, b_grad_value,
                D, Dv, scale_log2, seed_ptr, o_row, o_m, M, dropout_p, KIND, BY_PARTS, PRECISION,
            )  # fmt: skip
    p_gk = grad_key_ptr + i_b * stride_gk_b + i_kh * stride_gk_h + o_m64 * stride_gk_m
    p_gv = grad_value_ptr + i_b * stride_gv_b + i_kh * stride_gv_h + o_m64 * stride_gv_m
    store_rows(p_gk, b_grad_key * scale, o_m < M, stride_gk_d, D, BLOCK_D)
    store_rows(p_gv, b_grad_value, o_m < M, stride_gv_d, Dv, BLOCK_V)


def exact_backward(
    grads: Sequence[torch.Tensor], grad_output: torch.Tensor, x: Inputs, exact_heads: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor,
) -> None:  # fmt: skip
    """Write the exact heads of the gradients of query, key and value."""
    query, key, value, key_mask, query_mask, seed = x.query, x.key, x.value, x.key_mask, x.query_mask, x.dropout_seed
    grad_query, grad_key, grad_value = grads
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    masks = tuple(stride for mask in (key_mask, query_mask) for stride in ((0, 0) if mask is None else mask.stride()))
    strides = *query.stride(), *key.stride(), *value.stride(), *grad_output.stride(), *masks
    tensors = query, key, value, grad_output, key_mask, query_mask, exact_heads, seed, lse, delta
    numbers = H, H // Hk, N, M, D, Dv
    factors = x.scale, x.scale * LOG2_E, x.dropout_p
    config = tile_config(query, D, Dv, backward=True)
    key_config = tile_config(query, D, Dv, backward=True, two_sums=True)
    blocks = -(-N // config["ROWS"])
    _bi_clustered_attention_bwd_exact_query_kernel[(B * H * blocks,)](
        *tensors, grad_query, *strides, *grad_query.stride(), *numbers, blocks, *factors, **config
    )
    blocks = -(-M // key_config["ROWS"])
    _bi_clustered_attention_bwd_exact_key_kernel[(B * Hk * blocks,)](
        *tensors, grad_key, grad_value, *strides, *grad_key.stride(), *grad_value.stride(),
        *numbers, blocks, *factors, **key_config,
    )  # fmt: skip
