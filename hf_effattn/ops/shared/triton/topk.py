"""The largest `k` of many rows: exact, deterministic, the lowest index among equals."""

import torch
import triton
import triton.language as tl

from .chips import LENGTHS, chip_of, on_device_of

WHOLE_ROW = 4096  # numbers of a row that a program holds in registers


@triton.jit
def _load_values(values_ptr, o_row, o_column, m_row, columns):
    """Values of some rows and columns, `-inf` where there is none."""
    m_value = m_row[:, None] & (o_column < columns)[None, :]
    # [BLOCK_R, BLOCK_N]
    return tl.load(values_ptr + o_row[:, None] * columns + o_column[None, :], mask=m_value, other=float("-inf"))


@triton.jit
def _ordered_bits(b_value):
    """Floats as unsigned integers of the same order; 0, below all numbers, for `-inf`."""
    b_bits = b_value.to(tl.int32, bitcast=True)
    # Negative numbers grow as their bits shrink: all bits flip there, and the sign bit elsewhere.
    b_bits = (b_bits ^ ((b_bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(b_value == float("-inf"), 0, b_bits)


@triton.jit(do_not_specialize=LENGTHS)
def _select_topk_kernel(
    values_ptr, bins_ptr, indices_ptr, chosen_ptr,
    rows, columns, topk,
    BIN: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finds the `topk`-th largest value of each row bit by bit, then keeps what is larger, and equals from the left.

    With `BIN` the columns are what `bins` `(rows, topk)` chose: `BIN` keys for each of its entries.
    """
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_row = o_row < rows
    o_n = tl.arange(0, BLOCK_N)
    if WHOLE:
        b_whole = _ordered_bits(_load_values(values_ptr, o_row, o_n, m_row, columns))

    b_valid = tl.zeros([BLOCK_R], tl.int32)
    if WHOLE:
        b_valid += tl.sum((b_whole > 0).to(tl.int32), 1)
    else:
        for start in range(0, columns, BLOCK_N):
            b_part = _ordered_bits(_load_values(values_ptr, o_row, start + o_n, m_row, columns))
            b_valid += tl.sum((b_part > 0).to(tl.int32), 1)
    b_wanted = tl.minimum(b_valid, topk)

    b_threshold = tl.zeros([BLOCK_R], tl.uint32)
    b_bit = tl.full([BLOCK_R], 2147483648, tl.uint32)
    for _ in range(32):
        b_candidate = b_threshold | b_bit
        b_count = tl.zeros([BLOCK_R], tl.int32)
        if WHOLE:
            b_count += tl.sum((b_whole >= b_candidate[:, None]).to(tl.int32), 1)
        else:
            for start in range(0, columns, BLOCK_N):
                b_part = _ordered_bits(_load_values(values_ptr, o_row, start + o_n, m_row, columns))
                b_count += tl.sum((b_part >= b_candidate[:, None]).to(tl.int32), 1)
        b_threshold = tl.where(b_count >= b_wanted, b_candidate, b_threshold)
        b_bit = b_bit >> 1

    b_above = tl.zeros([BLOCK_R], tl.int32)
    for start in range(0, columns, BLOCK_N):
        b_part = _ordered_bits(_load_values(values_ptr, o_row, start + o_n, m_row, columns))
        b_above += tl.sum((b_part > b_threshold[:, None]).to(tl.int32), 1)
    b_ties_wanted = b_wanted - b_above
    b_taken = tl.zeros([BLOCK_R], tl.int32)
    b_ties = tl.zeros([BLOCK_R], tl.int32)
    for start in range(0, columns, BLOCK_N):
        o_column = start + o_n
        b_value = _load_values(values_ptr, o_row, o_column, m_row, columns)
        b_part = _ordered_bits(b_value)
        b_tie = (b_part == b_threshold[:, None]).to(tl.int32)
        b_tie_rank = b_ties[:, None] + tl.cumsum(b_tie, 1)
        m_take = (b_part > b_threshold[:, None]) | ((b_tie > 0) & (b_tie_rank <= b_ties_wanted[:, None]))
        b_place = b_taken[:, None] + tl.cumsum(m_take.to(tl.int32), 1) - 1
        b_taken += tl.sum(m_take.to(tl.int32), 1)
        b_ties += tl.sum(b_tie, 1)
        m_take &= m_row[:, None] & (b_place < topk)
        o_out = o_row[:, None] * topk + b_place
        b_index = tl.zeros([BLOCK_R, BLOCK_N], tl.int32) + o_column[None, :]
        if BIN:
            o_bin = o_row[:, None] * topk + b_index // BIN
            b_index = tl.load(bins_ptr + o_bin, mask=m_take, other=0) * BIN + b_index % BIN
        tl.store(indices_ptr + o_out, b_index, mask=m_take)
        tl.store(chosen_ptr + o_out, b_value, mask=m_take)
    for start in range(0, topk, BLOCK_N):
        o_place = start + o_n
        m_none = m_row[:, None] & (o_place[None, :] < topk) & (o_place[None, :] >= b_taken[:, None])
        o_out = o_row[:, None] * topk + o_place[None, :]
        tl.store(indices_ptr + o_out, tl.full([BLOCK_R, BLOCK_N], -1, tl.int32), mask=m_none)
        tl.store(chosen_ptr + o_out, tl.full([BLOCK_R, BLOCK_N], float("-inf"), tl.float32), mask=m_none)


def select_topk(
    values: torch.Tensor,
    topk: int,
    *,
    bins: torch.Tensor | None = None,
    bin_length: int = 0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices, ascending, and values of the `topk` largest of each row of `values` `(rows, columns)`, float32.

    `-inf` is never chosen; a row with fewer others gets index -1 and value `-inf` behind them. With `bins`
    `(rows, topk)` and their `bin_length`, column `c` stands for index `bins[row, c // bin_length] · bin_length +
    c % bin_length`. `out` are contiguous tensors to write to.
    """
    rows, columns = values.shape
    if out is None:
        out = values.new_empty(rows, topk, dtype=torch.int32), values.new_empty(rows, topk)
    indices, chosen = out
    whole = columns <= WHOLE_ROW
    block_n = max(64, triton.next_power_of_2(columns)) if whole else WHOLE_ROW // 2
    block_r = min(16, max(1, WHOLE_ROW // 2 // block_n))
    with on_device_of(values):
        if rows:
            _select_topk_kernel[(triton.cdiv(rows, block_r),)](
                values, bins, indices, chosen, rows, columns, topk,
                BIN=0 if bins is None else bin_length, WHOLE=whole, BLOCK_R=block_r, BLOCK_N=block_n,
                num_warps=8 if block_n == WHOLE_ROW else 4, **chip_of(values).all_registers,
            )  # fmt: skip
    return indices, chosen
