"""What the attention kernels share: tiles of sorted rows, products of rows, block sizes."""

import torch
import triton
import triton.language as tl

from .chips import block_width, chip_of

LOG2_E = 1.4426950408889634
BITS_PER_NAT = tl.constexpr(LOG2_E)
LOWEST = tl.constexpr(-3.0e38)  # where a softmax begins: finite, so that a row without keys gives 0 and no NaN
PART = tl.constexpr(32)  # columns of a part of a row


@triton.jit
def load_mask(mask_ptr, i_b, o_n, m_n, stride_b, stride_n):
    """Which of the rows `o_n` of an item, of those in `m_n`, the mask says that count; all, where it is None."""
    if mask_ptr is not None:
        m_n &= tl.load(mask_ptr + i_b * stride_b + o_n.to(tl.int64) * stride_n, mask=m_n, other=0) != 0
    return m_n


@triton.jit
def load_tile(order_ptr, starts_ptr, tiles_ptr, i_p, i_tile, N, clusters, tiles, TILE: tl.constexpr):
    """The cluster of a tile of sorted rows, the places of its rows, which of them exist, and the rows."""
    cluster = tl.load(tiles_ptr + i_p * tiles + i_tile)
    starts_ptr += i_p * (clusters + 2) + cluster
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    o_place = first + (i_tile - first // TILE - cluster) * TILE + tl.arange(0, TILE)
    m_row = o_place < last
    # [TILE]
    b_row = tl.load(order_ptr + i_p * N + o_place, mask=m_row, other=0).to(tl.int64)
    return cluster, o_place, m_row, b_row


@triton.jit
def load_rows(p_rows, m_rows, stride_d, D, BLOCK_D: tl.constexpr):
    """Rows at pointers `p_rows`, 0 where `m_rows` is False and behind the last column: `(rows, BLOCK_D)`."""
    o_d = tl.arange(0, BLOCK_D)
    return tl.load(p_rows[:, None] + o_d[None, :] * stride_d, mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_operand(p_rows, m_rows, stride_d, D, BLOCK_D: tl.constexpr):
    """What `load_rows` loads, and what it was loaded by: an operand of `dot_rows`."""
    return load_rows(p_rows, m_rows, stride_d, D, BLOCK_D), p_rows, m_rows, stride_d


@triton.jit
def store_rows(p_rows, b_rows, m_rows, stride_d, D, BLOCK_D: tl.constexpr):
    """Writes to pointers `p_rows`, in their dtype, the first `D` columns of rows `(rows, BLOCK_D)` where `m_rows`."""
    o_d = tl.arange(0, BLOCK_D)
    m_out = m_rows[:, None] & (o_d < D)[None, :]
    tl.store(p_rows[:, None] + o_d[None, :] * stride_d, b_rows.to(p_rows.dtype.element_ty), mask=m_out)


@triton.jit
def dot_by_parts(p_a, m_a, stride_a, p_b, m_b, stride_b, D, PRECISION: tl.constexpr):
    """`A B^T` of rows at the pointers `p_a` and `p_b`, some of their columns at a time.

    A product keeps its operands in registers (float32 in halves, on tensor cores): long rows do not fit at once.
    """
    b_product = tl.zeros([m_a.shape[0], m_b.shape[0]], tl.float32)
    for first in range(0, D, PART):
        o_d = first + tl.arange(0, PART)
        # [COLUMNS, PART]
        p_part_b = p_b[:, None] + o_d[None, :] * stride_b
        b_b = tl.load(p_part_b, mask=m_b[:, None] & (o_d < D)[None, :], other=0.0)
        # [ROWS, PART]
        p_part_a = p_a[:, None] + o_d[None, :] * stride_a
        b_a = tl.load(p_part_a, mask=m_a[:, None] & (o_d < D)[None, :], other=0.0)
        b_product = tl.dot(b_a.to(b_b.dtype), tl.trans(b_b), b_product, input_precision=PRECISION)
    return b_product


def tile_config(
    tensor: torch.Tensor,
    head_dim: int,
    value_dim: int,
    *,
    backward: bool = False,
    two_sums: bool = False,
    three: bool = False,
) -> dict:
    """Block sizes, warps and stages of a kernel that takes a tile of rows over tiles of columns (keys or rows).

    The largest that fit the registers and the shared memory of the tensor's chip without a spill; with `two_sums`
    of a backward kernel that adds up the gradients of keys and of values at once; with `three` of one with more to
    hold, of which three run side by side for short rows on a large chip.
    """
    chip = chip_of(tensor)
    itemsize = tensor.element_size()
    block_d, block_v = block_width(head_dim), block_width(value_dim)
    widest = max(block_d, block_v)
    single = itemsize == 4
    row_bytes = widest * itemsize
    rows = 32 if single else 64
    hip = chip.name == "hip"
    columns = 64 if row_bytes <= 128 and not (single or backward or hip) else 32
    if widest > 128:
        rows //= 2
    if (single and backward) or (widest > 128 and (single or backward)):
        columns = 16
    from_shared = not single and chip.is_large
    by_parts = row_bytes >= 512 or (backward and row_bytes >= 256 and not from_shared)
    # AMD's warps are twice as wide, and leave each lane half the registers where there are eight.
    wide = not hip and (row_bytes >= 256 or (single and two_sums) if backward else single and widest == 128)
    # Loading further ahead costs registers, of which float32 and the widest rows leave none.
    ahead = 2 if single or by_parts or hip else 3
    fitting = (chip.shared_memory // itemsize - rows * (block_d + block_v)) // (columns * (block_d + block_v))
    if two_sums and not from_shared:
        rows = min(rows, 32)
    if three and not from_shared:
        columns = min(columns, 32)
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BY_PARTS": by_parts,
        "PRECISION": chip.dot_precision(tensor.dtype),
        "num_warps": 8 if wide else 4,
        "num_stages": max(1, min(ahead, fitting)),
        **chip.all_registers,
        **({"maxnreg": 168} if three and from_shared and widest <= 64 else {}),
    }
