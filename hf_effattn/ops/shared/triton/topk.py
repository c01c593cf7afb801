"""The largest `k` of many rows: exact, deterministic, the first among equals."""

import torch
import triton
import triton.language as tl

from .chips import chip_of
from .launch import kernel
from .tiles import load_mask

WHOLE_ROW = 4096  # numbers of a row that a program holds in registers
ROW_OF_A_WARP = 1024  # so many fit into one warp, which waits for no other


@triton.jit
def _load_bits(values_ptr, o_column, columns):
    """Some values of a row as unsigned integers of the same order; 0, below all numbers, for `-inf` and for none."""
    b_value = tl.load(values_ptr + o_column, mask=o_column < columns, other=float("-inf"))
    return _ordered_bits(b_value)


@triton.jit
def _ordered_bits(b_value):
    """Floats as unsigned integers of the same order; 0, below all numbers, for `-inf`."""
    b_bits = b_value.to(tl.int32, bitcast=True)
    # Negative numbers grow as their bits shrink: all bits flip there, and the sign bit elsewhere.
    b_bits = (b_bits ^ ((b_bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(b_value == float("-inf"), 0, b_bits)


@triton.jit
def _count_from(b_whole, values_ptr, least, columns, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many numbers of a row are `least` or more."""
    count = tl.sum((b_whole >= least).to(tl.int32), 0)
    if not WHOLE:
        for start in range(BLOCK_N, columns, BLOCK_N):
            b_part = _load_bits(values_ptr, start + tl.arange(0, BLOCK_N), columns)
            count += tl.sum((b_part >= least).to(tl.int32), 0)
    return count


@triton.jit
def _find_least(b_whole, values_ptr, columns, topk, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The least of the `topk` largest numbers of a row, found bit by bit, and how many of its equals are among them.

    `b_whole` are the row's first numbers, all of them where `WHOLE`.
    """
    one = tl.full([], 1, tl.uint32)
    least, bit = one - 1, one << 31
    count = _count_from(b_whole, values_ptr, one, columns, WHOLE, BLOCK_N)
    wanted = tl.minimum(count, topk)
    while (bit > 0) & (count != wanted):  # the last bits seldom matter
        candidate = least | bit
        reached = _count_from(b_whole, values_ptr, candidate, columns, WHOLE, BLOCK_N)
        least = tl.where(reached >= wanted, candidate, least)
        count = tl.where(reached >= wanted, reached, count)
        bit = bit >> 1
    above = _count_from(b_whole, values_ptr, least + 1, columns, WHOLE, BLOCK_N)
    return least, wanted - above


@triton.jit
def _store_largest(b_bits, least, equals, taken, b_index, b_value, indices_ptr, chosen_ptr, topk):
    """Store some of a row's largest numbers behind the `taken` ones; equals wanted, how many taken, which now."""
    b_equal = (b_bits == least).to(tl.int32)
    m_take = (b_bits > least) | ((b_equal > 0) & (tl.cumsum(b_equal, 0) <= equals))
    b_place = taken + tl.cumsum(m_take.to(tl.int32), 0) - 1
    tl.store(indices_ptr + b_place, b_index, mask=m_take & (b_place < topk))
    tl.store(chosen_ptr + b_place, b_value, mask=m_take & (b_place < topk))
    return equals - tl.sum(b_equal, 0), taken + tl.sum(m_take.to(tl.int32), 0), m_take


@triton.jit
def _mark(marks_ptr, i_row, b_key, m_key, rows, M, words):
    """Sets the bit of a row of its table in the words of some keys, `(tables, M, words)`."""
    if marks_ptr is not None:
        i_r = (i_row % rows).to(tl.int32)
        p_words = marks_ptr + (i_row // rows * M + b_key) * words + i_r // 32
        tl.atomic_or(p_words, tl.where(m_key, 1, 0) << (i_r % 32), mask=m_key, sem="relaxed")


@triton.jit
def _store_nothing(taken, indices_ptr, chosen_ptr, topk, BLOCK_N: tl.constexpr):
    """Index -1 and `-inf` where a row had too few numbers."""
    for start in range(taken, topk, BLOCK_N):
        o_place = start + tl.arange(0, BLOCK_N)
        tl.store(indices_ptr + o_place, -1, mask=o_place < topk)
        tl.store(chosen_ptr + o_place, float("-inf"), mask=o_place < topk)


@kernel
def _select_topk_kernel(
    values_ptr, indices_ptr, chosen_ptr, marks_ptr, columns, topk, first_row, rows, M, words,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The indices and values of the largest numbers of one row, which marks them."""
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
    i_row = tl.program_id(0).to(tl.int64)
    values_ptr += i_row * columns
    indices_ptr += i_row * topk
    chosen_ptr += i_row * topk
    b_whole = _load_bits(values_ptr, tl.arange(0, BLOCK_N), columns)
    least, equals = _find_least(b_whole, values_ptr, columns, topk, WHOLE, BLOCK_N)
    taken = tl.sum(tl.zeros([BLOCK_N], tl.int32), 0)
    for start in range(0, columns, BLOCK_N):
        o_column = start + tl.arange(0, BLOCK_N)
        b_value = tl.load(values_ptr + o_column, mask=o_column < columns, other=float("-inf"))
        equals, taken, m_take = _store_largest(
            _ordered_bits(b_value), least, equals, taken, o_column, b_value, indices_ptr, chosen_ptr, topk
        )
        _mark(marks_ptr, i_row + first_row, o_column, m_take, rows, M, words)
    _store_nothing(taken, indices_ptr, chosen_ptr, topk, BLOCK_N)


@kernel
def _select_candidates_kernel(
    centroids_ptr, key_ptr, key_mask_ptr, bias_ptr, bins_ptr, indices_ptr, chosen_ptr, marks_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d, stride_mask_b, stride_mask_m,
    key_heads, rows, M, D, topk, first_row, words, bin_keys, scale_log2,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The largest scores of one row among the keys in the bins that it chose: they are scored again and marked.

    Bin `b` holds the keys `b % COLUMNS + COLUMNS · (b // COLUMNS · bin_keys + i)` with `i < bin_keys`.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_p = (i_row + first_row) // rows
    key_ptr += i_p // key_heads * stride_key_b + i_p % key_heads * stride_key_h
    centroids_ptr += (i_row + first_row) * D
    indices_ptr += i_row * topk
    chosen_ptr += i_row * topk
    o_n = tl.arange(0, BLOCK_N)
    b_bin = tl.load(bins_ptr + i_row * topk + o_n // bin_keys, mask=o_n < topk * bin_keys, other=-1)
    b_key = b_bin % COLUMNS + COLUMNS * (b_bin // COLUMNS * bin_keys + o_n % bin_keys)
    b_key = tl.where(b_bin >= 0, b_key, M)
    m_key = load_mask(key_mask_ptr, i_p // key_heads, b_key, b_key < M, stride_mask_b, stride_mask_m)
    p_key = key_ptr + b_key.to(tl.int64)[:, None] * stride_key_m
    b_score = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, D, BLOCK_D):
        o_d = first + tl.arange(0, BLOCK_D)
        # [BLOCK_D]
        b_centroid = tl.load(centroids_ptr + o_d, mask=o_d < D, other=0.0)
        b_centroid = b_centroid.to(key_ptr.dtype.element_ty).to(tl.float32)
        # [BLOCK_N, BLOCK_D]
        b_part = tl.load(p_key + o_d[None, :] * stride_key_d, mask=m_key[:, None] & (o_d < D)[None, :], other=0.0)
        b_score += tl.sum(b_part.to(tl.float32) * b_centroid[None, :], 1)
    b_score *= scale_log2
    if bias_ptr is not None:
        b_score += tl.load(bias_ptr + i_p * M + b_key, mask=m_key, other=0.0)
    b_score = tl.where(m_key, b_score, float("-inf"))
    b_bits = _ordered_bits(b_score)
    least, equals = _find_least(b_bits, chosen_ptr, BLOCK_N, topk, True, BLOCK_N)
    taken = tl.sum(tl.zeros([BLOCK_N], tl.int32), 0)
    _, taken, m_take = _store_largest(b_bits, least, equals, taken, b_key, b_score, indices_ptr, chosen_ptr, topk)
    _mark(marks_ptr, i_row + first_row, b_key, m_take, rows, M, words)
    _store_nothing(taken, indices_ptr, chosen_ptr, topk, BLOCK_N)


def select_topk(
    values: torch.Tensor,
    topk: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    marks: torch.Tensor | None = None,
    first_row: int = 0,
    rows_of_table: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices, ascending, and values of the `topk` largest of each row of `values` `(rows, columns)`, float32.

    `-inf` is never chosen; a row with fewer others gets index -1 and value `-inf` behind them. `out` are contiguous
    tensors to write to; in `marks`, see `centroid_pass`, rows of tables are numbered from `first_row` on.
    """
    rows, columns = values.shape
    if out is None:
        out = values.new_empty(rows, topk, dtype=torch.int32), values.new_empty(rows, topk)
    block_n = min(WHOLE_ROW, max(64, 1 << (columns - 1).bit_length()))
    marked = (0, 0) if marks is None else marks.shape[1:]
    _select_topk_kernel[(rows,)](
        values, *out, marks, columns, topk, first_row, rows_of_table, *marked,
        ALIGNED=columns % 16 == 0, WHOLE=columns <= block_n, BLOCK_N=block_n,
        num_warps=max(1, block_n // ROW_OF_A_WARP), **chip_of(values).all_registers,
    )  # fmt: skip
    return out
