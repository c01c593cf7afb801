"""Which points K-means looks at before it labels all of them: those it is fitted on, and those that can be seeds.

All are counted among the points that are not masked, so that padding changes nothing.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

# Centroids are fitted on at least this many points per cluster.
FIT_POINTS_PER_CLUSTER = 4
# The first seed stands at a random share of the rows, in units of 2 to the power of minus this.
SHARE_BITS = 16


def strided_rows(length: int, count: int) -> torch.Tensor:
    """`count` row numbers evenly spread over `0 .. length - 1` (all of them where `count >= length`); read only."""
    return torch.from_numpy(_spread(length, min(length, count)))


@lru_cache  # arrays: a cached tensor would keep the mode (inference, grad) in which it was made
def _spread(length: int, count: int) -> np.ndarray:
    return np.arange(count) * length // max(1, count)


def most_fit_rows(clusters: int, fit_points: int) -> int:
    """How many points at most the centroids are fitted on."""
    return max(fit_points, FIT_POINTS_PER_CLUSTER * clusters)


def fit_rows(length: int, clusters: int, fit_points: int) -> torch.Tensor:
    """The rows out of `length` that centroids, or the metric of keys, are fitted on."""
    return strided_rows(length, most_fit_rows(clusters, fit_points))


@dataclass(frozen=True)
class Seeding:
    """How seeds are found: in groups, each among rows of its own, as farthest-first is a chain of steps."""

    seeds: int  # of a group, at most. Group `i` of `g` finds seeds `i, i + g, i + 2g, ...`.
    rows: int  # that `seeds` seeds are looked for among, and the fewest in all

    def groups(self, clusters: int) -> int:
        """How many groups there are."""
        return -(-clusters // self.seeds)

    def most_rows(self, clusters: int) -> int:
        """How many of the fitted rows at most can become seeds."""
        return max(self.rows, -(-self.rows * clusters // self.seeds))

    def rows_of(self, length: int, clusters: int) -> torch.Tensor:
        """The rows among `length` fitted ones that can become seeds; row `i` is of group `i % g`."""
        return strided_rows(length, self.most_rows(clusters))


# The PyTorch forms, then the kernels, in which each step waits for the one before while most of the chip is idle.
# Shorter chains find seeds that are as good for most heads, but worse for those of a BERT's first two layers.
SEEDING = Seeding(seeds=64, rows=512)
KERNEL_SEEDING = Seeding(seeds=8, rows=64)


def first_seed_share(seed: int) -> int:
    """Where among the rows farthest-first starts, in units of `2 ** -SHARE_BITS`."""
    return int(torch.randint(2**SHARE_BITS, (1,), generator=torch.Generator().manual_seed(seed), device="cpu"))


def first_seed(length: int, seed: int) -> int:
    """The row out of `length` that farthest-first starts from."""
    return first_seed_share(seed) * length >> SHARE_BITS


def seed_rows(seeding: Seeding, length: int, clusters: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates for seeds, group by group, as many of each `(g · n,)`, and where each group starts `(g,)`; read only.

    A group with one row less has its last row twice. The second is never chosen, as the first of equals is.
    """
    rows, first = _grouped(seeding, length, clusters, seed)
    return torch.from_numpy(rows), torch.from_numpy(first)


@lru_cache
def _grouped(seeding: Seeding, length: int, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows, groups = _spread(length, min(length, seeding.most_rows(clusters))), seeding.groups(clusters)
    counts = [len(range(i, len(rows), groups)) for i in range(groups)]
    places = np.arange(counts[0] * groups).reshape(-1, groups).T.flatten()
    places[places >= len(rows)] -= groups
    return rows[places], np.array([first_seed(count, seed) for count in counts])
