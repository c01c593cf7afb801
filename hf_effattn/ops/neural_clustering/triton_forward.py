"""Kernels of the forward pass: centroids over words, some columns at a time; memberships are never in memory.

Scores are exponents of 2. The words of a row are split over programs, each of which leaves a partial result and the
logarithm of its sum of weights.
"""

import triton
import triton.language as tl

from ..chips import LENGTHS
from ..sorted_clusters.triton_tiles import LOWEST, dot_by_parts, load_key_mask

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=LENGTHS)
def _neural_clustering_fwd_length_kernel(
    words_ptr, mask_ptr, inverse_ptr, stride_words_b, stride_words_n, stride_words_d, stride_mask_b, stride_mask_n,
    N, d, tiles, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`1 / |Z_j|`; 0 for a word of length 0 and for a masked one."""
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    o_n = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    if HAS_MASK:
        mask_ptr += i_b * stride_mask_b
    m_word = load_key_mask(mask_ptr, o_n, N, stride_mask_n, HAS_MASK)
    p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
    b_square = tl.zeros([ROWS], tl.float32)
    for first in range(0, d, BLOCK_D):
        o_d = first + tl.arange(0, BLOCK_D)
        # [ROWS, BLOCK_D]
        b_words = tl.load(
            p_words[:, None] + o_d[None, :] * stride_words_d, mask=m_word[:, None] & (o_d < d)[None, :], other=0.0
        ).to(tl.float32)
        b_square += tl.sum(b_words * b_words, 1)
    b_inverse = tl.where(b_square > 0, 1.0 / tl.sqrt(tl.where(b_square > 0, b_square, 1.0)), 0.0)
    tl.store(inverse_ptr + i_b * N + o_n, b_inverse, mask=o_n < N)


@triton.jit
def scores_of(
    p_a, m_a, stride_a, p_b, m_b, stride_b, b_inverse, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`φ` of rows and columns, one side centroids and one words, as exponents of 2; `b_inverse` fits the product."""
    b_product = dot_by_parts(p_a, m_a, stride_a, p_b, m_b, stride_b, d, ROWS, COLUMNS, PRECISION)
    return b_product * b_inverse * LOG2E


@triton.jit(do_not_specialize=LENGTHS)
def _neural_clustering_fwd_update_kernel(
    words_ptr, directions_ptr, mask_ptr, inverse_ptr, partial_ptr, lse_ptr,
    stride_words_b, stride_words_n, stride_words_d, stride_dir_b, stride_dir_k, stride_dir_d,
    stride_mask_b, stride_mask_n, N, k, d, tiles, splits, split_length,
    COSINE: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`Ĉ_i = Σ_j U_ij Z_j` over a part of the words, for some columns of `Z`; `log2 Σ_j 2^φ_ij` of the part.

    Source: Wang 2022, Eq. 2 and 3.
    """
    i_split = tl.program_id(0) % splits
    i_tile = tl.program_id(0) // splits % tiles
    i_b = (tl.program_id(0) // (splits * tiles)).to(tl.int64)
    o_k = i_tile * ROWS + tl.arange(0, ROWS)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_k = o_k < k
    if HAS_MASK:
        mask_ptr += i_b * stride_mask_b
    p_direction = directions_ptr + i_b * stride_dir_b + o_k.to(tl.int64) * stride_dir_k
    b_updated = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for start in range(i_split * split_length, tl.minimum(N, (i_split + 1) * split_length), COLUMNS):
        o_n = start + tl.arange(0, COLUMNS)
        m_word = load_key_mask(mask_ptr, o_n, N, stride_mask_n, HAS_MASK)
        p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
        b_inverse = tl.full([COLUMNS], 1.0, tl.float32)
        if COSINE:
            b_inverse = tl.load(inverse_ptr + i_b * N + o_n, mask=m_word, other=0.0)
        b_scores = scores_of(
            p_direction, m_k, stride_dir_d, p_words, m_word, stride_words_d, b_inverse[None, :], d,
            ROWS, COLUMNS, PRECISION,
        )  # fmt: skip
        b_scores = tl.where(m_word[None, :], b_scores, float("-inf"))
        b_higher = tl.maximum(b_highest, tl.max(b_scores, 1))
        b_weights = tl.exp2(b_scores - b_higher[:, None])
        b_kept = tl.exp2(b_highest - b_higher)
        b_total = b_total * b_kept + tl.sum(b_weights, 1)
        # [COLUMNS, BLOCK_D]
        b_words = tl.load(
            p_words[:, None] + o_d[None, :] * stride_words_d, mask=m_word[:, None] & (o_d < d)[None, :], other=0.0
        )
        b_updated = b_updated * b_kept[:, None]
        b_updated += tl.dot(b_weights.to(b_words.dtype), b_words, input_precision=PRECISION)
        b_highest = b_higher
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    o_part = (i_b * k + o_k) * splits + i_split
    p_partial = partial_ptr + o_part[:, None] * d + o_d[None, :]
    tl.store(p_partial, b_updated / b_divisor[:, None], mask=m_k[:, None] & (o_d < d)[None, :])
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + o_part, tl.where(b_total > 0, b_highest + tl.log2(b_divisor), LOWEST), mask=m_k)


@triton.jit(do_not_specialize=LENGTHS)
def _neural_clustering_fwd_label_kernel(
    words_ptr, directions_ptr, mask_ptr, inverse_ptr, total_ptr, labels_ptr,
    stride_words_b, stride_words_n, stride_words_d, stride_dir_b, stride_dir_k, stride_dir_d,
    stride_mask_b, stride_mask_n, N, k, d, tiles,
    COSINE: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`I_j = argmax_i U_ij`, in logs, the first of equals (Source: Wang 2022, Eq. 4)."""
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    o_n = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    if HAS_MASK:
        mask_ptr += i_b * stride_mask_b
    m_word = load_key_mask(mask_ptr, o_n, N, stride_mask_n, HAS_MASK)
    p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
    b_inverse = tl.full([ROWS], 1.0, tl.float32)
    if COSINE:
        b_inverse = tl.load(inverse_ptr + i_b * N + o_n, mask=m_word, other=0.0)
    b_best = tl.full([ROWS], float("-inf"), tl.float32)
    b_label = tl.zeros([ROWS], tl.int32)
    for start in range(0, k, COLUMNS):
        o_k = start + tl.arange(0, COLUMNS)
        m_k = o_k < k
        p_direction = directions_ptr + i_b * stride_dir_b + o_k.to(tl.int64) * stride_dir_k
        b_scores = scores_of(
            p_words, m_word, stride_words_d, p_direction, m_k, stride_dir_d, b_inverse[:, None], d,
            ROWS, COLUMNS, PRECISION,
        )  # fmt: skip
        b_total = tl.load(total_ptr + i_b * k + o_k, mask=m_k, other=0.0)
        b_scores = tl.where(m_k[None, :], b_scores - b_total[None, :], float("-inf"))
        b_largest, b_place = tl.max(b_scores, 1, return_indices=True)
        b_label = tl.where(b_largest > b_best, start + b_place, b_label)
        b_best = tl.maximum(b_best, b_largest)
    b_label = tl.where(m_word, b_label, 0)
    tl.store(labels_ptr + i_b * N + o_n, b_label.to(tl.int64), mask=o_n < N)
