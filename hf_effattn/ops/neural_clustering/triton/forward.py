"""Kernels of the forward pass: scores of some words of every row, then what is made of them.

A score is computed once and read by every program that needs it; memberships are never in memory. Scores are exponents
of 2. A tile has `WORDS` words, `CENTROIDS` centroids or `BLOCK_D` columns of both, whatever a kernel sums over.
"""

import triton
import triton.language as tl

from ...shared.triton.launch import kernel
from ...shared.triton.tiles import LOWEST, load_mask

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_block(p_rows, m_rows, o_d, stride_d, d):
    """Some columns of rows, 0 where `m_rows` is False and behind the last column: `(rows, columns)`."""
    return tl.load(p_rows[:, None] + o_d[None, :] * stride_d, mask=m_rows[:, None] & (o_d < d)[None, :], other=0.0)


@kernel
def _neural_clustering_fwd_length_kernel(
    words_ptr, mask_ptr, inverse_ptr, stride_words_b, stride_words_n, stride_words_d, stride_mask_b, stride_mask_n,
    N, d, tiles, WORDS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`1 / |Z_j|`; 0 for a word of length 0 and for a masked one."""
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    o_n = tl.program_id(0) % tiles * WORDS + tl.arange(0, WORDS)
    m_word = load_mask(mask_ptr, i_b, o_n, o_n < N, stride_mask_b, stride_mask_n)
    p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
    b_square = tl.zeros([WORDS], tl.float32)
    for start in range(0, d, BLOCK_D):
        # [WORDS, BLOCK_D]
        b_words = load_block(p_words, m_word, start + tl.arange(0, BLOCK_D), stride_words_d, d).to(tl.float32)
        b_square += tl.sum(b_words * b_words, 1)
    b_inverse = tl.where(b_square > 0, 1.0 / tl.sqrt(tl.where(b_square > 0, b_square, 1.0)), 0.0)
    tl.store(inverse_ptr + i_b * N + o_n, b_inverse, mask=o_n < N)


@kernel
def _neural_clustering_fwd_score_kernel(
    words_ptr, directions_ptr, mask_ptr, inverse_ptr, scores_ptr,
    stride_words_b, stride_words_n, stride_words_d, stride_dir_b, stride_dir_k, stride_dir_d,
    stride_mask_b, stride_mask_n, N, k, d, first_row, last_row, tiles, blocks, rows,
    COSINE: tl.constexpr, WORDS: tl.constexpr, CENTROIDS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`φ(C_i, Z_j)` of the words `first_row .. last_row - 1`; -inf of a masked word and behind the last centroid."""
    i_block = tl.program_id(0) % blocks
    i_tile = tl.program_id(0) // blocks % tiles
    i_b = (tl.program_id(0) // (blocks * tiles)).to(tl.int64)
    o_row = i_tile * WORDS + tl.arange(0, WORDS)
    o_n = first_row + o_row
    o_k = i_block * CENTROIDS + tl.arange(0, CENTROIDS)
    m_word = load_mask(mask_ptr, i_b, o_n, o_n < last_row, stride_mask_b, stride_mask_n)
    m_k = o_k < k
    p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
    p_direction = directions_ptr + i_b * stride_dir_b + o_k.to(tl.int64) * stride_dir_k
    b_scores = tl.zeros([WORDS, CENTROIDS], tl.float32)
    for start in range(0, d, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        # [WORDS, BLOCK_D], [CENTROIDS, BLOCK_D]
        b_words = load_block(p_words, m_word, o_d, stride_words_d, d)
        b_direction = load_block(p_direction, m_k, o_d, stride_dir_d, d)
        b_scores = tl.dot(b_words, tl.trans(b_direction), b_scores, input_precision=PRECISION)
    if COSINE:
        b_scores *= tl.load(inverse_ptr + i_b * N + o_n, mask=m_word, other=0.0)[:, None]
    b_scores = tl.where(m_word[:, None] & m_k[None, :], b_scores * LOG2E, float("-inf"))
    p_scores = scores_ptr + ((i_b * rows + o_row) * blocks * CENTROIDS)[:, None] + o_k[None, :]
    tl.store(p_scores, b_scores, mask=(o_n < last_row)[:, None])


@kernel
def _neural_clustering_fwd_update_kernel(
    words_ptr, mask_ptr, scores_ptr, partial_ptr, lse_ptr, stride_words_b, stride_words_n, stride_words_d,
    stride_mask_b, stride_mask_n, k, d, first_row, last_row, blocks, rows, splits, split_length,
    WORDS: tl.constexpr, CENTROIDS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`Ĉ_i = Σ_j U_ij Z_j` over a part of the words, for some columns of `Z`; `log2 Σ_j 2^φ_ij` of the part.

    A part goes on where it stopped in the words before `first_row`. Source: Wang 2022, Eq. 2 and 3.
    """
    i_split = tl.program_id(0) % splits
    i_block = tl.program_id(0) // splits % blocks
    i_b = (tl.program_id(0) // (splits * blocks)).to(tl.int64)
    o_k = i_block * CENTROIDS + tl.arange(0, CENTROIDS)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_part = (i_b * k + o_k) * splits + i_split
    p_partial = partial_ptr + o_part[:, None] * d + o_d[None, :]
    # Every program keeps its own, the same for all columns: none reads what another writes.
    p_lse = lse_ptr + o_part * tl.num_programs(1) + tl.program_id(1)
    m_k, m_before = o_k < k, (o_k < k) & (first_row > 0)
    m_columns = (o_d < d)[None, :]
    # [CENTROIDS, BLOCK_D]
    b_updated = tl.load(p_partial, mask=m_before[:, None] & m_columns, other=0.0)
    b_highest = tl.load(p_lse, mask=m_before, other=LOWEST)
    b_total = tl.where(b_highest > LOWEST, 1.0, 0.0)
    end = tl.minimum(last_row - first_row, (i_split + 1) * split_length)
    for start in range(i_split * split_length, end, WORDS):
        o_row = start + tl.arange(0, WORDS)
        m_row = o_row < end
        o_n = first_row + o_row
        m_word = load_mask(mask_ptr, i_b, o_n, o_n < first_row + end, stride_mask_b, stride_mask_n)
        p_scores = scores_ptr + ((i_b * rows + o_row) * blocks * CENTROIDS)[:, None] + o_k[None, :]
        # [WORDS, CENTROIDS]
        b_scores = tl.load(p_scores, mask=m_row[:, None], other=float("-inf"))
        b_higher = tl.maximum(b_highest, tl.max(b_scores, 0))
        b_weights = tl.exp2(b_scores - b_higher[None, :])
        b_kept = tl.exp2(b_highest - b_higher)
        b_total = b_total * b_kept + tl.sum(b_weights, 0)
        # [WORDS, BLOCK_D]
        p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
        b_words = load_block(p_words, m_word, o_d, stride_words_d, d)
        b_weights = tl.trans(b_weights.to(b_words.dtype))
        b_updated = tl.dot(b_weights, b_words, b_updated * b_kept[:, None], input_precision=PRECISION)
        b_highest = b_higher
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    tl.store(p_partial, b_updated / b_divisor[:, None], mask=m_k[:, None] & m_columns)
    tl.store(p_lse, tl.where(b_total > 0, b_highest + tl.log2(b_divisor), LOWEST), mask=m_k)


@kernel
def _neural_clustering_fwd_label_kernel(
    scores_ptr, total_ptr, labels_ptr, N, k, first_row, last_row, tiles, blocks, rows,
    WORDS: tl.constexpr, CENTROIDS: tl.constexpr,
):  # fmt: skip
    """`I_j = argmax_i U_ij`, in logs, the first of equals; 0 of a masked word (Source: Wang 2022, Eq. 4)."""
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    o_row = tl.program_id(0) % tiles * WORDS + tl.arange(0, WORDS)
    m_row = first_row + o_row < last_row
    b_best = tl.full([WORDS], float("-inf"), tl.float32)
    b_label = tl.zeros([WORDS], tl.int32)
    for i_block in range(0, blocks):
        o_k = i_block * CENTROIDS + tl.arange(0, CENTROIDS)
        p_scores = scores_ptr + ((i_b * rows + o_row) * blocks * CENTROIDS)[:, None] + o_k[None, :]
        # [WORDS, CENTROIDS]
        b_scores = tl.load(p_scores, mask=m_row[:, None], other=float("-inf"))
        b_scores -= tl.load(total_ptr + i_b * k + o_k, mask=o_k < k, other=0.0)[None, :]
        b_largest = tl.max(b_scores, 1)
        # Two plain reductions: one that carries both is a branch for every number.
        b_place = tl.min(tl.where(b_scores == b_largest[:, None], o_k[None, :], blocks * CENTROIDS), 1)
        b_label = tl.where(b_largest > b_best, b_place, b_label)
        b_best = tl.maximum(b_best, b_largest)
    tl.store(labels_ptr + i_b * N + first_row + o_row, b_label.to(tl.int64), mask=m_row)
