"""How far a reader has to walk: from transformers' call to an op, and through `patch_attention`.

A walk follows one argument. It enters every function that is handed the model, or one of its stacks, the first time
that it is called, and goes back with it. Each time the next function lies in another file counts, returns included.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from support.cst_conversions import small_model, tokens
from test_import_direction import LAYERS
from torch import nn

import hf_effattn
from hf_effattn.patching.model_types.stacks import Stack

MOST = 6
MOST_CHANGES, MOST_CHANGES_OF_REPORT = 12, 26
MOST_CLIMBS_OF_REPORT = 2
LIBRARY = str(Path(hf_effattn.__file__).parent)
PATCHING = str(Path(hf_effattn.patching.__file__).parent)
LOCAL: dict[str, Any] = {"segment_length": 4, "window": 4}
CASES = [
    ("bert", "clustered", "clustered_attention", {"clusters": 4}),
    ("bert", "i-clustered", "improved_clustered_attention", {"clusters": 4, "topk": 4}),
    ("bert", "bi-clustered", "bi_clustered_attention", {"clusters": 4, "topk": 4, "key_clusters": 4}),
    ("gpt2", "clustered", "causal_clustered_attention", LOCAL | {"clusters": 4}),
    ("gpt2", "i-clustered", "causal_clustered_attention", LOCAL | {"clusters": 4, "exact_keys": 4}),
    ("gpt2", "bi-clustered", "causal_clustered_attention", LOCAL | {"exact_keys": 4, "key_clusters": 4}),
    *(
        (model_type, "cst", "slice_attention", {"slice_length": 4, "composition": composition})
        for model_type in ("bert", "gpt2")
        for composition in ("merged", "local-global")
    ),
]


@pytest.mark.parametrize(("model_type", "method", "op", "settings"), CASES)
@torch.no_grad()
def test_few_functions_lie_between_transformers_and_the_op(
    model_type: str, method: str, op: str, settings: dict[str, Any]
) -> None:
    model = small_model(model_type)
    hf_effattn.patch_attention(model, method, **settings, min_length=0)
    counts: list[int] = []

    def entered(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == op:
            hops, caller = 1, frame.f_back
            while caller is not None and caller.f_code.co_filename.startswith(PATCHING):
                hops, caller = hops + 1, caller.f_back
            counts.append(hops)

    sys.setprofile(entered)
    try:
        model(tokens())
    finally:
        sys.setprofile(None)
    assert counts
    assert max(counts) <= MOST, f"{max(counts)} functions"


def files_walked(model: nn.Module, walk: Callable[[], object]) -> list[str]:
    """The files of the library along a walk with a model, without repetitions next to each other."""
    files: list[str] = []
    inside: list[FrameType] = []
    known: set[CodeType] = set()

    def follow(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "return" and inside and inside[-1] is frame:
            inside.pop()
        elif event == "call" and code.co_filename.startswith(LIBRARY) and code not in known:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            handed = (frame.f_locals.get(name) for name in names)
            if not any(argument is model or isinstance(argument, Stack) for argument in handed):
                return
            known.add(code)
            inside.append(frame)
        else:
            return
        if inside and files[-1:] != [inside[-1].f_code.co_filename]:
            files.append(inside[-1].f_code.co_filename)

    sys.setprofile(follow)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return files


def test_patching_goes_through_few_files() -> None:
    model = small_model("bert")
    files = files_walked(model, lambda: hf_effattn.patch_attention(model, "bi-clustered", min_length=0))
    assert files[0] == files[-1] == hf_effattn.patching.patch.__file__
    assert len(files) - 1 <= MOST_CHANGES, "\n".join(files)


def climbs(files: list[str]) -> list[tuple[str, str]]:
    """Where a walk returns to a room above, other than the one that it began in and comes back to each time."""
    rooms = [Path(file).relative_to(LIBRARY).parts[0] for file in files]
    return [(left, to) for left, to in pairwise(rooms) if LAYERS.index(to) < LAYERS.index(left) and to != rooms[0]]


def test_a_report_goes_through_few_files_and_climbs_at_most_twice() -> None:
    model, inputs = small_model("bert"), {"input_ids": tokens()}
    files = files_walked(model, lambda: hf_effattn.report(model, inputs, "bi-clustered", repeats=1, progress=False))
    assert len(files) - 1 <= MOST_CHANGES_OF_REPORT, "\n".join(files)
    assert len(climbs(files)) <= MOST_CLIMBS_OF_REPORT, "\n".join(files)
