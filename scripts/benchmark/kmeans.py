"""Is our K-means faster than others on many problems at once, and are its clusters as good?

The rivals are the package flash-kmeans, where it is installed and there is a GPU, and scikit-learn, which takes one
problem after the other on the CPU. All make the same number of Lloyd's iterations; ours looks for seeds far from each
other first, which is timed too, the others start from points drawn at random. The cost of clusters is the mean squared
distance of a point to its centroid, over that to the mean of all points.

    python -m scripts.benchmark.kmeans                       # adds to scripts/results/benchmark_kmeans.json
    python -m scripts.benchmark.kmeans --points 8192,32768 --dtype float32
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from sklearn.cluster import KMeans  # type: ignore[import-untyped]

from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio, peak_memory_added
from hf_effattn.ops import kmeans

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns, device_defaults, print_rows

OURS, FLASH, SCIKIT = "hf_effattn", "flash-kmeans", "scikit-learn"
Clustered = tuple[torch.Tensor, torch.Tensor]


def flash_kmeans(points: torch.Tensor, clusters: int, iterations: int) -> Clustered:
    """The rival on a GPU."""
    rival = importlib.import_module("flash_kmeans")
    labels, centroids, _ = rival.batch_kmeans_Euclid(points, clusters, max_iters=iterations)
    return labels, centroids


def scikit_learn(points: torch.Tensor, clusters: int, iterations: int) -> Clustered:
    """One problem after the other."""
    found = [
        KMeans(clusters, init="random", n_init=1, max_iter=iterations, tol=0.0, random_state=0).fit(problem)
        for problem in points.float().cpu().numpy()
    ]
    labels, centroids = (np.stack([getattr(one, name) for one in found]) for name in ("labels_", "cluster_centers_"))
    return torch.as_tensor(labels).long().to(points.device), torch.as_tensor(centroids).to(points.device)


def implementations(points: torch.Tensor, clusters: int, iterations: int) -> dict[str, Callable[[], Clustered]]:
    """What this machine has, ours first."""
    calls: dict[str, Callable[[], Clustered]] = {OURS: partial(kmeans, points, clusters, iterations=iterations)}
    if points.is_cuda and importlib.util.find_spec("flash_kmeans") is not None:
        calls[FLASH] = partial(flash_kmeans, points, clusters, iterations)
    if not points.is_cuda:
        calls[SCIKIT] = partial(scikit_learn, points, clusters, iterations)
    return calls


def cost_of(points: torch.Tensor, clustered: Clustered) -> float:
    """Mean squared distance to the own centroid over that to the mean: 1 is one cluster, 0 a cluster per point."""
    labels, centroids = clustered
    points, centroids = points.float(), centroids.float()
    own = centroids.gather(1, labels.long()[..., None].expand(-1, -1, points.shape[2]))
    spread = (points - points.mean(dim=1, keepdim=True)).square().sum()
    return ((points - own).square().sum() / spread).item()


def points_in_clouds(problems: int, points: int, dim: int, clusters: int) -> torch.Tensor:
    """Normal clouds around as many centres as there are clusters, as keys and queries of trained models have them."""
    generator = torch.Generator().manual_seed(points)
    centres = torch.randn(problems, clusters, dim, generator=generator)
    own = torch.randint(clusters, (problems, points), generator=generator)
    noise = torch.randn(problems, points, dim, generator=generator)
    return centres.gather(1, own[..., None].expand(-1, -1, dim)) + noise


def measure(
    run: dict[str, Any], dim: int, iterations: int, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """A row for every implementation: milliseconds, ours against it, peak memory and the cost of its clusters."""
    points = points_in_clouds(run["problems"], run["points"], dim, run["clusters"])
    points = points.to(device, getattr(torch, run["dtype"]))
    calls = implementations(points, run["clusters"], iterations)
    rows: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        found, peak = peak_memory_added(call, device)  # the warm-up round too
        rows[name] = run | {
            "implementation": name,
            "cost": cost_of(points, found),
            # PyTorch does not see what NumPy holds.
            "peak_bytes": None if name == SCIKIT else peak,
        }
    seconds = interleaved_rounds(calls, device, repeats)
    for name, times in seconds.items():
        rows[name] |= {
            "ms": 1e3 * (median(times) or 0.0),
            "ours_faster": median_ratio(times, seconds[OURS]),
            "rounds": len(times),
        }
    return list(rows.values())


def main(
    points: Annotated[str, typer.Option(help="Comma-separated numbers of points.")] = "8192",
    problems: int = 96,
    dim: int = 64,
    clusters: int = 256,
    iterations: int = 10,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, else float32.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 5,
    output: Path | None = None,
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every size, and print the table."""
    device, dtype, output = device_defaults("benchmark_kmeans", dtype, output)
    kept = KeptRuns(output, {"dim": dim, "iterations": iterations, "repeats": repeats}, device)
    runs = [
        {"problems": problems, "points": int(count), "clusters": clusters, "dtype": dtype}
        for count in points.split(",")
    ]
    for run in track(kept.missing(runs), description="sizes"):
        kept.add(*measure(run, dim, iterations, device, repeats))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
