"""Kernels of the backward pass: memberships are computed again, every gradient has one writer, so that runs repeat."""

import triton
import triton.language as tl

from ..chips import LENGTHS
from ..sorted_clusters.triton_tiles import dot_by_parts, load_key_mask
from .triton_forward import scores_of


@triton.jit(do_not_specialize=LENGTHS)
def _neural_clustering_bwd_direction_kernel(
    words_ptr, directions_ptr, mask_ptr, inverse_ptr, total_ptr, grad_updated_ptr, mean_ptr, partial_ptr,
    stride_words_b, stride_words_n, stride_words_d, stride_dir_b, stride_dir_k, stride_dir_d,
    stride_mask_b, stride_mask_n, stride_gu_b, stride_gu_k, stride_gu_d, N, k, d, tiles, splits, split_length,
    COSINE: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dC_i = Σ_j dφ_ij Z_j` over a part of the words, `dφ = U (dU - δ)`, `dU_ij = dĈ_i · Z_j`, `δ_i = dĈ_i · Ĉ_i`."""
    i_split = tl.program_id(0) % splits
    i_tile = tl.program_id(0) // splits % tiles
    i_b = (tl.program_id(0) // (splits * tiles)).to(tl.int64)
    o_k = i_tile * ROWS + tl.arange(0, ROWS)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_k = o_k < k
    if HAS_MASK:
        mask_ptr += i_b * stride_mask_b
    p_direction = directions_ptr + i_b * stride_dir_b + o_k.to(tl.int64) * stride_dir_k
    p_grad = grad_updated_ptr + i_b * stride_gu_b + o_k.to(tl.int64) * stride_gu_k
    b_total = tl.load(total_ptr + i_b * k + o_k, mask=m_k, other=0.0)
    b_mean = tl.load(mean_ptr + i_b * k + o_k, mask=m_k, other=0.0)
    b_grad_direction = tl.zeros([ROWS, BLOCK_D], tl.float32)
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
        m_pair = m_k[:, None] & m_word[None, :]
        b_weights = tl.exp2(tl.where(m_pair, b_scores - b_total[:, None], float("-inf")))
        b_grad = dot_by_parts(p_grad, m_k, stride_gu_d, p_words, m_word, stride_words_d, d, ROWS, COLUMNS, PRECISION)
        b_grad = b_weights * (b_grad - b_mean[:, None]) * b_inverse[None, :]
        # [COLUMNS, BLOCK_D]
        b_words = tl.load(
            p_words[:, None] + o_d[None, :] * stride_words_d, mask=m_word[:, None] & (o_d < d)[None, :], other=0.0
        )
        b_grad_direction += tl.dot(b_grad.to(b_words.dtype), b_words, input_precision=PRECISION)
    p_partial = partial_ptr + ((i_b * splits + i_split) * k + o_k[:, None]) * d + o_d[None, :]
    tl.store(p_partial, b_grad_direction, mask=m_k[:, None] & (o_d < d)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _neural_clustering_bwd_word_kernel(
    words_ptr, directions_ptr, mask_ptr, inverse_ptr, total_ptr, grad_updated_ptr, mean_ptr, grad_words_ptr,
    stride_words_b, stride_words_n, stride_words_d, stride_dir_b, stride_dir_k, stride_dir_d,
    stride_mask_b, stride_mask_n, stride_gu_b, stride_gu_k, stride_gu_d, stride_gw_b, stride_gw_n, stride_gw_d,
    N, k, d, tiles,
    COSINE: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dZ_j = Σ_i U_ij dĈ_i + dφ_ij C_i` for some columns.

    The cosine does not change along the word: what the product with it gives there is taken out.
    """
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    o_n = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if HAS_MASK:
        mask_ptr += i_b * stride_mask_b
    m_word = load_key_mask(mask_ptr, o_n, N, stride_mask_n, HAS_MASK)
    p_words = words_ptr + i_b * stride_words_b + o_n.to(tl.int64) * stride_words_n
    b_inverse = tl.full([ROWS], 1.0, tl.float32)
    if COSINE:
        b_inverse = tl.load(inverse_ptr + i_b * N + o_n, mask=m_word, other=0.0)
    b_grad_words = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_pull = tl.zeros([ROWS], tl.float32)
    for start in range(0, k, COLUMNS):
        o_k = start + tl.arange(0, COLUMNS)
        m_k = o_k < k
        p_direction = directions_ptr + i_b * stride_dir_b + o_k.to(tl.int64) * stride_dir_k
        p_grad = grad_updated_ptr + i_b * stride_gu_b + o_k.to(tl.int64) * stride_gu_k
        b_product = dot_by_parts(
            p_words, m_word, stride_words_d, p_direction, m_k, stride_dir_d, d, ROWS, COLUMNS, PRECISION
        )
        b_total = tl.load(total_ptr + i_b * k + o_k, mask=m_k, other=0.0)
        b_mean = tl.load(mean_ptr + i_b * k + o_k, mask=m_k, other=0.0)
        b_product *= b_inverse[:, None]
        m_pair = m_word[:, None] & m_k[None, :]
        b_weights = tl.exp2(tl.where(m_pair, b_product * 1.4426950408889634 - b_total[None, :], float("-inf")))
        b_grad = dot_by_parts(p_words, m_word, stride_words_d, p_grad, m_k, stride_gu_d, d, ROWS, COLUMNS, PRECISION)
        b_grad = b_weights * (b_grad - b_mean[None, :])
        b_pull += tl.sum(b_grad * b_product, 1)
        b_grad *= b_inverse[:, None]
        m_columns = m_k[:, None] & (o_d < d)[None, :]
        # [COLUMNS, BLOCK_D]
        b_grad_updated = tl.load(p_grad[:, None] + o_d[None, :] * stride_gu_d, mask=m_columns, other=0.0)
        # [COLUMNS, BLOCK_D]
        b_direction = tl.load(p_direction[:, None] + o_d[None, :] * stride_dir_d, mask=m_columns, other=0.0)
        b_grad_words += tl.dot(b_weights.to(b_grad_updated.dtype), b_grad_updated, input_precision=PRECISION)
        b_grad_words += tl.dot(b_grad.to(b_direction.dtype), b_direction, input_precision=PRECISION)
    if COSINE:
        # [ROWS, BLOCK_D]
        b_words = tl.load(
            p_words[:, None] + o_d[None, :] * stride_words_d, mask=m_word[:, None] & (o_d < d)[None, :], other=0.0
        )
        b_grad_words -= (b_pull * b_inverse * b_inverse)[:, None] * b_words.to(tl.float32)
    p_grad_words = grad_words_ptr + i_b * stride_gw_b + o_n.to(tl.int64)[:, None] * stride_gw_n
    p_grad_words += o_d[None, :] * stride_gw_d
    m_store = (o_n < N)[:, None] & (o_d < d)[None, :]
    tl.store(p_grad_words, b_grad_words.to(grad_words_ptr.dtype.element_ty), mask=m_store)
