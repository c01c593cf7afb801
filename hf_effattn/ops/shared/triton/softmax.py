"""Steps of kernels that take the softmax of each query over blocks of columns: keys, or means of many keys.

Rows are queries, columns are keys or means; a mask `(ROWS, COLUMNS)`, or one that broadcasts to it, tells which pairs
count.
"""

import triton
import triton.language as tl

from ..dropout import KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from .dropout import dropout_factor
from .tiles import dot_by_parts

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
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a block of columns, with base-2 scores and their values, into the running softmax."""
    b_weights, b_kept, b_higher, b_total = softmax_weights(b_scores, b_highest, b_total)
    if HAS_DROPOUT:
        b_weights *= dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    b_weights = b_weights.to(b_value.dtype)
    b_output = tl.dot(b_weights, b_value, b_output * b_kept[:, None], input_precision=PRECISION)
    return b_output, b_higher, b_total
