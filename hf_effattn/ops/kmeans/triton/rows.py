"""Which rows count and which of them K-means is fitted on, found on the GPU; and how kernels load such rows."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...shared.triton.launch import kernel

# The mean of so many rows is subtracted from all points. No distance changes, and products keep their digits.
ORIGIN_SAMPLE: tl.constexpr = tl.constexpr(32)
# Up to so many fitted rows are found by products that fit into 31 bits, without a table.
MOST_FOUND = 2**15


@triton.jit
def finite(b_points):
    """The points with 0 for every number that is not finite: a product would take it to every cluster."""
    return tl.where(tl.abs(b_points) < float("inf"), b_points, tl.zeros_like(b_points))


@triton.jit
def load_points(points_ptr, row, valid, o_d, stride_n, stride_d, head_dim):
    """Rows of one problem, 0 where they are not valid."""
    p_points = points_ptr + row.to(tl.int64)[:, None] * stride_n + o_d.to(tl.int64)[None, :] * stride_d
    # [BLOCK_N, BLOCK_D]
    return tl.load(p_points, mask=valid[:, None] & (o_d < head_dim)[None, :], other=0.0)


@triton.jit
def load_fit_rows(rows_ptr, i_b, o_r, total, fit_rows):
    """Rows that the fitted ones `o_r` of an item are, -1 beyond them; without a table all `total` rows count."""
    if rows_ptr is None:
        row = o_r * (total // fit_rows) + o_r * (total % fit_rows) // fit_rows
        row = tl.where(o_r < fit_rows, row, -1)
    else:
        row = tl.load(rows_ptr + i_b * fit_rows + o_r, mask=o_r < fit_rows, other=-1)
    return row


@triton.jit
def load_fitted(counts_ptr, i_b, total, fit_rows):
    """How many rows of an item are fitted on."""
    count = total
    if counts_ptr is not None:
        count = tl.load(counts_ptr + i_b)
    return tl.minimum(count, fit_rows)


@triton.jit
def sample_mean(points_ptr, stride_n, stride_d, rows_ptr, i_b, total, fit_rows, fitted, o_d, head_dim):
    """Mean `[BLOCK_D]` of a few of the fitted rows, evenly spread."""
    o_s = tl.arange(0, ORIGIN_SAMPLE).to(tl.int64) * fitted // ORIGIN_SAMPLE
    row = load_fit_rows(rows_ptr, i_b, o_s.to(tl.int32), total, fit_rows)
    b_points = load_points(points_ptr, row, row >= 0, o_d, stride_n, stride_d, head_dim)
    return tl.sum(finite(b_points).to(tl.float32), axis=0) / ORIGIN_SAMPLE


@kernel
def _kmeans_rows_kernel(
    mask_ptr, stride_mask_b, stride_mask_n, rows_ptr, counts_ptr, ranks_ptr, length, fit_rows, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per item: fit row `r` is the `⌊r n / min(n, R)⌋`-th of the `n` rows that count, -1 beyond them."""
    i_b = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCK)
    rows_ptr += i_b * fit_rows
    mask_ptr += i_b * stride_mask_b
    ranks_ptr += i_b * length
    count = 0
    for start in range(0, length, BLOCK):
        o_n = start + o_block
        m_n = tl.load(mask_ptr + o_n.to(tl.int64) * stride_mask_n, mask=o_n < length, other=0)
        count += tl.sum((m_n != 0).to(tl.int32), axis=0)
    fitted = tl.minimum(count, fit_rows)
    tl.store(counts_ptr + i_b, count)
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
        tl.store(rows_ptr + o_r, -1, mask=(o_r >= fitted) & (o_r < fit_rows))


@dataclass(frozen=True)
class Rows:
    """The rows that count, and those of them that centroids are fitted on."""

    most: int  # `R`, how many are fitted on at most
    total: int  # `N`
    # `(B, R)` int32, the rows that centroids are fitted on; -1 beyond them. None: all rows count, and row `r` is `⌊r N
    # / R⌋`.
    fit: torch.Tensor | None = None
    counts: torch.Tensor | None = None  # `(B,)` int32, how many rows count; None = all
    # `(B, N)` int32, the place of every row among those that count and -1 for the others; None = all count
    ranks: torch.Tensor | None = None


def find_rows(points: torch.Tensor, mask: torch.Tensor | None, most: int) -> Rows:
    """The rows of points `(B, H, N, D)`, under a mask `(B, N)`, at most `most` of them to be fitted on."""
    B, _, N, _ = points.shape
    most = min(N, most)
    if mask is None and most <= MOST_FOUND:
        return Rows(most, N)
    mask = points.new_ones(B, N, dtype=torch.bool) if mask is None else mask
    fit, counts, ranks = (mask.new_empty(B, *shape, dtype=torch.int32) for shape in ((most,), (), (N,)))
    _kmeans_rows_kernel[(B,)](mask, *mask.stride(), fit, counts, ranks, N, most, BLOCK=2048, num_warps=8)
    return Rows(most, N, fit, counts, ranks)
