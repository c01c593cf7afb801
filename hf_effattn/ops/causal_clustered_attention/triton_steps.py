"""What the kernels of causal attention over clusters share: where blocks stand, which rows go together, softmax steps.

Sizes: `P = B · H` problems, `S` tokens of a segment, `U` segments that have older ones, `C` query clusters, `T` top
keys, `G` key clusters of a block. Columns of a query's softmax are numbered, for dropout: `0 .. N - 1` the keys by
their position, then the key clusters of all levels, or the remainder.
"""

import triton
import triton.language as tl

from ..bi_clustered_attention.triton_forward import dot_rows
from ..chips import LENGTHS as COMMON_LENGTHS
from ..dropout import KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from ..sorted_clusters.triton_dropout import dropout_factor
from ..sorted_clusters.triton_tiles import load_rows

KINDS = tl.constexpr(KINDS_OF_WEIGHTS)
KIND = tl.constexpr(TOPK_AND_SUMMARY_WEIGHTS)
# Arguments that change with the length of the inputs, see `chips`.
LENGTHS = (
    *COMMON_LENGTHS,
    *("problems", "segments", "served", "levels", "level", "means", "base", "first_column", "readers", "epochs"),
    *("tables", "shares"),
)


@triton.jit
def load_count(counts_ptr, i_b, N, HAS_COUNTS: tl.constexpr):
    """How many tokens of an item count; they stand first."""
    count = N
    if HAS_COUNTS:
        count = tl.load(counts_ptr + i_b)
    return count


@triton.jit
def clusters_of_block(level, segment_length, keys_per_cluster, key_clusters):
    """`G` of a level, as in `Layout.clusters_of_block`."""
    return tl.maximum(1, tl.minimum(key_clusters, (segment_length << level) // keys_per_cluster))


@triton.jit
def blocks_of_level(level, served):
    """How many blocks of a level are read: every other one, as in `Layout.runs`."""
    return (served - (1 << level)) // (2 << level) + 1


@triton.jit
def load_group(labels_ptr, s, rows, ROWS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The queries of a segment that one program takes, if query `s` opens a group: `(is_opener, label, rows, mask)`.

    A group holds up to `ROWS` queries of one cluster. A query joins the open group of its cluster or opens the next
    one, so that its place depends on earlier queries only. `labels_ptr` are those of the segment's `rows` queries.
    """
    label = tl.load(labels_ptr + s)
    o_s = tl.arange(0, BLOCK_S)
    before = 0
    for start in range(0, s, BLOCK_S):
        b_label = tl.load(labels_ptr + start + o_s, mask=start + o_s < s, other=-1)
        before += tl.sum((b_label == label).to(tl.int32), 0)
    is_opener = before % ROWS == 0
    b_row = tl.zeros([ROWS], tl.int32)
    found = 0
    if is_opener:
        o_r = tl.arange(0, ROWS)
        for start in range(s, rows, BLOCK_S):
            b_label = tl.load(labels_ptr + start + o_s, mask=start + o_s < rows, other=-1)
            b_member = (b_label == label).to(tl.int32)
            b_place = found + tl.cumsum(b_member, 0) - 1
            m_place = (b_member > 0)[None, :] & (b_place[None, :] == o_r[:, None])
            b_row += tl.sum(tl.where(m_place, start + o_s[None, :], 0), 1)
            found += tl.sum(b_member, 0)
    return is_opener, label, b_row, tl.arange(0, ROWS) < found


@triton.jit
def load_summaries(
    members_ptr, b_top, m_top, i_pk, older, N, levels, served, segment_length, keys_per_cluster, key_clusters
):
    """Of top keys of a segment with `older` ones before its window: the row of their clusters' means, their columns.

    `members_ptr` `(B · Hk, levels, N)` has the row of the mean that every key is part of, at each level.
    """
    b_segment = (b_top // segment_length).to(tl.int32)
    b_mean = tl.zeros_like(b_segment)
    b_column = tl.zeros_like(b_segment)
    base = 0
    first_column = 0
    for level in range(levels):
        G = clusters_of_block(level, segment_length, keys_per_cluster, key_clusters)
        if (older >> level) & 1:
            m_inside = m_top & ((b_segment >> level) == (older >> level) - 1)
            p_members = members_ptr + (i_pk * levels + level) * N + b_top
            b_member = tl.load(p_members, mask=m_inside, other=0)
            b_mean = tl.where(m_inside, b_member, b_mean)
            b_column = tl.where(m_inside, N + first_column + (b_member - base) % G, b_column)
        base += blocks_of_level(level, served) * G
        first_column += G
    return b_mean.to(tl.int64), b_column


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
    b_key, p_key, stride_key_d, b_value, p_value, stride_value_d, m_column, b_bias, m_pair, b_grad_query,
    b_query, p_query, stride_query_d, b_grad, p_grad, stride_grad_d, m_row, b_lse, b_delta,
    D, Dv, scale_log2, seed_ptr, o_row, o_column, columns, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `Σ_x dS_ix K_x` over a block of columns `x` for the pairs of `m_pair` `(ROWS, COLUMNS)`."""
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
