"""Random numbers that stay the same: for one seed, with any number of processes, and in later versions of NumPy.

A chunk of samples has a stream of its own, named by the seed, the split and the chunk's number, so chunks can be made
in any order. Of NumPy only the bit generator is used: its stream is promised to stay, that of `Generator`'s
distributions is not.
"""

import numpy as np

SPLITS = ("train", "validation", "test")


class RandomStream:
    """The random numbers of one chunk of a split."""

    def __init__(self, seed: int, split: str, chunk: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split), chunk)))

    def words(self, count: int) -> np.ndarray:
        """Uniform integers of 32 bits as uint64 `(count,)`, so that a product with a small number is exact."""
        raw = np.asarray(self._bits.random_raw((count + 1) // 2), dtype="<u8")
        return raw.view("<u4")[:count].astype(np.uint64)

    def integers(self, bound: int, *shape: int) -> np.ndarray:
        """Uniform integers from 0 to below `bound`, int64 of a shape.

        `bound` is at most `2 ** 16`: the shares of two values differ by less than `bound / 2 ** 32`.
        """
        drawn = (self.words(int(np.prod(shape))) * np.uint64(bound)) >> np.uint64(32)
        return drawn.astype(np.int64).reshape(shape)
