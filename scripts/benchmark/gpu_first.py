"""The first look at a GPU: one command of seven minutes, whose numbers say what to do next there.

What a launch costs on the host, how long every kernel of a layer takes and why, what users get, whether the kernels
are right. Every step has a budget of seconds and is kept as JSON when it ends, fails or overruns; the next one begins.
What the file has from this machine and code is not measured again. At the end it prints what follows from the numbers.

    python -m scripts.benchmark.gpu_first                         # writes scripts/results/gpu/first.json
    python -m scripts.benchmark.gpu_first --read first.json       # prints what follows from it, and measures nothing
    python -m scripts.benchmark.gpu_first --steps durations,layers --again    # measures these two anew
    python -m scripts.benchmark.gpu_first --rehearse              # all of it, tiny, without a GPU
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..shared.command_line import check_names, run_with_help
from ..shared.runs import RESULTS, KeptRuns
from ._budgets import RESTART, DeviceLostError, Found, Step, last_rows, run_steps
from ._gpu_decisions import decisions
from ._gpu_kernels import cold_code, counters, durations
from ._gpu_launches import launches, static_launcher
from ._gpu_layers import COMPILE, DURATIONS, Setup, of_one_length, rehearsal, warm_ups
from ._gpu_processes import ROOT, compile_kernels, tests
from ._gpu_walls import causal, crossovers, exact, layers, machine, models

# The budgets are 390 seconds in all; an import takes up to 25 more.
STEPS: dict[str, tuple[float, Callable[[Setup, Found], None]]] = {
    "machine": (10, machine),
    "exact": (20, exact),
    "launches": (15, launches),
    "static launcher": (5, static_launcher),
    COMPILE: (70, compile_kernels),
    DURATIONS: (40, durations),
    "counters": (40, counters),
    "cold code": (25, cold_code),
    "layers": (45, layers),
    "models": (30, models),
    "causal": (30, causal),
    "tests": (40, tests),
    "crossovers": (20, crossovers),
}
SECONDS = 395.0
REHEARSED = ROOT / ".cache" / "gpu-first-rehearsal.json"
# Code that the numbers depend on, and what only reads them.
MEASURED = ("hf_effattn/**/*.py", "scripts/benchmark/*.py", "tests/gpu/*.py")
ONLY_READ = ("_gpu_decisions.py", "_gpu_tables.py")


def hash_of_code() -> str:
    """Of every Python file that a number here depends on: a checkout without Git has one, too."""
    files = {path for pattern in MEASURED for path in ROOT.glob(pattern)}
    code = hashlib.sha256()
    for path in sorted(files - {ROOT / "scripts" / "benchmark" / name for name in ONLY_READ}):
        code.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return code.hexdigest()[:12]


def commit() -> str | None:
    """What is checked out; None without Git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def answers(device: torch.device) -> bool:
    """Whether the device still computes."""
    try:
        return torch.ones(1, device=device).add(1).item() == 2
    except RuntimeError:
        return False


def steps_of(setup: Setup) -> list[Step]:
    """The steps on a device; each finds in `setup.results` what those before it found."""

    def measure(name: str, function: Callable[[Setup, Found], None], found: Found) -> None:
        setup.results[name] = found
        function(setup, found)

    return [Step(name, seconds, partial(measure, name, function)) for name, (seconds, function) in STEPS.items()]


def launch_into_nothing() -> None:
    """From now on Triton compiles for an H100, and its driver's launch does nothing."""
    sys.path.append(str(ROOT / "tests" / "compile"))
    import_module("compile_kernels").start("sm_90", import_module("host").IdleGpu)


def main(
    output: Annotated[Path | None, typer.Option(help="Default: scripts/results/gpu/first.json.")] = None,
    seconds: Annotated[float, typer.Option(help="Of all steps; one that would end later is left out.")] = SECONDS,
    steps: Annotated[str | None, typer.Option(help=f"Comma-separated: {', '.join(STEPS)}. Default: all.")] = None,
    again: Annotated[bool, typer.Option(help="Measure what the file has, too.")] = False,
    read: Annotated[Path | None, typer.Option(help="Print what follows from this file, and measure nothing.")] = None,
    warm_up: Annotated[str | None, typer.Option(help="Only compile the kernels of these layers.")] = None,
    length: Annotated[int | None, typer.Option(help="Of the layers of --warm-up: only so many tokens.")] = None,
    rehearse: Annotated[bool, typer.Option(help="Tiny sizes on the CPU, and no launch reaches a GPU.")] = False,
) -> None:
    """Measure what is missing, keep it as JSON after every step, and print what follows from it."""
    end = time.monotonic() + seconds
    if read is not None:
        print(decisions(json.loads(read.read_text(encoding="utf-8"))["rows"]))
        return
    if not rehearse and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU that torch can use; --rehearse runs without one")
    setup = rehearsal() if rehearse else Setup(torch.device("cuda", torch.cuda.current_device()))
    if warm_up is not None:
        calls = warm_ups(setup if length is None else of_one_length(setup, length))
        check_names("layers", warm_up.split(","), calls)
        for name in warm_up.split(","):
            calls[name]()
        return
    output = output or (REHEARSED if rehearse else RESULTS / "gpu" / "first.json")
    if rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        launch_into_nothing()
    check_names("steps", (steps or "").split(",") if steps else (), STEPS)
    chosen = [step for step in steps_of(setup) if steps is None or step.name in steps.split(",")]
    code = hash_of_code()
    kept = keep_of(output, code, setup, rehearse)
    setup.results.update({name: row["found"] for name, row in last_rows(kept.rows).items()})
    names = [step.name for step in chosen] if again else []
    about: dict[str, Any] = {"code": code, "commit": commit(), "rehearsal": rehearse}
    try:
        late = run_steps(chosen, kept, end, partial(answers, setup.device), about, names)
    except DeviceLostError as lost:
        print(f"the GPU does not answer after {lost}: the same command goes on behind it")
        raise typer.Exit(RESTART) from None
    print(decisions(kept.rows))
    if late:
        print(f"no time was left for: {', '.join(late)}; the same command measures them")
    print(f"written: {output}")


def keep_of(output: Path, code: str, setup: Setup, rehearse: bool) -> KeptRuns:
    """The file, whose rows count where this machine measured this code; others are gone with the next step."""
    kept = KeptRuns(output, {"rehearsal": rehearse}, setup.device)
    same = {"code": code} | kept.machine
    kept.counts = lambda row: same.items() <= row.items()
    kept.read()
    return kept


if __name__ == "__main__":
    run_with_help(main, __doc__)
