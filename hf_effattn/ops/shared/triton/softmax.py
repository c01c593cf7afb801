"""Steps of kernels that take the softmax of each query over blocks of columns: keys, or means of many keys.

Rows are queries, columns are keys or means; a mask `(ROWS, COLUMNS)`, or one that broadcasts to it, tells which pairs
count.
"""

import triton
import triton.language as tl

from ..dropout import KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from .dropout import dropout_factor
from .tiles import dot_by_parts, load_rows

KINDS = tl.constexpr(KINDS_OF_WEIGHTS)
KIND = tl.constexpr(TOPK_AND_SUMMARY_WEIGHTS)


@triton.jit
def dot_rows(
    b_a, b_b, p_a, m_a, stride_a, p_b, m_b, stride_b, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`A B^T` of blocks of rows, or by parts of the rows at the pointers that the blocks were loaded from."""
    if BY_PARTS:
        b_product = dot_by_parts(p_a, m_a, stride_a, p_b, m_b, stride_b, D, ROWS, COLUMNS, PRECISION)
    else:
        b_product = tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)
    return b_product


@triton.jit
def softmax_weights(b_scores, b_highest, b_total):
    """Weights of a block of base-2 scores beside the highest so far, what those before shrink by, highest and sum."""
    b_higher = tl.maximum(b_highest, tl.max(b_scores, 1))
    b_weights = tl.exp2(b_scores - b_higher[:, None])
    b_kept = tl.exp2(b_highest - b_higher)
    return b_weights, b_kept, b_higher, b_total * b_kept + tl.sum(b_weights, 1)


@triton.jit
def softmax_step(
    b_scores, b_value, b_output, b_highest, b_total, seed_ptr, o_row, o_column, columns, dropout_p,
    TAKEN: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a block of columns, with base-2 scores and their values, into the running softmax; or out, if `TAKEN`."""
    b_higher = tl.maximum(b_highest, tl.max(b_scores, 1))
    b_weights = tl.exp2(b_scores - b_higher[:, None])
    if TAKEN:
        b_weights = -b_weights
    b_kept = tl.exp2(b_highest - b_higher)
    b_total = b_total * b_kept + tl.sum(b_weights, 1)
    if HAS_DROPOUT:
        b_weights *= dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    b_output = b_output * b_kept[:, None]
    b_output += tl.dot(b_weights.to(b_value.dtype), b_value, input_precision=PRECISION)
    return b_output, b_higher, b_total


@triton.jit
def query_step(
    p_key, stride_key_d, p_value, stride_value_d, m_column, b_bias, m_pair, b_grad_query,
    b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
    D, Dv, scale_log2, seed_ptr, o_row, o_column, columns, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `Σ_x dS_ix K_x` over columns whose keys and values are at the pointers, for `m_pair` `(ROWS, COLUMNS)`."""
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    b_key = load_rows(p_key, m_column, stride_key_d, D, BLOCK_D)
    b_value = load_rows(p_value, m_column, stride_value_d, Dv, BLOCK_V)
    b_scores = dot_rows(
        b_query, b_key, p_query, m_row, stride_query_d, p_key, m_column, stride_key_d, D,
        ROWS, COLUMNS, BY_PARTS, PRECISION,
    )  # fmt: skip
    b_scores = b_scores * scale_log2 + b_bias[None, :] - b_lse[:, None]
    b_weights = tl.exp2(tl.where(m_pair, b_scores, float("-inf")))
    b_grad_weights = dot_rows(
        b_grad, b_value, p_grad, m_row, stride_grad_d, p_value, m_column, stride_value_d, Dv,
        ROWS, COLUMNS, BY_PARTS, PRECISION,
    )  # fmt: skip
    if HAS_DROPOUT:
        b_grad_weights *= dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    b_grad_scores = (b_weights * (b_grad_weights - b_delta[:, None])).to(b_key.dtype)
    return b_grad_query + tl.dot(b_grad_scores, b_key, input_precision=PRECISION)


@triton.jit
def column_step(
    b_key, p_key, stride_key_d, b_value, p_value, stride_value_d, m_column, b_bias, m_pair, b_grad_key, b_grad_value,
    p_query, stride_query_d, p_grad, stride_grad_d, m_row, p_lse, p_delta,
    D, Dv, scale_log2, seed_ptr, o_row, o_column, columns, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `Σ_i dS_ix Q_i` and `Σ_i p_ix dV_i` over queries `i` at the pointers, for `m_pair` `(COLUMNS, ROWS)`."""
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_query = load_rows(p_query, m_row, stride_query_d, D, BLOCK_D)
    b_grad = load_rows(p_grad, m_row, stride_grad_d, Dv, BLOCK_V)
    # [ROWS]
    b_lse = tl.load(p_lse, mask=m_row, other=0.0)
    b_delta = tl.load(p_delta, mask=m_row, other=0.0)
    b_scores = dot_rows(
        b_key, b_query, p_key, m_column, stride_key_d, p_query, m_row, stride_query_d, D,
        COLUMNS, ROWS, BY_PARTS, PRECISION,
    )  # fmt: skip
    b_scores = b_scores * scale_log2 + b_bias[:, None] - b_lse[None, :]
    b_weights = tl.exp2(tl.where(m_pair, b_scores, float("-inf")))
    b_grad_weights = dot_rows(
        b_value, b_grad, p_value, m_column, stride_value_d, p_grad, m_row, stride_grad_d, Dv,
        COLUMNS, ROWS, BY_PARTS, PRECISION,
    )  # fmt: skip
    b_dropped = b_weights
    if HAS_DROPOUT:
        b_factor = tl.trans(dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND))
        b_dropped = b_weights * b_factor
        b_grad_weights *= b_factor
    b_grad_scores = (b_weights * (b_grad_weights - b_delta[None, :])).to(b_query.dtype)
    b_grad_key += tl.dot(b_grad_scores, b_query, input_precision=PRECISION)
    b_grad_value += tl.dot(b_dropped.to(b_grad.dtype), b_grad, input_precision=PRECISION)
    return b_grad_key, b_grad_value
