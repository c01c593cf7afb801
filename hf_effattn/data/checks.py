"""Checks of arguments, made before anything is read or written."""

from collections.abc import Sequence
from typing import Any


def check_one_source(arguments: Any, *sources: Sequence[str]) -> None:
    """That data are named in one way: of two, one would be left out without a word.

    Args:
        arguments (`Any`): dataclass of the data's arguments.
        sources (`Sequence[str]`): the options of each way.

    Raises:
        ValueError: options of more than one way are set.
    """
    named = [[f"--{name}" for name in names if getattr(arguments, name)] for names in sources]
    if sum(map(bool, named)) > 1:
        ways = "; or ".join(", ".join(f"--{name}" for name in names) for names in sources)
        raise ValueError(
            f"{' and '.join(name for names in named for name in names)} name data in more than one way: leave out all"
            f" but one of {ways}"
        )
