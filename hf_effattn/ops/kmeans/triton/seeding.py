"""Kernels that find the seeds of K-means: norms and directions of the fitted points, their distances, the choice."""

import triton
import triton.language as tl

from ...shared.triton.chips import LENGTHS
from .rows import finite, load_points, sample_mean


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_prepare_kernel(
    points_ptr,
    stride_points_b,
    stride_points_h,
    stride_points_n,
    stride_points_d,
    rows_ptr,
    stride_rows_b,
    counts_ptr,
    stride_counts_b,
    metric_ptr,
    origin_ptr,
    fit_directions_ptr,
    norms_ptr,
    heads,
    heads_per_metric,
    fit_rows,
    head_dim,
    HAS_METRIC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of every fitted point, its origin subtracted: the direction `x G` and the norm `x G x^T`."""
    blocks = tl.cdiv(fit_rows, BLOCK_R)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_r = tl.program_id(0) % blocks
    i_b = i_p // heads
    o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, BLOCK_K)
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    rows_ptr += i_b * stride_rows_b
    fitted = tl.minimum(tl.load(counts_ptr + i_b * stride_counts_b), fit_rows)
    row = tl.load(rows_ptr + o_r, mask=o_r < fit_rows, other=-1)
    norms = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, head_dim, BLOCK_K):
        o_d = start + o_k
        b_origin = sample_mean(points_ptr, stride_points_n, stride_points_d, rows_ptr, fitted, o_d, head_dim)
        if i_r == 0:
            tl.store(origin_ptr + i_p * head_dim + o_d, b_origin, mask=o_d < head_dim)
        b_points = load_points(points_ptr, row, row >= 0, o_d, stride_points_n, stride_points_d, head_dim)
        b_points = finite(b_points) - b_origin[None, :]
        b_directions = b_points
        if HAS_METRIC:
            b_directions = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
            p_metric = metric_ptr + i_p // heads_per_metric * head_dim * head_dim
            for inner in range(0, head_dim, BLOCK_K):
                o_i = inner + o_k
                b_origin_i = sample_mean(points_ptr, stride_points_n, stride_points_d, rows_ptr, fitted, o_i, head_dim)
                b_inner = load_points(points_ptr, row, row >= 0, o_i, stride_points_n, stride_points_d, head_dim)
                b_inner = finite(b_inner) - b_origin_i[None, :]
                m_metric = (o_i < head_dim)[:, None] & (o_d < head_dim)[None, :]
                # [BLOCK_K, BLOCK_K]
                b_metric = tl.load(p_metric + o_i[:, None] * head_dim + o_d[None, :], mask=m_metric, other=0.0)
                b_directions = tl.dot(b_inner, b_metric, b_directions, input_precision=PRECISION)
            p_directions = fit_directions_ptr + (i_p * fit_rows + o_r)[:, None] * head_dim + o_d[None, :]
            tl.store(p_directions, b_directions, mask=(o_r < fit_rows)[:, None] & (o_d < head_dim)[None, :])
        norms += tl.sum(b_points * b_directions, axis=1)
    tl.store(norms_ptr + i_p * fit_rows + o_r, norms, mask=o_r < fit_rows)


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_distances_kernel(
    points_ptr,
    stride_points_b,
    stride_points_h,
    stride_points_n,
    stride_points_d,
    rows_ptr,
    stride_rows_b,
    counts_ptr,
    stride_counts_b,
    origin_ptr,
    fit_directions_ptr,
    norms_ptr,
    distances_ptr,
    first_problem,
    heads,
    fit_rows,
    seeding_rows,
    groups,
    group_rows,
    head_dim,
    HAS_METRIC: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`x_i G x_i^T + x_j G x_j^T - 2 x_i G x_j^T` of the rows of a group; a tile per program."""
    tiles = tl.cdiv(group_rows, BLOCK_S)
    i_group = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    i_tile = tl.program_id(0) % (tiles * tiles)
    i_p = first_problem + i_group // groups
    i_g = i_group % groups
    i_b = i_p // heads
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    fitted = tl.minimum(tl.load(counts_ptr + i_b * stride_counts_b), fit_rows)
    candidates = tl.minimum(fitted, seeding_rows)
    o_s = i_tile // tiles * BLOCK_S + tl.arange(0, BLOCK_S)
    o_t = i_tile % tiles * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_s * groups + i_g < candidates
    m_t = o_t * groups + i_g < candidates
    # The fitted rows that these rows of the group are.
    fit_s = (o_s * groups + i_g).to(tl.int64) * fitted // tl.maximum(candidates, 1)
    fit_t = (o_t * groups + i_g).to(tl.int64) * fitted // tl.maximum(candidates, 1)
    row_s = tl.load(rows_ptr + i_b * stride_rows_b + fit_s, mask=m_s, other=-1)
    row_t = tl.load(rows_ptr + i_b * stride_rows_b + fit_t, mask=m_t, other=-1)
    products = tl.zeros([BLOCK_S, BLOCK_S], tl.float32)
    for start in range(0, head_dim, BLOCK_K):
        o_d = start + tl.arange(0, BLOCK_K)
        b_origin = tl.load(origin_ptr + i_p * head_dim + o_d, mask=o_d < head_dim, other=0.0)
        b_s = load_points(points_ptr, row_s, m_s, o_d, stride_points_n, stride_points_d, head_dim)
        b_s = finite(b_s) - b_origin[None, :]
        if HAS_METRIC:
            p_t = fit_directions_ptr + (i_p * fit_rows + fit_t)[:, None] * head_dim + o_d[None, :]
            # [BLOCK_S, BLOCK_K]
            b_t = tl.load(p_t, mask=m_t[:, None] & (o_d < head_dim)[None, :], other=0.0)
        else:
            b_t = load_points(points_ptr, row_t, m_t, o_d, stride_points_n, stride_points_d, head_dim)
            b_t = finite(b_t) - b_origin[None, :]
        products = tl.dot(b_s, tl.trans(b_t), products, input_precision=PRECISION)
    norms_s = tl.load(norms_ptr + i_p * fit_rows + fit_s, mask=m_s, other=0.0)
    norms_t = tl.load(norms_ptr + i_p * fit_rows + fit_t, mask=m_t, other=0.0)
    b_distances = norms_s[:, None] + norms_t[None, :] - 2 * products
    p_distances = distances_ptr + (i_group * group_rows + o_s)[:, None] * group_rows + o_t[None, :]
    tl.store(p_distances, b_distances, mask=(o_s < group_rows)[:, None] & (o_t < group_rows)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_choose_kernel(
    counts_ptr,
    stride_counts_b,
    distances_ptr,
    chosen_ptr,
    first_problem,
    heads,
    fit_rows,
    seeding_rows,
    groups,
    group_rows,
    clusters,
    first_share,
    SHARE_BITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Farthest-first in one group of rows per program: which fitted row each seed is.

    Seed `i_g + groups · step` is the group's choice of this step. Every step waits for the one before, so none does
    more than it must: what a seed is as a centroid is looked up afterwards.
    """
    i_group = tl.program_id(0).to(tl.int64)
    i_p = first_problem + i_group // groups
    i_g = i_group % groups
    fitted = tl.minimum(tl.load(counts_ptr + i_p // heads * stride_counts_b), fit_rows).to(tl.int64)
    candidates = tl.minimum(fitted, seeding_rows)
    own_rows = tl.cdiv(tl.maximum(candidates - i_g, 0), groups)
    o_s = tl.arange(0, BLOCK_S)
    chosen = first_share * own_rows >> SHARE_BITS
    nearest_seed = tl.where(o_s < own_rows, float("inf"), float("-inf"))
    for step in range(0, tl.cdiv(clusters - i_g, groups)):
        fit = (chosen * groups + i_g) * fitted // tl.maximum(candidates, 1)
        tl.store(chosen_ptr + i_p * clusters + i_g + groups * step, fit.to(tl.int32))
        p_distances = distances_ptr + (i_group * group_rows + chosen) * group_rows + o_s
        # [BLOCK_S]
        b_distances = tl.load(p_distances, mask=o_s < own_rows, other=float("-inf"))
        nearest_seed = tl.minimum(nearest_seed, b_distances)
        farthest = tl.argmax(nearest_seed, axis=0, tie_break_left=True)
        # Points that are not finite must not lead outside.
        chosen = tl.minimum(farthest, tl.maximum(own_rows - 1, 0))


@triton.jit(do_not_specialize=LENGTHS)
def _kmeans_seed_kernel(
    points_ptr,
    stride_points_b,
    stride_points_h,
    stride_points_n,
    stride_points_d,
    rows_ptr,
    stride_rows_b,
    counts_ptr,
    stride_counts_b,
    origin_ptr,
    fit_directions_ptr,
    norms_ptr,
    chosen_ptr,
    centroids_ptr,
    directions_ptr,
    half_norms_ptr,
    heads,
    fit_rows,
    clusters,
    head_dim,
    BINARY: tl.constexpr,
    HAS_METRIC: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Seeds as centroids, each with its direction `c G` and half norm `c G c^T / 2`: the fitted rows that were chosen.

    Where `BINARY` they are evenly spread.
    """
    blocks = tl.cdiv(clusters, BLOCK_C)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_p // heads
    o_c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < clusters
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < head_dim
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    if BINARY:
        fitted = tl.minimum(tl.load(counts_ptr + i_b * stride_counts_b), fit_rows)
        fit = o_c.to(tl.int64) * fitted // clusters
        b_origin = tl.zeros([BLOCK_D], tl.float32)
        b_norms = tl.zeros([BLOCK_C], tl.float32) + head_dim
    else:
        fit = tl.load(chosen_ptr + i_p * clusters + o_c, mask=m_c, other=0).to(tl.int64)
    # With fewer points than clusters no seed is ever used, but reading one must stay inside.
    fit = tl.minimum(fit, fit_rows - 1)
    if not BINARY:
        b_origin = tl.load(origin_ptr + i_p * head_dim + o_d, mask=m_d, other=0.0)
        b_norms = tl.load(norms_ptr + i_p * fit_rows + fit, mask=m_c, other=0.0)
    row = tl.load(rows_ptr + i_b * stride_rows_b + fit, mask=m_c, other=-1)
    b_seeds = load_points(points_ptr, row, row >= 0, o_d, stride_points_n, stride_points_d, head_dim)
    b_seeds = finite(b_seeds) - b_origin[None, :]
    offsets = (i_p * clusters + o_c)[:, None] * head_dim + o_d[None, :]
    m_seeds = m_c[:, None] & m_d[None, :]
    tl.store(centroids_ptr + offsets, b_seeds, mask=m_seeds)
    tl.store(half_norms_ptr + i_p * clusters + o_c, b_norms * 0.5, mask=m_c)
    if HAS_METRIC:
        p_directions = fit_directions_ptr + (i_p * fit_rows + fit)[:, None] * head_dim + o_d[None, :]
        # [BLOCK_C, BLOCK_D]
        tl.store(directions_ptr + offsets, tl.load(p_directions, mask=m_seeds, other=0.0), mask=m_seeds)
