"""What the kernels share: which sorted ranks meet, and their scores.

Ranks of a window that goes around the end of the row are counted on: virtual ranks below 0 for the keys of a query,
beyond the last block for the queries of a key. So the walk of a tile over its partners is one range, and a pair meets
at one place of it: a window has at most as many blocks as the row.
"""

import triton
import triton.language as tl

from ...shared.triton.dropout import dropout_factor
from ...shared.triton.softmax import dot_rows, score_gradients
from ...shared.triton.tiles import dot_by_parts
from ..reference import MEMBERSHIP_FLOOR

FLOOR = tl.constexpr(MEMBERSHIP_FLOOR)


@triton.jit
def load_text(lengths_ptr, words_ptr, i_b, window):
    """Block length, words and used blocks of a row, the blocks that a query sees, and how many ranks back."""
    w = tl.load(lengths_ptr + i_b)
    n = tl.load(words_ptr + i_b)
    used = tl.cdiv(n, w)
    return w, n, used, tl.minimum(window, used), (tl.minimum(window, used + 1) - 1) * w


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
def load_partners(order_ptr, labels_ptr, o_virtual, end, w, n, used):
    """Rank, virtual block, original index and label of virtual ranks, and which of them are words."""
    whole = used * w
    o_rank = tl.where(o_virtual < 0, o_virtual + whole, tl.where(o_virtual >= whole, o_virtual - whole, o_virtual))
    # One row more keeps the division of ranks below 0 exact.
    block = (o_virtual + whole) // w - used
    m_word = (o_virtual < end) & (o_rank < n) & (o_rank >= 0)
    index = tl.load(order_ptr + o_rank, mask=m_word, other=0)
    label = index
    if labels_ptr is not None:
        label = tl.load(labels_ptr + o_rank, mask=m_word, other=0)
    return o_rank, block, index, label, m_word


@triton.jit
def by_query(b_numbers, BY_KEY: tl.constexpr):
    """A number of each query where tiles are queries by keys, or (`BY_KEY`) keys by queries."""
    return b_numbers[None, :] if BY_KEY else b_numbers[:, None]


@triton.jit
def by_key(b_numbers, BY_KEY: tl.constexpr):
    """A number of each key, likewise."""
    return b_numbers[:, None] if BY_KEY else b_numbers[None, :]


@triton.jit
def meet(query, key, seen, reach, CAUSAL: tl.constexpr, HAS_LABELS: tl.constexpr, BY_KEY: tl.constexpr):
    """Which keys which queries see; both are what `load_partners` gave."""
    block_q, block_k = by_query(query[1], BY_KEY), by_key(key[1], BY_KEY)
    visible = by_query(query[4], BY_KEY) & by_key(key[4], BY_KEY) & (block_k <= block_q) & (block_k > block_q - seen)
    if CAUSAL:
        visible &= by_key(key[2], BY_KEY) <= by_query(query[2], BY_KEY)
    if HAS_LABELS:
        visible &= by_query(query[3], BY_KEY) == by_key(key[3], BY_KEY)
        visible &= by_query(query[0], BY_KEY) - by_key(key[0], BY_KEY) <= reach
    return visible


@triton.jit
def shared_membership(membership_ptr, a, b, stride_n, stride_c, clusters, PRECISION: tl.constexpr):
    """`P_a · P_b + 1e-4` of what `load_partners` gave, the many columns of `P` some at a time."""
    p_a, p_b = membership_ptr + a[2].to(tl.int64) * stride_n, membership_ptr + b[2].to(tl.int64) * stride_n
    return dot_by_parts(p_a, a[4], stride_c, p_b, b[4], stride_c, clusters, PRECISION) + FLOOR


@triton.jit
def pair_gradients(
    query, key, value, grad, b_bias, visible, b_lse, b_delta, D, Dv, scale_log2, seed_ptr, o_row, o_rank, N, dropout_p,
    KINDS: tl.constexpr, KIND: tl.constexpr, BY_KEY: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dS = A (dA - δ)` of operands, with a bias or None on their scores, and the weights `A` after dropout.

    For dropout queries `o_row` are numbered through, and keys have ranks.
    """
    if BY_KEY:
        b_scores = dot_rows(key, query, D, BY_PARTS, PRECISION) * scale_log2
        b_grad = dot_rows(value, grad, Dv, BY_PARTS, PRECISION)
    else:
        b_scores = dot_rows(query, key, D, BY_PARTS, PRECISION) * scale_log2
        b_grad = dot_rows(grad, value, Dv, BY_PARTS, PRECISION)
    if b_bias is not None:
        b_scores += b_bias
    b_factor = None
    if seed_ptr is not None:
        b_factor = dropout_factor(seed_ptr, o_row, o_rank, N, dropout_p, KINDS, KIND)
        if BY_KEY:
            b_factor = tl.trans(b_factor)
    b_lse, b_delta = by_query(b_lse, BY_KEY), by_query(b_delta, BY_KEY)
    return score_gradients(b_scores, visible, b_lse, b_delta, b_grad, b_factor)
