"""Kernels of Lloyd's algorithm: every point to its nearest centroid, every centroid to the mean of its points."""

import triton
import triton.language as tl

from ...shared.triton.chips import LENGTHS
from .rows import finite, load_points


@triton.jit
def load_centered(points_ptr, row, valid, o_d, stride_n, stride_d, p_origin, head_dim, HAS_ORIGIN: tl.constexpr):
    """Rows of one problem in float32, the origin subtracted."""
    b_points = load_points(points_ptr, row, valid, o_d, stride_n, stride_d, head_dim)
    if HAS_ORIGIN:
        b_points -= tl.load(p_origin + o_d, mask=o_d < head_dim, other=0.0)[None, :]
    return b_points


@triton.jit
def load_directions(directions_ptr, o_c, o_d, clusters, head_dim):
    """Directions of some centroids of one problem, as columns."""
    m_directions = (o_d < head_dim)[:, None] & (o_c < clusters)[None, :]
    # [BLOCK_D, BLOCK_C]
    return tl.load(directions_ptr + o_c[None, :] * head_dim + o_d[:, None], mask=m_directions, other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_assign_kernel(
    points_ptr,
    stride_points_b,
    stride_points_h,
    stride_points_n,
    stride_points_d,
    rows_ptr,
    stride_rows_b,
    counts_ptr,
    stride_counts_b,
    ranks_ptr,
    origin_ptr,
    directions_ptr,
    half_norms_ptr,
    labels_ptr,
    heads,
    length,
    clusters,
    head_dim,
    HAS_ROWS: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    HAS_ORIGIN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Label `argmax_c x·(c G) - c G c^T / 2`, the first of equals, tile by tile of centroids.

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
        row = tl.load(rows_ptr + i_b * stride_rows_b + o_n, mask=o_n < length, other=-1)
        valid = row >= 0
    else:
        row = o_n
        valid = o_n < length
        if HAS_RANKS:
            rank = tl.load(ranks_ptr + i_b * length + o_n, mask=valid, other=-1)
            valid = rank >= 0
    p_origin = origin_ptr
    if HAS_ORIGIN:
        p_origin += i_p * head_dim
    if not SPLIT:
        b_points = load_centered(
            points_ptr, row, valid, o_d, stride_points_n, stride_points_d, p_origin, head_dim, HAS_ORIGIN
        )
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
                b_points = load_centered(
                    points_ptr, row, valid, o_k, stride_points_n, stride_points_d, p_origin, head_dim, HAS_ORIGIN
                )
                b_directions = load_directions(directions_ptr, o_j, o_k, clusters, head_dim)
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
        count = tl.load(counts_ptr + i_b * stride_counts_b)
        label = tl.where(valid, tl.where(count <= clusters, rank, label), 0)
    tl.store(labels_ptr + i_p * length + o_n, label.to(labels_ptr.dtype.element_ty), mask=o_n < length)


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_sum_kernel(
    points_ptr,
    stride_points_b,
    stride_points_h,
    stride_points_n,
    stride_points_d,
    rows_ptr,
    stride_rows_b,
    origin_ptr,
    fit_directions_ptr,
    labels_ptr,
    sums_ptr,
    direction_sums_ptr,
    sizes_ptr,
    heads,
    fit_rows,
    clusters,
    head_dim,
    BINARY: tl.constexpr,
    HAS_METRIC: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums of the fitted points of some clusters, and of their directions, over a part of the points.

    A sum is a product with the 0/1 table of membership, so its order is fixed. Parts take blocks of points in turn:
    padding behind the points changes no sum.
    """
    blocks = tl.cdiv(clusters, BLOCK_C)
    i_part = tl.program_id(0) // blocks % PARTS
    i_p = (tl.program_id(0) // (blocks * PARTS)).to(tl.int64)
    i_b = i_p // heads
    o_c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < head_dim
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    if BINARY:
        b_origin = tl.zeros([BLOCK_D], tl.float32)
    else:
        b_origin = tl.load(origin_ptr + i_p * head_dim + o_d, mask=m_d, other=0.0)
    sums = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    direction_sums = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    sizes = tl.zeros([BLOCK_C], tl.float32)
    for start in range(i_part * BLOCK_R, fit_rows, PARTS * BLOCK_R):
        o_r = start + tl.arange(0, BLOCK_R)
        label = tl.load(labels_ptr + i_p * fit_rows + o_r, mask=o_r < fit_rows, other=-1)
        row = tl.load(rows_ptr + i_b * stride_rows_b + o_r, mask=o_r < fit_rows, other=-1)
        # [BLOCK_C, BLOCK_R]
        b_member = (o_c[:, None] == label[None, :]).to(tl.float32)
        sizes += tl.sum(b_member, axis=1)
        b_points = load_points(points_ptr, row, row >= 0, o_d, stride_points_n, stride_points_d, head_dim)
        b_points = finite(b_points) - b_origin[None, :]
        sums = tl.dot(b_member, b_points, sums, input_precision=PRECISION)
        if HAS_METRIC:
            p_directions = fit_directions_ptr + (i_p * fit_rows + o_r)[:, None] * head_dim + o_d[None, :]
            # [BLOCK_R, BLOCK_D]
            b_directions = tl.load(p_directions, mask=(row >= 0)[:, None] & m_d[None, :], other=0.0)
            direction_sums = tl.dot(b_member, b_directions, direction_sums, input_precision=PRECISION)
    o_out = (i_p * PARTS + i_part) * clusters + o_c
    offsets = o_out[:, None] * head_dim + o_d[None, :]
    m_sums = (o_c < clusters)[:, None] & m_d[None, :]
    tl.store(sums_ptr + offsets, sums, mask=m_sums)
    if HAS_METRIC:
        tl.store(direction_sums_ptr + offsets, direction_sums, mask=m_sums)
    tl.store(sizes_ptr + o_out, sizes, mask=o_c < clusters)


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_update_kernel(
    sums_ptr,
    direction_sums_ptr,
    sizes_ptr,
    centroids_ptr,
    directions_ptr,
    half_norms_ptr,
    clusters,
    head_dim,
    BINARY: tl.constexpr,
    HAS_METRIC: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Centroid = mean of its fitted points (majority bits where `BINARY`); an empty cluster keeps its centroid.

    The direction `c G` is the mean of the points' directions.
    """
    blocks = tl.cdiv(clusters, BLOCK_C)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    o_c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_D)
    m_sums = (o_c < clusters)[:, None] & (o_d < head_dim)[None, :]
    sums = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    direction_sums = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    sizes = tl.zeros([BLOCK_C], tl.float32)
    # Unrolled: the loads of all parts are under way at once.
    for i_part in tl.static_range(PARTS):
        o_part = (i_p * PARTS + i_part) * clusters + o_c
        offsets = o_part[:, None] * head_dim + o_d[None, :]
        # [BLOCK_C, BLOCK_D]
        sums += tl.load(sums_ptr + offsets, mask=m_sums, other=0.0)
        if HAS_METRIC:
            direction_sums += tl.load(direction_sums_ptr + offsets, mask=m_sums, other=0.0)
        sizes += tl.load(sizes_ptr + o_part, mask=o_c < clusters, other=0.0)
    b_centroids = tl.where(sums >= 0, 1.0, -1.0) if BINARY else sums / tl.maximum(sizes, 1.0)[:, None]
    m_c = sizes > 0
    m_sums &= m_c[:, None]
    offsets = (i_p * clusters + o_c)[:, None] * head_dim + o_d[None, :]
    tl.store(centroids_ptr + offsets, b_centroids, mask=m_sums)
    if not BINARY:
        b_directions = b_centroids
        if HAS_METRIC:
            b_directions = direction_sums / tl.maximum(sizes, 1.0)[:, None]
            tl.store(directions_ptr + offsets, b_directions, mask=m_sums)
        half_norms = tl.sum(b_centroids * b_directions, axis=1) * 0.5
        tl.store(half_norms_ptr + i_p * clusters + o_c, half_norms, mask=m_c)
