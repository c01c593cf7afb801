"""K-means for a CPU: all problems of a chunk at once."""

import torch

from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import CHUNK_BYTES, RowChunk, row_chunks
from ..shared.tables import cluster_rows, cluster_sizes, cluster_sums
from .reference import Inputs, as_sign, empty_clusters
from .sampling import SEEDING, first_seed, fit_rows, most_fit_rows, strided_rows

BYTE_LABELS = 255  # numbers from 1 on that a byte holds
FEW = 1 / 8  # of the candidates, as many seeds need less than all products of them


def farthest_first(points: torch.Tensor, directions: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """Seeds `(P, C, D)` out of points `(P, N, D)` with directions `x G`."""
    P, N, D = points.shape
    norms = torch.linalg.vecdot(points, directions)
    columns, distances = points.transpose(1, 2), None
    if clusters > FEW * N:
        # All products at once: what is left for each of the C steps is too small to be worth a second thread.
        distances = torch.baddbmm(norms[..., None], points, directions.transpose(1, 2), alpha=-2)
        distances = distances.flatten(0, 1)  # row p · N + i: from point i of problem p, less the others' norms
    first_row = torch.arange(P, device=points.device) * N
    chosen = [first_row + first_seed(N, seed)]
    nearest_seed = torch.full_like(norms, torch.inf)
    for _ in range(1, clusters):
        if distances is None:
            # On a CPU a product with one row, which is several times as fast as one with a column.
            seeds = directions.flatten(0, 1).index_select(0, chosen[-1])[:, None]
            own_norms = norms.flatten().index_select(0, chosen[-1])[:, None, None]
            found = torch.baddbmm(own_norms, seeds, columns, alpha=-2)[:, 0]
        else:
            found = distances.index_select(0, chosen[-1])
        torch.minimum(nearest_seed, found, out=nearest_seed)
        chosen.append((nearest_seed + norms).argmax(dim=1) + first_row)
    return points.flatten(0, 1).index_select(0, torch.stack(chosen, dim=1).flatten()).view(P, clusters, D)


def in_metric(points: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """Directions `x G`, `(P, N, D)`: `x G y^T` is the product of two points in the metric."""
    return points if metric is None else points @ metric


def find_seeds(points: torch.Tensor, clusters: int, seed: int, metric: torch.Tensor | None) -> torch.Tensor:
    """Seeds `(P, C, D)` out of the fitted points `(P, N, D)`, found in as many groups as `sampling` says."""
    rows = SEEDING.rows_of(points.shape[1], clusters).to(points.device)
    seeds = points.new_empty(points.shape[0], clusters, points.shape[2])
    groups = SEEDING.groups(clusters)
    for i in range(groups):
        own = points if groups == 1 and len(rows) == points.shape[1] else points.index_select(1, rows[i::groups])
        seeds[:, i::groups] = farthest_first(own, in_metric(own, metric), len(range(i, clusters, groups)), seed)
    return seeds


def nearest(points: torch.Tensor, directions: torch.Tensor, half_norms: torch.Tensor) -> torch.Tensor:
    """Number of the centroid at the smallest `c G c^T / 2 - x G c^T` for every point `(P, N, D)`: `(P, N)`."""
    clusters = directions.shape[1]
    if clusters > BYTE_LABELS:
        return torch.baddbmm(half_norms[:, None], points, directions.transpose(1, 2), alpha=-1).argmin(dim=2)
    # On a CPU argmax would be the dearest step of all, as it takes one number at a time; these take vectors of them.
    # The largest are marked by their number counted from the last: the first of equals has the largest mark.
    scores = torch.bmm(directions, points.transpose(1, 2)).sub_(half_norms[..., None])  # (P, C, N)
    marks = (scores >= scores.amax(dim=1, keepdim=True)).view(torch.uint8)
    marks *= torch.arange(clusters, 0, -1, dtype=torch.uint8, device=points.device)[:, None]
    # A score that is not a number is marked nowhere and must not lead outside.
    return clusters - marks.amax(dim=1).long().clamp_(min=1)


def prepare(centroids: torch.Tensor, metric: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `nearest` compares points with: directions `c G` `(P, C, D)` and `c G c^T / 2` `(P, C)`."""
    directions = in_metric(centroids, metric)
    return directions, torch.linalg.vecdot(centroids, directions) / 2


def lloyd(
    points: torch.Tensor, centroids: torch.Tensor, iterations: int, metric: torch.Tensor | None, binary: bool
) -> torch.Tensor:
    """Lloyd's algorithm (majority bits where `binary`); an empty cluster keeps its centroid."""
    P, clusters, _ = centroids.shape
    for _ in range(iterations):
        index = cluster_rows(nearest(points, *prepare(centroids, metric)), clusters)
        sizes = cluster_sizes(index, P, clusters)[..., None]
        means = cluster_sums(points, index, P, clusters) / sizes.clamp(min=1)
        centroids = torch.where(sizes > 0, as_sign(means) if binary else means, centroids)
    return centroids


def cluster_chunk(
    chunk: RowChunk,
    labels: torch.Tensor,
    points: torch.Tensor,
    clusters: int,
    iterations: int,
    fit_points: int,
    seed: int,
    metric: torch.Tensor | None = None,
    planes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fit centroids on some of a chunk's points and label all of them.

    Args:
        chunk: the heads and rows of `points` that are clustered, every head a problem of its own.
        labels: `(B, H, N, 1)`, written.
        points: `(B, H, N, D)`.
        metric: `(P, D, D)`, symmetric: distances are `(x - y) G (x - y)^T`.
        planes: `(D, bits)`: cluster the signs of the points' projections instead of the points.

    Returns:
        The centroids `(P, C, D)`.
    """
    dtype = accumulation_dtype(points.dtype)
    P = chunk.query_heads
    rows = points.shape[2] if chunk.query_rows is None else len(chunk.query_rows)

    def load(selection: slice | torch.Tensor) -> torch.Tensor:
        part = chunk.queries(points, selection).view(P, -1, points.shape[3]).to(dtype)
        return part if planes is None else as_sign(part @ planes)

    def store(part_labels: torch.Tensor, selection: slice) -> None:
        chunk.store_queries(labels, part_labels.reshape(P // chunk.group, -1, 1), selection)

    if rows <= clusters:
        store(torch.arange(rows, device=points.device).expand(P, rows), slice(None))
        own = load(slice(None))
        return torch.cat([own, own.new_zeros(P, clusters - rows, own.shape[2])], dim=1)
    fitted = load(fit_rows(rows, clusters, fit_points).to(points.device))
    if planes is None:
        centroids = find_seeds(fitted, clusters, seed, metric)
    else:
        centroids = fitted[:, strided_rows(fitted.shape[1], clusters)]
    centroids = lloyd(fitted, centroids, iterations, metric, binary=planes is not None)

    directions, half_norms = prepare(centroids, metric)
    step = max(1, CHUNK_BYTES // (P * clusters * dtype.itemsize))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        store(nearest(load(part), directions, half_norms), part)
    return centroids


def fitting_bytes_per_head(points: torch.Tensor, clusters: int, fit_points: int, width: int) -> int:
    """What decides how many heads go into a chunk: the seeding is a long chain of small steps, better walked once
    for many heads, so this is a quarter of what one head's fitted points and their distances need.
    """
    rows = min(points.shape[2], most_fit_rows(clusters, fit_points))
    return rows * max(clusters, width) * accumulation_dtype(points.dtype).itemsize // 4


def _forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels `(B, H, N)` and centroids `(B, H, C, D)` of points `(B, H, N, D)`; a masked point has label 0."""
    points, mask, clusters, iterations, fit_points, seed = x
    B, H, N, D = points.shape
    labels = (torch.empty if mask is None else torch.zeros)(B, H, N, 1, dtype=torch.int64, device=points.device)
    centroids = points.new_zeros(B, H, clusters, D, dtype=accumulation_dtype(points.dtype))
    bytes_per_head = fitting_bytes_per_head(points, clusters, fit_points, D)

    def cluster(chunk: RowChunk) -> None:
        found = cluster_chunk(chunk, labels, points, clusters, iterations, fit_points, seed)
        centroids[chunk.batch, chunk.first_head : chunk.last_head] = found

    for_every_chunk(cluster, row_chunks(points, None, mask, bytes_per_head) if H else (), points.device)
    return labels[..., 0], centroids


kmeans = register_op("kmeans", Inputs, _forward, fake=empty_clusters, shown=2)
