"""Which points K-means looks at before it labels all of them: those it is fitted on, and those that can be seeds.

All are counted among the points that are not masked, so that padding changes nothing.
"""

import torch

# Centroids are fitted on at least this many points per cluster.
FIT_POINTS_PER_CLUSTER = 4
# Seeds are looked for among this many of them, or among this many per cluster.
SEEDING_POINTS = 512
SEEDING_POINTS_PER_CLUSTER = 2
# Farthest-first is a chain of steps, each over all its rows: more seeds than this are found in independent groups.
SEEDS_PER_GROUP = 256
# The first seed stands at a random share of the rows, in units of 2 to the power of minus this.
SHARE_BITS = 16


def strided_rows(length: int, count: int) -> torch.Tensor:
    """`count` row numbers evenly spread over `0 .. length - 1` (all of them where `count >= length`)."""
    count = min(length, count)
    return torch.arange(count) * length // max(1, count)


def most_fit_rows(clusters: int, fit_points: int) -> int:
    """How many points at most the centroids are fitted on."""
    return max(fit_points, FIT_POINTS_PER_CLUSTER * clusters)


def fit_rows(length: int, clusters: int, fit_points: int) -> torch.Tensor:
    """The rows out of `length` that centroids, or the metric of keys, are fitted on."""
    return strided_rows(length, most_fit_rows(clusters, fit_points))


def most_seeding_rows(clusters: int) -> int:
    """How many of the fitted rows at most can become seeds."""
    return max(SEEDING_POINTS, SEEDING_POINTS_PER_CLUSTER * clusters)


def seeding_rows(length: int, clusters: int) -> torch.Tensor:
    """The rows among `length` fitted ones that can become seeds."""
    return strided_rows(length, most_seeding_rows(clusters))


def seeding_groups(clusters: int) -> int:
    """In how many independent groups the seeds are found: group `i` of `g` finds seeds `i, i + g, i + 2g, ...`."""
    return -(-clusters // SEEDS_PER_GROUP)


def first_seed_share(seed: int) -> int:
    """Where among the rows farthest-first starts, in units of `2 ** -SHARE_BITS`."""
    return int(torch.randint(2**SHARE_BITS, (1,), generator=torch.Generator().manual_seed(seed), device="cpu"))


def first_seed(length: int, seed: int) -> int:
    """The row out of `length` that farthest-first starts from."""
    return first_seed_share(seed) * length >> SHARE_BITS
