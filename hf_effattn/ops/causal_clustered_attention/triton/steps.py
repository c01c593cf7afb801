"""What the kernels of causal attention over clusters share: where blocks stand, which rows go together.

Sizes: `P = B · H` problems, `S` tokens of a segment, `U` segments that have older ones, `C` query clusters, `T` top
keys, `G` key clusters of a block. Columns of a query's softmax are numbered, for dropout: `0 .. N - 1` the keys by
their position, then the key clusters of all levels, or the remainder.
"""

import triton
import triton.language as tl

from ...shared.triton.chips import LENGTHS as COMMON_LENGTHS

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
