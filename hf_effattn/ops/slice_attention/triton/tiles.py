"""What the kernels of slice attention share: tiles of slices, and the scores of a tile of queries on a tile of keys.

A tile of rows is `SLICES` slices where they fit into `ROWS` rows (one short slice would leave tensor cores idle), else
a part of one slice. The keys of the windows come in parts: those of a query's own slice (part 0) and of the slices
before and after it (parts -1 and 1). Within a part a key meets one slice only, so it has one position term.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import KIB, block_width, chip_of
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.softmax import KINDS
from ...shared.triton.tiles import PART
from ..reference import LOCAL_WEIGHTS

KIND = tl.constexpr(LOCAL_WEIGHTS)


@triton.jit
def tile_rows(i_tile, L, N, tiles_per_slice, SLICES: tl.constexpr, ROWS: tl.constexpr):
    """The first slice of a tile, its rows, and which of them exist."""
    first_slice = i_tile // tiles_per_slice * SLICES
    o_inner = i_tile % tiles_per_slice * ROWS + tl.arange(0, ROWS)
    o_row = first_slice * L + o_inner
    return first_slice, o_row, (o_inner < SLICES * L) & (o_row < N)


@triton.jit
def load_with_positions(
    p_rows, m_rows, stride_d, p_positions, m_positions, o_d, D, HAS_POSITIONS: tl.constexpr
):  # fmt: skip
    """Columns `o_d` of rows with those of their position terms (rows of a contiguous table), in the rows' dtype."""
    m_d = (o_d < D)[None, :]
    # [rows, columns]
    b_rows = tl.load(p_rows[:, None] + o_d[None, :] * stride_d, mask=m_rows[:, None] & m_d, other=0.0)
    if HAS_POSITIONS:
        m_both = (m_rows & m_positions)[:, None] & m_d
        b_position = tl.load(p_positions[:, None] + o_d[None, :], mask=m_both, other=0.0)
        b_rows = (b_rows.to(tl.float32) + b_position.to(tl.float32)).to(b_rows.dtype)
    return b_rows


@triton.jit
def dot_with_positions(
    b_a, p_a, m_a, stride_a, p_positions_a, b_b, p_b, m_b, stride_b, p_positions_b, m_positions_b, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`A B^T` of blocks that were loaded with their position terms, or by parts of what they were loaded from.

    A product keeps its operands in registers (float32 in halves, on tensor cores): long rows do not fit at once.
    """
    if BY_PARTS:
        b_product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, D, PART):
            o_d = first + tl.arange(0, PART)
            # [ROWS, PART], [COLUMNS, PART]
            b_part_a = load_with_positions(p_a, m_a, stride_a, p_positions_a, m_a, o_d, D, HAS_A)
            b_part_b = load_with_positions(p_b, m_b, stride_b, p_positions_b, m_positions_b, o_d, D, HAS_B)
            b_product = tl.dot(b_part_a, tl.trans(b_part_b), b_product, input_precision=PRECISION)
    else:
        b_product = tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)
    return b_product


@triton.jit
def part_range(part, first_slice, L, extension, N, SLICES: tl.constexpr):
    """The keys of a part that the queries of a tile of slices may see: first and behind the last."""
    begin = (first_slice + part) * L
    end = begin + SLICES * L
    begin = tl.where(part < 0, begin + L - extension, begin)
    end = tl.where(part > 0, end - L + extension, end)
    return tl.maximum(begin, 0), tl.minimum(end, N)


@triton.jit
def part_visible(o_row, m_row, o_key, m_key, part, L, extension, CAUSAL: tl.constexpr):
    """Who sees whom in a part `(rows, keys)`, and each key's place in the window of the slice that it meets."""
    o_place = o_key % L + part * L + extension
    m_key &= (o_place >= 0) & (o_place < L + 2 * extension)
    m_visible = (o_row[:, None] // L + part == o_key[None, :] // L) & m_row[:, None] & m_key[None, :]
    if CAUSAL:
        m_visible &= o_key[None, :] <= o_row[:, None]
    return m_visible, o_place


@triton.jit
def sink_visible(o_row, m_row, o_key, m_key, L, extension, CAUSAL: tl.constexpr):
    """Who sees which sink beside its window, `(rows, keys)`."""
    start = (o_row // L * L)[:, None]
    m_visible = o_key[None, :] < start - extension
    if not CAUSAL:
        m_visible |= o_key[None, :] >= start + L + extension
    return m_visible & m_row[:, None] & m_key[None, :]


@triton.jit
def gradients_of_scores(
    b_scores, b_grad_weights, m_visible, b_lse, b_delta, scale_log2, seed_ptr, o_row, o_column, columns, dropout_p
):  # fmt: skip
    """Those of the scaled scores of a tile of queries on a tile of keys, `p (G · V f − δ)`."""
    b_weights = tl.exp2(tl.where(m_visible, b_scores * scale_log2 - b_lse[:, None], float("-inf")))
    if seed_ptr is not None:
        b_grad_weights *= dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    return b_weights * (b_grad_weights - b_delta[:, None])


def tile_config(
    tensor: torch.Tensor,
    slice_length: int,
    head_dim: int,
    value_dim: int,
    *,
    computes: Literal["output", "query", "key"] = "output",
) -> dict[str, Any]:
    """Block sizes, warps and stages of a kernel that computes the output, or gradients of queries, or of keys."""
    chip = chip_of(tensor)
    itemsize = tensor.element_size()
    block_d, block_v = block_width(head_dim), block_width(value_dim)
    row_bytes = max(block_d, block_v, 32) * itemsize
    # What a program holds grows with its rows: two sums beside its keys and values, one beside its queries.
    numbers = (2048 if itemsize == 4 else 4096) if computes == "key" else 8192
    rows = min(64 if itemsize == 2 else 32, max(16, numbers // row_bytes))
    wide = row_bytes >= 512 or (row_bytes >= 256 and (itemsize == 4 or chip.name == "hip"))
    hopper = chip.name == "cuda" and chip.shared_memory > 200 * KIB
    few_warps = row_bytes <= 64 or (row_bytes == 128 and (itemsize == 4 or computes == "output"))
    few_warps |= row_bytes == 256 and itemsize == 4
    return {
        "SLICES": max(1, rows // slice_length),
        "ROWS": rows,
        "COLUMNS": 16 if itemsize == 4 and (not hopper if wide else computes == "query") else min(rows, 32),
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BY_PARTS": wide or (itemsize == 4 and computes != "output" and chip.name == "cuda"),
        "PRECISION": chip.dot_precision(tensor.dtype),
        # Eight of AMD's warps, twice as wide, leave each lane half the registers.
        "num_warps": 4 if few_warps or chip.name == "hip" else 8,
        "num_stages": 1,
        **chip.all_registers,
    }
