"""What `torch.jit.trace` would keep of one text for all: whether it is so short that exact attention runs.

The graph raises at lengths at which the model itself would run the other. Tracing drops an assertion, of whose result
nothing is made; a scripted function that can raise stays.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

LONGEST = 2**31 - 1


def hold_choice(length: Any, is_exact: Callable[[int], bool], shortest: int | None) -> None:
    """Let the graph that is traced raise where another choice would be made.

    Args:
        length (`torch.Tensor`): `N`, of which tracing makes a tensor.
        is_exact (`Callable`): of a number of tokens, whether exact attention runs; from some length on it never does.
        shortest (`int`, *optional*): `min_length`, or the length that stands for it; None: the method never runs.
    """
    traced = int(length)
    if not is_exact(traced):
        if shortest:
            _refusal()(torch.as_tensor(length), shortest, LONGEST)
        return
    first, exact = LONGEST, traced  # of the lengths with the method, and one without
    if is_exact(first):
        return
    while first - exact > 1:
        middle = (first + exact) // 2
        first, exact = (first, middle) if is_exact(middle) else (middle, exact)
    _refusal()(torch.as_tensor(length), 0, first)


def _refuse(length: torch.Tensor, least: int, end: int) -> torch.Tensor:
    if bool(length < least) or bool(length >= end):
        raise ValueError(
            "this model was traced by torch.jit.trace with a text "
            + ("above" if bool(length < least) else "below")
            + " its min_length, beyond which other attention runs: trace it anew, or patched with min_length=0"
        )
    return length  # a trace takes no function without a result


@cache
def _refusal() -> Callable[[torch.Tensor, int, int], torch.Tensor]:
    scripted: Callable[[torch.Tensor, int, int], torch.Tensor] = torch.jit.script(_refuse)
    return scripted
