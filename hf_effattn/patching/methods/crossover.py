"""From how many tokens on a method is faster than exact attention: what was measured, in `crossover.json`."""

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_MEASURED = json.loads(files(__package__).joinpath("crossover.json").read_text())
CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["min_length"]
CAUSAL_CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["causal_min_length"]
_KNOWN: dict[tuple[Any, ...], int] = {}
# A kind of device that was not measured is taken to start at this many times the longest length of those that were. It
# is a cautious guess: an H200 starts 4 to 13 times as late as a CPU, with kernels that other accelerators lack.
UNMEASURED = 4


def crossover_length(method: str, price: Mapping[str, int], device_type: str, *, causal: bool) -> int | None:
    """The number of tokens from which a method is faster.

    Args:
        method (`str`): its name.
        price (`Mapping[str, int]`): the counts that its time depends on most, and their values; of those that settings
            were measured with, the length is taken to grow no faster than the count that grows most: an assumption, as
            some of the work grows with a product of two (clusters times key clusters).
        device_type (`str`): `"cpu"`, `"cuda"`, ...; where nothing was measured, 4 times the longest of the others.
        causal (`bool`): whether the future is masked.

    Returns:
        `int`, *optional*: None where the future is masked on a kind of device that no length is known of: there the
        method does not run by itself.

    Raises:
        ValueError: of this method nothing was measured.
    """
    crossover = CAUSAL_CROSSOVER if causal else CROSSOVER
    if device_type in crossover:
        return _promised(crossover[device_type], method, price)
    longest = max(_promised(measured, method, price) for measured in crossover.values())
    return None if causal else longest * UNMEASURED


def why_never(method: str, device_type: str) -> str:
    """Why a decoder runs exact attention at every length on a kind of device, for messages."""
    return (
        f'on "{device_type}" exact attention runs at every length: where the future is masked "{method}" has been '
        "timed on CPUs only since it has kernels. To force it pass min_length=0 or a number of tokens"
    )


def _promised(measured: list[dict[str, Any]], method: str, price: Mapping[str, int]) -> int:
    """The shortest length that a row promises for these counts: its own, times the growth of its largest count."""
    key = id(measured), method, *price.items()  # every forward pass asks
    if key not in _KNOWN:
        _KNOWN[key] = _shortest(measured, method, price)
    return _KNOWN[key]


def _shortest(measured: list[dict[str, Any]], method: str, price: Mapping[str, int]) -> int:
    rows = [row for row in measured if row["method"] == method]
    if not rows:
        raise ValueError(
            f'no shortest length of "{method}" has been measured: give min_length (0 forces it), or measure it: '
            "python -m scripts.benchmark.crossover"
        )
    dearer = [max((value / row[name] for name, value in price.items() if name in row), default=1.0) for row in rows]
    return min(math.ceil(row["min_length"] * max(1.0, factor)) for row, factor in zip(rows, dearer, strict=True))
