"""The columns of one softmax, in parts: each a batched product of queries with the table of keys that they share.

Every shape, and the place of every query, depends on positions and on earlier tokens alone: a later token can change
no product that an earlier output is made of, not even its rounding.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `S` tokens of a segment, `U` segments that have
older ones, `C` query clusters, `T` top keys, `G` key clusters of a block.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from ...shared.precision import accumulation_dtype
from ...shared.tables import cluster_rows, cluster_sizes, cluster_sums
from ..layout import Layout, Run
from ..reference import Settings
from .grouping import Grouping, cluster_keys


@dataclass(frozen=True)
class Gradients:
    """Sums in float32 or float64.

    Attributes:
        query: of the scaled queries, `(P, g, segments, S, D)`.
        key, value: `(P, segments · S, D)`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Part(ABC):
    """Some columns of the softmax, for the queries of some segments.

    Tensors of queries are `(P, g, segments, S, ...)`; in a part they are `(batch, rows, ...)`.

    Attributes:
        columns: where the part's columns stand among those that dropout draws for.
        values: the table `(batch, columns, Dv)`.
    """

    columns: slice
    values: torch.Tensor

    @abstractmethod
    def region(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of what belongs to the part's queries."""

    @abstractmethod
    def to_rows(self, region: torch.Tensor) -> torch.Tensor:
        """A region as `(batch, rows, ...)`."""

    @abstractmethod
    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of `to_rows`."""

    @abstractmethod
    def mask_(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `(batch, rows, columns)` with what the part adds to them."""

    @abstractmethod
    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Scores `(batch, rows, columns)` in float32 or float64 of all queries `(P, g, segments, S, D)`."""

    @abstractmethod
    def add_gradients(
        self, query: torch.Tensor, grad_scores: torch.Tensor, grad_values: torch.Tensor, into: Gradients
    ) -> None:
        """Add what flows through the part.

        Args:
            query: all (scaled) queries, `(P, g, segments, S, D)`.
            grad_scores: `(batch, rows, columns)`.
            grad_values: `(batch, columns, Dv)`, of the table.
            into: what is added to.
        """

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part's queries `(batch, rows, ...)` out of all."""
        return self.to_rows(self.region(tensor))

    def add(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows of the part to the target of all queries."""
        self.region(target).add_(self.from_rows(rows))


class KeyPart(Part):
    """A part whose columns are keys, or means of keys: `keys` is their table `(batch, columns, D)`."""

    keys: torch.Tensor

    @abstractmethod
    def add_to_keys(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient `(batch, columns, D)` of a table to that of all keys `(P, segments · S, D)`."""

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        products = self.take(query) @ self.keys.transpose(1, 2)
        return self.mask_(products.to(accumulation_dtype(products.dtype)))

    def add_gradients(
        self, query: torch.Tensor, grad_scores: torch.Tensor, grad_values: torch.Tensor, into: Gradients
    ) -> None:
        grad_scores = grad_scores.to(self.keys.dtype)
        self.add_to_keys(into.value, grad_values)
        self.add_to_keys(into.key, grad_scores.transpose(1, 2) @ self.take(query))
        self.add(into.query, grad_scores @ self.keys)


class LocalPart(KeyPart):
    """The exact keys of the window and the segment itself."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: int, layout: Layout) -> None:
        self.P, self.group, self.layout = key.shape[0], group, layout
        self.columns = slice(0, layout.local_keys)
        self.keys, self.values = self._windows(key), self._windows(value)

    def _windows(self, rows: torch.Tensor) -> torch.Tensor:
        S, before = self.layout.segment_length, self.layout.window_segments * self.layout.segment_length
        windows = F.pad(rows, (0, 0, before, 0)).unfold(1, self.layout.local_keys, S)  # (P, segments, D, keys)
        return windows.flatten(0, 1).transpose(1, 2)

    def region(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_rows(self, region: torch.Tensor) -> torch.Tensor:
        return region.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        S = self.layout.segment_length
        return rows.unflatten(0, (self.P, -1)).unflatten(2, (self.group, S)).transpose(1, 2)

    def mask_(self, scores: torch.Tensor) -> torch.Tensor:
        S, w, segments = self.layout.segment_length, self.layout.window_segments, self.layout.segments
        column = torch.arange(self.layout.local_keys, device=scores.device)
        row, segment = (torch.arange(size, device=scores.device) for size in (S, segments))
        future = column > row[:, None] + w * S  # (S, keys)
        missing = column < (w - segment[:, None]) * S  # (segments, keys)
        scores.view(self.P, segments, self.group, S, -1).masked_fill_(future | missing[:, None, None], -torch.inf)
        return scores

    def add_to_keys(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        S, w, segments = self.layout.segment_length, self.layout.window_segments, self.layout.segments
        windows = gradient.unflatten(0, (self.P, segments)).unflatten(2, (w + 1, S))
        target = target.unflatten(1, (segments, S))
        for back in range(min(w + 1, segments)):
            target[:, : segments - back] += windows[:, back:, w - back]


class TopPart(KeyPart):
    """The exact keys that centroids chose, for blocks of queries of one segment and cluster.

    A query joins the open block of its cluster or opens the next one: its place depends on earlier queries only.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, grouping: Grouping, layout: Layout, settings: Settings
    ) -> None:
        P, g, U, S = grouping.labels.shape
        C, T = grouping.top.shape[3:]
        self.P, self.layout = P, layout
        self.columns = slice(layout.local_keys, layout.local_keys + T)
        length = next((length for length in (4, 8, 16, 32) if length * C >= S), 64)
        self.rows_of_block, blocks = length, min(S, C + S // length)
        labels = grouping.labels.flatten(0, 2)  # (P · g · U, S)
        opener, slot = self._places(labels, length)
        number = (opener == torch.arange(S, device=key.device)).cumsum(1) - 1  # of the block that a query may open
        block = number.gather(1, opener)
        problem = torch.arange(len(labels), device=key.device)[:, None] * blocks
        self.slots = ((problem + block) * length + slot).flatten()
        cluster = torch.zeros(len(labels), blocks, dtype=torch.int64, device=key.device).scatter_(1, block, labels)
        self.shape = P, g, U, S
        self.batch = len(labels) * blocks
        table = torch.arange(len(labels), device=key.device)[:, None] * C + cluster
        top = grouping.top.view(-1, T).index_select(0, table.flatten())  # (batch, T)
        heads = torch.arange(P, device=key.device) * key.shape[1]
        self.top_rows = (top.view(P, -1, T) + heads[:, None, None]).view(-1, T)
        older = (torch.arange(U, device=key.device) + 1) * S
        self.missing = (torch.arange(T, device=key.device) >= older[:, None]).view(U, 1, T)
        self.blocks = blocks
        self.keys, self.values = self._gather(key), self._gather(value)

    @staticmethod
    def _places(labels: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For labels `(problems, S)`: the query that opened the block of a query, and the query's slot in it."""
        S = labels.shape[1]
        order = labels.argsort(dim=1, stable=True)
        place = torch.arange(S, device=labels.device).expand_as(labels)
        in_order = labels.gather(1, order)
        starts = torch.cat([torch.ones_like(in_order[:, :1]), in_order[:, 1:] != in_order[:, :-1]], dim=1)
        rank = place - (place * starts).cummax(dim=1).values
        opener = order.gather(1, place - rank % length)
        back = torch.empty_like(order).scatter_(1, order, place)
        return opener.gather(1, back), (rank % length).gather(1, back)

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flatten(0, 1).index_select(0, self.top_rows.flatten()).view(*self.top_rows.shape, -1)

    def region(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, self.layout.first_served :]

    def to_rows(self, region: torch.Tensor) -> torch.Tensor:
        packed = region.new_zeros(self.batch * self.rows_of_block, region.shape[4])
        packed.index_copy_(0, self.slots, region.reshape(-1, region.shape[4]))
        return packed.view(self.batch, self.rows_of_block, -1)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flatten(0, 1).index_select(0, self.slots).view(*self.shape, -1)

    def mask_(self, scores: torch.Tensor) -> torch.Tensor:
        P, g, U, _ = self.shape
        segments = scores.view(P, g, U, self.blocks * self.rows_of_block, -1)
        segments.masked_fill_(self.missing, -torch.inf)
        return scores

    def add_to_keys(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        target.flatten(0, 1).index_add_(0, self.top_rows.flatten(), gradient.flatten(0, 1).to(target.dtype))


class SummaryPart(KeyPart):
    """The means of the key clusters of some blocks of one level, weighed by the keys that are not among the top."""

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        run: Run,
        grouping: Grouping,
        layout: Layout,
        settings: Settings,
    ) -> None:
        self.P, self.group, self.run, self.layout = key.shape[0], grouping.labels.shape[1], run, layout
        self.length = layout.block_keys(run.level)
        self.G = layout.clusters_of_block(run.level)
        start = layout.local_keys + settings.topk + layout.first_cluster_columns[run.level]
        self.columns = slice(start, start + self.G)
        blocks = self._blocks(key)
        self.labels = cluster_keys(blocks, self.G, settings)  # (P · blocks, keys)
        self.index = cluster_rows(self.labels, self.G)
        self.sizes = cluster_sizes(self.index, len(blocks), self.G)
        self.divisors = self.sizes.clamp(min=1)[..., None]
        self.keys, self.values = self._means(blocks), self._means(self._blocks(value))
        self.log_rest = self._log_rest(grouping)

    def _span(self, rows: torch.Tensor) -> torch.Tensor:
        """View `(P, blocks, keys, D)` of the blocks' rows: every other block of the level."""
        length, run = self.length, self.run
        part = rows.narrow(1, run.first_block * length, (2 * run.blocks - 1) * length)
        return part.unfold(1, length, 2 * length).transpose(2, 3)

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        return self._span(rows).reshape(-1, self.length, rows.shape[2])

    def _means(self, blocks: torch.Tensor) -> torch.Tensor:
        return (cluster_sums(blocks, self.index, len(blocks), self.G) / self.divisors).to(blocks.dtype)

    @cached_property
    def _segments(self) -> slice:
        """The segments from the first that reads to the last, those of other blocks among them."""
        first = self.run.first_segment
        return slice(first, first + (self.run.blocks - 1) * (2 << self.run.level) + self.run.segments)

    def region(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(P, g, blocks, S, ..., segments)`."""
        return tensor[:, :, self._segments].unfold(2, self.run.segments, 2 << self.run.level)

    def to_rows(self, region: torch.Tensor) -> torch.Tensor:
        # (P, blocks, g, segments, S, ...)
        return region.permute(0, 2, 1, 5, 3, 4).reshape(self.P * self.run.blocks, -1, region.shape[4])

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        S = self.layout.segment_length
        rows = rows.view(self.P, self.run.blocks, self.group, self.run.segments, S, -1)
        return rows.permute(0, 2, 1, 4, 5, 3)

    def mask_(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.view_as(self.log_rest).add_(self.log_rest).view_as(scores)

    def _log_rest(self, grouping: Grouping) -> torch.Tensor:
        """`log n_jc` of every query, `(P · blocks · g · segments, S, G)`; -inf for clusters without a key left."""
        run, S = self.run, self.layout.segment_length
        first = run.first_segment - self.layout.first_served
        served = slice(first, first + self._segments.stop - self._segments.start)

        def of_readers(tensor: torch.Tensor) -> torch.Tensor:
            """`(P, g, U, ...)` as `(P · blocks, g · segments, ...)`."""
            parts = tensor[:, :, served].unfold(2, run.segments, 2 << run.level)
            return parts.movedim(2, 1).movedim(-1, 3).reshape(-1, self.group * run.segments, *tensor.shape[3:])

        top, labels = of_readers(grouping.top), of_readers(grouping.labels)
        batch, readers, C, T = top.shape
        block = torch.arange(run.blocks, device=top.device).repeat(self.P)[:, None, None, None]
        place = top - (run.first_block + 2 * block) * self.length
        inside = (place >= 0) & (place < self.length)
        older = torch.arange(run.segments, device=top.device).repeat(self.group)
        older = (older + (run.first_block + 2 * block[:, 0, 0] + 1) * (1 << run.level)) * S  # (batch, readers)
        inside &= torch.arange(T, device=top.device) < older[:, :, None, None]
        chosen = self.labels.gather(1, place.clamp(0, self.length - 1).flatten(1)).view_as(top)
        counts = torch.zeros(batch, readers, C, self.G, dtype=torch.int32, device=top.device)
        counts.scatter_add_(3, chosen, inside.to(torch.int32))
        rest = (self.sizes[:, None, None] - counts).clamp(min=0).flatten(0, 2)
        table = torch.arange(batch * readers, device=top.device)[:, None] * C + labels.flatten(0, 1)
        log_rest = rest.to(accumulation_dtype(self.keys.dtype)).log_()
        return log_rest.index_select(0, table.flatten()).view(batch * readers, S, self.G)

    def add_to_keys(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        shares = gradient.to(target.dtype) / self.divisors  # of every key of a cluster in its mean's gradient
        rows = shares.flatten(0, 1).index_select(0, self.index)
        self._span(target).add_(rows.view(self.P, self.run.blocks, self.length, -1))
