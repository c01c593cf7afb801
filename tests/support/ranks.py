"""Calls on the ranks of a gloo group, each in a process of its own."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scripts.reliability._children import Child

LONGEST_WAIT_SECONDS = 300


def on_ranks(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returns, made by a process of its own in a gloo group of as many.

    Raises:
        RuntimeError: a call raises or does not end; with what every rank says.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            Child(partial(_in_group, call, rank, len(calls), Path(folder) / "store"), Path(folder) / f"said-{rank}")
            for rank, call in enumerate(calls)
        ]
        answers, problems = [], []
        for number, rank in enumerate(ranks):
            try:
                answers.append(rank.result(LONGEST_WAIT_SECONDS))
            except (RuntimeError, TimeoutError) as error:
                problems.append(f"rank {number}: {error}")
    if problems:
        raise RuntimeError("; ".join(problems))
    return answers


def _in_group(call: Callable[[], Any], rank: int, count: int, store: Path) -> Any:
    longest = timedelta(seconds=LONGEST_WAIT_SECONDS)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=count, timeout=longest)
    try:
        return call()
    finally:
        dist.destroy_process_group()
