"""K-means on many sets of points at once."""

from typing import Any

import torch

from ..shared.arguments import check_count, check_floats, check_mask, choose_backend
from . import batched, reference


def _triton(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from . import triton

    return triton.kmeans(*arguments)


DEFAULT_ITERATIONS = 10
LARGEST_SEED = 2**63 - 1  # what torch's generators and operators take


def check_seed(seed: int) -> None:
    """Raise unless `seed` is an int that torch's generators take."""
    check_count("seed", seed, minimum=0)
    if seed > LARGEST_SEED:
        raise ValueError(f"seed must be at most {LARGEST_SEED}, got {seed}")


def kmeans(
    points: torch.Tensor,
    clusters: int,
    *,
    iterations: int = DEFAULT_ITERATIONS,
    mask: torch.Tensor | None = None,
    fit_points: int | None = None,
    seed: int = 0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K-means on `P` sets of points: Lloyd's algorithm (Source: Lloyd 1982), seeded farthest-first (Gonzalez 1985).

    Seeds are looked for among `max(512, 8 · clusters)` evenly spread points, in independent groups of up to 64 seeds.
    An empty cluster keeps its centroid. The result depends on nothing but the arguments, and on no masked point; no
    gradient flows through it. Distances and means are computed in float32, or float64 for float64 points; the
    kernels multiply 16-bit points with centroids in the points' dtype.

    Args:
        points (`torch.Tensor`): `(P, N, D)`, any strides.
        clusters (`int`): number of clusters `C`; with `C` or fewer points that count, each gets its own.
        iterations (`int`): rounds of Lloyd's algorithm; 0 takes the seeds as they are.
        mask (`torch.BoolTensor`, *optional*): `(P, N)`, True = counts; other points get label 0.
        fit_points (`int`, *optional*): how many evenly spread points the centroids are fitted on, at least 4 per
            cluster, before every point goes to the nearest centroid; default: all.
        seed (`int`): decides the first seed.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        Integer labels `(P, N)` in `0 .. clusters - 1`, and the centroids `(P, C, D)` that the points are nearest to,
        in float32 or float64; clusters may be empty, and with fewer points than clusters the last centroids are 0.

    Raises:
        ValueError: an unknown backend, counts that are too small, sizes that do not fit together.
        TypeError: a mask that is not boolean, a count that is not an int, points that are not floating-point.
    """
    check_count("clusters", clusters)
    check_count("iterations", iterations, minimum=0)
    if fit_points is not None:
        check_count("fit_points", fit_points)
    check_seed(seed)
    check_floats("points", points, "(P, N, D)")
    check_mask("mask", mask, points[:, None])
    run = choose_backend(backend, (reference.kmeans, batched.kmeans, _triton), points.detach())
    # The forms take (B, H, N, D) and a mask (B, N). Without a mask, all problems are heads of one item.
    batch_dim = 0 if mask is None else 1
    fit_points = points.shape[1] if fit_points is None else fit_points
    labels, centroids = run(points.detach().unsqueeze(batch_dim), mask, clusters, iterations, fit_points, seed)
    return labels.squeeze(batch_dim), centroids.squeeze(batch_dim)
