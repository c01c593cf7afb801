"""What the benchmarks share: options, runs that are kept, and calls that are timed beside each other."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from transformers import PreTrainedModel

from hf_effattn.measuring.cost import compare, peak_memory_added

from ..shared.runs import KeptRuns, device_defaults, print_rows

Lengths = Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")]
Dtypes = Annotated[str | None, typer.Option(help="Comma-separated. Default: float32, on a GPU bfloat16.")]
Repeats = Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")]
CPU = torch.device("cpu")

Rows = list[dict[str, Any]]
Run = Callable[[PreTrainedModel], torch.Tensor]


def numbers(text: str) -> list[int]:
    """Those of a comma-separated option."""
    return [int(part) for part in text.split(",")]


def keep_missing(
    kept: KeptRuns, cases: Iterable[dict[str, Any]], measure: Callable[[dict[str, Any]], Rows], name: str
) -> None:
    """Measure the cases that the file has no rows of, and keep their rows after each."""
    for case in track(kept.missing(cases), description=name.replace("_", " ")):
        kept.add(*measure(case))


def measure_dtypes(
    name: str,
    settings: dict[str, Any],
    cases: Iterable[dict[str, Any]],
    dtypes: str | None,
    output: Path | None,
    measure: Callable[[dict[str, Any], torch.device], Rows],
) -> None:
    """Measure all cases in all dtypes, on the GPU where there is one, keep the rows and print them."""
    device, dtypes, output = device_defaults(f"benchmark_{name}", dtypes, output)
    kept = KeptRuns(output, settings, device)
    runs = [case | {"dtype": dtype} for case in cases for dtype in dtypes.split(",")]
    keep_missing(kept, runs, lambda run: measure(run, device), name)
    print_rows(kept)


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    exact: Collection[str],
    device: torch.device,
    repeats: int,
    prefix: str = "",
) -> dict[str, dict[str, Any]]:
    """What every call costs: `peak_bytes`, and the fields of `compare`, their names behind `prefix`.

    A call that does not run says why: `refused`. It is not compared with the others.
    """
    rows: dict[str, dict[str, Any]] = {name: {} for name in calls}
    running = dict(calls)
    for name, call in calls.items():
        try:  # the warm-up round, too
            rows[name][f"{prefix}peak_bytes"] = peak_memory_added(call, device)[1]
        except Exception as error:  # no memory, or a kernel that this chip has no room for
            rows[name][f"{prefix}refused"] = str(error).splitlines()[0]
            del running[name]
    for name, times in compare(running, exact, device, repeats).items():
        rows[name] |= {f"{prefix}{field}": value for field, value in times.items()}
    return rows


def forward(model: PreTrainedModel, run: Run) -> torch.Tensor:
    """The last hidden state that `run` takes of a model, without gradients."""
    with torch.no_grad():
        return run(model.eval())


def training_step(model: PreTrainedModel, run: Run) -> None:
    """Forward and backward pass, gradients thrown away."""
    run(model.train()).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def time_models(
    models: Mapping[str, PreTrainedModel],
    run: Run,
    device: torch.device,
    repeats: int,
    *,
    trains: bool,
) -> dict[str, dict[str, Any]]:
    """What the passes of whole models cost; the first is what the others are compared with.

    `run` takes the last hidden state of a model; `trains`: whether a step of training is timed, too.
    """
    passes: dict[str, Callable[..., object]] = {"forward": forward} | ({"training": training_step} if trains else {})
    rows: dict[str, dict[str, Any]] = {name: {} for name in models}
    for name, one_pass in passes.items():
        calls = {method: partial(one_pass, model, run) for method, model in models.items()}
        for method, times in time_calls(calls, [next(iter(models))], device, repeats, f"{name}_").items():
            rows[method] |= times
    return rows
