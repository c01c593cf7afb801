"""How a few queries differ from the means of their clusters, on a GPU; to `torch.compile` it is one op."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...kmeans.triton.rows import find_rows, finite, load_fit_rows, load_points
from ...shared.gradients import register_op
from ...shared.triton.chips import Chip, block_width, chip_of
from ...shared.triton.launch import kernel
from ...shared.triton.recorded import recorded

PART, MOST_PARTS = 512, 32  # fitted rows of a part at least, and parts of a problem at most


@triton.jit
def _load_labelled(
    query_ptr, labels_ptr, rows_ptr, i_b, o_r, total, fit_rows, stride_query_n, stride_query_d, stride_labels_n, o_d,
    head_dim,
):  # fmt: skip
    """Some columns of fitted rows, and their labels, -1 for a row that does not count."""
    row = load_fit_rows(rows_ptr, i_b, o_r, total, fit_rows)
    b_label = tl.load(labels_ptr + row.to(tl.int64) * stride_labels_n, mask=row >= 0, other=-1).to(tl.int32)
    b_points = load_points(query_ptr, row, row >= 0, o_d, stride_query_n, stride_query_d, head_dim)
    return finite(b_points), b_label


@kernel
def _query_offsets_sums_kernel(
    query_ptr, labels_ptr, rows_ptr, sums_ptr, sizes_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_labels_b, stride_labels_h, stride_labels_n,
    heads, total, fit_rows, splits, block_rows, clusters, head_dim,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum, and the number, of those of `block_rows` fitted rows that are in each of `BLOCK_C` clusters.

    A sum is a product with the 0/1 table of membership, so its order is fixed. A program sums `BLOCK_K` columns.
    """
    blocks, parts = tl.cdiv(clusters, BLOCK_C), tl.cdiv(head_dim, BLOCK_K)
    i_part = tl.program_id(0) % parts
    i_block = tl.program_id(0) // parts % blocks
    i_split = tl.program_id(0) // (parts * blocks) % splits
    i_p = (tl.program_id(0) // (parts * blocks * splits)).to(tl.int64)
    i_b, i_h = i_p // heads, i_p % heads
    o_c = i_block * BLOCK_C + tl.arange(0, BLOCK_C)
    o_k = i_part * BLOCK_K + tl.arange(0, BLOCK_K)
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    labels_ptr += i_b * stride_labels_b + i_h * stride_labels_h
    b_sums = tl.zeros([BLOCK_C, BLOCK_K], tl.float32)
    b_sizes = tl.zeros([BLOCK_C], tl.int32)
    for start in range(i_split * block_rows, tl.minimum((i_split + 1) * block_rows, fit_rows), BLOCK_R):
        b_points, b_label = _load_labelled(
            query_ptr, labels_ptr, rows_ptr, i_b, start + tl.arange(0, BLOCK_R), total, fit_rows,
            stride_query_n, stride_query_d, stride_labels_n, o_k, head_dim,
        )  # fmt: skip
        # [BLOCK_C, BLOCK_R]
        b_member = (o_c[:, None] == b_label[None, :]).to(tl.float32).to(b_points.dtype)
        b_sums = tl.dot(b_member, b_points, b_sums, input_precision=PRECISION)
        b_place = b_label - i_block * BLOCK_C
        m_own = (b_place >= 0) & (b_place < BLOCK_C)
        b_sizes += tl.histogram(tl.where(m_own, b_place, 0), BLOCK_C, mask=m_own)
    o_row = (i_p * splits + i_split) * clusters + o_c
    p_sums = sums_ptr + o_row[:, None] * head_dim + o_k[None, :]
    tl.store(p_sums, b_sums, mask=(o_c < clusters)[:, None] & (o_k < head_dim)[None, :])
    tl.store(sizes_ptr + o_row, b_sizes.to(tl.float32), mask=(o_c < clusters) & (i_part == 0))


@kernel
def _query_offsets_kernel(
    query_ptr, labels_ptr, rows_ptr, sums_ptr, sizes_ptr, offsets_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_labels_b, stride_labels_h, stride_labels_n,
    heads, total, fit_rows, splits, clusters, head_dim,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`BLOCK_K` columns of `Q_i - Q̄_l(i)` of `BLOCK_R` fitted rows, from what the parts left, added up in their order.

    Rows that do not count, or whose label is none, get 0.
    """
    blocks, parts = tl.cdiv(fit_rows, BLOCK_R), tl.cdiv(head_dim, BLOCK_K)
    i_p = (tl.program_id(0) // (parts * blocks)).to(tl.int64)
    i_b, i_h = i_p // heads, i_p % heads
    o_r = tl.program_id(0) // parts % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    o_k = tl.program_id(0) % parts * BLOCK_K + tl.arange(0, BLOCK_K)
    b_points, b_label = _load_labelled(
        query_ptr + i_b * stride_query_b + i_h * stride_query_h,
        labels_ptr + i_b * stride_labels_b + i_h * stride_labels_h,
        rows_ptr, i_b, o_r, total, fit_rows, stride_query_n, stride_query_d, stride_labels_n, o_k, head_dim,
    )  # fmt: skip
    # [BLOCK_R, BLOCK_K]
    b_offsets = b_points.to(tl.float32)
    for first in range(0, clusters, BLOCK_C):
        o_c = first + tl.arange(0, BLOCK_C)
        b_sums = tl.zeros([BLOCK_C, BLOCK_K], tl.float32)
        b_sizes = tl.zeros([BLOCK_C], tl.float32)
        for split in range(0, splits, PARTS):
            o_split = split + tl.arange(0, PARTS)
            o_row = (i_p * splits + o_split)[:, None] * clusters + o_c[None, :]
            m_row = (o_split < splits)[:, None] & (o_c < clusters)[None, :]
            # [PARTS, BLOCK_C, BLOCK_K], [PARTS, BLOCK_C]
            p_sums = sums_ptr + o_row[:, :, None] * head_dim + o_k[None, None, :]
            m_sums = m_row[:, :, None] & (o_k < head_dim)[None, None, :]
            b_sums += tl.sum(tl.load(p_sums, mask=m_sums, other=0.0), 0)
            b_sizes += tl.sum(tl.load(sizes_ptr + o_row, mask=m_row, other=0.0), 0)
        b_means = b_sums / tl.maximum(b_sizes, 1.0)[:, None]
        b_place = b_label - first
        m_own = (b_place >= 0) & (b_place < BLOCK_C)
        b_index = tl.broadcast_to(tl.where(m_own, b_place, 0)[:, None], [BLOCK_R, BLOCK_K])
        b_offsets -= tl.where(m_own[:, None], tl.gather(b_means, b_index, 0), 0.0)
    m_some = (b_label >= 0) & (b_label < clusters)
    b_offsets = tl.where(m_some[:, None], b_offsets, 0.0)
    p_offsets = offsets_ptr + (i_p * fit_rows + o_r)[:, None] * head_dim + o_k[None, :]
    b_offsets = b_offsets.to(offsets_ptr.dtype.element_ty)
    tl.store(p_offsets, b_offsets, mask=(o_r < fit_rows)[:, None] & (o_k < head_dim)[None, :])


def part_length(clusters: int, rows: int) -> int:
    """Fitted rows of a part, so many that what all parts leave is less than what they read.

    It does not depend on the number of problems or on padding, and so no sum does.
    """
    return max(PART, block_width(4 * clusters), block_width(-(-rows // MOST_PARTS)))


def blocks_of(
    chip: Chip, wide: bool, masked: bool, clusters: int, block_d: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Block sizes, warps, stages and registers of the two kernels; `wide`: a row takes many registers."""
    block_c = min(64, block_width(clusters))
    sums = {"BLOCK_R": 32 if wide else 128, "BLOCK_K": min(32, block_d), "num_warps": 4}
    # With a mask, row numbers are loaded before the rows, which takes as many stages again.
    sums["num_stages"] = 2 if chip.name == "hip" else 5 if masked else 3
    # Each program reads what all parts of a problem left: with more rows to a program, this is read less often.
    residuals = {
        "BLOCK_R": 256 if wide else 512,
        "BLOCK_K": 16,
        "PARTS": 4,
        "num_warps": 4 if chip.name == "hip" else 8,
    }
    # On a large chip three programs of the first kernel run side by side with so few registers, and two of the second.
    of_sums, of_residuals = ({"maxnreg": 168}, {"maxnreg": 128}) if chip.is_large else 2 * (chip.all_registers,)
    return {"BLOCK_C": block_c} | sums | of_sums, {"BLOCK_C": block_c} | residuals | of_residuals


class Inputs(NamedTuple):
    """As the public op takes them."""

    query: torch.Tensor
    labels: torch.Tensor
    query_mask: torch.Tensor | None
    clusters: int
    rows: int


def _empty_residuals(x: Inputs) -> torch.Tensor:
    B, H, N, D = x.query.shape
    return x.query.new_empty(B, H, min(N, x.rows), D)


@recorded
def _forward(x: Inputs) -> torch.Tensor:
    """`η` `(B, H, n, D)` of `n = min(N, rows)` evenly spread queries, in their dtype."""
    query, labels, query_mask, clusters, rows = x
    B, H, N, D = query.shape
    residuals = _empty_residuals(x)
    if residuals.numel() == 0:
        return residuals
    chip, fitted = chip_of(query), find_rows(query, query_mask, rows)
    length = min(part_length(clusters, rows), block_width(fitted.most))
    splits = -(-fitted.most // length)
    sums, sizes = (query.new_empty(B * H * splits * clusters, d, dtype=torch.float32) for d in (D, 1))
    wide = query.dtype == torch.float32 or D % 16 > 0  # multiplied in halves, or loaded number by number
    of_sums, of_residuals = blocks_of(chip, wide, fitted.fit is not None, clusters, block_width(D))
    parts = -(-D // of_sums["BLOCK_K"]) * -(-clusters // of_sums["BLOCK_C"])
    row_blocks = -(-fitted.most // of_residuals["BLOCK_R"])
    inputs = *query.stride(), *labels.stride(), H, N, fitted.most, splits
    _query_offsets_sums_kernel[(B * H * splits * parts,)](
        query, labels, fitted.fit, sums, sizes, *inputs, length, clusters, D,
        PRECISION=chip.dot_precision(torch.float32), **of_sums,
    )  # fmt: skip
    _query_offsets_kernel[(B * H * row_blocks * -(-D // of_residuals["BLOCK_K"]),)](
        query, labels, fitted.fit, sums, sizes, residuals, *inputs, clusters, D, **of_residuals
    )
    return residuals


query_residuals = register_op("query_residuals_triton", Inputs, _forward, fake=_empty_residuals)
