"""Which rows count and which of them K-means is fitted on, found on the GPU; and how kernels load such rows."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import LENGTHS, on_device_of

# So many rows' mean is subtracted from all points: distances do not see it, and products lose no digits to a shift.
ORIGIN_SAMPLE: tl.constexpr = tl.constexpr(32)


@triton.jit
def finite(b_points):
    """The points in float32, with 0 for every number that is not finite: a product would take it to every cluster."""
    b_points = b_points.to(tl.float32)
    return tl.where(tl.abs(b_points) < float("inf"), b_points, 0.0)


@triton.jit
def load_points(points_ptr, row, valid, o_d, stride_n, stride_d, head_dim):
    """Rows of one problem, 0 where they are not valid."""
    p_points = points_ptr + row.to(tl.int64)[:, None] * stride_n + o_d.to(tl.int64)[None, :] * stride_d
    # [BLOCK_N, BLOCK_D]
    return tl.load(p_points, mask=valid[:, None] & (o_d < head_dim)[None, :], other=0.0)


@triton.jit
def sample_mean(points_ptr, stride_n, stride_d, rows_ptr, fitted, o_d, head_dim):
    """Mean `[BLOCK_D]` of a few of the fitted rows, evenly spread."""
    o_s = tl.arange(0, ORIGIN_SAMPLE)
    row = tl.load(rows_ptr + o_s.to(tl.int64) * fitted // ORIGIN_SAMPLE)
    b_points = load_points(points_ptr, row, row >= 0, o_d, stride_n, stride_d, head_dim)
    return tl.sum(finite(b_points), axis=0) / ORIGIN_SAMPLE


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_rows_kernel(
    mask_ptr, stride_mask_b, stride_mask_n, rows_ptr, counts_ptr, ranks_ptr, length, fit_rows,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per item: fit row `r` is the `⌊r n / min(n, R)⌋`-th of the `n` rows that count, -1 beyond them."""
    i_b = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCK)
    rows_ptr += i_b * fit_rows
    count = length
    if HAS_MASK:
        mask_ptr += i_b * stride_mask_b
        ranks_ptr += i_b * length
        count = 0
        for start in range(0, length, BLOCK):
            o_n = start + o_block
            m_n = tl.load(mask_ptr + o_n.to(tl.int64) * stride_mask_n, mask=o_n < length, other=0)
            count += tl.sum((m_n != 0).to(tl.int32), axis=0)
    fitted = tl.minimum(count, fit_rows)
    tl.store(counts_ptr + i_b, count)
    if HAS_MASK:
        before = 0
        for start in range(0, length, BLOCK):
            o_n = start + o_block
            m_n = tl.load(mask_ptr + o_n.to(tl.int64) * stride_mask_n, mask=o_n < length, other=0)
            counted = (m_n != 0).to(tl.int32)
            rank = before + tl.cumsum(counted, axis=0) - 1
            tl.store(ranks_ptr + o_n, tl.where(counted > 0, rank, -1), mask=o_n < length)
            # The only fit row that this rank can be, and whether it is.
            fit = (rank.to(tl.int64) * fitted + count - 1) // tl.maximum(count, 1)
            is_fit = (counted > 0) & (fit < fitted) & (fit * count // tl.maximum(fitted, 1) == rank)
            tl.store(rows_ptr + fit, o_n, mask=is_fit)
            before += tl.sum(counted, axis=0)
    for start in range(0, fit_rows, BLOCK):
        o_r = start + o_block
        if HAS_MASK:
            tl.store(rows_ptr + o_r, -1, mask=(o_r >= fitted) & (o_r < fit_rows))
        else:
            tl.store(rows_ptr + o_r, o_r.to(tl.int64) * count // fitted, mask=o_r < fit_rows)


@dataclass(frozen=True)
class Rows:
    """The rows that count; without a mask all items share one entry, with batch stride 0.

    Attributes:
        fit: `(B, R)` int32, the rows that centroids are fitted on; -1 beyond them.
        counts: `(B,)` int32, how many rows count.
        ranks: `(B, N)` int32, the place of every row among those that count and -1 for the others; None = all count.
    """

    fit: torch.Tensor
    counts: torch.Tensor
    ranks: torch.Tensor | None


def find_rows(points: torch.Tensor, mask: torch.Tensor | None, most: int) -> Rows:
    """The rows of points `(B, H, N, D)`, under a mask `(B, N)`, at most `most` of them to be fitted on."""
    B, _, N, _ = points.shape
    items = 1 if mask is None else B
    fit = torch.empty(items, min(N, most), dtype=torch.int32, device=points.device)
    counts = torch.empty(items, dtype=torch.int32, device=points.device)
    ranks = None if mask is None else torch.empty(B, N, dtype=torch.int32, device=points.device)
    strides = (0, 0) if mask is None else mask.stride()
    with on_device_of(points):
        _kmeans_rows_kernel[(items,)](
            mask, *strides, fit, counts, ranks, N, fit.shape[1], HAS_MASK=mask is not None, BLOCK=2048, num_warps=8
        )
    return Rows(fit.expand(B, -1), counts.expand(B), ranks)
