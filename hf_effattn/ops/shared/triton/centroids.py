"""Attention of the centroids over all keys, which also leaves what their top keys are selected from.

That is the largest score of each of many bins of keys, `COLUMNS` apart: the top keys are in the top bins, whose keys
are scored again. Few keys have a bin each.

Where few centroids would leave the chip idle the keys are split over programs; each leaves a partial result and the
logarithm of its sum of weights, and `merge_splits` puts them together where they are used. Scores are exponents of 2.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .chips import chip_of
from .dropout import dropout_factor
from .launch import kernel
from .softmax import CENTROID_KIND, KINDS, softmax_weights
from .tiles import LOG2_E, LOWEST, dot_by_parts, load_mask, tile_config
from .topk import WHOLE_ROW, _select_candidates_kernel, select_topk

BINS = 1024  # at least so many of a row, if there are as many keys
FEW_CANDIDATES, CANDIDATES = 512, 2048  # keys that one program scores again: the wanted and the largest number
SCORE_BYTES = 2**28  # of the bins in memory at once
PROGRAMS = 264  # two for each of the 132 multiprocessors of a large chip, where they run side by side


@dataclass(frozen=True)
class CentroidPass:
    """What the pass over the keys leaves, `R = G · C` rows for each of `B · key heads` tables."""

    # `(B · Hk · R, splits, Dv)` float32, attention over each part of the keys; empty if not asked for
    values: torch.Tensor
    lse: torch.Tensor  # `(B · Hk · R, splits)` float32, base-2 logarithm of the sum of weights of each part
    # `(B · Hk · R, topk)` int32, the top keys in the order of their bins, -1 where there are too few
    top: torch.Tensor
    top_scores: torch.Tensor  # their scores times log2(e), `-inf` where there is no key


@triton.jit
def merge_splits(values_ptr, lse_ptr, i_row, splits, Dv, BLOCK_V: tl.constexpr):
    """The attention of one row out of its partial results, and its base-2 log-sum-exp."""
    o_v = tl.arange(0, BLOCK_V)
    b_value = tl.zeros([BLOCK_V], tl.float32)
    highest = LOWEST + 0.0
    total = 0.0
    for split in range(splits):
        lse = tl.load(lse_ptr + i_row * splits + split)
        higher = tl.maximum(highest, lse)
        kept, weight = tl.exp2(highest - higher), tl.exp2(lse - higher)
        # [BLOCK_V]
        b_part = tl.load(values_ptr + (i_row * splits + split) * Dv + o_v, mask=o_v < Dv, other=0.0)
        b_value = b_value * kept + b_part * weight
        total = total * kept + weight
        highest = higher
    return b_value / total, highest + tl.log2(total)


@kernel
def _centroid_attention_fwd_kernel(
    centroids_ptr, key_ptr, value_ptr, key_mask_ptr, bias_ptr, seed_ptr, values_ptr, lse_ptr, scores_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d, stride_mask_b, stride_mask_m,
    key_heads, rows, M, D, Dv, first_row, last_row, blocks, splits, split_length, bin_keys, columns, scale_log2,
    dropout_p,
    HAS_BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`softmax(scale · Qc K^T) V` over one part of the keys, for a block of the rows `first_row .. last_row - 1`.

    With `HAS_BINS` it also writes the largest score of every bin of `bin_keys` keys.
    """
    i_block = tl.program_id(0) % blocks
    i_split = tl.program_id(0) // blocks % splits
    tables_before = first_row // rows
    i_p = tl.program_id(0) // (blocks * splits) + tables_before
    # Rows of all tables are numbered through; a table's part of the range is cut to it.
    o_row = tl.maximum(i_p * rows, first_row) + i_block * ROWS + tl.arange(0, ROWS)
    m_row = o_row < tl.minimum((i_p + 1) * rows, last_row)
    o_row = o_row.to(tl.int64)
    i_b, i_h = (i_p // key_heads).to(tl.int64), (i_p % key_heads).to(tl.int64)
    key_ptr += i_b * stride_key_b + i_h * stride_key_h
    if value_ptr is not None:
        value_ptr += i_b * stride_value_b + i_h * stride_value_h
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m_row_d = m_row[:, None] & (o_d < D)[None, :]
    # [ROWS, BLOCK_D]
    b_centroid = tl.load(centroids_ptr + o_row[:, None] * D + o_d[None, :], mask=m_row_d, other=0.0)
    b_centroid = b_centroid.to(key_ptr.dtype.element_ty)
    if value_ptr is not None:
        b_values = tl.zeros([ROWS, BLOCK_V], tl.float32)
        b_highest = tl.full([ROWS], LOWEST, tl.float32)
        b_total = tl.zeros([ROWS], tl.float32)

    if HAS_BINS:
        columns = tl.multiple_of(columns, 16)
        scores_ptr += (tl.min(o_row, 0) - first_row) * columns
        b_best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    for start in range(i_split * split_length, tl.minimum(M, (i_split + 1) * split_length), COLUMNS):
        o_m = start + tl.arange(0, COLUMNS)
        m_key = load_mask(key_mask_ptr, i_b, o_m, o_m < M, stride_mask_b, stride_mask_m)
        p_key = key_ptr + o_m.to(tl.int64) * stride_key_m
        if BY_PARTS:
            p_centroid = centroids_ptr + o_row * D
            b_scores = dot_by_parts(p_centroid, m_row, 1, p_key, m_key, stride_key_d, D, PRECISION)
        else:
            p_key_t = p_key[None, :] + o_d[:, None] * stride_key_d
            # [BLOCK_D, COLUMNS]
            b_key = tl.load(p_key_t, mask=m_key[None, :] & (o_d < D)[:, None], other=0.0)
            b_scores = tl.dot(b_centroid, b_key, input_precision=PRECISION)
        b_scores *= scale_log2
        if bias_ptr is not None:
            b_scores += tl.load(bias_ptr + i_p.to(tl.int64) * M + o_m, mask=m_key, other=0.0)[None, :]
        b_scores = tl.where(m_key[None, :], b_scores, float("-inf"))
        if HAS_BINS:
            b_best = tl.maximum(b_best, b_scores)
            tile = start // COLUMNS
            if (tile % bin_keys == bin_keys - 1) | (start + COLUMNS >= M):
                o_bins = tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
                tl.store(scores_ptr + tile // bin_keys * COLUMNS + o_bins, b_best, mask=m_row[:, None])
                b_best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
        if value_ptr is not None:
            b_weights, b_kept, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
            if seed_ptr is not None:
                b_weights *= dropout_factor(seed_ptr, o_row, o_m, M, dropout_p, KINDS, CENTROID_KIND)
            p_value = value_ptr + o_m.to(tl.int64)[:, None] * stride_value_m + o_v[None, :] * stride_value_d
            # [COLUMNS, BLOCK_V]
            b_value = tl.load(p_value, mask=m_key[:, None] & (o_v < Dv)[None, :], other=0.0)
            b_weights = b_weights.to(b_value.dtype)
            b_values = tl.dot(b_weights, b_value, b_values * b_kept[:, None], input_precision=PRECISION)

    if value_ptr is not None:
        b_divisor = tl.where(b_total > 0, b_total, 1.0)
        # Both before the addresses: behind them a few registers would spill.
        b_values = b_values / b_divisor[:, None]
        b_lse = b_highest + tl.log2(b_divisor)
        o_part = o_row * splits + i_split
        p_values = values_ptr + o_part[:, None] * Dv + o_v[None, :]
        tl.store(p_values, b_values, mask=m_row[:, None] & (o_v < Dv)[None, :])
        tl.store(lse_ptr + o_part, b_lse, mask=m_row)


def split_count(programs: int, length: int, block: int) -> int:
    """How many parts of `length` rows, in whole blocks, keep a chip busy that has `programs` programs for each."""
    return max(1, min(PROGRAMS // max(1, programs), -(-length // (4 * block)), 64))


def bin_length(M: int, topk: int) -> int:
    """Keys of a bin, so that few bins and few candidates are left to choose from."""
    few, most = FEW_CANDIDATES // max(1, topk), CANDIDATES // max(1, topk)
    return max(1, min(M // BINS, few), min(-(-M // WHOLE_ROW), most))


def centroid_pass(
    centroids: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    scale: float,
    topk: int,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    marks: torch.Tensor | None = None,
) -> CentroidPass:
    """One pass of the centroids over the keys.

    Args:
        centroids: `(B · H, C, D)` float32, contiguous.
        key: `(B, Hk, M, D)`, any strides; `Hk` divides `H`.
        value: `(B, Hk, M, Dv)`, any strides, or None: then no attention is computed, only top keys.
        key_mask: `(B, M)`, True = attend.
        scale: factor on the scores.
        topk: top keys per centroid, at most `M`; 0 for none.
        dropout_p, dropout_seed: dropout on the attention; a seed of None is no dropout.
        bias: what is added to the scores of each key, an exponent of 2, `(B · Hk, M)` float32, or None.
        marks: `(B · Hk, M, ⌈R / 32⌉)` int32, in which a key's top bits are set: bit `r` where row `r` has it; or None.
    """
    B, Hk, M, D = key.shape
    Dv = 0 if value is None else value.shape[3]
    rows = centroids.shape[0] * centroids.shape[1] // max(1, B * Hk)
    config = tile_config(key, D, Dv)
    if topk and not (key_mask is dropout_seed is bias is None):
        # Bins leave no registers for more columns.
        config["COLUMNS"] = min(config["COLUMNS"], 32 if max(config["BLOCK_D"], config["BLOCK_V"]) <= 64 else 16)
    bin_keys = bin_length(M, topk)
    whole_bins = bin_keys * config["COLUMNS"]
    columns = -(-M // whole_bins) * config["COLUMNS"] if topk else 0
    splits = split_count(B * Hk * -(-rows // config["ROWS"]), M, config["COLUMNS"])
    split_length = -(-M // (splits * whole_bins)) * whole_bins
    total = B * Hk * rows
    values = key.new_empty(total, splits, Dv, dtype=torch.float32)
    lse = key.new_empty(total, splits, dtype=torch.float32)
    top = key.new_empty(total, topk, dtype=torch.int32)
    top_scores = key.new_empty(total, topk, dtype=torch.float32)
    key_strides = *key.stride(), *((0, 0) if key_mask is None else key_mask.stride())
    for first, last in score_chunks(B * Hk, rows, 4 * columns):
        bins = key.new_empty(last - first, columns, dtype=torch.float32)
        tables = -(-last // rows) - first // rows
        blocks = -(-min(rows, last - first) // config["ROWS"])
        _centroid_attention_fwd_kernel[(tables * splits * blocks,)](
            centroids, key, value, key_mask, bias, dropout_seed, values, lse, bins,
            *key.stride(), *((0, 0, 0, 0) if value is None else value.stride()), *key_strides[4:],
            Hk, rows, M, D, Dv, first, last, blocks, splits, split_length, bin_keys, columns, scale * LOG2_E,
            dropout_p,
            HAS_BINS=topk > 0, **config,
        )  # fmt: skip
        out = top[first:last], top_scores[first:last]
        if topk and bin_keys == 1:
            select_topk(bins, topk, out, marks, first, rows)
        elif topk:
            block_n = max(64, 1 << (topk * bin_keys - 1).bit_length())
            num_warps = min(16, max(1, block_n // 128))
            _select_candidates_kernel[(last - first,)](
                centroids, key, key_mask, bias, select_topk(bins, topk)[0], *out, marks, *key_strides,
                Hk, rows, M, D, topk, first, 0 if marks is None else marks.shape[2], bin_keys, scale * LOG2_E,
                COLUMNS=config["COLUMNS"], BLOCK_N=block_n, BLOCK_D=16, num_warps=num_warps,
                **chip_of(key).registers(num_warps),
            )  # fmt: skip
    return CentroidPass(values, lse, top, top_scores)


def score_chunks(tables: int, rows: int, bytes_per_row: int) -> list[tuple[int, int]]:
    """Ranges of the `tables · rows` rows whose scores fit into memory: whole tables, or parts of one."""
    if rows == 0:
        return []
    fitting = max(1, SCORE_BYTES // max(1, bytes_per_row))
    whole = max(1, fitting // rows) * rows  # rows of as many whole tables as fit, of one at least
    step = min(fitting, whole)
    chunks = (
        (first, min(first + step, top + whole))
        for top in range(0, tables * rows, whole)
        for first in range(top, top + whole, step)
    )
    return [(first, min(last, tables * rows)) for first, last in chunks]
