"""Metrics of K-means on a GPU: of the queries before each segment, of its keys; and centroids in them.

Sizes as in `layout` and `clusters`.
"""

import torch
import triton.language as tl

from ...cluster_queries.reference import METRIC_RIDGE
from ...kmeans.triton import Centroids
from ...kmeans.triton.rows import finite
from ...kmeans.triton.seeding import for_products, load_metric
from ...shared.triton.chips import block_width, chip_of
from ...shared.triton.launch import kernel
from .layout import Layout, Rows

COLUMNS = 16  # of a metric, that a program normalises


@kernel
def _causal_metric_products_kernel(
    key_ptr, products_ptr, sums_ptr,
    key_heads, rows_of_keys, D, segment_length, shift, parts,
    WIDE: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`Σ x_i^T x` and `Σ x` of the keys of one block, `PART` columns `x_i` a program.

    Products of 16-bit keys are exact; of others (`WIDE`) the first key is subtracted, or the product of the sums would
    eat the digits of the sum of the products.
    """
    i_sorted = (tl.program_id(0) // parts).to(tl.int64)
    i_part = tl.program_id(0) % parts
    i_block = i_sorted // key_heads
    key_ptr += i_sorted % key_heads * rows_of_keys * D
    o_i, o_d = i_part * PART + tl.arange(0, PART), tl.arange(0, BLOCK_D)
    m_i, m_d = o_i < D, o_d < D
    if WIDE:
        b_first_i = finite(tl.load(key_ptr + shift * D + o_i, mask=m_i, other=0.0))
        b_first_d = finite(tl.load(key_ptr + shift * D + o_d, mask=m_d, other=0.0))
    b_products = tl.zeros([PART, BLOCK_D], tl.float32)
    # Every row of the sums is the same: a product with ones.
    b_sums = tl.zeros([16, BLOCK_D], tl.float32)
    for begin in range(0, segment_length, ROWS):
        o_r = begin + tl.arange(0, ROWS)
        b_place = i_block * segment_length + o_r
        m_row = ((o_r < segment_length) & (b_place >= shift))[:, None]
        p_row = key_ptr + b_place[:, None] * D
        # [ROWS, PART], [ROWS, BLOCK_D]
        b_i = finite(tl.load(p_row + o_i[None, :], mask=m_row & m_i[None, :], other=0.0))
        b_d = finite(tl.load(p_row + o_d[None, :], mask=m_row & m_d[None, :], other=0.0))
        if WIDE:
            b_i = tl.where(m_row, b_i - b_first_i[None, :], 0.0)
            b_d = tl.where(m_row, b_d - b_first_d[None, :], 0.0)
        b_products = tl.dot(tl.trans(b_i), b_d, b_products, input_precision=PRECISION)
        b_ones = tl.full([16, ROWS], 1.0, tl.float32).to(b_d.dtype)
        b_sums = tl.dot(b_ones, b_d, b_sums, input_precision=PRECISION)
    p_products = products_ptr + (i_sorted * D + o_i[:, None]) * D + o_d[None, :]
    tl.store(p_products, b_products, mask=m_i[:, None] & m_d[None, :])
    tl.store(sums_ptr + i_sorted * D + o_d, tl.sum(b_sums, 0) / 16, mask=m_d & (i_part == 0))


@kernel
def _causal_metric_kernel(
    products_ptr, sums_ptr, metric_ptr,
    key_heads, group, D, segment_length, shift, parts,
    PREFIX: tl.constexpr, RIDGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some columns of a covariance, its mean diagonal 1, and the ridge.

    Of the products of `group` query heads; with `PREFIX` of those of all blocks up to the segment's, less the mean.
    """
    i_p = (tl.program_id(0) // parts).to(tl.int64)
    o_i, o_d = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D)
    m_i, m_d = o_i < D, o_d < D
    count = i_p // key_heads + 1 if PREFIX else group
    b_products = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    b_squares, b_sums = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    b_sums_i = tl.zeros([COLUMNS], tl.float32)
    for part in range(0, count):
        i_own = part * key_heads + i_p % key_heads if PREFIX else i_p * group + part
        p_products = products_ptr + i_own * D * D
        p_part = p_products + o_d[:, None] * D + o_i[None, :]
        b_products += tl.load(p_part, mask=m_d[:, None] & m_i[None, :], other=0.0)
        b_squares += tl.load(p_products + o_d * (D + 1), mask=m_d, other=0.0)
        if PREFIX:
            b_sums += tl.load(sums_ptr + i_own * D + o_d, mask=m_d, other=0.0)
            b_sums_i += tl.load(sums_ptr + i_own * D + o_i, mask=m_i, other=0.0)
    if PREFIX:
        keys = (count * segment_length - shift).to(tl.float32)
        b_products -= b_sums[:, None] * (b_sums_i / keys)[None, :]
        b_squares = tl.maximum(b_squares - b_sums * b_sums / keys, 0.0)
    size = tl.sum(b_squares, 0) / D
    b_metric = b_products / tl.where(size > 0, size, 1.0)
    b_metric += tl.where(o_d[:, None] == o_i[None, :], RIDGE, 0.0)
    p_metric = metric_ptr + (i_p * D + o_d[:, None]) * D + o_i[None, :]
    tl.store(p_metric, b_metric, mask=m_d[:, None] & m_i[None, :])


@kernel
def _causal_directions_kernel(
    centroids_ptr, starts_ptr, metric_ptr, directions_ptr, half_norms_ptr,
    group, clusters, D, parts,
    ROWS: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What points are compared with, to find the nearest of a problem's centroids that stand for any query.

    The first centroid is the origin: directions that all of them share would be rounded with what tells them apart.
    """
    i_p = (tl.program_id(0) // parts).to(tl.int64)
    o_c, o_d = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    m_c, m_d = o_c < clusters, o_d < D
    centroids_ptr += i_p * clusters * D
    metric_ptr += i_p // group * D * D
    # [ROWS, BLOCK_D]
    p_rows = o_c[:, None] * D + o_d[None, :]
    m_rows = m_c[:, None] & m_d[None, :]
    b_directions = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, D, PART):
        o_k = first + tl.arange(0, PART)
        p_part = centroids_ptr + o_c[:, None] * D + o_k[None, :]
        b_part = tl.load(p_part, mask=m_c[:, None] & (o_k < D)[None, :], other=0.0).to(tl.float32)
        b_part -= finite(tl.load(centroids_ptr + o_k, mask=o_k < D, other=0.0)).to(tl.float32)[None, :]
        b_metric = load_metric(metric_ptr, o_k, o_d, D)
        b_directions = tl.dot(b_part, b_metric, b_directions, input_precision=PRECISION)
    b_centroids = tl.load(centroids_ptr + p_rows, mask=m_rows, other=0.0).to(tl.float32)
    b_origin = finite(tl.load(centroids_ptr + o_d, mask=m_d, other=0.0)).to(tl.float32)
    b_rounded, b_half_norms = for_products(b_centroids - b_origin[None, :], b_directions, b_origin, directions_ptr)
    p_start = starts_ptr + i_p * (clusters + 2) + o_c
    m_empty = tl.load(p_start + 1, mask=m_c, other=0) == tl.load(p_start, mask=m_c, other=0)
    tl.store(directions_ptr + i_p * clusters * D + p_rows, b_rounded, mask=m_rows)
    b_half_norms = tl.where(m_empty, float("inf"), b_half_norms)
    tl.store(half_norms_ptr + i_p * clusters + o_c, b_half_norms, mask=m_c)


def prefix_metrics(layout: Layout, rows: Rows) -> torch.Tensor:
    """Of every late segment the metric of all distant keys, `(L · P, D, D)` float32."""
    key, n = rows.key, layout.settings.segment_length
    P, D = key.shape[0] * key.shape[1], key.shape[3]
    chip, block_d, wide = chip_of(key), block_width(D), key.dtype == torch.float32
    products, metric = (torch.empty(layout.late * P, D, D, dtype=torch.float32, device=key.device) for _ in range(2))
    sums = torch.empty(layout.late * P, D, dtype=torch.float32, device=key.device)
    most = 64 if wide or not chip.is_large else 128
    part = min(32 if wide and block_d > 128 else 64, block_d)
    _causal_metric_products_kernel[(layout.late * P * -(-D // part),)](
        key, products, sums, P, key.shape[2], D, n, layout.shift, -(-D // part),
        WIDE=wide, ROWS=max(16, min(most, 64 * most // block_d)), PART=part, BLOCK_D=block_d,
        PRECISION=chip.dot_precision(torch.float32), num_warps=8, num_stages=1, **chip.all_registers,
    )  # fmt: skip
    return _normalised(layout, rows, products, sums, metric)


def residual_metrics(layout: Layout, rows: Rows, products: torch.Tensor) -> torch.Tensor:
    """Of every late segment the metric of the residuals with these products `(L · P · g, D, D)`: `(L · P, D, D)`."""
    metric = torch.empty(len(products) // rows.group, *products.shape[1:], dtype=torch.float32, device=products.device)
    return _normalised(layout, rows, products, None, metric)


def _normalised(
    layout: Layout, rows: Rows, products: torch.Tensor, sums: torch.Tensor | None, metric: torch.Tensor
) -> torch.Tensor:
    """`metric`, written."""
    D, parts = metric.shape[2], -(-metric.shape[2] // COLUMNS)
    _causal_metric_kernel[(len(metric) * parts,)](
        products, sums, metric, rows.heads // rows.group, rows.group, D, layout.settings.segment_length,
        layout.shift, parts, PREFIX=sums is not None, RIDGE=METRIC_RIDGE, COLUMNS=COLUMNS, BLOCK_D=block_width(D),
    )  # fmt: skip
    return metric


def known_centroids(centroids: torch.Tensor, starts: torch.Tensor, metric: torch.Tensor) -> Centroids:
    """Centroids `(L · P · g, C, D)` for points to be compared with; none of a cluster without queries."""
    problems, C, D = centroids.shape
    chip, block_d = chip_of(centroids), block_width(D)
    directions = torch.empty_like(centroids)
    half_norms = torch.empty(problems, C, dtype=torch.float32, device=centroids.device)
    rows = min(32, block_width(C))
    _causal_directions_kernel[(problems * -(-C // rows),)](
        centroids, starts, metric, directions, half_norms, problems // len(metric), C, D, -(-C // rows),
        ROWS=rows, PART=min(32, block_d), BLOCK_D=block_d, PRECISION=chip.dot_precision(torch.float32),
        num_warps=8 if block_d > 128 else 4, num_stages=1, **chip.all_registers,
    )  # fmt: skip
    return Centroids(centroids, centroids, directions, half_norms)
