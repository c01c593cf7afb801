"""From how many tokens on a method is faster than exact attention: what was measured, in `crossover.json`."""

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_MEASURED = json.loads(files(__package__).joinpath("crossover.json").read_text())
CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["min_length"]
CAUSAL_CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["causal_min_length"]
# Of the lengths measured elsewhere, for a device that has none of its own: an accelerator multiplies so much faster
# than it starts the many short steps of a clustering, and of the causal forms, that exact attention wins for longer.
# Cautious estimates from the steps and bytes on an H200.
UNMEASURED, CAUSAL_UNMEASURED = 4, 8


def crossover_length(method: str, price: Mapping[str, int], device_type: str, *, causal: bool) -> int:
    """The number of tokens from which a method is faster.

    Args:
        method (`str`): its name.
        price (`Mapping[str, int]`): the settings that its time grows with, at most in proportion, and their values.
        device_type (`str`): `"cpu"`, `"cuda"`, ...; where nothing was measured, 4 times the length on others, 8 times
            where the future is masked.
        causal (`bool`): whether the future is masked.

    Raises:
        ValueError: of this method nothing was measured.
    """
    crossover = CAUSAL_CROSSOVER if causal else CROSSOVER
    if device_type in crossover:
        return _promised(crossover[device_type], method, price)
    longest = max(_promised(measured, method, price) for measured in crossover.values())
    return longest * (CAUSAL_UNMEASURED if causal else UNMEASURED)


def _promised(measured: list[dict[str, Any]], method: str, price: Mapping[str, int]) -> int:
    """The least of what the measured settings promise for these: each as it is, or grown with its price."""
    rows = [row for row in measured if row["method"] == method]
    if not rows:
        raise ValueError(
            f'no shortest length of "{method}" has been measured: give min_length (0 forces it), or measure it: '
            "python -m scripts.benchmark.crossover"
        )
    dearer = [max((value / row[name] for name, value in price.items()), default=1.0) for row in rows]
    return min(math.ceil(row["min_length"] * max(1.0, factor)) for row, factor in zip(rows, dearer, strict=True))
