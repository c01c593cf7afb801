"""ListOps of the Long Range Arena: nested list operations on digits, whose result is the class.

Source: Nangia and Bowman 2018 (the task); Tay et al. 2020 and the generator that is published with it (trees, lengths
and sizes). A node of a tree is an operator with probability 1/4 and a digit else, always a digit at the largest depth;
an operator takes 2 to `max_args` arguments. Trees whose number of tokens is not strictly between the two lengths are
thrown away, and no expression comes twice.

The published files also hold the parentheses of a binary tree, which the published reader deletes before it counts or
encodes anything; the expressions here never have them. Its other change, `]` to `X`, serves a tokenizer that drops
punctuation, and is not made here.

Trees grow breadth first and many at once, so that a node costs a few nanoseconds: most trees are thrown away.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .checks import GeneratedSettings, check_range
from .random_streams import RandomStream

DIGITS = tuple("0123456789")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
# The number of a token is its place here.
TOKENS = (*DIGITS, *OPERATORS, END)
_MIN, _MAX, _MED, _SUM = range(len(DIGITS), len(DIGITS) + len(OPERATORS))
_END = len(TOKENS) - 1
# A draw of 32 bits below this is an operator: one node in four.
_OPERATOR_DRAWS = np.uint64(2**30)
_OPERATOR_BITS = np.uint64(30)
CHUNK = 500
_TREES_AT_ONCE = 8192
_FRUITLESS_ROUNDS = 200


@dataclass(frozen=True)
class ListOpsSettings(GeneratedSettings):
    """Settings of ListOps; the defaults are the published ones. Lengths that no tree has are a `ValueError`.

    Attributes:
        min_length: an expression has more tokens than this.
        max_length: and fewer than this.
        max_depth: nodes from the root to the deepest digit, both counted.
        max_args: the most arguments of an operator.
    """

    train_size: int = 96_000
    validation_size: int = 2_000
    test_size: int = 2_000
    min_length: int = 500
    max_length: int = 2_000
    max_depth: int = 10
    max_args: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("max_depth", self.max_depth, 1, 20)
        check_range("max_args", self.max_args, 2, 100)
        check_range("min_length", self.min_length, 0)
        check_range("max_length", self.max_length, 2, 100_000)
        # 1 token is a digit alone, 4 are an operator with two arguments; 2 and 3 do not exist.
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
        shortest = next((length for length in (1, 4) if length > self.min_length), self.min_length + 1)
        if shortest > longest or shortest >= self.max_length:
            raise ValueError(
                f"no expression is longer than min_length {self.min_length} and shorter than max_length "
                f"{self.max_length}: with max_depth {self.max_depth} and max_args {self.max_args} the longest has "
                f"{longest} tokens"
            )


class _Level(NamedTuple):
    """Nodes of equal depth: trees in order, in a tree from left to right; so siblings are neighbours."""

    owner: np.ndarray  # the tree of a node
    token: np.ndarray  # a digit or an operator, by its number
    arity: np.ndarray  # arguments of an operator; 0 for a digit


def generate_listops(settings: ListOpsSettings, split: str, chunk: int) -> tuple[list[str], np.ndarray]:
    """`CHUNK` expressions, tokens with a space between, and their values; a pure function of its arguments.

    Short expressions may come twice; `load_lra` leaves the second out. Where hardly any tree has a length between the
    two that are set, it is a `ValueError`.
    """
    stream = RandomStream(settings.seed, split, chunk)
    texts: list[str] = []
    values: list[np.ndarray] = []
    rounds_without_any = 0
    while len(texts) < CHUNK:
        levels = _grow(stream, settings)
        if levels[0].owner.size == 0:
            rounds_without_any += 1
            if rounds_without_any == _FRUITLESS_ROUNDS:
                raise ValueError(
                    f"none of {_FRUITLESS_ROUNDS * _TREES_AT_ONCE:,} trees has more than min_length "
                    f"{settings.min_length} and fewer than max_length {settings.max_length} tokens; widen the lengths"
                )
            continue
        rounds_without_any = 0
        values.append(_values(levels))
        texts += _texts(levels)
    return texts[:CHUNK], np.concatenate(values)[:CHUNK]


def _grow(stream: RandomStream, settings: ListOpsSettings) -> list[_Level]:
    """Trees with a number of tokens strictly between the two lengths, level by level."""
    choices = np.uint64(settings.max_args - 1)
    owner = np.arange(_TREES_AT_ONCE)
    length = np.zeros(_TREES_AT_ONCE, dtype=np.int64)
    levels = []
    for depth in range(1, settings.max_depth + 1):
        draw = stream.words(owner.size)
        if depth < settings.max_depth:
            is_operator = draw < _OPERATOR_DRAWS
            # One draw is used up from the left: the kind of the node, then arity and operator, or the digit.
            spread = draw * choices
            arity = np.where(is_operator, 2 + (spread >> _OPERATOR_BITS), 0).astype(np.int64)
            operator = _MIN + (((spread & (_OPERATOR_DRAWS - np.uint64(1))) * np.uint64(4)) >> _OPERATOR_BITS)
            digit = ((draw - _OPERATOR_DRAWS) * np.uint64(10)) // (np.uint64(3) * _OPERATOR_DRAWS)
            token = np.where(is_operator, operator, digit).astype(np.uint8)
        else:
            arity = np.zeros(owner.size, dtype=np.int64)
            token = ((draw * np.uint64(10)) >> np.uint64(32)).astype(np.uint8)
        levels.append(_Level(owner, token, arity))
        # A node is a token, and an operator has its bracket besides.
        length += np.bincount(owner, 1 + (arity > 0), _TREES_AT_ONCE).astype(np.int64)
        to_come = np.bincount(owner, arity, _TREES_AT_ONCE)
        hopeless = length + to_come >= settings.max_length
        owner = np.repeat(owner, np.where(hopeless[owner], 0, arity))
        # What a tree that is not grown on lacks would make it too long.
        length[hopeless] = settings.max_length
    kept = (length > settings.min_length) & (length < settings.max_length)
    number = np.cumsum(kept) - 1
    return [
        _Level(number[level.owner[chosen]], level.token[chosen], level.arity[chosen])
        for level in levels
        for chosen in [kept[level.owner]]
    ]


def _first_children(arity: np.ndarray) -> np.ndarray:
    """Place in the next level of each operator's first argument."""
    counts = arity[arity > 0]
    return np.cumsum(counts) - counts


def _values(levels: list[_Level]) -> np.ndarray:
    """The values of whole trees, from the deepest level up."""
    below = levels[-1].token.astype(np.int64)
    for level in reversed(levels[:-1]):
        value = level.token.astype(np.int64)
        operators = np.flatnonzero(level.arity)
        if operators.size:
            first, counts = _first_children(level.arity), level.arity[operators]
            # Sorted within each operator's arguments: the ends and the middle are three of the four results.
            ordered = np.sort(np.repeat(np.arange(operators.size), counts) * 10 + below) % 10
            middle = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) // 2
            results = (ordered[first], ordered[first + counts - 1], middle, np.add.reduceat(below, first) % 10)
            value[operators] = np.choose(value[operators] - _MIN, results)
        below = value
    return below


def _texts(levels: list[_Level]) -> list[str]:
    """The trees depth first, as tokens with a space between."""
    sizes = [np.ones(levels[-1].token.size, dtype=np.int64)]
    for level in reversed(levels[:-1]):
        size = np.ones(level.token.size, dtype=np.int64)
        operators = np.flatnonzero(level.arity)
        if operators.size:
            size[operators] = 2 + np.add.reduceat(sizes[-1], _first_children(level.arity))
        sizes.append(size)
    sizes.reverse()
    ends = np.cumsum(sizes[0])
    tokens = np.full(ends[-1], _END, dtype=np.uint8)
    place = ends - sizes[0]
    for depth, level in enumerate(levels):
        tokens[place] = level.token
        operators = np.flatnonzero(level.arity)
        if not operators.size:
            break
        counts = level.arity[operators]
        before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]
        first = before[_first_children(level.arity)]
        # An argument stands behind its operator and the arguments before it.
        place = np.repeat(place[operators] + 1 - first, counts) + before
    written = tokens.tolist()
    return [
        " ".join([TOKENS[token] for token in written[end - size : end]])
        for end, size in zip(ends.tolist(), sizes[0].tolist(), strict=True)
    ]
