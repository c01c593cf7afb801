"""Kernels of neural clustering: scores of some words of every row, then what is made of them.

A score is computed once and read by every program that needs it. The backward pass computes memberships again, and
every gradient has one writer, so that runs repeat. Scores are exponents of 2. A tile has `WORDS` words, `CENTROIDS`
centroids or `BLOCK_D` columns of both, whatever a kernel sums over.
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


@kernel
def _neural_clustering_bwd_score_kernel(
    words_ptr, directions_ptr, mask_ptr, inverse_ptr, total_ptr, grad_updated_ptr, mean_ptr,
    weights_ptr, grad_scores_ptr, pull_ptr,
    stride_words_b, stride_words_n, stride_words_d, stride_dir_b, stride_dir_k, stride_dir_d,
    stride_mask_b, stride_mask_n, stride_gu_b, stride_gu_k, stride_gu_d, N, k, d, first_row, last_row,
    tiles, blocks, rows,
    COSINE: tl.constexpr, WORDS: tl.constexpr, CENTROIDS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`U_ij`, `dφ_ij / |Z_j|` and, of a tile's centroids, `Σ_i dφ_ij φ_ij / |Z_j|²`, which is what Z_j pulls.

    `dφ = U (dU - δ)`, `dU_ij = dĈ_i · Z_j`, `δ_i = dĈ_i · Ĉ_i`. Where the similarity is the inner product `|Z_j|` is
    not there, nor the pull.
    """
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
    p_grad = grad_updated_ptr + i_b * stride_gu_b + o_k.to(tl.int64) * stride_gu_k
    b_scores = tl.zeros([WORDS, CENTROIDS], tl.float32)
    b_grad = tl.zeros([WORDS, CENTROIDS], tl.float32)
    for start in range(0, d, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        # [WORDS, BLOCK_D], twice [CENTROIDS, BLOCK_D]
        b_words = load_block(p_words, m_word, o_d, stride_words_d, d)
        b_direction = load_block(p_direction, m_k, o_d, stride_dir_d, d)
        b_scores = tl.dot(b_words, tl.trans(b_direction), b_scores, input_precision=PRECISION)
        b_grad_updated = load_block(p_grad, m_k, o_d, stride_gu_d, d)
        b_grad = tl.dot(b_words, tl.trans(b_grad_updated), b_grad, input_precision=PRECISION)
    b_total = tl.load(total_ptr + i_b * k + o_k, mask=m_k, other=0.0)
    b_mean = tl.load(mean_ptr + i_b * k + o_k, mask=m_k, other=0.0)
    b_inverse = tl.full([WORDS], 1.0, tl.float32)
    if COSINE:
        b_inverse = tl.load(inverse_ptr + i_b * N + o_n, mask=m_word, other=0.0)
        b_scores *= b_inverse[:, None]
    m_pair = m_word[:, None] & m_k[None, :]
    b_weights = tl.exp2(tl.where(m_pair, b_scores * LOG2E - b_total[None, :], float("-inf")))
    b_grad = b_weights * (b_grad - b_mean[None, :])
    m_row = o_n < last_row
    if COSINE:
        b_pull = tl.sum(b_grad * b_scores, 1) * b_inverse * b_inverse
        tl.store(pull_ptr + (i_b * rows + o_row) * blocks + i_block, b_pull, mask=m_row)
        b_grad *= b_inverse[:, None]
    o_pair = ((i_b * rows + o_row) * blocks * CENTROIDS)[:, None] + o_k[None, :]
    tl.store(weights_ptr + o_pair, b_weights.to(weights_ptr.dtype.element_ty), mask=m_row[:, None])
    tl.store(grad_scores_ptr + o_pair, b_grad.to(grad_scores_ptr.dtype.element_ty), mask=m_row[:, None])


@kernel
def _neural_clustering_bwd_direction_kernel(
    words_ptr, mask_ptr, grad_scores_ptr, partial_ptr, stride_words_b, stride_words_n, stride_words_d,
    stride_mask_b, stride_mask_n, k, d, first_row, last_row, blocks, rows, splits, split_length,
    WORDS: tl.constexpr, CENTROIDS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dC_i = Σ_j dφ_ij Z_j / |Z_j|` over a part of the words, added to that of the words before `first_row`."""
    i_split = tl.program_id(0) % splits
    i_block = tl.program_id(0) // splits % blocks
    i_b = (tl.program_id(0) // (splits * blocks)).to(tl.int64)
    o_k = i_block * CENTROIDS + tl.arange(0, CENTROIDS)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    p_partial = partial_ptr + ((i_b * splits + i_split) * k + o_k[:, None]) * d + o_d[None, :]
    m_partial = (o_k < k)[:, None] & (o_d < d)[None, :]
    # [CENTROIDS, BLOCK_D]
    b_grad_direction = tl.load(p_partial, mask=m_partial & (first_row > 0), other=0.0)
    end = tl.minimum(last_row - first_row, (i_split + 1) * split_length)
    for start in range(i_split * split_length, end, WORDS):
        o_row = start + tl.arange(0, WORDS)
        o_n = first_row + o_row
        m_word = load_mask(mask_ptr, i_b, o_n, o_n < first_row + end, stride_mask_b, stride_mask_n)
        p_grad = grad_scores_ptr + ((i_b * rows + o_row) * blocks * CENTROIDS)[:, None] + o_k[None, :]
        # [WORDS, CENTROIDS]
        b_grad = tl.load(p_grad, mask=m_word[:, None], other=0.0)
        # [WORDS, BLOCK_D]
        p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
        b_words = load_block(p_words, m_word, o_d, stride_words_d, d).to(b_grad.dtype)
        b_grad_direction = tl.dot(tl.trans(b_grad), b_words, b_grad_direction, input_precision=PRECISION)
    tl.store(p_partial, b_grad_direction, mask=m_partial)


@triton.jit
def add_rows(
    b_sum, factors_ptr, o_pair, m_row, rows_ptr, stride_k, stride_d, o_d, k, d, blocks,
    CENTROIDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to a tile of words some columns of the rows of all centroids, by factors that are stored per pair."""
    for i_block in range(0, blocks):
        o_k = i_block * CENTROIDS + tl.arange(0, CENTROIDS)
        p_factors = factors_ptr + (o_pair * CENTROIDS)[:, None] + o_k[None, :]
        # [WORDS, CENTROIDS], [CENTROIDS, BLOCK_D]
        b_factors = tl.load(p_factors, mask=m_row[:, None], other=0.0)
        b_rows = load_block(rows_ptr + o_k.to(tl.int64) * stride_k, o_k < k, o_d, stride_d, d)
        b_sum = tl.dot(b_factors, b_rows.to(b_factors.dtype), b_sum, input_precision=PRECISION)
    return b_sum


@kernel
def _neural_clustering_bwd_word_kernel(
    words_ptr, directions_ptr, mask_ptr, grad_updated_ptr, weights_ptr, grad_scores_ptr, pull_ptr, grad_words_ptr,
    stride_words_b, stride_words_n, stride_words_d, stride_dir_b, stride_dir_k, stride_dir_d,
    stride_mask_b, stride_mask_n, stride_gu_b, stride_gu_k, stride_gu_d, stride_gw_b, stride_gw_n, stride_gw_d,
    k, d, first_row, last_row, tiles, blocks, rows,
    COSINE: tl.constexpr, WORDS: tl.constexpr, CENTROIDS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dZ_j = Σ_i U_ij dĈ_i + dφ_ij C_i / |Z_j|` for some columns.

    The cosine does not change along the word: what the product with it gives there is taken out.
    """
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    o_row = tl.program_id(0) % tiles * WORDS + tl.arange(0, WORDS)
    o_n = first_row + o_row
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_row = o_n < last_row
    o_pair = (i_b * rows + o_row) * blocks
    # One after the other: both at once would need more registers than there are.
    b_grad_words = add_rows(
        tl.zeros([WORDS, BLOCK_D], tl.float32), weights_ptr, o_pair, m_row, grad_updated_ptr + i_b * stride_gu_b,
        stride_gu_k, stride_gu_d, o_d, k, d, blocks, CENTROIDS, PRECISION,
    )  # fmt: skip
    b_grad_words = add_rows(
        b_grad_words, grad_scores_ptr, o_pair, m_row, directions_ptr + i_b * stride_dir_b,
        stride_dir_k, stride_dir_d, o_d, k, d, blocks, CENTROIDS, PRECISION,
    )  # fmt: skip
    if COSINE:
        m_word = load_mask(mask_ptr, i_b, o_n, o_n < last_row, stride_mask_b, stride_mask_n)
        p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
        # [WORDS, BLOCK_D]
        b_words = load_block(p_words, m_word, o_d, stride_words_d, d)
        b_pull = tl.zeros([WORDS], tl.float32)
        for i_block in range(0, blocks):
            b_pull += tl.load(pull_ptr + o_pair + i_block, mask=m_row, other=0.0)
        b_grad_words -= b_pull[:, None] * b_words.to(tl.float32)
    p_grad_words = grad_words_ptr + i_b * stride_gw_b + o_n.to(tl.int64)[:, None] * stride_gw_n
    p_grad_words += o_d[None, :] * stride_gw_d
    b_grad_words = b_grad_words.to(grad_words_ptr.dtype.element_ty)
    tl.store(p_grad_words, b_grad_words, mask=m_row[:, None] & (o_d < d)[None, :])
