"""Kernels of Lloyd's algorithm: every point to its nearest centroid, every centroid to the mean of its points."""

import triton
import triton.language as tl

from ...shared.triton.chips import LENGTHS
from .rows import finite, load_fit_rows, load_points
from .seeding import for_products, load_metric


@triton.jit
def load_directions(directions_ptr, o_c, o_d, clusters, head_dim):
    """Directions of some centroids of one problem, as columns."""
    m_directions = (o_d < head_dim)[:, None] & (o_c < clusters)[None, :]
    # [BLOCK_D, BLOCK_C]
    return tl.load(directions_ptr + o_c[None, :] * head_dim + o_d[:, None], mask=m_directions, other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_assign_kernel(
    points_ptr, stride_points_b, stride_points_h, stride_points_n, stride_points_d,
    rows_ptr, counts_ptr, ranks_ptr, directions_ptr, half_norms_ptr, labels_ptr,
    heads, total, length, clusters, head_dim,
    HAS_ROWS: tl.constexpr, HAS_RANKS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Label `argmax_c x·(c G) - h_c`, the first of equals, tile by tile of centroids.

    With `HAS_ROWS` the points are the fitted ones and label -1 marks where there is none; else all points, where label
    0 stands for a masked one and few points are a cluster each. With `SPLIT` a block holds a part of the dimensions.
    """
    blocks = tl.cdiv(length, BLOCK_N)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_p // heads
    o_n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    o_c = tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_D)
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    if HAS_ROWS:
        row = load_fit_rows(rows_ptr, i_b, o_n, total, length)
        valid = row >= 0
    else:
        row = o_n
        valid = o_n < length
        if HAS_RANKS:
            rank = tl.load(ranks_ptr + i_b * length + o_n, mask=valid, other=-1)
            valid = rank >= 0
    if not SPLIT:
        b_points = load_points(points_ptr, row, valid, o_d, stride_points_n, stride_points_d, head_dim)
        b_points = b_points.to(directions_ptr.dtype.element_ty)
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    label = tl.zeros([BLOCK_N], tl.int32)
    directions_ptr += i_p * clusters * head_dim
    half_norms_ptr += i_p * clusters
    for start in range(0, clusters, BLOCK_C):
        o_j = start + o_c
        if SPLIT:
            scores = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
            for first in range(0, head_dim, BLOCK_D):
                o_k = first + o_d
                b_points = load_points(points_ptr, row, valid, o_k, stride_points_n, stride_points_d, head_dim)
                b_directions = load_directions(directions_ptr, o_j, o_k, clusters, head_dim)
                b_points = b_points.to(b_directions.dtype)
                scores = tl.dot(b_points, b_directions, scores, input_precision=PRECISION)
        else:
            b_directions = load_directions(directions_ptr, o_j, o_d, clusters, head_dim)
            scores = tl.dot(b_points, b_directions, input_precision=PRECISION)
        scores -= tl.load(half_norms_ptr + o_j, mask=o_j < clusters, other=float("inf"))[None, :]
        tile_best, tile_label = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_better = tile_best > best
        best = tl.where(is_better, tile_best, best)
        # Scores that are not finite must not lead outside.
        label = tl.where(is_better, tl.minimum(start + tile_label, clusters - 1), label)
    if HAS_ROWS:
        label = tl.where(valid, label, -1)
    elif HAS_RANKS:
        count = tl.load(counts_ptr + i_b)
        label = tl.where(valid, tl.where(count <= clusters, rank, label), 0)
    tl.store(labels_ptr + i_p * length + o_n, label.to(labels_ptr.dtype.element_ty), mask=o_n < length)


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_update_kernel(
    points_ptr, stride_points_b, stride_points_h, stride_points_n, stride_points_d,
    rows_ptr, labels_ptr, metric_ptr, origin_ptr, centroids_ptr, directions_ptr, half_norms_ptr,
    heads, heads_per_metric, total, fit_rows, clusters, head_dim,
    BINARY: tl.constexpr, HAS_METRIC: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Centroid = mean of its fitted points (majority bits where `BINARY`); an empty cluster keeps its centroid.

    A sum is a product with the 0/1 table of membership, so its order is fixed, and padding behind changes nothing.
    """
    blocks = tl.cdiv(clusters, BLOCK_C)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_p // heads
    o_c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < head_dim
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    if HAS_METRIC:
        metric_ptr += i_p // heads_per_metric * head_dim * head_dim
    offsets = (i_p * clusters + o_c)[:, None] * head_dim
    b_centroids = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    b_directions = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    sizes = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, head_dim, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        m_k = o_k < head_dim
        sums = tl.zeros([BLOCK_C, BLOCK_K], tl.float32)
        sizes = tl.zeros([BLOCK_C], tl.float32)
        for start in range(0, fit_rows, BLOCK_R):
            o_r = start + tl.arange(0, BLOCK_R)
            label = tl.load(labels_ptr + i_p * fit_rows + o_r, mask=o_r < fit_rows, other=-1)
            row = load_fit_rows(rows_ptr, i_b, o_r, total, fit_rows)
            b_points = load_points(points_ptr, row, row >= 0, o_k, stride_points_n, stride_points_d, head_dim)
            b_points = finite(b_points)
            # [BLOCK_C, BLOCK_R]
            b_member = (o_c[:, None] == label[None, :]).to(tl.float32)
            sizes += tl.sum(b_member, axis=1)
            sums = tl.dot(b_member.to(b_points.dtype), b_points, sums, input_precision=PRECISION)
        b_origin = tl.load(origin_ptr + i_p * head_dim + o_k, mask=m_k, other=0.0)
        b_part = sums / tl.maximum(sizes, 1.0)[:, None] - b_origin[None, :]
        if BINARY:
            b_part = tl.where(m_k[None, :], tl.where(sums >= 0, 1.0, -1.0), 0.0)
        m_part = ((o_c < clusters) & (sizes > 0))[:, None] & m_k[None, :]
        tl.store(centroids_ptr + offsets + o_k[None, :], b_part, mask=m_part)
        if BLOCK_K == BLOCK_D:
            b_centroids = b_part
        else:
            b_place = (o_k[:, None] == o_d[None, :]).to(tl.float32)
            b_centroids = tl.dot(b_part, b_place, b_centroids, input_precision=PRECISION)
        if HAS_METRIC:
            b_metric = load_metric(metric_ptr, o_k, o_d, head_dim)
            b_directions = tl.dot(b_part, b_metric, b_directions, input_precision=PRECISION)
    if not HAS_METRIC:
        b_directions = b_centroids
    m_c = (o_c < clusters) & (sizes > 0)
    b_origin_d = tl.load(origin_ptr + i_p * head_dim + o_d, mask=m_d, other=0.0)
    b_rounded, half_norms = for_products(b_centroids, b_directions, b_origin_d, directions_ptr)
    tl.store(directions_ptr + offsets + o_d[None, :], b_rounded, mask=m_c[:, None] & m_d[None, :])
    tl.store(half_norms_ptr + i_p * clusters + o_c, half_norms, mask=m_c)
