"""K-means for a CPU: all problems of a chunk at once."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..shared.gradients import register_op
from ..shared.head_threads import for_every_chunk
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import CHUNK_BYTES, EVERY_ROW, RowChunk, row_chunks
from .reference import Inputs, as_sign, empty_clusters
from .sampling import SEEDING, most_fit_rows, seed_rows, strided_rows

FEW = 1 / 4  # with more seeds than this share of the candidates, all products at once are cheaper
# Bytes of scores at once, which several operators read: half of a core's cache.
BLOCK_BYTES = 2**20
WHOLE_ROWS = 256  # a block has a multiple of so many rows, as products of others are slower


def take_rows(points: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows `(n,)` of `(P, N, D)`: `(P, n, D)`, copied in the order in which they lie."""
    if points.stride(0) < points.stride(1):  # as a model's projections leave them: a row of all problems together
        return points.transpose(0, 1).index_select(0, rows).transpose(0, 1)
    return points.index_select(1, rows)


@dataclass
class Points:
    """The rows that count of some heads, every head a problem of its own."""

    own: torch.Tensor  # (P, N, D), a view
    counted: torch.Tensor | None  # the places of those rows, None = all
    planes: torch.Tensor | None = None  # (D, bits): the signs of the rows' projections stand for them
    # What was asked for, by how many rows.
    _places: dict[int, slice | torch.Tensor] = field(default_factory=dict)
    _spread: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.own.shape[1] if self.counted is None else len(self.counted)

    def places(self, count: int) -> slice | torch.Tensor:
        """Where `count` evenly spread ones of the rows that count lie, all where they are no more."""
        count = min(count, self.length)
        if count not in self._places:
            rows: slice | torch.Tensor = EVERY_ROW
            if count < self.length:
                rows = strided_rows(self.length, count).to(self.own.device)
            self._places[count] = rows if self.counted is None else self.counted[rows]
        return self._places[count]

    def spread(self, count: int) -> torch.Tensor:
        """These rows, `(P, n, D)`."""
        count = min(count, self.length)
        if count not in self._spread:
            self._spread[count] = self.at(self.places(count))
        return self._spread[count]

    def at(self, places: slice | torch.Tensor) -> torch.Tensor:
        """The rows `(P, n, D)` at these places, in float32 or float64: a view where they can be one."""
        part = self.own[:, places] if isinstance(places, slice) else take_rows(self.own, places)
        part = part.to(accumulation_dtype(part.dtype))
        return part if self.planes is None else as_sign(part @ self.planes)

    def parts(self, step: int) -> Iterator[slice | torch.Tensor]:
        """The places of all rows that count, up to `step` at once."""
        for start in range(0, self.length, step):
            part = slice(start, start + step)
            yield part if self.counted is None else self.counted[part]

    @property
    def is_view(self) -> bool:
        """Whether rows that are neighbours need no copy."""
        return self.counted is None and self.planes is None and self.own.dtype == accumulation_dtype(self.own.dtype)


class Members:
    """Points `(P, N, D)` as the rows of a table's clusters, in the order in which they lie."""

    def __init__(self, points: torch.Tensor, clusters: int) -> None:
        first_row = torch.arange(0, len(points) * clusters, clusters, device=points.device)
        self.shape, self.clusters = points.shape, clusters
        self.turned = points.stride(0) < points.stride(1)  # a copy would cost as much as their sums
        self.rows = (points.transpose(0, 1) if self.turned else points).flatten(0, 1)
        self.first_row = first_row if self.turned else first_row[:, None]

    def index(self, labels: torch.Tensor) -> torch.Tensor:
        """The rows' clusters, flat, of labels `(P, N)` of any dtype."""
        turned = labels.T if self.turned else labels
        return (turned.to(torch.int64, memory_format=torch.contiguous_format) + self.first_row).flatten()

    def means(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The means `(P · C, D)` of each cluster, NaN if it is empty, and its number of rows `(P · C, 1)`."""
        sizes = torch.bincount(index, minlength=self.shape[0] * self.clusters)[:, None]
        means = self.rows.new_zeros(len(sizes), self.shape[2]).index_add_(0, index, self.rows).div_(sizes)
        return means, sizes

    def residuals(self, labels: torch.Tensor) -> torch.Tensor:
        """Residuals of points `(P, N, D)` from the means of their clusters."""
        index = self.index(labels)
        of_rows = self.means(index)[0].index_select(0, index)
        torch.sub(self.rows, of_rows, out=of_rows)
        P, N, D = self.shape
        return of_rows.view(N, P, D).transpose(0, 1) if self.turned else of_rows.view(P, N, D)


def farthest_first(points: torch.Tensor, directions: torch.Tensor, clusters: int, first: torch.Tensor) -> torch.Tensor:
    """Seeds `(P, C, D)` out of points `(P, N, D)` with directions `x G`; `first`: the row that each starts from."""
    P, N, _ = points.shape
    norms = torch.linalg.vecdot(points, directions)[..., None]
    ones = torch.ones_like(norms)
    # One product is a squared distance: |x|² - 2 x G y^T + |y|².
    rows = torch.cat([directions * -2, norms, ones], dim=2)
    columns = torch.cat([points, ones, norms], dim=2).transpose(1, 2).contiguous()  # for vectors of points
    # All products at once: what is left for each of the C steps is too small to be worth a second thread.
    distances = torch.bmm(rows, columns) if clusters > FEW * N else None
    problem = torch.arange(P, device=points.device)[:, None]
    chosen = [first[:, None]]
    nearest_seed = points.new_full((P, 1, N), torch.inf)
    for _ in range(1, clusters):
        last = chosen[-1]
        # Matrices of one row: matmul would take them for vectors, several times as slow.
        to_last = distances[problem, last] if distances is not None else torch.bmm(rows[problem, last], columns)
        torch.minimum(nearest_seed, to_last, out=nearest_seed)
        chosen.append(nearest_seed.argmax(dim=2))
    return points[problem, torch.cat(chosen, dim=1)]


def in_metric(points: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """Directions `x G`, `(P, N, D)`: `x G y^T` is the product of two points in the metric."""
    return points if metric is None else torch.bmm(points, metric)


def find_seeds(points: torch.Tensor, clusters: int, seed: int, metric: torch.Tensor | None) -> torch.Tensor:
    """Seeds `(P, C, D)` out of the fitted points `(P, N, D)`, of all groups that `sampling` says at once."""
    P, N, D = points.shape
    rows, first = (numbers.to(points.device) for numbers in seed_rows(SEEDING, N, clusters, seed))
    candidates, groups = take_rows(points, rows), len(first)
    by_group, directions = (part.reshape(P * groups, -1, D) for part in (candidates, in_metric(candidates, metric)))
    seeds = farthest_first(by_group, directions, -(-clusters // groups), first.repeat(P))
    return seeds.view(P, groups, -1, D).transpose(1, 2).reshape(P, -1, D)[:, :clusters]


def nearest(points: torch.Tensor, directions: torch.Tensor, half_norms: torch.Tensor) -> torch.Tensor:
    """Number of the centroid at the smallest `c G c^T / 2 - x G c^T` for every point `(P, N, D)`: `(P, N)`."""
    last = directions.shape[1] - 1
    marks = torch.arange(last, -1, -1, dtype=points.dtype, device=points.device)[:, None]
    return (last - nearest_marks(points.transpose(1, 2), directions, half_norms, marks)).long()


def nearest_marks(
    columns: torch.Tensor, directions: torch.Tensor, half_norms: torch.Tensor, marks: torch.Tensor
) -> torch.Tensor:
    """The mark of the nearest centroid to every point `(P, D, N)`: `(P, N)`.

    Marks `(C, 1)` number the centroids from the last, so that the first of equals has the largest. A point whose
    scores are all NaN gets 0, the last centroid's mark.
    """
    (P, clusters, _), N, half_norms = directions.shape, columns.shape[2], half_norms[..., None]

    def of_block(block: torch.Tensor) -> torch.Tensor:
        # On a CPU argmax would be the slowest step of all, as it takes one number at a time. These operators take
        # vectors of them; a comparison does so in place only.
        scores = torch.bmm(directions, block).sub_(half_norms)  # (P, C, n)
        return scores.ge_(scores.amax(dim=1, keepdim=True)).mul_(marks).amax(dim=1)

    step = max(1, BLOCK_BYTES // max(1, P * clusters * columns.dtype.itemsize * WHOLE_ROWS)) * WHOLE_ROWS
    if step >= N or columns.device.type != "cpu":
        return of_block(columns)
    return torch.cat([of_block(block) for block in columns.split(step, dim=2)], dim=1)


def prepare(centroids: torch.Tensor, metric: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `nearest` compares points with: directions `c G` `(P, C, D)` and `c G c^T / 2` `(P, C)`."""
    directions = in_metric(centroids, metric)
    return directions, torch.linalg.vecdot(centroids, directions) / 2


def lloyd(
    points: torch.Tensor, centroids: torch.Tensor, iterations: int, metric: torch.Tensor | None, binary: bool
) -> torch.Tensor:
    """Lloyd's algorithm (majority bits where `binary`); an empty cluster keeps its centroid."""
    if iterations == 0:
        return centroids
    P, clusters, D = centroids.shape
    members, columns, table = Members(points, clusters), points.transpose(1, 2), centroids.reshape(-1, D)
    marks = torch.arange(clusters - 1, -1, -1, dtype=points.dtype, device=points.device)[:, None]
    for _ in range(iterations):
        labels = clusters - 1 - nearest_marks(columns, *prepare(table.view(P, clusters, D), metric), marks)
        means, sizes = members.means(members.index(labels))
        table = torch.where(sizes > 0, as_sign(means) if binary else means, table)
    return table.view(P, clusters, D)


def cluster(
    points: Points,
    labels: torch.Tensor,
    fitted: torch.Tensor,
    clusters: int,
    iterations: int,
    seed: int,
    metric: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fit centroids on some of the points and label all of them.

    Args:
        labels: `(P, N)`, written.
        fitted: `(P, n, D)`, what the centroids are fitted on.
        metric: `(P, D, D)`, symmetric: distances are `(x - y) G (x - y)^T`.

    Returns:
        The centroids `(P, C, D)`.
    """
    (P, _, D), length, binary = fitted.shape, points.length, points.planes is not None
    if length <= clusters:
        labels[:, points.places(length)] = torch.arange(length, device=labels.device)
        return torch.cat([fitted, fitted.new_zeros(P, clusters - length, D)], dim=1)
    if binary:
        centroids = fitted[:, strided_rows(fitted.shape[1], clusters)]
    else:
        centroids = find_seeds(fitted, clusters, seed, metric)
    centroids = lloyd(fitted, centroids, iterations, metric, binary)
    compared = prepare(centroids, metric)
    step = length if points.is_view else max(1, CHUNK_BYTES // (P * D * fitted.dtype.itemsize))
    for places in points.parts(step):
        labels[:, places] = nearest(points.at(places), *compared)
    return centroids


def fitting_bytes_per_head(points: torch.Tensor, clusters: int, fit_points: int, width: int) -> int:
    """What decides how many heads go into a chunk. Seeding is a long chain of small steps, better taken once for many
    heads, so this is a quarter of what one head's fitted points and their distances need.
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

    def run(chunk: RowChunk) -> None:
        head_points = Points(chunk.of_query_heads(points), chunk.query_rows)
        fitted = head_points.spread(most_fit_rows(clusters, fit_points))
        head_centroids = cluster(head_points, chunk.of_heads(labels), fitted, clusters, iterations, seed)
        centroids[chunk.batch, chunk.first_head : chunk.last_head] = head_centroids

    for_every_chunk(run, row_chunks(points, None, mask, bytes_per_head) if H else (), points.device)
    return labels, centroids


kmeans = register_op("kmeans", Inputs, _forward, fake=empty_clusters, shown=2)
