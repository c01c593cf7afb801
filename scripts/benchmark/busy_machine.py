"""How much faster than SDPA are the methods on a CPU alone, and how much beside one other busy process?

Exact attention has few long steps, clustered attention many short ones, which suffer more where threads wait for each
other. The busy process is started here and ended, whatever happens. Run it without variables that change how threads
wait (`OMP_WAIT_POLICY`, ...), as users do; those that are set are kept with the numbers.

    python -m scripts.benchmark.busy_machine         # writes scripts/results/benchmark_busy_machine.json
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from rich.progress import track

from hf_effattn.measuring.bench import Attend, Inputs, forward, random_inputs
from hf_effattn.measuring.cost import compare
from hf_effattn.patching.methods import make_method

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns, print_table
from ._inputs import HEAD_DIM, HEADS, attention_inputs

METHODS: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 100},
    "i-clustered": {"clusters": 100, "topk": 32},
    "bi-clustered": {"clusters": 64, "topk": 64, "key_clusters": 32},
}
ALONE, BESIDE = "alone", "beside a busy process"
THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_")
# It ends by itself where its parent was killed.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"


@contextmanager
def busy_process() -> Iterator[None]:
    """Another process that never waits, for the time of the block."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def inputs_of(length: int) -> Inputs:
    """Query, key and value of a middle layer of the demo's BERT; random ones where it is not installed."""
    layers = attention_inputs(length)
    if layers:
        return layers[len(layers) // 2]
    return random_inputs(1, length, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))


def measure(length: int, where: str, repeats: int) -> list[dict[str, Any]]:
    """Times of every method at a length, interleaved with SDPA."""
    inputs = inputs_of(length)
    calls: dict[str, Attend] = {"SDPA": F.scaled_dot_product_attention}
    calls |= {name: make_method(name, min_length=0, **settings).run for name, settings in METHODS.items()}
    runs = {name: partial(forward, attend, inputs) for name, attend in calls.items()}
    with busy_process() if where == BESIDE else nullcontext():
        for run in runs.values():
            run()
        times = compare(runs, ("SDPA",), torch.device("cpu"), repeats)
    return [
        {"length": length, "where": where, "method": name}
        | {field: found[field] for field in ("ms", "speedup", "rounds")}
        for name, found in times.items()
    ]


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Speed-ups over SDPA: a row per method and place, a column per length."""
    frame = pd.DataFrame([row for row in rows if row["method"] != "SDPA"])
    return frame.pivot(index=["method", "where"], columns="length", values="speedup")


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "2048,4096,8192,16384",
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 7,
    output: Path = Path(__file__).parents[1] / "results" / "benchmark_busy_machine.json",
) -> None:
    """Measure every length alone and beside a busy process, print the speed-ups and keep all as JSON."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(THREAD_VARIABLES)}
    settings = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "repeats": repeats, "methods": METHODS}
    kept = KeptRuns(output, settings | {"variables": variables})
    wanted = [{"length": int(part), "where": where} for part in lengths.split(",") for where in (ALONE, BESIDE)]
    for run in track(kept.missing(wanted), description="lengths"):
        kept.add(*measure(run["length"], run["where"], repeats))
    print_table(table(kept.rows), output, index=True)


if __name__ == "__main__":
    run_with_help(main, __doc__)
