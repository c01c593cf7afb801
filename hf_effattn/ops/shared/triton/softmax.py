"""Steps of kernels that take the softmax of each query over blocks of columns, keys or means of many, and their ways
back.

Rows are queries, columns are keys or means; a mask `(ROWS, COLUMNS)`, or one that broadcasts to it, tells which pairs
count. Scores are exponents of 2. All queries, keys, values and gradients are operands, see `load_operand`, but a
`b_value`. Weights are dropped by their places: rows `o_row`, columns `o_column` of `columns`; a `seed_ptr` of None
drops none.
"""

import triton
import triton.language as tl

from ..dropout import CENTROID_WEIGHTS, KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from .dropout import dropout_factor
from .tiles import dot_by_parts

KINDS = tl.constexpr(KINDS_OF_WEIGHTS)
KIND = tl.constexpr(TOPK_AND_SUMMARY_WEIGHTS)
CENTROID_KIND = tl.constexpr(CENTROID_WEIGHTS)


@triton.jit
def dot_rows(a, b, D, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """`A B^T` of operands, `(rows of A, rows of B)`; by parts of what they were loaded from."""
    if BY_PARTS:
        b_product = dot_by_parts(a[1], a[2], a[3], b[1], b[2], b[3], D, PRECISION)
    else:
        b_product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
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
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a block of columns, with scores and their values, into a running softmax.

    That is a sum of values, and of their queries the highest score so far and the sum of weights beside it.
    """
    b_weights, b_kept, b_higher, b_total = softmax_weights(b_scores, b_highest, b_total)
    if seed_ptr is not None:
        b_weights *= dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    b_weights = b_weights.to(b_value.dtype)
    b_output = tl.dot(b_weights, b_value, b_output * b_kept[:, None], input_precision=PRECISION)
    return b_output, b_higher, b_total


@triton.jit
def attend(
    query, key, b_value, m_pair, b_output, b_highest, b_total, D, scale_log2,
    seed_ptr, o_row, o_column, columns, dropout_p,
    KIND: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a block of keys and values into the running softmax of queries."""
    b_scores = tl.where(m_pair, dot_rows(query, key, D, BY_PARTS, PRECISION) * scale_log2, float("-inf"))
    return softmax_step(
        b_scores, b_value, b_output, b_highest, b_total, seed_ptr, o_row, o_column, columns, dropout_p, KIND, PRECISION
    )


@triton.jit
def score_gradients(b_scores, m_pair, b_lse, b_delta, b_grad_weights, b_factor):
    """`dS = p (f dw - δ)`, and the weights `f p`; `f` are the dropout factors, None for 1."""
    b_weights = tl.exp2(tl.where(m_pair, b_scores - b_lse, float("-inf")))
    b_dropped = b_weights
    if b_factor is not None:
        b_grad_weights *= b_factor
        b_dropped = b_weights * b_factor
    return b_weights * (b_grad_weights - b_delta), b_dropped


@triton.jit
def add_to_queries(
    query, grad, b_lse, b_delta, key, value, m_pair, b_bias, b_turn, b_grad_query, D, Dv, scale_log2,
    seed_ptr, o_row, o_column, columns, dropout_p,
    KIND: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of queries, without the scale, what they get from a block of columns.

    `b_bias` is added to the scores, `b_turn` to the gradients of a query's weights; None is nothing.
    """
    b_scores = dot_rows(query, key, D, BY_PARTS, PRECISION) * scale_log2
    if b_bias is not None:
        b_scores += b_bias[None, :]
    b_grad_weights = dot_rows(grad, value, Dv, BY_PARTS, PRECISION)
    if b_turn is not None:
        b_grad_weights += b_turn[:, None]
    b_factor = None
    if seed_ptr is not None:
        b_factor = dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    b_grad_scores, _ = score_gradients(b_scores, m_pair, b_lse[:, None], b_delta[:, None], b_grad_weights, b_factor)
    b_key = key[0]
    return tl.dot(b_grad_scores.to(b_key.dtype), b_key, b_grad_query, input_precision=PRECISION)


@triton.jit
def add_to_keys(
    key, value, query, grad, lse_ptr, delta_ptr, m_pair, b_grad_key, b_grad_value, D, Dv, scale_log2,
    seed_ptr, o_row, o_column, columns, dropout_p,
    KIND: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of keys, without the scale, and of values what they get from a block of queries.

    The queries' log-sum-exps and `δ` are those of rows `o_row`; `m_pair` is `(keys, queries)`.
    """
    b_lse = tl.load(lse_ptr + o_row, mask=query[2], other=float("inf"))
    b_delta = tl.load(delta_ptr + o_row, mask=query[2], other=0.0)
    b_scores = dot_rows(key, query, D, BY_PARTS, PRECISION) * scale_log2
    b_grad_weights = dot_rows(value, grad, Dv, BY_PARTS, PRECISION)
    b_factor = None
    if seed_ptr is not None:
        b_factor = tl.trans(dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND))
    b_grad_scores, b_dropped = score_gradients(
        b_scores, m_pair, b_lse[None, :], b_delta[None, :], b_grad_weights, b_factor
    )  # fmt: skip
    b_query, b_grad = query[0], grad[0]
    b_grad_value = tl.dot(b_dropped.to(b_grad.dtype), b_grad, b_grad_value, input_precision=PRECISION)
    b_grad_key = tl.dot(b_grad_scores.to(b_query.dtype), b_query, b_grad_key, input_precision=PRECISION)
    return b_grad_key, b_grad_value
