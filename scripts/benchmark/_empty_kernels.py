"""Kernels that do nothing, with few arguments and with as many as a large kernel of the package has."""

import triton.language as tl


def five(x, y, length, rows, BLOCK: tl.constexpr):
    """Two tensors, two numbers, a constant."""


def forty_five(
    a, b, c, d, e, f, g, h, i, j, k, m,
    a_batch, a_head, a_row, b_batch, b_head, b_row, c_batch, c_head, c_row, d_batch, d_head, d_row,
    e_batch, e_head, e_row, f_batch, f_head, f_row, heads, length, width, clusters, topk, scale,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, COLUMNS: tl.constexpr,
    TABLES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Twelve tensors, 24 numbers, nine constants."""
