"""K-means on the GPU: rows are chosen, seeds found, centroids fitted and points labelled without leaving it.

No table of points by centroids is ever in memory, nothing waits for the host, and every sum has a fixed order.
"""

from dataclasses import dataclass

import torch

from ...shared.gradients import register_op
from ...shared.triton.chips import Chip, block_width, chip_of
from ...shared.triton.recorded import constant, recorded
from ..reference import Inputs, empty_clusters
from ..sampling import KERNEL_SEEDING, SHARE_BITS, first_seed_share, most_fit_rows
from .lloyd import _kmeans_assign_kernel, _kmeans_update_kernel
from .rows import Rows, find_rows
from .seeding import _kmeans_seed_kernel

# For a round in one launch: the most clusters, all held by one program, and the fitted rows that it labels.
MOST_HELD, PART = 128, 256


@dataclass(frozen=True)
class Centroids:
    """What points are compared with: `argmax_c x·direction_c - half_norm_c`."""

    origin: torch.Tensor  # `(B · H, D)`, to be added to all centroids
    centroids: torch.Tensor  # `(B · H, C, D)` float32
    directions: torch.Tensor  # `(B · H, C, D)`, `c G` in the dtype of the points; in float16 times `FLOAT16_SCALE`
    half_norms: torch.Tensor  # `(B · H, C)`, `c G c^T / 2 + origin·direction`, scaled alike


def assign_blocks(block_d: int, wide: bool, shared_memory: int) -> tuple[int, int, int, int, int]:
    """`(BLOCK_N, BLOCK_C, BLOCK_D, num_warps, num_stages)` of the assignment.

    `wide`: products are of float32. A row that does not fit into registers is read in parts.
    """
    stages = 1 if shared_memory <= 64 * 1024 else 2
    if block_d > (64 if wide else 128):
        return 128, 32 if wide else 64, 32 if wide else 64, 8, stages
    return 128, 32 if wide else 64, block_d, 8 if wide and block_d >= 64 else 4, stages


def update_blocks(block_d: int, wide: bool, chip: Chip, clusters: int) -> dict[str, int]:
    """Block sizes, warps and stages of the kernel that adds up the members of some clusters."""
    if wide or block_d > 64:
        sizes = 16, 32, min(block_d, 32), 8 if block_d > 128 else 4, 1
    else:
        # Few clusters are split over more programs. With many, each of those would read all rows once more.
        large = (16, 256, block_d, 8, 3) if clusters <= 64 else (32, 256, block_d, 8, 2)
        sizes = large if chip.is_large else (16, 128, block_d, 4, 3)
    return dict(zip(("BLOCK_C", "BLOCK_R", "BLOCK_K", "num_warps", "num_stages"), sizes, strict=True))


def fit(
    points: torch.Tensor, rows: Rows, metric: torch.Tensor | None, clusters: int, iterations: int, seed: int,
    binary: bool = False,
) -> Centroids:  # fmt: skip
    """Seeds and Lloyd's algorithm on the fitted rows of points `(B, H, N, D)`.

    `metric` is `(B · Hk, D, D)`, float32, for `Hk` heads that divide `H`.
    """
    B, H, _, D = points.shape
    P, R, block_d = B * H, rows.most, block_width(D)
    chip = chip_of(points)
    wide = points.dtype == torch.float32

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=points.device)

    centroids, half_norms, origin = new(P, clusters, D), new(P, clusters), new(P, D)
    directions = torch.empty_like(centroids, dtype=points.dtype)
    result = Centroids(origin, centroids, directions, half_norms)
    per_metric = 1 if metric is None else P // metric.shape[0]
    groups = -(-clusters // 16) if binary else KERNEL_SEEDING.groups(clusters)
    # On NVIDIA's chips, what a program stored is visible once it has arrived. AMD's barrier does not ensure that.
    in_one_launch = chip.is_large and not wide and block_d <= 64 and clusters <= MOST_HELD
    update = update_blocks(block_d, wide, chip, clusters) | chip.all_registers
    if in_one_launch:
        update |= {"BLOCK_C": block_width(clusters), "BLOCK_R": 128, "num_warps": 8, "num_stages": 1}
    blocks, splits = -(-clusters // update["BLOCK_C"]), -(-R // PART) if in_one_launch else 1
    sums, sizes = (new(P, splits * in_one_launch, clusters, d) for d in (D, 1))
    labels = torch.empty(P, R * (not in_one_launch), dtype=torch.int32, device=points.device)
    arrived = torch.empty(P, dtype=torch.int32, device=points.device)
    strided_points = points, *points.stride()
    _kmeans_seed_kernel[(P * groups,)](
        *strided_points, rows.fit, rows.counts, metric, origin, centroids, directions, half_norms, arrived,
        H, per_metric, rows.total, R, KERNEL_SEEDING.most_rows(clusters), groups, clusters, D,
        constant(first_seed_share, seed), SHARE_BITS=SHARE_BITS, ROWS=KERNEL_SEEDING.rows, SEEDS=16,
        BLOCK_K=min(block_d, 16 if wide else 32), PRECISION=chip.dot_precision(torch.float32), BINARY=binary,
    )  # fmt: skip
    for _ in range(iterations):
        if not in_one_launch:
            assign(points, rows, result, labels, fitted_only=True)
        _kmeans_update_kernel[(P * blocks * splits,)](
            *strided_points, rows.fit, labels, metric, origin, centroids, directions, half_norms,
            sums, sizes, arrived, H, per_metric, rows.total, R, blocks, splits, PART if in_one_launch else R,
            clusters, D, LABELS=in_one_launch, PARTS=4, BLOCK_D=block_d,
            PRECISION=chip.dot_precision(torch.float32), BINARY=binary, **update,
        )  # fmt: skip
    return result


def assign(
    points: torch.Tensor, rows: Rows, centroids: Centroids, labels: torch.Tensor, *, fitted_only: bool = False
) -> None:
    """Write the label of every point to `(B · H, N)`, or to `(B · H, R)` that of the fitted ones only."""
    B, H, _, D = points.shape
    length, block_d = labels.shape[-1], block_width(D)
    chip = chip_of(points)
    wide = centroids.directions.dtype == torch.float32
    clusters = centroids.directions.shape[1]
    block_n, block_c, part_d, num_warps, num_stages = assign_blocks(block_d, wide, chip.shared_memory)
    _kmeans_assign_kernel[(B * H * -(-length // block_n),)](
        points, *points.stride(), rows.fit, rows.counts, rows.ranks, centroids.directions, centroids.half_norms,
        labels, H, rows.total, length, clusters, D,
        HAS_ROWS=fitted_only, SPLIT=part_d < block_d,
        BLOCK_N=block_n, BLOCK_C=block_c, BLOCK_D=part_d, PRECISION=chip.dot_precision(points.dtype),
        num_warps=num_warps, num_stages=num_stages, **chip.all_registers,
    )  # fmt: skip


def own_clusters(points: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Labels `(B, H, N)` where there are no more points than clusters: the rank among those that count."""
    B, H, N, _ = points.shape
    if mask is None:
        return torch.arange(N, device=points.device).repeat(B, H, 1)
    ranks = (mask.cumsum(dim=1) - 1).masked_fill(~mask, 0)
    return ranks[:, None].repeat(1, H, 1)


def own_centroids(points: torch.Tensor, rows: Rows, clusters: int) -> torch.Tensor:
    """Centroids `(B, H, C, D)` of items with no more points than clusters: the points that count."""
    B, H, _, D = points.shape
    centroids = torch.zeros(B, H, clusters, D, dtype=torch.float32, device=points.device)
    counted = points
    if rows.fit is not None:
        first = rows.fit[:, None, :clusters, None]
        counted = points.gather(2, first.clamp(min=0).long().expand(B, H, -1, D)).masked_fill(first < 0, 0)
    centroids[:, :, : counted.shape[2]] = counted
    return centroids


@recorded
def _forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels `(B, H, N)` and centroids `(B, H, C, D)` of points `(B, H, N, D)`; a masked point has label 0."""
    points, mask, clusters, iterations, fit_points, seed = x
    B, H, N, D = points.shape
    if points.numel() == 0:
        return own_clusters(points, mask), points.new_zeros(B, H, clusters, D, dtype=torch.float32)
    rows = find_rows(points, mask, most_fit_rows(clusters, fit_points))
    if clusters >= N:
        return own_clusters(points, mask), own_centroids(points, rows, clusters)
    fitted = fit(points, rows, None, clusters, iterations, seed)
    labels = torch.empty(B, H, N, dtype=torch.int64, device=points.device)
    assign(points, rows, fitted, labels)
    centroids = (fitted.centroids + fitted.origin[:, None]).view(B, H, clusters, D)
    if rows.counts is not None:
        is_own = (rows.counts <= clusters)[:, None, None, None]
        centroids = torch.where(is_own, own_centroids(points, rows, clusters), centroids)
    return labels, centroids


kmeans = register_op("kmeans_triton", Inputs, _forward, fake=empty_clusters, shown=2)
