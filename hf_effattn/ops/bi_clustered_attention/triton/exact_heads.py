"""Exact attention on a GPU for the heads that `exact_heads` names; programs of all other heads end at once.

Which heads they are is known to the GPU alone: nothing waits for the host, and a CUDA graph replays on other heads.
"""

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import LENGTHS, on_device_of
from ...shared.triton.softmax import dot_rows, softmax_step
from ...shared.triton.tiles import LOG2_E, LOWEST, load_key_mask, load_rows, tile_config


@triton.jit(do_not_specialize=LENGTHS)
def _bi_clustered_attention_fwd_exact_kernel(
    query_ptr, key_ptr, value_ptr, key_mask_ptr, query_mask_ptr, exact_heads_ptr, seed_ptr, output_ptr, lse_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d, stride_key_b, stride_key_h, stride_key_m,
    stride_key_d, stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_mask_b, stride_mask_m, stride_qm_b, stride_qm_n,
    H, group, N, M, D, Dv, blocks, scale_log2, dropout_p,
    HAS_MASK: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`softmax(scale · Q_i K^T) V` of a tile of queries, and their base-2 log-sum-exp; 0 where the query is masked."""
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_b, i_h = i_p // H, i_p % H
    if tl.load(exact_heads_ptr + i_p // group) == 0:
        return
    o_n = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    if HAS_QUERY_MASK:
        query_mask_ptr += i_b * stride_qm_b
    m_query = load_key_mask(query_mask_ptr, o_n, N, stride_qm_n, HAS_QUERY_MASK)
    if HAS_MASK:
        key_mask_ptr += i_b * stride_mask_b
    key_ptr += i_b * stride_key_b + i_h // group * stride_key_h
    value_ptr += i_b * stride_value_b + i_h // group * stride_value_h
    o_row = i_p * N + o_n
    p_query = query_ptr + i_b * stride_query_b + i_h * stride_query_h + o_n.to(tl.int64) * stride_query_n
    # [ROWS, BLOCK_D]
    b_query = load_rows(p_query, m_query, stride_query_d, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, M, COLUMNS):
        o_m = first + tl.arange(0, COLUMNS)
        m_key = load_key_mask(key_mask_ptr, o_m, M, stride_mask_m, HAS_MASK)
        o_m64 = o_m.to(tl.int64)
        p_key = key_ptr + o_m64 * stride_key_m
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
        b_value = load_rows(value_ptr + o_m64 * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
        b_scores = dot_rows(
            b_query, b_key, p_query, m_query, stride_query_d, p_key, m_key, stride_key_d, D,
            ROWS, COLUMNS, BY_PARTS, PRECISION,
        )  # fmt: skip
        b_scores = tl.where(m_query[:, None] & m_key[None, :], b_scores * scale_log2, float("-inf"))
        b_output, b_highest, b_total = softmax_step(
            b_scores, b_value, b_output, b_highest, b_total, seed_ptr, o_row, o_m, M, dropout_p,
            False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    tl.store(lse_ptr + o_row, b_highest + tl.log2(b_divisor), mask=o_n < N)
    o_v = tl.arange(0, BLOCK_V)
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h
    p_output += o_n.to(tl.int64)[:, None] * stride_output_n + o_v[None, :] * stride_output_d
    b_output = (b_output / b_divisor[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(p_output, b_output, mask=(o_n < N)[:, None] & (o_v < Dv)[None, :])


def attend_exactly(
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    exact_heads: torch.Tensor,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> None:
    """Write the exact heads of `output` `(B, H, N, Dv)` and of the base-2 log-sum-exp `lse` `(B · H, N)`."""
    B, H, N, D = query.shape
    M, Dv = value.shape[2:]
    config = tile_config(query, D, Dv)
    blocks = triton.cdiv(N, config["ROWS"])
    masks = (stride for mask in (key_mask, query_mask) for stride in ((0, 0) if mask is None else mask.stride()))
    with on_device_of(query):
        _bi_clustered_attention_fwd_exact_kernel[(B * H * blocks,)](
            query, key, value, key_mask, query_mask, exact_heads, dropout_seed, output, lse,
            *query.stride(), *key.stride(), *value.stride(), *output.stride(), *masks,
            H, H // key.shape[1], N, M, D, Dv, blocks, scale * LOG2_E, dropout_p,
            HAS_MASK=key_mask is not None, HAS_QUERY_MASK=query_mask is not None,
            HAS_DROPOUT=dropout_seed is not None, **config,
        )  # fmt: skip
