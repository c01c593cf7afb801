"""Measures whether memory stays within bounds, and whether threads can share a model.

For every kind of model: the peak resident memory that one pass adds at 1,024 to 65,536 tokens, as the power of the
length that it grows with; what 2,000 passes of varying lengths and 1,000 patches leave behind; eight threads on one
model beside one after the other. Each in a process of its own.

What is left behind is counted where it was allocated, as bytes of malloc, objects and blocks of Python: resident
memory also has what malloc keeps for later. oneDNN keeps a compiled kernel for each new shape, so each length passes
once before the count; exact attention is counted beside, once without that cache.

    python -m scripts.reliability.memory                 # writes scripts/results/memory.json
"""

import ctypes
import gc
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_effattn

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._children import run
from ._tiny import KINDS, ids_of, patch, tiny

LENGTHS = (1024, 4096, 16384, 65536)
PASSES, PATCHES, LONGEST_PASS = 2000, 1000, 192
THREADS, PASSES_OF_A_THREAD = 8, 10
# A step between the half and the end: a kept tensor of one number is some 400 bytes and 1.3 blocks.
ALLOWED = {"bytes": 64.0, "blocks": 0.5, "objects": 0.5}
# What is counted beside our methods: the same model, not patched.
CONTROLS = {"BERT, exact": "BERT, clustered", "GPT-2, exact": "GPT-2, clustered"}
WITHOUT_CACHE = "BERT, exact, without oneDNN's cache"
LONG = {"BERT, i-clustered": 10_000}


def resident(field: str) -> int:
    """Bytes of a line of `/proc/self/status`: `VmRSS` now, `VmHWM` at most."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated() -> int:
    """Bytes that malloc has handed out and that were not freed; of glibc 2.33 or newer."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocInfo
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


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
    """What the second half of the steps adds: bytes, objects and blocks of Python, and resident memory."""
    counted: dict[int, dict[str, int]] = {}
    for number in range(1, steps + 1):
        step(number)
        if number in (steps // 2, steps):
            gc.collect()
            held_now = {"bytes": allocated(), "blocks": sys.getallocatedblocks(), "objects": len(gc.get_objects())}
            counted[number] = held_now | {"resident": resident("VmRSS")}
    half, last = counted[steps // 2], counted[steps]
    grown = {name: last[name] - half[name] for name in last}
    held = all(grown[name] <= allowed * (steps - steps // 2) for name, allowed in ALLOWED.items())
    return {"steps": steps, **grown, "held": held}


@torch.no_grad()
def passes(kind: str, steps: int = PASSES) -> dict[str, Any]:
    """Passes of random lengths, after one of each, whose bytes are counted apart."""
    if kind == WITHOUT_CACHE:
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"  # read when this process first multiplies
        kind = "BERT, exact"
    model, lengths = tiny(CONTROLS.get(kind, kind), LONGEST_PASS, patched=kind not in CONTROLS), random.Random(0)
    model(ids_of(LONGEST_PASS))
    before = allocated()
    for length in range(1, LONGEST_PASS + 1):
        model(ids_of(length))
    gc.collect()
    first = allocated() - before
    return {"first": first} | growth(lambda number: model(ids_of(lengths.randint(1, LONGEST_PASS), number)), steps)


@torch.no_grad()
def patches(kind: str, steps: int = PATCHES) -> dict[str, Any]:
    """Patched, run and taken back; the outputs at the end are those of before. A control is only run."""
    model, ids = tiny(CONTROLS.get(kind, kind), LONGEST_PASS, patched=False), ids_of(LONGEST_PASS)
    expected = model(ids).last_hidden_state

    def step(number: int) -> None:
        if kind not in CONTROLS:
            patch(model, str(KINDS[kind][1]))
        if number % 10 == 0:
            model(ids)
        if kind not in CONTROLS:
            hf_effattn.unpatch_attention(model)

    grown = growth(step, steps)
    return grown | {"held": grown["held"] and torch.equal(model(ids).last_hidden_state, expected)}


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
        threaded = list(pool.map(outputs, range(THREADS)))
    same = [torch.equal(*pair) for rows in zip(threaded, expected, strict=True) for pair in zip(*rows, strict=True)]
    return {"steps": len(same), "equal": sum(same), "held": all(same)}


def planned() -> list[dict[str, Any]]:
    """What identifies each row."""
    patchable = [kind for kind, (_, method) in KINDS.items() if method is not None]
    return [
        *({"measure": "peak", "kind": kind, "length": length} for length in LENGTHS for kind in KINDS),
        *({"measure": "passes", "kind": kind, "steps": PASSES} for kind in (*KINDS, *CONTROLS, WITHOUT_CACHE)),
        *({"measure": "passes", "kind": kind, "steps": steps} for kind, steps in LONG.items()),
        *({"measure": "patches", "kind": kind, "steps": PATCHES} for kind in (*patchable, *CONTROLS)),
        *({"measure": "threads", "kind": kind} for kind in KINDS),
    ]


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {call.__name__: call for call in (peak, passes, patches, threads)}


def measure(run_of: dict[str, Any]) -> dict[str, Any]:
    """One row, without what identifies it."""
    arguments = {name: value for name, value in run_of.items() if name != "measure"}
    return MEASURES[run_of["measure"]](**arguments)


def slope(bytes_at: dict[int, int]) -> float:
    """The power of the length that memory grows with, between the longest length and a quarter of it."""
    longest = max(bytes_at)
    return math.log(bytes_at[longest] / bytes_at[longest // 4], 4)


def main(
    output: Annotated[Path, typer.Option(help="JSON file of the results; rows in it are kept.")] = (
        RESULTS / "memory.json"
    ),
) -> None:
    kept = KeptRuns(output, {"lengths": LENGTHS, "longest_pass": LONGEST_PASS, "allowed_of_a_step": ALLOWED})
    with tempfile.TemporaryDirectory() as folder:
        for number, trial in enumerate(missing := kept.missing(planned()), start=1):
            print(f"{number} of {len(missing)}: {', '.join(map(str, trial.values()))}", flush=True)
            kept.add(trial | run(lambda trial=trial: measure(trial), Path(folder) / "said"))  # type: ignore[misc]
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
