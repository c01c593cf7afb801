"""Checks of settings, made before anything is read or written."""

from collections.abc import Mapping


def check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise unless a setting is a whole number within its range.

    Args:
        name (`str`): of the setting.
        value (`int`): what was given.
        least (`int`): the smallest value that is allowed.
        most (`int`, *optional*): the largest; default none.

    Raises:
        TypeError: not a whole number.
        ValueError: out of the range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise unless every split has a size of at least one sample.

    Args:
        sizes (`Mapping[str, int]`): samples of each split.

    Raises:
        TypeError: a size that is not a whole number.
        ValueError: a size below 1.
    """
    for split, size in sizes.items():
        check_range(f"{split}_size", size, 1)
