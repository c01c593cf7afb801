"""Keys of completed segments, for a CPU: packed by cluster once, and read by all later segments.

Sizes: `P` key/value heads of a chunk, `S` segments of a batch, `m` keys that become distant for each, `G` clusters of
these, `nb` blocks of `L` keys per head.
"""

from math import inf

import torch

from ..bi_clustered_attention.residuals import ERROR_PER_VARIANCE
from ..cluster_queries.batched import as_metric
from ..kmeans.batched import Points, cluster
from ..kmeans.sampling import most_fit_rows
from ..shared.cluster_blocks import ClusterBlocks
from ..shared.precision import SMALLEST
from ..shared.tables import cluster_rows, cluster_sizes
from .reference import Settings
from .segment_batches import SegmentBatch, key_block_length, places_of


class CompletedKeys:
    """Completed keys and values of a chunk `(P, N, ·)`, and their clusters.

    The clusters and places of a segment stand behind those of the segments before, and do not change any more. Their
    number does not depend on the keys.

    Attributes:
        places: `nb · L`, of the rows in use.
        width: places of each of the last batch's segments.
        segments: of the last batch.
        rows: `(P, most, D + Dv)`: key and value less the means of their cluster; 0 in empty places.
        full: `(P, most)`, 1 where a key is, else 0.
        sources: `(P, most)` number of the key, 0 in empty places.
        distances: `d_t²` `(P, most)`; -1 in empty places.
        farthest: the largest `d_t²` that each of the last batch's segments sees, `(P, S)`.
        clusters: `(P, most / L)` cluster of a block.
        means: `(P, ·, D + Dv)`.
        grad: gradients of `rows`; None before there are any.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, settings: Settings, batches: list[SegmentBatch]
    ) -> None:
        self.key, self.value, self.settings = key, value, settings
        P, _, self.D = key.shape
        self.Dv = value.shape[2]
        self.L = key_block_length(settings)
        late = [batch for batch in batches if batch.new.stop]
        most = sum(batch.count * places_of(batch.new.stop - batch.new.start, settings) for batch in late)
        segments = sum(batch.count for batch in late)
        self.places, self.G, self.width, self.segments = 0, 0, 0, 0
        self.rows = key.new_empty(P, most, self.D + self.Dv)
        self.full = key.new_empty(P, most)
        self.sources = torch.zeros(P, most, dtype=torch.int64, device=key.device)
        self.distances = key.new_empty(P, most)
        self.farthest = key.new_full((P, 1), -1.0)
        self.clusters = torch.empty(P, most // self.L, dtype=torch.int64, device=key.device)
        self.means = key.new_empty(P, segments * settings.key_clusters, self.D + self.Dv)
        self.first_mean = key[:, :1] if not late else key[:, late[0].new].mean(dim=1, keepdim=True)
        self.total = key.new_zeros(P, 1, 1, self.D)
        self.gram, self.within = (key.new_zeros(P, 1, self.D, self.D) for _ in range(2))
        self.grad: torch.Tensor | None = None
        self.blocks: list[tuple[slice, slice, ClusterBlocks]] = []

    def _distant(self, batch: SegmentBatch) -> torch.Tensor:
        """How many distant keys each segment has, `(S, 1, 1)`."""
        return torch.tensor(batch.distant, device=self.key.device)[:, None, None]

    def _new(self, rows: torch.Tensor, batch: SegmentBatch) -> torch.Tensor:
        """Of rows `(P, N, ·)` those that a batch's segments are the first to see: `(P, S, m, ·)`."""
        return rows[:, batch.new_keys].unflatten(1, (batch.count, -1))

    def metrics(self, batch: SegmentBatch) -> torch.Tensor:
        """Of every segment of the next batch the metric of its distant keys, `(P · S, D, D)`."""
        centered = self._new(self.key, batch) - self.first_mean[:, None]
        totals = centered.sum(dim=2, keepdim=True).cumsum(dim=1) + self.total
        grams = (centered.transpose(2, 3) @ centered).cumsum(dim=1) + self.gram
        self.total, self.gram = totals[:, -1:], grams[:, -1:]
        means = totals / self._distant(batch)
        return as_metric((grams / self._distant(batch) - means.transpose(2, 3) * means).flatten(0, 1))

    def labels_of(self, batch: SegmentBatch, covariance: torch.Tensor) -> torch.Tensor:
        """Clusters of the keys of the next batch `(P · S, m)`, by `Σ_η` `(P · S, D, D)` of their segments."""
        keys = self._new(self.key, batch).flatten(0, 1)
        return labels_of(keys, self.settings.key_clusters, self.settings, as_metric(covariance.clone()))

    def add(self, batch: SegmentBatch, labels: torch.Tensor, covariance: torch.Tensor) -> None:
        """The keys of the next batch, of their labels `(P · S, m)` and of the covariances `Σ_η` `(P · S, D, D)`."""
        settings, D, G, P, S = self.settings, self.D, self.settings.key_clusters, len(self.key), batch.count
        m = labels.shape[1]
        index = cluster_rows(labels, G)
        sizes = cluster_sizes(index, P * S, G)
        width = places_of(m, settings)
        blocks = ClusterBlocks.of(index, sizes, aligned=True, length=self.L, per_head=width // self.L)
        packed = blocks.pack(self._new(self.key, batch), self._new(self.value, batch))  # (P · S · nb, L, D + Dv)
        means = blocks.sum(packed.sum(dim=1), P * S * G) / sizes.view(-1, 1).clamp(min=1)
        empty = (blocks.sources == index.numel()).view(P, -1)
        places = slice(self.places, self.places + empty.shape[1])
        full = self.full[:, places].copy_(~empty)
        packed.addcmul_(full.reshape(-1, self.L, 1), blocks.of_cluster(means)[:, None], value=-1)
        self.rows[:, places] = packed.view(P, -1, packed.shape[2])
        first = torch.arange(P, device=packed.device)[:, None] * S * m - batch.new.start
        self.sources[:, places] = (blocks.sources.view(P, -1) - first).masked_fill_(empty, 0)
        clusters = blocks.clusters.view(P, -1) % (S * G) + self.G
        self.clusters[:, places.start // self.L : places.stop // self.L] = clusters
        self.means[:, self.G : self.G + S * G] = means.view(P, S * G, -1)
        distances = self.distances[:, places].fill_(1.0)
        if settings.linear_summaries:
            spread = packed.view(P * S, width, -1)[..., :D]
            squares = torch.linalg.vecdot(spread @ covariance, spread).clamp_(min=SMALLEST)
            distances.copy_(squares.view(P, -1))
            if settings.max_predicted_error < inf:
                within = (spread.transpose(1, 2) @ spread).unflatten(0, (P, S))
                self.within = within.cumsum(dim=1) + self.within[:, -1:]
        distances.masked_fill_(empty, -1.0)
        of_segments = torch.cat([self.farthest[:, -1:], distances.unflatten(1, (S, -1)).amax(dim=2)], dim=1)
        self.farthest = of_segments.cummax(dim=1).values[:, 1:]
        self.blocks.append((batch.new_keys, places, blocks))
        self.places, self.G, self.width, self.segments = places.stop, self.G + S * G, width, S

    def hide_later(self, numbers: torch.Tensor, value: float, width: int) -> torch.Tensor:
        """Fill in `value` where a segment of the last batch would see keys of later ones: `(P, S · ·, columns, ...)`.

        The last columns belong to that batch, `width` of them to each segment.
        """
        S = self.segments
        if S > 1:
            by_segment = numbers.unflatten(1, (S, -1))  # (P, S, ·, columns, ...)
            new_columns = by_segment[:, :, :, -S * width :].unflatten(3, (S, width))
            later = torch.ones(S, S, dtype=torch.bool, device=numbers.device).triu(1)
            new_columns.masked_fill_(later.view(S, 1, S, *[1] * (new_columns.ndim - 4)), value)
        return numbers

    def predicted(self, of_heads: torch.Tensor, batch: SegmentBatch) -> torch.Tensor:
        """Predicted errors of the segments `(P · S,)`; `of_heads`: covariances of residuals `(P · S, g, D, D)`."""
        within = (self.within / self._distant(batch)).flatten(0, 1)
        return (of_heads * within[:, None]).sum(dim=(2, 3)).amax(dim=1) * ERROR_PER_VARIANCE

    def grad_rows(self) -> torch.Tensor:
        """Memory for the gradients of the rows, to be added to."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.rows)
        return self.grad

    def store_gradients(self, of_key: torch.Tensor, of_value: torch.Tensor) -> None:
        """Add what the rows got to the gradients of keys and values `(P, N, ·)`."""
        if self.grad is None:
            return
        for new_keys, places, blocks in self.blocks:
            both = blocks.unpack(self.grad[:, places].reshape(-1, blocks.length, self.grad.shape[2]), len(self.rows))
            of_key[:, new_keys] += both[..., : self.D]
            of_value[:, new_keys] += both[..., self.D :]


def labels_of(points: torch.Tensor, clusters: int, settings: Settings, metric: torch.Tensor | None) -> torch.Tensor:
    """Labels `(heads, n)` by K-means of points `(heads, n, D)`; of fewer points, each is a cluster."""
    if clusters == 1:
        return torch.zeros(points.shape[:2], dtype=torch.int64, device=points.device)
    labels, rows = points.new_empty(points.shape[:2], dtype=torch.int64), Points(points, counted=None)
    fitted = rows.spread(most_fit_rows(clusters, settings.fit_queries))
    cluster(rows, labels, fitted, clusters, settings.rounds, settings.seed, metric)
    return labels
