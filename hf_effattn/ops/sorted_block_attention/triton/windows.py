"""What the kernels share: which sorted ranks meet, and their scores.

Ranks of a window that goes around the end of the row are counted on: virtual ranks below 0 for the keys of a query,
beyond the last block for the queries of a key. So the walk of a tile over its partners is one range, and a pair meets
at one place of it: a window has at most as many blocks as the row.
"""

import triton
import triton.language as tl

from ...shared.triton.softmax import dot_rows
from ...shared.triton.tiles import dot_by_parts, load_operand
from ..reference import MEMBERSHIP_FLOOR

FLOOR = tl.constexpr(MEMBERSHIP_FLOOR)


@triton.jit
def load_text(lengths_ptr, words_ptr, i_b, window):
    """Block length, words and used blocks of a row, and the blocks that a query sees."""
    w = tl.load(lengths_ptr + i_b)
    n = tl.load(words_ptr + i_b)
    used = tl.cdiv(n, w)
    return w, n, used, tl.minimum(window, used)


@triton.jit
def walk_of_queries(first, w, n, seen, TILE: tl.constexpr):
    """First and last + 1 virtual rank of the keys that a tile of queries, from rank `first` on, can see."""
    begin = (first // w - seen + 1) * w
    end = (tl.minimum(first + TILE, n) - 1) // w * w + w
    return begin, tl.where(first < n, end, begin)


@triton.jit
def walk_of_keys(first, w, n, seen, TILE: tl.constexpr):
    """First and last + 1 virtual rank of the queries that can see a tile of keys, from rank `first` on."""
    begin = first // w * w
    end = ((tl.minimum(first + TILE, n) - 1) // w + seen) * w
    return begin, tl.where(first < n, end, begin)


@triton.jit
def load_partners(order_ptr, labels_ptr, o_virtual, end, w, n, used, HAS_LABELS: tl.constexpr):
    """Rank, virtual block, original index and label of virtual ranks, and which of them are words."""
    whole = used * w
    o_rank = tl.where(o_virtual < 0, o_virtual + whole, tl.where(o_virtual >= whole, o_virtual - whole, o_virtual))
    # One row more keeps the division of ranks below 0 exact.
    block = (o_virtual + whole) // w - used
    m_word = (o_virtual < end) & (o_rank < n) & (o_rank >= 0)
    index = tl.load(order_ptr + o_rank, mask=m_word, other=0)
    label = index
    if HAS_LABELS:
        label = tl.load(labels_ptr + o_rank, mask=m_word, other=0)
    return o_rank, block, index, label, m_word


@triton.jit
def meet(
    rank_q, block_q, index_q, label_q, m_q, rank_k, block_k, index_k, label_k, m_k, seen, reach,
    CAUSAL: tl.constexpr, HAS_LABELS: tl.constexpr,
):  # fmt: skip
    """Which keys which queries see; one side comes as a column, the other as a row."""
    visible = m_q & m_k & (block_k <= block_q) & (block_k > block_q - seen)
    if CAUSAL:
        visible &= index_k <= index_q
    if HAS_LABELS:
        visible &= (label_q == label_k) & (rank_q - rank_k <= reach)
    return visible


@triton.jit
def products(
    p_a, m_a, stride_a, p_b, m_b, stride_b, D, BLOCK_D: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """`A B^T` of rows at the pointers `p_a` and `p_b`."""
    # [rows of A, BLOCK_D], [rows of B, BLOCK_D]
    a, b = load_operand(p_a, m_a, stride_a, D, BLOCK_D), load_operand(p_b, m_b, stride_b, D, BLOCK_D)
    return dot_rows(a, b, D, BY_PARTS, PRECISION)


@triton.jit
def shared_membership(
    membership_ptr, index_a, m_a, index_b, m_b, stride_n, stride_c, clusters, PRECISION: tl.constexpr
):  # fmt: skip
    """`P_a · P_b + 1e-4`, the many columns of `P` some at a time."""
    p_a, p_b = membership_ptr + index_a.to(tl.int64) * stride_n, membership_ptr + index_b.to(tl.int64) * stride_n
    return dot_by_parts(p_a, m_a, stride_c, p_b, m_b, stride_c, clusters, PRECISION) + FLOOR
