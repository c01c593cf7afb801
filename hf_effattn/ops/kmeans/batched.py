"""K-means for a CPU: all problems of a chunk at once."""

import torch

from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import CHUNK_BYTES, EVERY_ROW, RowChunk, row_chunks
from .reference import Inputs, as_sign, empty_clusters
from .sampling import SEEDING, fit_rows, most_fit_rows, seed_rows, strided_rows

FEW = 1 / 4  # of the candidates, as many seeds need less than all products of them
# Of the scores of points and centroids, which several operators read: a half of a core's cache.
BLOCK_BYTES = 2**20
FEWEST_ROWS = 256  # of a block


def take_rows(points: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows `(n,)` of `(P, N, D)`: `(P, n, D)`, copied in the order in which they lie."""
    if points.stride(0) < points.stride(1):  # as a model's projections leave them: a row of all problems together
        return points.transpose(0, 1).index_select(0, rows).transpose(0, 1)
    return points.index_select(1, rows)


def chosen_rows(
    points: torch.Tensor, counted: torch.Tensor | None, selection: slice | torch.Tensor
) -> torch.Tensor:
    """A selection of the rows `counted` (None = all) of `(P, N, D)`: a view of neighbours where all count."""
    rows = selection if counted is None else counted[selection]
    return points[:, rows] if isinstance(rows, slice) else take_rows(points, rows)


def farthest_first(
    points: torch.Tensor, directions: torch.Tensor, clusters: int, first: torch.Tensor
) -> torch.Tensor:
    """Seeds `(P, C, D)` out of points `(P, N, D)` with directions `x G`; `first`: the row that each starts from."""
    P, N, D = points.shape
    norms = torch.linalg.vecdot(points, directions)[..., None]
    ones = torch.ones_like(norms)
    # One product is a squared distance: |x|² - 2 x G y^T + |y|².
    own = torch.cat([directions * -2, norms, ones], dim=2)
    others = torch.cat([points, ones, norms], dim=2)
    columns = others.transpose(1, 2).contiguous()  # for vectors of points
    # All products at once: what is left for each of the C steps is too small to be worth a second thread.
    distances = (own @ columns).flatten(0, 1) if clusters > FEW * N else None
    own, others = own.flatten(0, 1), others.flatten(0, 1)  # row p · N + i: point i of problem p
    first_row = torch.arange(0, P * N, N, device=points.device)
    chosen = [(first_row + first)[:, None]]
    first_row = first_row[:, None]
    nearest_seed = points.new_full((P, 1, N), torch.inf)
    for _ in range(1, clusters):
        last = chosen[-1]
        found = torch.embedding(own, last) @ columns if distances is None else torch.embedding(distances, last)
        torch.minimum(nearest_seed, found, out=nearest_seed)
        chosen.append(nearest_seed.argmax(dim=2) + first_row)
    return torch.embedding(others, torch.cat(chosen, dim=1))[..., :D]


def in_metric(points: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """Directions `x G`, `(P, N, D)`: `x G y^T` is the product of two points in the metric."""
    return points if metric is None else points @ metric


def find_seeds(points: torch.Tensor, clusters: int, seed: int, metric: torch.Tensor | None) -> torch.Tensor:
    """Seeds `(P, C, D)` out of the fitted points `(P, N, D)`, of all groups that `sampling` says at once."""
    P, N, D = points.shape
    rows, first = (found.to(points.device) for found in seed_rows(SEEDING, N, clusters, seed))
    own, groups = take_rows(points, rows), len(first)
    by_group = (part.reshape(P * groups, -1, D) for part in (own, in_metric(own, metric)))
    found = farthest_first(*by_group, -(-clusters // groups), first.repeat(P))
    return found.view(P, groups, -1, D).transpose(1, 2).reshape(P, -1, D)[:, :clusters]


def nearest(points: torch.Tensor, directions: torch.Tensor, half_norms: torch.Tensor) -> torch.Tensor:
    """Number of the centroid at the smallest `c G c^T / 2 - x G c^T` for every point `(P, N, D)`: `(P, N)`."""
    (P, N, _), clusters = points.shape, directions.shape[1]
    step = N
    if points.device.type == "cpu":
        step = max(FEWEST_ROWS, BLOCK_BYTES // max(1, P * clusters * points.dtype.itemsize))
    last, half_norms = clusters - 1, half_norms[..., None]
    # On a CPU argmax would be the dearest step of all, as it takes one number at a time; these take vectors of them,
    # and a comparison does so in place only. The first of equals has the largest mark.
    marks = torch.arange(last, -1, -1, dtype=points.dtype, device=points.device)[:, None]
    found = points.new_empty(P, N)
    columns = points.transpose(1, 2)
    for start in range(0, N, max(1, step)):
        part = slice(start, start + step)
        scores = torch.bmm(directions, columns[..., part]).sub_(half_norms)  # (P, C, step)
        scores.ge_(scores.amax(dim=1, keepdim=True)).mul_(marks)
        torch.amax(scores, dim=1, out=found[:, part])
    # Scores that are no numbers are marked nowhere: 0, which is the last centroid's mark.
    return (last - found).long()


def prepare(centroids: torch.Tensor, metric: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `nearest` compares points with: directions `c G` `(P, C, D)` and `c G c^T / 2` `(P, C)`."""
    directions = in_metric(centroids, metric)
    return directions, torch.linalg.vecdot(centroids, directions) / 2


def lloyd(
    points: torch.Tensor, centroids: torch.Tensor, iterations: int, metric: torch.Tensor | None, binary: bool
) -> torch.Tensor:
    """Lloyd's algorithm (majority bits where `binary`); an empty cluster keeps its centroid."""
    P, clusters, D = centroids.shape
    first_row = torch.arange(0, P * clusters, clusters, device=points.device)[:, None]
    # The sums' order is that of the rows in memory, where they need no copy.
    turned = points.stride(0) < points.stride(1)
    rows = (points.transpose(0, 1) if turned else points).flatten(0, 1)
    for _ in range(iterations):
        table_rows = nearest(points, *prepare(centroids, metric)) + first_row
        index = (table_rows.T if turned else table_rows).flatten()
        sizes = torch.bincount(index, minlength=P * clusters)[:, None]
        means = rows.new_zeros(P * clusters, D).index_add_(0, index, rows) / sizes
        if binary:
            means = as_sign(means)
        centroids = torch.where(sizes > 0, means, centroids.flatten(0, 1)).view(P, clusters, D)
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
        labels: `(B, H, N)`, written.
        points: `(B, H, N, D)`.
        metric: `(P, D, D)`, symmetric: distances are `(x - y) G (x - y)^T`.
        planes: `(D, bits)`: cluster the signs of the points' projections instead of the points.

    Returns:
        The centroids `(P, C, D)`.
    """
    dtype = accumulation_dtype(points.dtype)
    P, heads = chunk.query_heads, slice(chunk.first_head * chunk.group, chunk.last_head * chunk.group)
    own, own_labels = points[chunk.batch, heads], labels[chunk.batch, heads]
    rows = points.shape[2] if chunk.query_rows is None else len(chunk.query_rows)

    def load(selection: slice | torch.Tensor) -> torch.Tensor:
        part = chosen_rows(own, chunk.query_rows, selection).to(dtype)
        return part if planes is None else as_sign(part @ planes)

    def store(part_labels: torch.Tensor, selection: slice) -> None:
        if chunk.query_rows is None:
            own_labels[:, selection] = part_labels
        else:
            own_labels.index_copy_(1, chunk.query_rows[selection], part_labels)

    if rows <= clusters:
        store(torch.arange(rows, device=points.device).expand(P, rows), EVERY_ROW)
        alone = load(EVERY_ROW)
        return torch.cat([alone, alone.new_zeros(P, clusters - rows, alone.shape[2])], dim=1)
    fitted = load(fit_rows(rows, clusters, fit_points).to(points.device))
    if planes is None:
        centroids = find_seeds(fitted, clusters, seed, metric)
    else:
        centroids = fitted[:, strided_rows(fitted.shape[1], clusters)]
    centroids = lloyd(fitted, centroids, iterations, metric, binary=planes is not None)

    compared = prepare(centroids, metric)
    copied = dtype != points.dtype or planes is not None or chunk.query_rows is not None
    step = max(1, CHUNK_BYTES // (P * fitted.shape[2] * dtype.itemsize)) if copied else rows
    for start in range(0, rows, step):
        part = slice(start, start + step)
        store(nearest(load(part), *compared), part)
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
    labels = (torch.empty if mask is None else torch.zeros)(B, H, N, dtype=torch.int64, device=points.device)
    centroids = points.new_zeros(B, H, clusters, D, dtype=accumulation_dtype(points.dtype))
    bytes_per_head = fitting_bytes_per_head(points, clusters, fit_points, D)

    def cluster(chunk: RowChunk) -> None:
        found = cluster_chunk(chunk, labels, points, clusters, iterations, fit_points, seed)
        centroids[chunk.batch, chunk.first_head : chunk.last_head] = found

    for_every_chunk(cluster, row_chunks(points, None, mask, bytes_per_head) if H else (), points.device)
    return labels, centroids


kmeans = register_op("kmeans", Inputs, _forward, fake=empty_clusters, shown=2)
