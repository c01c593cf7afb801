"""How property tests run: a fixed set of cases in `make test`, random ones by the hundred thousand in `make fuzz`."""

import os
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

Drawn = TypeVar("Drawn")
# How many times as many cases as in `make test`, all random: `make fuzz` sets it.
TIMES = "HF_EFFATTN_FUZZ_TIMES"
COUNTS = "HF_EFFATTN_FUZZ_COUNTS"  # the file that the numbers of cases are written to
CASES: Counter[str] = Counter()  # tried, by what was checked


def property_test(
    name: str, check: Callable[[Drawn], None], strategy: SearchStrategy[Drawn], *, share: int, together: int = 1
) -> None:
    """Check drawn cases: `share` of them, the same in every run, or under `make fuzz` many times as many, random.

    Args:
        name (`str`): of what is checked, under which cases are counted.
        check (`Callable`): raises where a property does not hold.
        strategy (`SearchStrategy`): of the cases; what fails is made small and printed.
        share (`int`): how many are drawn.
        together (`int`): cases that one drawn of the strategy holds.
    """
    times = int(os.environ.get(TIMES, "0"))

    @settings(
        max_examples=share * max(1, times),
        derandomize=not times,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(strategy)
    def run(case: Drawn) -> None:
        CASES[name] += together
        check(case)

    run()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        *(rows.nan_to_num(0.0, -8.0, -9.0) for rows in (left, right))
    )
