"""Kernels of Lloyd's algorithm: every point to its nearest centroid, every centroid to the mean of its points."""

import triton
import triton.language as tl

from ...shared.triton.launch import kernel
from .rows import finite, load_fit_rows, load_points
from .seeding import for_products, load_metric


@triton.jit
def nearest(
    b_points, points_ptr, row, valid, stride_n, stride_d, directions_ptr, half_norms_ptr, clusters, head_dim,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Label `argmax_c x·(c G) - h_c` of some rows, the first of equals, tile by tile of centroids.

    Where `b_points` is None the rows are loaded by parts of the dimensions.
    """
    o_c, o_d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    label = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, clusters, BLOCK_C):
        o_j = start + o_c
        scores = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        for first in range(0, head_dim if b_points is None else BLOCK_D, BLOCK_D):
            o_k = first + o_d
            b_part = b_points
            if b_points is None:
                b_part = load_points(points_ptr, row, valid, o_k, stride_n, stride_d, head_dim)
            m_directions = (o_k < head_dim)[:, None] & (o_j < clusters)[None, :]
            # [BLOCK_D, BLOCK_C]
            b_directions = tl.load(
                directions_ptr + o_j[None, :] * head_dim + o_k[:, None], mask=m_directions, other=0.0
            )
            scores = tl.dot(b_part.to(b_directions.dtype), b_directions, scores, input_precision=PRECISION)
        scores -= tl.load(half_norms_ptr + o_j, mask=o_j < clusters, other=float("inf"))[None, :]
        tile_best = tl.max(scores, 1)
        # Two plain reductions: one that carries both is a branch for every number. Scores that are not finite must not
        # lead outside.
        tile_label = tl.min(tl.where(scores == tile_best[:, None], o_j[None, :], clusters - 1), 1)
        is_better = tile_best > best
        best = tl.where(is_better, tile_best, best)
        label = tl.where(is_better, tile_label, label)
    return label


@kernel
def _kmeans_assign_kernel(
    points_ptr, stride_points_b, stride_points_h, stride_points_n, stride_points_d,
    rows_ptr, counts_ptr, ranks_ptr, directions_ptr, half_norms_ptr, labels_ptr,
    heads, total, length, clusters, head_dim,
    HAS_ROWS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The nearest centroid's number for every point.

    With `HAS_ROWS` the points are the fitted ones and label -1 marks where there is none; else all points, where label
    0 stands for a masked one and few points are a cluster each.
    """
    blocks = tl.cdiv(length, BLOCK_N)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_p // heads
    o_n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    if HAS_ROWS:
        row = load_fit_rows(rows_ptr, i_b, o_n, total, length)
        valid = row >= 0
    else:
        row = o_n
        valid = o_n < length
        if ranks_ptr is not None:
            rank = tl.load(ranks_ptr + i_b * length + o_n, mask=valid, other=-1)
            valid = rank >= 0
    o_d = tl.arange(0, BLOCK_D)
    b_points = None if SPLIT else load_points(points_ptr, row, valid, o_d, stride_points_n, stride_points_d, head_dim)
    label = nearest(
        b_points, points_ptr, row, valid, stride_points_n, stride_points_d,
        directions_ptr + i_p * clusters * head_dim, half_norms_ptr + i_p * clusters, clusters, head_dim,
        BLOCK_N, BLOCK_C, BLOCK_D, PRECISION,
    )  # fmt: skip
    if HAS_ROWS:
        label = tl.where(valid, label, -1)
    elif ranks_ptr is not None:
        count = tl.load(counts_ptr + i_b)
        label = tl.where(valid, tl.where(count <= clusters, rank, label), 0)
    tl.store(labels_ptr + i_p * length + o_n, label.to(labels_ptr.dtype.element_ty), mask=o_n < length)


@kernel
def _kmeans_update_kernel(
    points_ptr, stride_points_b, stride_points_h, stride_points_n, stride_points_d,
    rows_ptr, labels_ptr, metric_ptr, origin_ptr, centroids_ptr, directions_ptr, half_norms_ptr,
    sums_ptr, sizes_ptr, arrived_ptr,
    heads, heads_per_metric, total, fit_rows, blocks, splits, block_rows, clusters, head_dim,
    BINARY: tl.constexpr, LABELS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Centroid = mean of its fitted points (majority bits where `BINARY`); an empty cluster keeps its centroid.

    A sum is a product with the 0/1 table of membership, so its order is fixed, and padding behind changes nothing.
    Where it `LABELS`, a program takes `block_rows` rows, which it labels, for all clusters: the last one of a problem
    to arrive adds up what all of them left, in their order, and only then changes what they have read.
    """
    i_p = (tl.program_id(0) // (blocks * splits)).to(tl.int64)
    i_split = tl.program_id(0) // blocks % splits
    i_b = i_p // heads
    # A start of 0 is known to the compiler, which then holds fewer numbers.
    first_c = 0 if LABELS else tl.program_id(0) % blocks * BLOCK_C
    o_c = first_c + tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < head_dim
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    if metric_ptr is not None:
        metric_ptr += i_p // heads_per_metric * head_dim * head_dim
    directions_ptr += i_p * clusters * head_dim
    half_norms_ptr += i_p * clusters
    offsets = o_c[:, None] * head_dim
    b_centroids = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    b_directions = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    sizes = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, BLOCK_D if BLOCK_K == BLOCK_D else head_dim, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        m_k = o_k < head_dim
        sums = tl.zeros([BLOCK_C, BLOCK_K], tl.float32)
        counts = tl.zeros([BLOCK_C], tl.int32)
        for start in range(i_split * block_rows, tl.minimum((i_split + 1) * block_rows, fit_rows), BLOCK_R):
            o_r = start + tl.arange(0, BLOCK_R)
            row = load_fit_rows(rows_ptr, i_b, o_r, total, fit_rows)
            b_points = load_points(points_ptr, row, row >= 0, o_k, stride_points_n, stride_points_d, head_dim)
            if LABELS:
                label = nearest(
                    b_points, points_ptr, row, row >= 0, stride_points_n, stride_points_d, directions_ptr,
                    half_norms_ptr, clusters, head_dim, BLOCK_R, BLOCK_C, BLOCK_D, PRECISION,
                )  # fmt: skip
                label = tl.where(row >= 0, label, -1)
            else:
                label = tl.load(labels_ptr + i_p * fit_rows + o_r, mask=o_r < fit_rows, other=-1)
            b_points = finite(b_points)
            # [BLOCK_C, BLOCK_R]
            b_member = (o_c[:, None] == label[None, :]).to(tl.float32)
            sums = tl.dot(b_member.to(b_points.dtype), b_points, sums, input_precision=PRECISION)
            # Not a sum of the table: its rows lie across the threads, and each would be a chain of exchanges.
            place = label - first_c
            m_own = (place >= 0) & (place < BLOCK_C)
            counts += tl.histogram(tl.where(m_own, place, 0), BLOCK_C, mask=m_own)
        sizes = counts.to(tl.float32)
        if LABELS:
            sums_ptr += i_p * splits * clusters * head_dim
            sizes_ptr += i_p * splits * clusters
            o_own = i_split * clusters + o_c
            m_sums = (o_c < clusters)[:, None] & m_d[None, :]
            tl.store(sums_ptr + o_own[:, None] * head_dim + o_d[None, :], sums, mask=m_sums)
            tl.store(sizes_ptr + o_own, sizes, mask=o_c < clusters)
            tl.debug_barrier()  # behind which one thread arrives for all
            is_last = tl.atomic_add(arrived_ptr + i_p, 1) % splits == splits - 1
            sums, sizes = tl.zeros_like(sums), tl.zeros_like(sizes)
            for part in range(0, tl.where(is_last, splits, 0), PARTS):
                o_part = part + tl.arange(0, PARTS)
                o_row = o_part[:, None] * clusters + o_c[None, :]
                m_row = (o_part < splits)[:, None] & (o_c < clusters)[None, :]
                # [PARTS, BLOCK_C, BLOCK_D], [PARTS, BLOCK_C]
                p_sums = sums_ptr + o_row[:, :, None] * head_dim + o_d[None, None, :]
                sums += tl.sum(tl.load(p_sums, mask=m_row[:, :, None] & m_d[None, None, :], other=0.0), 0)
                sizes += tl.sum(tl.load(sizes_ptr + o_row, mask=m_row, other=0.0), 0)
        b_origin = tl.load(origin_ptr + i_p * head_dim + o_k, mask=m_k, other=0.0)
        b_part = sums / tl.maximum(sizes, 1.0)[:, None] - b_origin[None, :]
        if BINARY:
            b_part = tl.where(m_k[None, :], tl.where(sums >= 0, 1.0, -1.0), 0.0)
        m_part = ((o_c < clusters) & (sizes > 0))[:, None] & m_k[None, :]
        tl.store(centroids_ptr + i_p * clusters * head_dim + offsets + o_k[None, :], b_part, mask=m_part)
        if BLOCK_K == BLOCK_D:
            b_centroids = b_part
        else:
            b_place = (o_k[:, None] == o_d[None, :]).to(tl.float32)
            b_centroids = tl.dot(b_part, b_place, b_centroids, input_precision=PRECISION)
        if metric_ptr is not None:
            b_metric = load_metric(metric_ptr, o_k, o_d, head_dim)
            b_directions = tl.dot(b_part, b_metric, b_directions, input_precision=PRECISION)
    if metric_ptr is None:
        b_directions = b_centroids
    m_c = (o_c < clusters) & (sizes > 0)
    b_origin_d = tl.load(origin_ptr + i_p * head_dim + o_d, mask=m_d, other=0.0)
    b_rounded, half_norms = for_products(b_centroids, b_directions, b_origin_d, directions_ptr)
    tl.store(directions_ptr + offsets + o_d[None, :], b_rounded, mask=m_c[:, None] & m_d[None, :])
    tl.store(half_norms_ptr + o_c, half_norms, mask=m_c)
