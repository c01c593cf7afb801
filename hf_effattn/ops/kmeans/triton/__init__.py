"""K-means on the GPU: rows are chosen, seeds found, centroids fitted and points labelled without leaving it.

No table of points by centroids is ever in memory, nothing waits for the host, and every sum has a fixed order. To
`torch.compile` it is one op.
"""

from dataclasses import dataclass

import torch
import triton

from ...shared.triton.chips import block_width, chip_of, on_device_of
from ..sampling import SHARE_BITS, first_seed_share, most_fit_rows, most_seeding_rows, seeding_groups
from .lloyd import _kmeans_assign_kernel, _kmeans_sum_kernel, _kmeans_update_kernel
from .rows import Rows, find_rows
from .seeding import _kmeans_choose_kernel, _kmeans_distances_kernel, _kmeans_prepare_kernel, _kmeans_seed_kernel

# Bytes of the distances between seeding rows that are in memory at once.
DISTANCES_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Centroids:
    """What points are compared with: `argmax_c (x - origin)·direction_c - half_norm_c`.

    Attributes:
        origin: `(B · H, D)`, subtracted from all points; None for codes of ±1.
        centroids, directions: `(B · H, C, D)` float32, the origin subtracted, and `c G`; one tensor without a metric.
        half_norms: `(B · H, C)`, `c G c^T / 2`.
    """

    origin: torch.Tensor | None
    centroids: torch.Tensor
    directions: torch.Tensor
    half_norms: torch.Tensor


def assign_blocks(block_d: int, points: int, exact: bool, shared_memory: int) -> tuple[int, int, int, int, int]:
    """`(BLOCK_N, BLOCK_C, BLOCK_D, num_warps, num_stages)` of the assignment.

    `exact`: a float32 product is made of three. A row that would not fit into registers is walked in parts.
    """
    stages = 1 if shared_memory <= 64 * 1024 else 2
    block_n = 64 if points < 4096 else 128
    if block_d > (64 if exact else 128):
        return block_n, 32 if exact else 64, 32 if exact else 64, block_n // 16, stages
    return block_n, 32 if exact or block_d > 64 else 64, block_d, 8 if block_n * block_d >= 8192 else 4, stages


def update_blocks(block_d: int, clusters: int, exact: bool) -> tuple[int, int, int, int]:
    """`(BLOCK_C, BLOCK_R, num_warps, num_stages)` of the update: blocks of few clusters make more programs."""
    if exact or block_d > 128:
        return 16, 32, 8 if block_d > 128 else 4, 1
    return (16, 64 if block_d <= 64 else 32, 4, 2) if clusters <= 256 else (32, 32, 4, 2)


def update_parts(clusters: int) -> int:
    """How many programs share the points of a cluster: few where many clusters already make many programs.

    Nothing else counts, or a text would get other labels beside longer ones.
    """
    return min(8, triton.next_power_of_2(max(1, 1024 // clusters)))


def fit(
    points: torch.Tensor,
    rows: Rows,
    metric: torch.Tensor | None,
    clusters: int,
    iterations: int,
    seed: int,
    binary: bool = False,
) -> Centroids:
    """Seeds and Lloyd's algorithm on the fitted rows of points `(B, H, N, D)`.

    `metric` is `(B · Hk, D, D)`, float32, for `Hk` heads that divide `H`.
    """
    B, H, _, D = points.shape
    P, R, block_d = B * H, rows.fit.shape[1], block_width(D)
    chip = chip_of(points)
    precision = chip.dot_precision(points.dtype)
    exact = points.dtype == torch.float32

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=points.device)

    origin = None if binary else new(P, D)
    fit_directions = None if metric is None else new(P, R, D)
    norms = None if binary else new(P, R)
    centroids, half_norms = new(P, clusters, D), new(P, clusters)
    directions = centroids if metric is None else new(P, clusters, D)
    result = Centroids(origin, centroids, directions, half_norms)
    labels = torch.empty(P, R, dtype=torch.int32, device=points.device)
    chosen = None if binary else torch.empty(P, clusters, dtype=torch.int32, device=points.device)

    strided_points = points, *points.stride()
    strided_rows = rows.fit, rows.fit.stride(0)
    sampled = *strided_points, *strided_rows, rows.counts, rows.counts.stride(0)
    block_k = min(block_d, 32)
    with on_device_of(points):
        # Codes take evenly spread rows as seeds, nothing is to be chosen.
        if not binary:
            _kmeans_prepare_kernel[(P * triton.cdiv(R, 64),)](
                *sampled,
                metric,
                origin,
                fit_directions,
                norms,
                H,
                1 if metric is None else P // metric.shape[0],
                R,
                D,
                HAS_METRIC=metric is not None,
                BLOCK_R=64,
                BLOCK_K=block_k,
                PRECISION=chip.dot_precision(torch.float32),
            )
            groups, seeding = seeding_groups(clusters), most_seeding_rows(clusters)
            group_rows = triton.cdiv(min(R, seeding), groups)
            step = max(1, DISTANCES_BYTES // (groups * group_rows**2 * torch.float32.itemsize))
            for first in range(0, P, step):
                problems = min(step, P - first)
                distances = new(problems * groups, group_rows, group_rows)
                _kmeans_distances_kernel[(problems * groups * triton.cdiv(group_rows, 64) ** 2,)](
                    *sampled,
                    origin,
                    fit_directions,
                    norms,
                    distances,
                    first,
                    H,
                    R,
                    seeding,
                    groups,
                    group_rows,
                    D,
                    HAS_METRIC=metric is not None,
                    BLOCK_S=64,
                    BLOCK_K=block_k,
                    PRECISION=precision,
                    num_warps=8,
                    num_stages=2,
                )
                _kmeans_choose_kernel[(problems * groups,)](
                    rows.counts,
                    rows.counts.stride(0),
                    distances,
                    chosen,
                    first,
                    H,
                    R,
                    seeding,
                    groups,
                    group_rows,
                    clusters,
                    first_seed_share(seed),
                    SHARE_BITS=SHARE_BITS,
                    BLOCK_S=block_width(group_rows),
                    num_warps=1,
                )
        _kmeans_seed_kernel[(P * triton.cdiv(clusters, 16),)](
            *sampled,
            origin,
            fit_directions,
            norms,
            chosen,
            centroids,
            directions,
            half_norms,
            H,
            R,
            clusters,
            D,
            BINARY=binary,
            HAS_METRIC=metric is not None,
            BLOCK_C=16,
            BLOCK_D=block_d,
        )
        parts = update_parts(clusters)
        block_c, block_r, num_warps, num_stages = update_blocks(block_d, clusters, exact)
        sums, sizes = new(P, parts, clusters, D), new(P, parts, clusters)
        direction_sums = None if metric is None else torch.empty_like(sums)
        for _ in range(iterations):
            assign(points, rows, result, labels, fitted_only=True)
            _kmeans_sum_kernel[(P * parts * triton.cdiv(clusters, block_c),)](
                *strided_points,
                *strided_rows,
                origin,
                fit_directions,
                labels,
                sums,
                direction_sums,
                sizes,
                H,
                R,
                clusters,
                D,
                BINARY=binary,
                HAS_METRIC=metric is not None,
                PARTS=parts,
                BLOCK_C=block_c,
                BLOCK_R=block_r,
                BLOCK_D=block_d,
                PRECISION=precision,
                num_warps=num_warps,
                num_stages=num_stages,
                **chip.all_registers,
            )
            _kmeans_update_kernel[(P * triton.cdiv(clusters, 8),)](
                sums,
                direction_sums,
                sizes,
                centroids,
                directions,
                half_norms,
                clusters,
                D,
                BINARY=binary,
                HAS_METRIC=metric is not None,
                PARTS=parts,
                BLOCK_C=8,
                BLOCK_D=block_d,
            )
    return result


def assign(
    points: torch.Tensor, rows: Rows, centroids: Centroids, labels: torch.Tensor, *, fitted_only: bool = False
) -> None:
    """Write the label of every point to `(B · H, N)`, or to `(B · H, R)` that of the fitted ones only."""
    B, H, _, D = points.shape
    length, block_d = labels.shape[-1], block_width(D)
    chip = chip_of(points)
    block_n, block_c, part_d, num_warps, num_stages = assign_blocks(
        block_d, length, points.dtype == torch.float32, chip.shared_memory
    )
    with on_device_of(points):
        _kmeans_assign_kernel[(B * H * triton.cdiv(length, block_n),)](
            points,
            *points.stride(),
            rows.fit,
            rows.fit.stride(0),
            rows.counts,
            rows.counts.stride(0),
            rows.ranks,
            centroids.origin,
            centroids.directions,
            centroids.half_norms,
            labels,
            H,
            length,
            centroids.directions.shape[1],
            D,
            HAS_ROWS=fitted_only,
            HAS_RANKS=rows.ranks is not None,
            HAS_ORIGIN=centroids.origin is not None,
            SPLIT=part_d < block_d,
            BLOCK_N=block_n,
            BLOCK_C=block_c,
            BLOCK_D=part_d,
            PRECISION=chip.dot_precision(points.dtype),
            num_warps=num_warps,
            num_stages=num_stages,
        )


def own_clusters(points: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Labels `(B, H, N)` where there are no more points than clusters: the rank among those that count."""
    B, H, N, _ = points.shape
    if mask is None:
        return torch.arange(N, device=points.device).repeat(B, H, 1)
    ranks = (mask.cumsum(dim=1) - 1).masked_fill(~mask, 0)
    return ranks[:, None].repeat(1, H, 1)


def own_centroids(points: torch.Tensor, rows: Rows, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids `(B, H, C, D)` of items with no more points than clusters, and which items `(B, 1, 1, 1)` are such."""
    B, H, _, D = points.shape
    centroids = torch.zeros(B, H, clusters, D, dtype=torch.float32, device=points.device)
    first = rows.fit[:, :clusters, None]
    index = first.clamp(min=0).long()[:, None].expand(B, H, -1, D)
    own = points.gather(2, index).masked_fill(first[:, None] < 0, 0)
    centroids[:, :, : own.shape[2]] = own
    return centroids, (rows.counts <= clusters)[:, None, None, None]


@torch.library.custom_op("hf_effattn::kmeans_triton", mutates_args=())
def kmeans(
    points: torch.Tensor,
    mask: torch.Tensor | None,
    clusters: int,
    iterations: int,
    fit_points: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels `(B, H, N)` and centroids `(B, H, C, D)` of points `(B, H, N, D)`; a masked point has label 0."""
    B, H, N, D = points.shape
    if points.numel() == 0:
        return own_clusters(points, mask), points.new_zeros(B, H, clusters, D, dtype=torch.float32)
    rows = find_rows(points, mask, most_fit_rows(clusters, fit_points))
    if clusters >= N:
        return own_clusters(points, mask), own_centroids(points, rows, clusters)[0]
    fitted = fit(points, rows, None, clusters, iterations, seed)
    labels = torch.empty(B, H, N, dtype=torch.int64, device=points.device)
    assign(points, rows, fitted, labels)
    centroids = fitted.centroids if fitted.origin is None else fitted.centroids + fitted.origin[:, None]
    centroids = centroids.view(B, H, clusters, D)
    if mask is not None:
        own, is_own = own_centroids(points, rows, clusters)
        centroids = torch.where(is_own, own, centroids)
    return labels, centroids


@kmeans.register_fake
def _(points, mask, clusters, *settings):
    B, H, N, D = points.shape
    labels = points.new_empty(B, H, N, dtype=torch.int64)
    return labels, points.new_empty(B, H, clusters, D, dtype=torch.float32)
