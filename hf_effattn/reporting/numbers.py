"""Numbers as a reader wants them: parts of 1, ratios, seconds, bytes, counts."""

import math
from collections.abc import Sequence

SMALLEST_SHARE = 1e-4  # smaller numbers are rounding, and unreadable
NOT_FINITE = "not finite"


def percent(value: float) -> str:
    """A part of 1 in per cent, with two digits that count."""
    if not math.isfinite(value):
        return NOT_FINITE
    if 0 < value < SMALLEST_SHARE:
        return f"under {100 * SMALLEST_SHARE:g}%"
    return f"{100 * value:.2g}%" if value < 0.095 else f"{100 * value:.0f}%"


def ratio(values: Sequence[float]) -> str:
    """One ratio or the span of several, `0.8×` or `0.8× to 1.3×`."""
    low, high = (f"{value:.2f}×" if value < 1.995 else f"{value:.1f}×" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def megabytes(number: int) -> str:
    """Bytes as MB (10^6)."""
    return f"{number / 1e6:,.1f} MB" if number < 10e6 else f"{number / 1e6:,.0f} MB"


def count(number: int, noun: str) -> str:
    """`1 text`, `2 texts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
