"""Measures whether memory stays within bounds, and whether threads can share a model.

For every kind of model: the peak resident memory that one pass adds at 1,024 to 65,536 tokens, as the power of the
length that it grows with; what 2,000 passes of varying lengths and 1,000 patches leave behind; eight threads on one
model beside one after the other. Each in a process of its own.

    python -m scripts.trust.memory                 # writes scripts/results/memory.json
"""

import gc
import math
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_effattn

from ..kept.command_line import run_with_help
from ..kept.runs import KeptRuns, print_rows
from ._children import run
from ._tiny import KINDS, ids_of, patch, tiny

LENGTHS = (1024, 4096, 16384, 65536)
PASSES, PATCHES, LONGEST_PASS = 2000, 1000, 192
THREADS, PASSES_OF_A_THREAD = 8, 10
# Between the half and the end: what a cache that is filled once takes is not growth.
GROWTH_ALLOWED = 2 * 2**20


def resident(field: str) -> int:
    """Bytes of a line of `/proc/self/status`: `VmRSS` now, `VmHWM` at most."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")


@torch.no_grad()
def peak(kind: str, length: int) -> dict[str, Any]:
    """Bytes that one pass adds at most."""
    model = tiny(kind, length)
    model(ids_of(64))
    ids = ids_of(length)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    before = resident("VmRSS")
    model(ids)
    return {"bytes": resident("VmHWM") - before, "held": True}


def growth(step: Callable[[int], object], steps: int) -> dict[str, Any]:
    """What the second half of the steps adds, in bytes and in objects of Python."""
    counted = {}
    for number in range(1, steps + 1):
        step(number)
        if number in (steps // 2, steps):
            gc.collect()
            counted[number] = resident("VmRSS"), len(gc.get_objects())
    grown, objects = (last - half for half, last in zip(counted[steps // 2], counted[steps], strict=True))
    return {"steps": steps, "bytes": grown, "objects": objects, "held": grown <= GROWTH_ALLOWED and objects <= 0}


@torch.no_grad()
def passes(kind: str) -> dict[str, Any]:
    """Passes of random lengths."""
    model, lengths = tiny(kind, LONGEST_PASS), random.Random(0)
    return growth(lambda number: model(ids_of(lengths.randint(1, LONGEST_PASS), number)), PASSES)


@torch.no_grad()
def patches(kind: str) -> dict[str, Any]:
    """Patched, run and taken back; the outputs at the end are those of before."""
    model, ids = tiny(kind, 32, patched=False), ids_of(32)
    expected = model(ids).last_hidden_state

    def step(number: int) -> None:
        patch(model, str(KINDS[kind][1]))
        if number % 10 == 0:
            model(ids)
        hf_effattn.unpatch_attention(model)

    found = growth(step, PATCHES)
    return found | {"held": found["held"] and torch.equal(model(ids).last_hidden_state, expected)}


def threads(kind: str) -> dict[str, Any]:
    """Passes of many threads at once, each on texts of its own, beside the same one after the other."""
    model = tiny(kind, LONGEST_PASS)

    @torch.no_grad()
    def outputs(thread: int) -> list[torch.Tensor]:
        lengths = random.Random(thread)
        return [
            model(ids_of(lengths.randint(1, LONGEST_PASS), 100 * thread + number)).last_hidden_state
            for number in range(PASSES_OF_A_THREAD)
        ]

    expected = [outputs(thread) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(outputs, range(THREADS)))
    same = [torch.equal(*pair) for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
    return {"steps": len(same), "equal": sum(same), "held": all(same)}


MEASURES: dict[str, Callable[[str], dict[str, Any]]] = {"passes": passes, "patches": patches, "threads": threads}


def measure(run_of: dict[str, Any]) -> dict[str, Any]:
    """One row, without what identifies it."""
    if run_of["measure"] == "peak":
        return peak(run_of["kind"], run_of["length"])
    return MEASURES[run_of["measure"]](run_of["kind"])


def slope(bytes_at: dict[int, int]) -> float:
    """The power of the length that memory grows with, between the longest length and a quarter of it."""
    longest = max(bytes_at)
    return math.log(bytes_at[longest] / bytes_at[longest // 4], 4)


def main(
    output: Annotated[Path, typer.Option(help="JSON file of the results; rows in it are kept.")] = (
        Path(__file__).parents[1] / "results" / "memory.json"
    ),
) -> None:
    kept = KeptRuns(output, {"lengths": LENGTHS, "longest_pass": LONGEST_PASS, "growth_allowed": GROWTH_ALLOWED})
    runs: list[dict[str, Any]] = [
        {"measure": "peak", "kind": kind, "length": length} for length in LENGTHS for kind in KINDS
    ]
    runs += [
        {"measure": name, "kind": kind}
        for name in MEASURES
        for kind, (_, method) in KINDS.items()
        if name != "patches" or method is not None
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(missing := kept.missing(runs), start=1):
            print(f"{number} of {len(missing)}: {', '.join(map(str, one.values()))}", flush=True)
            kept.add(one | run(lambda one=one: measure(one), Path(folder) / "said"))  # type: ignore[misc]
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
