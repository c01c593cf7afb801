"""Sums of products of rows, cluster by cluster: covariances of queries, of keys with values, gradients of dipoles."""

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import block_width, chip_of
from ...shared.triton.cluster_table import is_exact
from ...shared.triton.launch import kernel
from ...shared.triton.sort import SortedRows


@triton.jit
def _load_members(
    a_ptr, b_ptr, b_row, m_row, stride_a_n, stride_a_d, stride_b_n, stride_b_d, o_d, o_v, D, Dv, SAME: tl.constexpr
):  # fmt: skip
    """Of some rows, those that exist, the columns `o_d` of `a` and `o_v` of `b`."""
    b_row = b_row.to(tl.int64)[:, None]
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    p_a = a_ptr + b_row * stride_a_n + o_d[None, :] * stride_a_d
    b_a = tl.load(p_a, mask=m_row & (o_d < D)[None, :], other=0.0)
    b_b = b_a
    if not SAME:
        p_b = b_ptr + b_row * stride_b_n + o_v[None, :] * stride_b_d
        b_b = tl.load(p_b, mask=m_row & (o_v < Dv)[None, :], other=0.0)
    return b_a, b_b


@kernel
def _bi_clustered_attention_products_kernel(
    a_ptr, b_ptr, order_ptr, starts_ptr, mean_a_ptr, mean_b_ptr, weights_ptr, exact_heads_ptr, products_ptr,
    sums_ptr,
    stride_a_b, stride_a_h, stride_a_n, stride_a_d, stride_b_b, stride_b_h, stride_b_n, stride_b_d,
    H, group, N, D, Dv, clusters, blocks, splits, length, factor,
    HAS_MEAN_B: tl.constexpr, HAS_WEIGHTS: tl.constexpr, AVERAGE: tl.constexpr, SAME: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`Σ_i (a_i - ā_c)^T (b_i - b̄_c)` over the rows of `length` clusters, some columns of `a` a program; the means.

    With weights `factor · Σ_i (a_i - ā_c)^T w_i b_i`, given the means, and `Σ_i w_i b_i`; exact heads get 0. With
    `AVERAGE` divided by the number of rows.
    """
    i_block = tl.program_id(0) % blocks
    i_split = tl.program_id(0) // blocks % splits
    i_p = (tl.program_id(0) // (blocks * splits)).to(tl.int64)
    a_ptr += i_p // H * stride_a_b + i_p % H * stride_a_h
    b_ptr += i_p // H * stride_b_b + i_p % H * stride_b_h
    order_ptr += i_p * N
    o_d, o_v = i_block * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m_d, m_v = o_d < D, o_v < Dv
    b_products = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
    b_sum = tl.zeros([BLOCK_V], tl.float32)
    count = 0
    end = tl.minimum(clusters, (i_split + 1) * length)
    end = tl.where(is_exact(exact_heads_ptr, i_p // group), 0, end)
    for cluster in range(i_split * length, end):
        p_start = starts_ptr + i_p * (clusters + 2) + cluster
        first, last = tl.load(p_start), tl.load(p_start + 1)
        size = tl.maximum(last - first, 1).to(tl.float32)
        count += last - first
        i_row = i_p * clusters + cluster
        o_place = first + tl.arange(0, ROWS)
        b_row = tl.load(order_ptr + o_place, mask=o_place < last, other=0)
        if HAS_WEIGHTS:
            b_mean_a = tl.load(mean_a_ptr + i_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        else:
            # Spread around the mean of a few rows first: what remains is small, and loses no digits to a shift.
            b_a, b_b = _load_members(
                a_ptr, b_ptr, b_row, (o_place < last)[:, None],
                stride_a_n, stride_a_d, stride_b_n, stride_b_d, o_d, o_v, D, Dv, SAME,
            )  # fmt: skip
            few = tl.minimum(size, ROWS)
            b_mean_a, b_mean_b = tl.sum(b_a.to(tl.float32), 0) / few, tl.sum(b_b.to(tl.float32), 0) / few
            b_sum_a, b_sum = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_V], tl.float32)
        for place in range(first, last, ROWS):
            o_place = place + tl.arange(0, ROWS)
            m_row = (o_place < last)[:, None]
            b_a, b_b = _load_members(
                a_ptr, b_ptr, b_row, m_row, stride_a_n, stride_a_d, stride_b_n, stride_b_d, o_d, o_v, D, Dv, SAME
            )  # fmt: skip
            # Which rows are next is on its way while these are.
            b_next = tl.load(order_ptr + o_place + ROWS, mask=o_place + ROWS < last, other=0)
            b_spread_a = tl.where(m_row, b_a.to(tl.float32) - b_mean_a[None, :], 0.0)
            if HAS_WEIGHTS:
                b_weights = tl.load(weights_ptr + i_p * N + b_row[:, None], mask=m_row, other=0.0)
                b_spread_b = b_b.to(tl.float32) * b_weights
            else:
                b_sum_a += tl.sum(b_spread_a, 0)
                b_spread_b = b_spread_a if SAME else tl.where(m_row, b_b.to(tl.float32) - b_mean_b[None, :], 0.0)
            b_sum = b_sum_a if SAME else b_sum + tl.sum(b_spread_b, 0)
            b_spread_a = tl.trans(b_spread_a.to(b_a.dtype))
            b_products += tl.dot(b_spread_a, b_spread_b.to(b_b.dtype), input_precision=PRECISION)
            b_row = b_next
        if not HAS_WEIGHTS:
            b_products -= b_sum_a[:, None] * (b_sum / size)[None, :]
            tl.store(mean_a_ptr + i_row * D + o_d, b_mean_a + b_sum_a / size, mask=m_d)
            if HAS_MEAN_B:
                tl.store(mean_b_ptr + i_row * Dv + o_v, b_mean_b + b_sum / size, mask=m_v & (i_block == 0))
    divisor = 1.0
    if AVERAGE:
        divisor = tl.maximum(count, 1).to(tl.float32)
    i_out = i_p * splits + i_split
    p_products = products_ptr + (i_out * D + o_d)[:, None] * Dv + o_v[None, :]
    tl.store(p_products, b_products * (factor / divisor), mask=m_d[:, None] & m_v[None, :])
    if HAS_WEIGHTS:
        tl.store(sums_ptr + i_out * Dv + o_v, b_sum, mask=m_v & (i_block == 0))


def cluster_products(
    a: torch.Tensor, b: torch.Tensor, members: SortedRows, mean_a: torch.Tensor, mean_b: torch.Tensor | None = None,
    exact_heads: torch.Tensor | None = None, *, weights: torch.Tensor | None = None, factor: float = 1.0,
    parts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`Σ (a - ā)^T (b - b̄)` of the rows `(B, H, N, ·)`, any strides, in float32; with weights `Σ (a - ā)^T w b`.

    Args:
        a, b: `(B, H, N, D)`, `(B, H, N, Dv)`.
        members: the rows sorted by cluster.
        mean_a, mean_b: `(B · H, C, ·)`, written: the mean of each cluster, 0 for an empty one; of `b` if not None.
            With weights `mean_a` is read, and `mean_b` None.
        exact_heads: `(B, H or key heads)` boolean, contiguous: the heads that are left out, with weights; or None.
        weights: `(B · H, N)` float32, or None.
        factor: of the products.
        parts: parts that all clusters are added up in; None: the mean of each cluster.

    Returns:
        `(B · H · C or parts, D, Dv)`, and with weights `w b` of the same, `(B · H · C or parts, Dv)`.
    """
    B, H, N, D = a.shape
    Dv = b.shape[3]
    length = 1 if parts is None else -(-members.clusters // parts)
    splits = -(-members.clusters // length)
    products = a.new_empty(B * H * splits, D, Dv, dtype=torch.float32)
    sums = None if weights is None else a.new_empty(B * H * splits, Dv, dtype=torch.float32)
    block_v = block_width(Dv)
    chip = chip_of(a)
    # Float32 is multiplied in halves, which take twice the registers.
    halves = a.element_size() // 2
    block_d = min(block_width(D), (64 if block_v <= 64 else 32) // halves)
    blocks = -(-D // block_d)
    rows = max(16, min(64, 4096 // block_v) // halves**2)
    if weights is not None and (D % 8 or Dv % 8):
        rows = max(16, rows // 2)  # rows that are loaded number by number take more registers
    num_warps = 8 if block_v > 128 and chip.name == "cuda" else 4
    three_fit = chip.is_large and num_warps == 4 and (weights is not None or halves > 1)  # side by side
    registers = {"maxnreg": 168} if three_fit else chip.all_registers
    _bi_clustered_attention_products_kernel[(B * H * splits * blocks,)](
        a, b, members.order, members.starts, mean_a, mean_b, weights, exact_heads, products, sums,
        *a.stride(), *b.stride(),
        H, 1 if exact_heads is None else H // exact_heads.shape[1], N, D, Dv,
        members.clusters, blocks, splits, length, factor,
        HAS_MEAN_B=mean_b is not None, HAS_WEIGHTS=weights is not None, AVERAGE=parts is None,
        SAME=a is b and blocks == 1,
        ROWS=rows, BLOCK_D=block_d, BLOCK_V=block_v,
        PRECISION=chip.dot_precision(a.dtype), num_warps=num_warps,
        # With weights no registers are left to load rows another step ahead.
        num_stages=3 if chip.name == "cuda" and weights is None else 2, **registers,
    )  # fmt: skip
    return products, sums
