"""The kernel that finds the seeds of K-means, and what centroids need to be compared with points."""

import triton
import triton.language as tl

from ...shared.triton.launch import kernel
from .rows import finite, load_fit_rows, load_fitted, load_points, sample_mean

# Factor on directions and half norms in float16, which keeps them within its range.
FLOAT16_SCALE = tl.constexpr(1 / 16)


@triton.jit
def for_products(b_points, b_directions, b_origin, directions_ptr):
    """Directions as products with points take them, and half norms, in which the origin's product is rounded alike."""
    if directions_ptr.dtype.element_ty == tl.float16:
        b_directions = tl.clamp(b_directions * FLOAT16_SCALE, -65504.0, 65504.0)
    b_rounded = b_directions.to(directions_ptr.dtype.element_ty)
    half_norms = tl.sum(b_points * b_directions * 0.5 + b_origin[None, :] * b_rounded.to(tl.float32), axis=1)
    return b_rounded, half_norms


@triton.jit
def load_metric(p_metric, o_i, o_d, head_dim):
    """A block of `G`."""
    m_metric = (o_i < head_dim)[:, None] & (o_d < head_dim)[None, :]
    return tl.load(p_metric + o_i[:, None] * head_dim + o_d[None, :], mask=m_metric, other=0.0)


@triton.jit
def load_in_metric(
    points_ptr, stride_n, stride_d, row, rows_ptr, i_b, total, fit_rows, fitted, p_metric, o_d, head_dim,
    HAS_ORIGIN: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of rows `x`, their origin subtracted, and of `x G`; and of the origin."""
    b_origin = tl.zeros_like(o_d).to(tl.float32)
    if HAS_ORIGIN:
        b_origin = sample_mean(
            points_ptr, stride_n, stride_d, rows_ptr, i_b, total, fit_rows, fitted, o_d, head_dim
        )  # fmt: skip
    b_points = load_points(points_ptr, row, row >= 0, o_d, stride_n, stride_d, head_dim)
    b_points = finite(b_points).to(tl.float32) - b_origin[None, :]
    b_directions = b_points
    if p_metric is not None:
        b_directions = tl.zeros_like(b_points)
        for inner in range(0, head_dim, BLOCK_K):
            o_i = inner + tl.arange(0, BLOCK_K)
            b_inner = load_points(points_ptr, row, row >= 0, o_i, stride_n, stride_d, head_dim)
            b_origin_i = sample_mean(
                points_ptr, stride_n, stride_d, rows_ptr, i_b, total, fit_rows, fitted, o_i, head_dim
            )  # fmt: skip
            b_metric = load_metric(p_metric, o_i, o_d, head_dim)
            b_inner = finite(b_inner).to(tl.float32) - b_origin_i[None, :]
            b_directions = tl.dot(b_inner, b_metric, b_directions, input_precision=PRECISION)
    return b_points, b_directions, b_origin


@kernel
def _kmeans_seed_kernel(
    points_ptr, stride_points_b, stride_points_h, stride_points_n, stride_points_d,
    rows_ptr, counts_ptr, metric_ptr, origin_ptr, centroids_ptr, directions_ptr, half_norms_ptr, arrived_ptr,
    heads, heads_per_metric, total, fit_rows, seeding_rows, groups, clusters, head_dim, first_share,
    SHARE_BITS: tl.constexpr, BINARY: tl.constexpr, ROWS: tl.constexpr, SEEDS: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Farthest-first among the rows of one group; its seeds as centroids, with directions and half norms.

    Every step waits for the one before: the distances `(x - y) G (x - y)^T` of all rows are in registers, and the
    choice is one maximum, of the distance's bits but the last, which hold the row. Where `BINARY` the seeds are evenly
    spread. Nobody has arrived at the rounds to come.
    """
    i_p = (tl.program_id(0) // groups).to(tl.int64)
    i_g = tl.program_id(0) % groups
    i_b = i_p // heads
    points_ptr += i_b * stride_points_b + i_p % heads * stride_points_h
    if metric_ptr is not None:
        metric_ptr += i_p // heads_per_metric * head_dim * head_dim
    fitted = load_fitted(counts_ptr, i_b, total, fit_rows)
    o_seed = tl.arange(0, SEEDS)
    o_c = i_g + groups * o_seed
    if BINARY:
        fit = o_c.to(tl.int64) * fitted // clusters
    else:
        candidates = tl.minimum(fitted, seeding_rows)
        own_rows = tl.cdiv(tl.maximum(candidates - i_g, 0), groups)
        o_s = tl.arange(0, ROWS)
        # The fitted rows that the rows of the group are.
        fit = (o_s * groups + i_g).to(tl.int64) * fitted // tl.maximum(candidates, 1)
        row = tl.where(o_s < own_rows, load_fit_rows(rows_ptr, i_b, fit.to(tl.int32), total, fit_rows), -1)
        products = tl.zeros([ROWS, ROWS], tl.float32)
        norms = tl.zeros([ROWS], tl.float32)
        for start in range(0, head_dim, BLOCK_K):
            o_d = start + tl.arange(0, BLOCK_K)
            b_points, b_directions, b_origin = load_in_metric(
                points_ptr, stride_points_n, stride_points_d, row, rows_ptr, i_b, total, fit_rows, fitted,
                metric_ptr, o_d, head_dim, True, BLOCK_K, PRECISION,
            )  # fmt: skip
            products = tl.dot(b_directions, tl.trans(b_points), products, input_precision=PRECISION)
            norms += tl.sum(b_points * b_directions, axis=1)
        norms_t = tl.sum(tl.where(o_s[:, None] == o_s[None, :], norms[:, None], 0.0), axis=0)
        distances = tl.maximum(norms[:, None] + norms_t[None, :] - 2 * products, 0.0)
        chosen = (first_share * own_rows.to(tl.int64) >> SHARE_BITS).to(tl.int32)
        b_chosen = tl.zeros([SEEDS], tl.int32) + chosen
        nearest_seed = tl.where(o_s < own_rows, float("inf"), 0.0)
        for step in range(1, tl.cdiv(clusters - i_g, groups)):
            b_row = tl.sum(tl.where(o_s[:, None] == chosen, distances, 0.0), axis=0)
            nearest_seed = tl.minimum(nearest_seed, b_row)
            marked = (nearest_seed.to(tl.int32, bitcast=True) & -ROWS) | (ROWS - 1 - o_s)
            chosen = ROWS - 1 - (tl.max(marked, 0) & (ROWS - 1))
            b_chosen = tl.where(o_seed == step, chosen, b_chosen)
        fit = (b_chosen * groups + i_g).to(tl.int64) * fitted // tl.maximum(candidates, 1)

    # With fewer points than clusters no seed is ever used, but reading one must stay inside.
    row = load_fit_rows(rows_ptr, i_b, tl.minimum(fit, fit_rows - 1).to(tl.int32), total, fit_rows)
    row = tl.where(o_c < clusters, row, -1)
    half_norms = tl.zeros([SEEDS], tl.float32)
    for start in range(0, head_dim, BLOCK_K):
        o_d = start + tl.arange(0, BLOCK_K)
        b_points, b_directions, b_origin = load_in_metric(
            points_ptr, stride_points_n, stride_points_d, row, rows_ptr, i_b, total, fit_rows, fitted, metric_ptr, o_d,
            head_dim, not BINARY, BLOCK_K, PRECISION,
        )  # fmt: skip
        b_rounded, b_part = for_products(b_points, b_directions, b_origin, directions_ptr)
        half_norms += b_part
        offsets = (i_p * clusters + o_c)[:, None] * head_dim + o_d[None, :]
        m_seeds = (o_c < clusters)[:, None] & (o_d < head_dim)[None, :]
        tl.store(centroids_ptr + offsets, b_points, mask=m_seeds)
        tl.store(directions_ptr + offsets, b_rounded, mask=m_seeds)
        if i_g == 0:
            tl.store(origin_ptr + i_p * head_dim + o_d, b_origin, mask=o_d < head_dim)
    tl.store(half_norms_ptr + i_p * clusters + o_c, half_norms, mask=o_c < clusters)
    tl.store(arrived_ptr + i_p, 0, mask=i_g == 0)
