"""Who attends to what in causal attention over clusters: decided by positions alone, so that no token can change it.

Tokens are counted among those that are not masked. A segment attends exactly to itself and to the segments of the
window before it. The `n` older segments are a sum of powers of two, as in a binary number: blocks of `2^level`
segments, the largest first. A block is a number of finished segments that start at a multiple of their count, so it
never changes once it is there, and every token is in one block of every level at most: the work of clustering all
blocks grows with `N log N`.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Blocks of one level, and the segments that read them: equally many per block, one after the other.

    Block `i` of the run starts at segment `(first_block + 2 i) · 2^level` and is read by the segments
    `first_segment + i · 2^(level + 1)` and the `segments - 1` ones after it.
    """

    level: int
    first_block: int
    blocks: int
    first_segment: int
    segments: int


@dataclass(frozen=True)
class Layout:
    """What every segment of a text attends to.

    Args:
        length (`int`): tokens that count.
        segment_length (`int`): tokens of a segment.
        window (`int`): tokens before a segment that it attends to exactly, rounded up to whole segments.
        keys_per_cluster (`int`): mean size of a key cluster in small blocks.
        key_clusters (`int`): most key clusters of a block.
        prefill (`bool`): whether query clusters are made once, of all queries.
    """

    length: int
    segment_length: int
    window: int
    keys_per_cluster: int
    key_clusters: int
    prefill: bool

    @property
    def segments(self) -> int:
        """Segments, the last of which may be short."""
        return -(-self.length // self.segment_length)

    @property
    def window_segments(self) -> int:
        return -(-self.window // self.segment_length)

    @property
    def local_keys(self) -> int:
        """Keys of the window and the segment itself."""
        return (self.window_segments + 1) * self.segment_length

    @property
    def first_served(self) -> int:
        """The first segment that has older ones."""
        return self.window_segments + 1

    @property
    def served(self) -> int:
        """How many segments have older ones; the u-th of them has u + 1."""
        return max(0, self.segments - self.first_served)

    def older(self, segment: int) -> int:
        """How many segments are older than the window of a segment."""
        return max(0, segment - self.window_segments)

    def blocks(self, segment: int) -> list[tuple[int, int]]:
        """The blocks `(level, index)` that the segments older than the window of a segment are made of."""
        older = self.older(segment)
        levels = [level for level in reversed(range(older.bit_length())) if older >> level & 1]
        return [(level, (older >> level) - 1) for level in levels]

    def block_keys(self, level: int) -> int:
        """Keys of a block."""
        return self.segment_length << level

    def clusters_of_block(self, level: int) -> int:
        """Key clusters of a block."""
        return max(1, min(self.key_clusters, self.block_keys(level) // self.keys_per_cluster))

    @property
    def levels(self) -> int:
        """How many levels have a block that is read."""
        return self.served.bit_length()

    def runs(self) -> Iterator[Run]:
        """All pairs of a block and the segments that read it; the last reading segments of a level may be few."""
        for level in range(self.levels):
            size = 1 << level
            blocks = (self.served - size) // (2 * size) + 1
            last = self.served - (2 * blocks - 1) * size + 1  # segments that read the last block
            whole = blocks if last >= size else blocks - 1
            first = self.window_segments + size
            if whole:
                yield Run(level, 0, whole, first, size)
            if whole < blocks:
                yield Run(level, 2 * whole, 1, first + whole * 2 * size, last)

    def epochs(self) -> list[tuple[int, int, int]]:
        """`(first, end, past)`: segments `first .. end - 1` share query clusters, made of the first `past` queries.

        The clusters are made anew when the queries have doubled: a logarithmic number of times.
        """
        if self.prefill:
            return [(self.first_served, self.segments, self.length)] if self.served else []
        epochs, first = [], self.first_served
        while first < self.segments:
            end = min(self.segments, 2 * first)
            epochs.append((first, end, first * self.segment_length))
            first = end
        return epochs

    @property
    def first_cluster_columns(self) -> list[int]:
        """Where the key clusters of every level begin among the columns of all levels; the last is the total."""
        columns = [0]
        for level in range(self.levels):
            columns.append(columns[-1] + self.clusters_of_block(level))
        return columns
