"""What benchmarks of exact attention share: options, runs that are kept, and a model beside transformers' own code."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from transformers import PreTrainedModel

from hf_effattn import patch_attention
from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio, peak_memory_added

from ..shared.runs import KeptRuns, device_defaults, print_rows
from .attention import EXACT

Dtypes = Annotated[str | None, typer.Option(help="Comma-separated. Default: float32, on a GPU bfloat16.")]
Repeats = Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")]
BLOCKS = "in blocks"


def check_models(models: str, known: dict[str, Any]) -> None:
    """Refuse names of models that there are not."""
    unknown = set(models.split(",")) - known.keys()
    if unknown:
        raise typer.BadParameter(f"models must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")


def measure_all(
    name: str,
    settings: dict[str, Any],
    cases: Iterable[dict[str, Any]],
    dtypes: str | None,
    output: Path | None,
    measure: Callable[[dict[str, Any], torch.device], list[dict[str, Any]]],
) -> None:
    """The rows of all cases and dtypes that the file of a benchmark has not, kept in it, and printed."""
    device, dtypes, output = device_defaults(f"benchmark_{name}", dtypes, output)
    kept = KeptRuns(output, settings, device)
    runs = [case | {"dtype": dtype} for case in cases for dtype in dtypes.split(",")]
    for run in track(kept.missing(runs), description=name.replace("_", " ")):
        kept.add(*measure(run, device))
    print_rows(kept)


def forward(model: PreTrainedModel, once: Callable[[PreTrainedModel], torch.Tensor]) -> torch.Tensor:
    """The last hidden state, without gradients."""
    with torch.no_grad():
        return once(model.eval())


def training_step(model: PreTrainedModel, once: Callable[[PreTrainedModel], torch.Tensor]) -> None:
    """Forward and backward pass, gradients thrown away."""
    once(model.train()).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def beside_own_code(
    case: dict[str, Any],
    exact: PreTrainedModel,
    once: Callable[[PreTrainedModel], torch.Tensor],
    device: torch.device,
    repeats: int,
    *,
    trains: bool,
) -> list[dict[str, Any]]:
    """A row for each way: seconds, how often as fast, the most bytes held, and the relative L2 distance.

    `once` gives the last hidden state of a model; `trains`: whether a step of training is timed, too.
    """
    exact = exact.to(device, getattr(torch, case["dtype"]))
    models = {EXACT: exact, BLOCKS: patch_attention(copy.deepcopy(exact), "exact")}
    outputs = {name: forward(model, once).double() for name, model in models.items()}
    away = (outputs[BLOCKS] - outputs[EXACT]).norm() / outputs[EXACT].norm()
    rows = {name: case | {"method": name} for name in models}
    rows[BLOCKS]["error"] = away.item()
    passes: dict[str, Callable] = {"forward": forward} | ({"training": training_step} if trains else {})
    for name, in_pass in passes.items():
        calls = {method: partial(in_pass, model, once) for method, model in models.items()}
        for method, call in calls.items():  # each warms up as it is weighed
            rows[method][f"{name}_peak_bytes"] = peak_memory_added(call, device)[1]
        seconds = interleaved_rounds(calls, device, repeats)
        for method, taken in seconds.items():
            rows[method] |= {f"{name}_seconds": median(taken), name: median_ratio(seconds[EXACT], taken)}
    return list(rows.values())
