"""What the first look at a GPU does in processes of their own: kernels are compiled, counters read, tests run."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ._budgets import DONE, FAILED, OVERRAN, Found
from ._gpu_layers import Setup, warm_ups

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "scripts.benchmark.gpu_first")
PYTEST = (sys.executable, "-m", "pytest", "-m", "")
POLL_SECONDS = 0.1
# They failed when tests/gpu last ran: sixteen warps asked for more registers than there are, and a later token changed
# earlier outputs by rounding. Both have been mended since.
REAL_SIZES = "tests/gpu/test_real_sizes.py::"
WITH_KERNELS = tuple(
    f"{REAL_SIZES}test_values_and_gradients[torch.bfloat16-{op}, many clusters]"
    for op in ("improved_clustered", "bi_clustered")
)
NOT_YET_PASSED = WITH_KERNELS + tuple(
    f"{REAL_SIZES}test_no_output_depends_on_a_later_token_but_for_rounding[causal {method}]"
    for method in ("clustered", "i-clustered", "bi-clustered")
)


@contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in a group of its own, which is killed at the end if it still runs, and the file of what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            yield process, output
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def printed(command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end, or to that of a budget. Returns its exit status and what it printed."""
    with started(command) as (process, output):
        status = process.wait()
        return status, output.read_text(errors="replace")


def side_by_side(commands: Mapping[str, Sequence[str]], found: Found) -> None:
    """Run commands, one on each processor, and note by name `status`, `seconds` and the last line of one that failed.

    Those that a budget leaves no time for are killed, and noted as that.
    """
    found |= {name: {"status": OVERRAN} for name in commands}
    waiting, running = dict(commands), dict[str, tuple[subprocess.Popen[bytes], Path, float]]()
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                name = next(iter(waiting))
                running[name] = *stack.enter_context(started(waiting.pop(name))), time.monotonic()
            for name, (process, output, begin) in list(running.items()):
                if process.poll() is not None:
                    found[name] = {"status": DONE, "seconds": round(time.monotonic() - begin, 1)}
                    if process.returncode:
                        lines = output.read_text(errors="replace").strip().splitlines()
                        found[name] |= {"status": FAILED, "error": (lines or [f"exit {process.returncode}"])[-1][:300]}
                    del running[name]
            time.sleep(POLL_SECONDS)


def compile_kernels(setup: Setup, found: Found) -> None:
    """Fill Triton's cache with the kernels of all later steps, those of the tests too, outside of what is timed."""
    if not setup.on_gpu:
        found["absent"] = "without a GPU nothing is compiled"
        return
    commands = {name: [*COMMAND, "--warm-up", name] for name in warm_ups(setup)}
    commands |= {test: [*PYTEST, test] for test in WITH_KERNELS}
    side_by_side(commands, found.setdefault("tasks", {}))


def tests(setup: Setup, found: Found) -> None:
    """Those of tests/gpu that have not passed on a GPU yet; without one, whether there are such tests."""
    options = ("-v", "--tb=line") if setup.on_gpu else ("-q", "--collect-only")
    with started([*PYTEST, *options, *NOT_YET_PASSED]) as (process, output):
        try:
            found["exit"] = process.wait()
        finally:  # also when the time is over
            text = output.read_text(errors="replace")
            found["outcomes"] = outcomes(text)
            found["asked_for"] = len(NOT_YET_PASSED)
            found["said"] = text.strip().splitlines()[-1:]


def outcomes(output: str) -> dict[str, str]:
    """What pytest printed of every test that has ended: `"passed"`, `"failed"`, `"error"` or `"skipped"`."""
    lines = re.findall(r"^\S+::(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, flags=re.MULTILINE)
    return {name: word.lower() for name, word in lines}
