"""Random texts for a model, and a model with larger queries: what the properties of models are checked on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from .properties import same

LENGTH = 23  # at most
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TextCase:
    """One forward pass; `exponent`: the power of ten that the queries are multiplied by."""

    seed: int
    B: int
    N: int
    dtype: torch.dtype
    padding: str
    exponent: float
    all_equal: bool


def drawn_text(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a `TextCase`."""
    return {
        "seed": draw(st.integers(0, 2**20)),
        "B": draw(st.sampled_from((1, 2, 3))),
        "N": draw(st.integers(1, LENGTH)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "padding": draw(st.sampled_from(("none", "left", "right"))),
        "exponent": draw(st.floats(-4, 4, width=16)),
        "all_equal": draw(st.sampled_from((False, False, True))),
    }


def text_of(case: TextCase, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(B, N)`; of the last text some are padding."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.B, 1 if case.all_equal else case.N
    ids = torch.randint(5, vocabulary, shape, generator=generator).repeat(1, case.N if case.all_equal else 1)
    mask = torch.ones_like(ids)
    if case.padding != "none":
        mask[-1, : int(torch.randint(case.N, (1,), generator=generator))] = 0
        mask = mask if case.padding == "left" else mask.flip(1)
    return ids, mask


@contextmanager
def multiplied(parts: list[torch.Tensor], factor: float) -> Iterator[None]:
    """Parts of a model's weights, times a number for a while."""
    kept = [rows.clone() for rows in parts]
    for rows in parts:
        rows.mul_(factor)
    try:
        yield
    finally:
        for rows, copy in zip(parts, kept, strict=True):
            rows.copy_(copy)


def check_influence(case: TextCase, run: Run, ids: torch.Tensor, mask: torch.Tensor, output: torch.Tensor) -> None:
    """Neither what padding holds nor the other texts of the batch change a bit."""
    assert same(run(ids.masked_fill(mask == 0, 7)), output), "padding has influence"
    if case.B > 1:
        item = case.seed % case.B
        other = ids.clone()
        other[torch.arange(case.B) != item] = 9
        assert same(run(other)[item], output[item]), "another text has influence"
