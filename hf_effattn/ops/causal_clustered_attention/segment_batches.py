"""Batches of segments that are computed at once: neighbours of equal sizes, in few large steps.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `S` segments of a batch, `n` tokens of each.
What belongs to several segments has them behind the heads, `(P · S, ...)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..shared.cluster_blocks import block_length
from .reference import Settings

# Most numbers that a batch of more than one segment reads in one step: 4 MiB in float32.
BATCH_NUMBERS = 2**20


@dataclass(frozen=True)
class SegmentBatch:
    """Neighbouring segments with equal numbers of keys of every kind but distant ones.

    Args:
        start (`int`): the first token.
        length (`int`): `n`.
        window (`int`): keys before each segment that it attends to exactly.
        topk (`int`): distant keys that it attends to exactly.
        new (`slice`): the keys that become distant with the first segment; as many for each of the other segments
            follow. Empty where there are no distant keys.
        fitted (`slice`): the queries whose clusters the first segment reads.
        count (`int`): `S`.
    """

    start: int
    length: int
    window: int
    topk: int
    new: slice
    fitted: slice
    count: int = 1

    @property
    def rows(self) -> slice:
        """The queries."""
        return slice(self.start, self.start + self.count * self.length)

    @property
    def new_keys(self) -> slice:
        """Keys that become distant with these segments."""
        return slice(self.new.start, self.new.start + self.count * (self.new.stop - self.new.start))

    @property
    def previous_queries(self) -> slice:
        """Queries of the segments before each of these, whose clusters they read."""
        return slice(self.fitted.start, self.fitted.start + self.count * (self.fitted.stop - self.fitted.start))

    @property
    def distant(self) -> list[int]:
        """How many distant keys each segment has."""
        step = self.new.stop - self.new.start
        return [self.new.stop + i * step for i in range(self.count)]

    def continues(self, other: "SegmentBatch") -> bool:
        """Whether this batch of one segment can be the next segment of another batch."""
        sizes = ("length", "window", "topk")
        alike = all(getattr(self, name) == getattr(other, name) for name in sizes)
        steps = ((self.new, other.new_keys, other.new), (self.fitted, other.previous_queries, other.fitted))
        return alike and all(
            following.start == before.stop and following.stop - following.start == first.stop - first.start
            for following, before, first in steps
        )

    def cut(self, rows: torch.Tensor, part: slice) -> torch.Tensor:
        """Rows of queries `(P, g, N, ...)` segment by segment, `(P · S, g, n, ...)`."""
        return rows[:, :, part].unflatten(2, (self.count, -1)).transpose(1, 2).flatten(0, 1)

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `cut`: `(P, g, S · n, ...)`."""
        return rows.unflatten(0, (-1, self.count)).transpose(1, 2).flatten(2, 3)

    def keys(self, rows: torch.Tensor, first: int, width: int) -> torch.Tensor:
        """Rows of keys `(P, N, D)` from `first` on, and for every next segment `n` further on: `(P · S, m, D)`.

        `first` and `width` `m` are those of the first segment.
        """
        last = first + (self.count - 1) * self.length + width
        return rows[:, first:last].unfold(1, width, self.length).transpose(2, 3).flatten(0, 1)

    def add_keys(self, target: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        """Add to rows `(P, N, D)` what `keys` has taken of them, `(P · S, m, D)`."""
        width, step = rows.shape[1], self.length
        by_segment = rows.unflatten(0, (-1, self.count))
        rounds = -(-width // step)  # what is added to at once must not overlap
        for i in range(min(rounds, self.count)):
            disjoint = by_segment[:, i::rounds]
            begin = first + i * step
            last = begin + (disjoint.shape[1] - 1) * rounds * step + width
            target[:, begin:last].unfold(1, width, rounds * step).transpose(2, 3).add_(disjoint)


def segment_batches(settings: Settings, length: int, heads: int) -> Iterator[SegmentBatch]:
    """The segments of rows of that length, in batches; `heads` are `P` key/value heads."""
    query, key, value = settings[:3]
    D, group = query.shape[3], query.shape[1] // max(1, key.shape[1])
    fused = query.device.type == "cpu" and settings.dropout_seed is None and value.shape[3] == D
    places = 0
    batch: SegmentBatch | None = None
    for start in range(0, length, settings.segment_length):
        stop = min(start + settings.segment_length, length)
        distant = settings.distant(start)
        before = settings.distant(max(0, start - settings.segment_length))
        fitted = settings.fitted(start) if distant else slice(0, 0)
        segment = SegmentBatch(
            start, stop - start, start - distant, min(settings.topk, distant), slice(before, distant), fitted
        )
        places += places_of(distant - before, settings)
        per_row = max(D, 0 if fused else max(segment.window, segment.length))
        numbers = heads * group * max(per_row * segment.length, settings.clusters * places, segment.topk * D)
        numbers = max(numbers, heads * segment.window * D)
        room = BATCH_NUMBERS // max(1, numbers)
        if batch is not None and segment.continues(batch) and batch.count < room:
            batch = replace(batch, count=batch.count + 1)
            continue
        if batch is not None:
            yield batch
        batch = segment
    if batch is not None:
        yield batch


def places_of(keys: int, settings: Settings) -> int:
    """Places for so many keys of a segment in blocks of one cluster each, however they are clustered."""
    clusters, L = min(settings.key_clusters, keys), key_block_length(settings)
    return (clusters + (keys - clusters) // L) * L


def key_block_length(settings: Settings) -> int:
    """Places of a block of keys."""
    return block_length(settings.segment_length / (4 * settings.key_clusters))
