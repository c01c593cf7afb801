"""Numbers that are not finite, on their way to JSON, which has no word for them, and back."""

import math
from collections.abc import Iterable
from typing import Any


def finite_or_none(values: Any) -> Any:
    """A tree of dicts and lists with None in the place of every number that is not finite."""
    if isinstance(values, dict):
        return {name: finite_or_none(value) for name, value in values.items()}
    if isinstance(values, list):
        return [finite_or_none(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def none_to_nan(values: Iterable[float | None]) -> list[float]:
    """Measured numbers that `finite_or_none` went over: None is NaN again."""
    return [math.nan if value is None else value for value in values]
