"""Kernels of the backward pass: memberships of some words of every row are computed again, then what is made of them.

Every gradient has one writer, so that runs repeat.
"""

import triton
import triton.language as tl

from ...shared.triton.launch import kernel
from ...shared.triton.tiles import load_mask
from .forward import LOG2E, load_block


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
