"""Which documents run together: fixed by their lengths alone, whoever runs them, and when."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW_BATCHES = 64
WINDOW_DOCUMENTS = 4096
# Of the tokens, the shares that lie in shorter batches than those which are timed.
TIMED_AT = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Batch:
    """Documents that run together and are kept together.

    Args:
        documents (`tuple[int, ...]`): their indices.
        tokens (`int`): of all.
        longest (`int`): tokens of the longest.
    """

    documents: tuple[int, ...]
    tokens: int
    longest: int


def fitting_runs(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Runs of neighbours that are within a number of tokens when padded to their longest, as `(start, end)`.

    Args:
        lengths (`Sequence[int]`): tokens of each.
        batch_tokens (`int`): the most tokens of a run; what is longer is a run of its own.
    """
    runs, start, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and longest * (index + 1 - start) > batch_tokens:
            runs.append((start, index))
            start, longest = index, length
    return [*runs, (start, len(lengths))] if len(lengths) else runs


def neighbours(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices in order, in groups of at most 4,096 whose sizes sum to `most` at most; a larger one is alone."""
    groups: list[list[int]] = []
    total = 0
    for index, size in enumerate(sizes):
        if not groups or total + size > most or len(groups[-1]) == WINDOW_DOCUMENTS:
            groups.append([])
            total = 0
        groups[-1].append(index)
        total += size
    return groups


def plan_windows(lengths: Sequence[int], batch_tokens: int) -> list[list[Batch]]:
    """Neighbours in windows of a bounded size, in each window sorted by length into batches.

    Args:
        lengths (`Sequence[int]`): tokens of each document.
        batch_tokens (`int`): the most tokens of a batch, padding included.

    Returns:
        `list[list[Batch]]`: the batches of each window; every document is in one.
    """
    planned = []
    for window in neighbours(lengths, WINDOW_BATCHES * batch_tokens):
        order = sorted(window, key=lambda index: (lengths[index], index))
        ordered = [lengths[index] for index in order]
        planned.append(
            [
                Batch(tuple(order[start:end]), sum(ordered[start:end]), ordered[end - 1])
                for start, end in fitting_runs(ordered, batch_tokens)
            ]
        )
    return planned


def at_quantiles(lengths: Sequence[int], tokens: Sequence[int], quantiles: Sequence[float]) -> list[int]:
    """Indices, by length in order, of where the given shares of all tokens lie in what is shorter; each once."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    summed = np.cumsum([tokens[index] for index in order])
    indices = [order[int(np.searchsorted(summed, quantile * summed[-1]))] for quantile in quantiles]
    return list(dict.fromkeys(indices))


class Pace:
    """How long batches take, from some that were timed: seconds per token grow in proportion to the longest sequence.

    Args:
        lengths (`Sequence[int]`): tokens of the longest sequence of each timed batch.
        tokens (`Sequence[int]`): of each timed batch.
        seconds (`Sequence[float]`): that each took.
    """

    def __init__(self, lengths: Sequence[int], tokens: Sequence[int], seconds: Sequence[float]) -> None:
        per_token = np.divide(seconds, tokens)
        slope = 0.0
        if len(set(lengths)) > 1:
            slope = max(0.0, float(np.polyfit(lengths, per_token, 1)[0]))
        self._slope = slope
        self._at_zero = max(0.0, float(np.mean(per_token) - slope * np.mean(lengths)))

    def seconds(self, longest: int, tokens: int) -> float:
        """What a batch will take."""
        return (self._at_zero + self._slope * longest) * tokens


class Remaining:
    """The batches that no rank has finished yet, as far as this one knows.

    Args:
        expected (`dict[int, float]`): the seconds that each will take one rank.
        documents (`dict[int, int]`): how many each holds.
        ranks (`int`): that work on them.
    """

    def __init__(self, expected: dict[int, float], documents: dict[int, int], ranks: int) -> None:
        self._expected, self._documents, self._ranks = dict(expected), documents, ranks
        self._seconds, self.documents = sum(expected.values()), sum(documents[index] for index in expected)

    def finish(self, indices: Iterable[int]) -> None:
        """Count batches as finished; those that were already change nothing."""
        for index in indices:
            if index in self._expected:
                self._seconds -= self._expected.pop(index)
                self.documents -= self._documents[index]

    @property
    def seconds(self) -> float:
        """Until the last is finished, if every rank is as fast as this one."""
        return max(0.0, self._seconds) / self._ranks
