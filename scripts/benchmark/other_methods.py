"""Which approximation of bidirectional attention reaches an error in the least time on a CPU? Ours, and others'.

Error and time on the queries, keys and values which the pretrained BERT of the demo makes of held-out novels, its
positions repeated beyond 512 tokens: the error is the relative L2 error of the attention output, all heads of a layer
together, the mean of its six layers; so is the time, with all clustering, hashing and choosing, as a share of SDPA's
in the same rounds. What each method does: `scripts/benchmark/_other_methods.py`.

    python -m scripts.benchmark.other_methods            # writes scripts/results/benchmark_other_methods.{json,png}
    python -m scripts.benchmark.other_methods --few --output scripts/results/benchmark_other_methods_avx2.json

The oracle chooses every query's true top keys from all scores and has no time: its errors are measured on some of the
queries. Of a few settings of ours both passes are timed, too, for training. A length that the output file holds is not
measured again.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from rich.progress import track

from hf_effattn.measuring.bench import Attend, Inputs, exact_output, forward, forward_backward
from hf_effattn.measuring.cost import interleaved_rounds, median
from hf_effattn.measuring.errors import relative_error
from hf_effattn.measuring.json_numbers import finite_or_none
from hf_effattn.patching.methods import make_method

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows, print_table
from . import _other_methods
from ._inputs import HEAD_DIM, HEADS, held_out_inputs
from ._plots import draw_other_methods
from ._timing import CPU, Lengths, Rows, numbers

TARGETS = (0.3, 0.2, 0.15, 0.1, 0.075, 0.05, 0.03, 0.02)
OURS = ("bi-clustered", "bi-clustered, no exact heads")
ORACLE = "oracle: true top keys"
TRAINING = "training"
# Queries of every head on which the oracle's error is measured.
ORACLE_QUERIES = 512

Settings = dict[str, Any]
Name = tuple[str, str]  # of a method and a setting
SDPA: Name = ("SDPA", "")


def grid(**values: tuple[Any, ...]) -> list[Settings]:
    """Every combination."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def rows_of(names: str, *values: tuple[int, ...]) -> list[Settings]:
    """Settings with these names, from their values."""
    return [dict(zip(names.split(), chosen, strict=True)) for chosen in values]


def _method(name: str, **fixed: Any) -> Callable[..., Attend]:
    return lambda **settings: make_method(name, min_length=0, **fixed, **settings).run


def _other(function: Callable[..., torch.Tensor], **fixed: Any) -> Callable[..., Attend]:
    return lambda **settings: partial(function, **fixed, **settings)


SIZES = rows_of(
    "clusters topk key_clusters",
    (25, 16, 16), (32, 32, 16), (32, 32, 32), (32, 64, 32), (50, 32, 32), (50, 64, 32), (64, 64, 32), (64, 64, 64),
    (64, 128, 64), (100, 64, 64), (100, 128, 64), (128, 64, 64), (128, 128, 64), (128, 128, 128), (200, 128, 128),
    (256, 128, 128), (256, 256, 128), (400, 256, 256),
)  # fmt: skip
# Order zero needs more exact keys for the same error.
LARGER = rows_of(
    "clusters topk key_clusters",
    (32, 128, 32), (40, 192, 32), (40, 384, 32), (64, 256, 64), (64, 384, 128), (100, 384, 128), (200, 512, 256),
)  # fmt: skip
IMPROVED = grid(clusters=(25, 50, 100, 200, 400), topk=(64, 192, 384))
SUMMARIES = grid(clusters=(32, 64, 128, 256), key_clusters=(32, 64, 128))
# With more heads exact there is less error, for which smaller clusters would take longer.
SPARED = [
    sizes | {"max_predicted_error": least}
    for least in (0.1, 0.2, 0.3)
    for sizes in rows_of(
        "clusters topk key_clusters", (32, 64, 32), (64, 128, 64), (100, 128, 64), (128, 128, 128), (200, 256, 128)
    )
]
# How a curve's settings become something to call, and the settings.
CURVES: dict[str, tuple[Callable[..., Attend], list[Settings]]] = {
    OURS[0]: (_method("bi-clustered"), SIZES + SPARED),
    OURS[1]: (_method("bi-clustered", max_predicted_error=None), SIZES),
    "bi-clustered, order zero": (_other(_other_methods.order_zero), SIZES + LARGER),
    "i-clustered, K-means": (_method("i-clustered"), IMPROVED),
    "i-clustered, LSH": (_method("i-clustered", clustering="lsh", iterations=10, bits=32), IMPROVED),
    "tilted summaries (MuSe)": (_other(_other_methods.tilted), SUMMARIES),
    "tilted summaries, dipole": (_other(_other_methods.tilted, dipole=True), SUMMARIES),
    "WildCat": (
        _other(_other_methods.wildcat),
        [
            sizes | {"temperature": temperature}
            for temperature in (2.0, 4.0, 8.0)
            for sizes in rows_of("coreset bins", (128, 4), (256, 8), (512, 8), (512, 16), (1024, 32), (2048, 32))
        ],
    ),
    "HyperAttention": (
        _other(_other_methods.hyper_attention),
        rows_of("block samples", (64, 64), (128, 128), (128, 512), (256, 256), (256, 1024), (512, 512), (512, 2048)),
    ),
    "Nyströmformer": (_other(_other_methods.nystromformer), grid(landmarks=(32, 64, 128, 256, 512))),
}  # fmt: skip
ORACLE_TOPK = (64, 256, 1024)
# What is timed backward, too, and on the README's second processor, cheap to dear.
FEW: dict[str, list[Settings]] = {
    "i-clustered, K-means": [{"clusters": 25, "topk": 64}, {"clusters": 100, "topk": 64}],
    OURS[0]: rows_of("clusters topk key_clusters", (32, 32, 32), (64, 64, 32), (64, 64, 64), (128, 128, 64)),
}


def label(settings: Settings) -> str:
    """Short name of a setting."""
    return " ".join(f"{name}={value:g}" for name, value in settings.items())


def settings_to_try(method: str, length: int) -> list[Settings]:
    """What of a method's settings is smaller than the text: at most a sixteenth in clusters, half in chosen keys."""
    most = {"clusters": length // 16, "key_clusters": length // 16, "block": length // 4}
    return [
        settings
        for settings in CURVES[method][1]
        if all(not isinstance(size, int) or size <= most.get(name, length // 2) for name, size in settings.items())
    ]


def measure(length: int, repeats: int) -> Rows:
    """Errors and times of all settings at a length, in the same rounds as SDPA, and the oracle's errors."""
    layers = held_out_inputs(length)
    calls = {
        (method, label(settings)): [make(**settings)] * len(layers)
        for method, (make, _) in CURVES.items()
        for settings in settings_to_try(method, length)
    }
    rows = measured_rows(length, calls, layers, repeats)
    mark_frontier(rows)
    return finite_or_none(rows + oracle_errors(length, layers))


def measure_few(length: int, repeats: int) -> Rows:
    """Errors and times of the few settings that the README shows."""
    layers = held_out_inputs(length)
    return measured_rows(length, few_calls(len(layers)), layers, repeats)


def mark_frontier(rows: Rows) -> None:
    """Say of every row of one length whether no setting of its method is faster and as exact."""
    for row in rows:
        same_method = [other for other in rows if other["method"] == row["method"]]
        row["on_frontier"] = row["error"] is not None and not any(
            other["ms"] < row["ms"] and other["error"] <= row["error"] for other in same_method
        )


def measured_rows(
    length: int, calls: dict[Name, list[Attend]], layers: list[Inputs], repeats: int, *, training: bool = False
) -> Rows:
    """A row for every call, which has what each layer runs: the error of its output, and its time beside SDPA's.

    `training`: the time of both passes.
    """
    exact = [exact_output(inputs) for inputs in layers]
    runs = track(calls.items(), description=f"{length:,} tokens: errors")
    errors = {name: errors_of_layers(attends, layers, exact) for name, attends in runs}
    if training:
        for inputs in layers:
            for rows in inputs:
                rows.requires_grad_()
        for attends in calls.values():
            forward_backward(attends[0], layers[0])
    times = times_of_layers(calls, layers, repeats, forward_backward if training else forward)
    named = {"length": length} | ({"part": TRAINING} if training else {})
    return [
        named
        | {"method": name[0], "name": name[1], **times[name]}
        | {"error": sum(errors[name]) / len(layers), "layer_errors": errors[name]}
        for name in calls
    ]


@torch.no_grad()
def errors_of_layers(attends: list[Attend], layers: list[Inputs], exact: list[torch.Tensor]) -> list[float]:
    """Of every layer the error of all its heads together."""
    runs = zip(attends, layers, exact, strict=True)
    return [relative_error(expected, attend(*inputs)) for attend, inputs, expected in runs]


def times_of_layers(
    calls: dict[Name, list[Attend]],
    layers: list[Inputs],
    repeats: int,
    one_pass: Callable[[Attend, Inputs], object],
) -> dict[Name, dict[str, float]]:
    """Of every call, by layer, which has run before, the time of a layer beside SDPA's: means of medians of rounds."""
    every = {SDPA: [F.scaled_dot_product_attention] * len(layers)} | calls
    seconds = dict.fromkeys(every, 0.0)
    for layer, inputs in enumerate(track(layers, description="times")):
        runs = {" | ".join(name): partial(one_pass, attends[layer], inputs) for name, attends in every.items()}
        rounds = interleaved_rounds(runs, CPU, repeats)
        for name in every:
            seconds[name] += (median(rounds[" | ".join(name)]) or 0.0) / len(layers)
    return {
        name: {"ms": 1e3 * seconds[name], "sdpa_ms": 1e3 * seconds[SDPA], "speedup": seconds[SDPA] / seconds[name]}
        for name in calls
    }


def measure_training(length: int, repeats: int) -> Rows:
    """Times of both passes of a few settings, in the same rounds as SDPA's."""
    layers = held_out_inputs(length)
    rows = measured_rows(length, few_calls(len(layers)), layers, repeats, training=True)
    return [row | {"error": None} for row in rows]  # those of the forward rows


def few_calls(layers: int) -> dict[Name, list[Attend]]:
    """The few settings, the same in every layer."""
    return {
        (method, label(settings)): [CURVES[method][0](**settings)] * layers
        for method, chosen in FEW.items()
        for settings in chosen
    }


def oracle_errors(length: int, layers: list[Inputs]) -> Rows:
    """Rows of the oracle, of evenly spread queries."""
    count = min(ORACLE_QUERIES, length)
    some = torch.arange(count) * length // count
    exact = [exact_output(inputs) for inputs in layers]
    rows = []
    for topk in (size for size in ORACLE_TOPK if size <= length // 2):
        errors = [
            relative_error(output[:, :, some], _other_methods.top_keys(query[:, :, some], key, value, topk=topk))
            for output, (query, key, value) in zip(exact, layers, strict=True)
        ]
        named = {"length": length, "method": ORACLE, "name": f"topk={topk}", "ms": None, "speedup": None}
        rows.append(named | {"error": sum(errors) / len(errors), "layer_errors": errors, "on_frontier": False})
    return rows


def fastest(rows: Rows, length: int, target: float) -> dict[str, dict[str, Any]]:
    """The row with the largest forward speed-up of every method that stays within an error at a length."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        timed = row["length"] == length and "part" not in row and row["speedup"]
        within = timed and row["error"] is not None and row["error"] <= target
        if within and row["speedup"] > best.get(row["method"], {"speedup": 0.0})["speedup"]:
            best[row["method"]] = row
    return best


def best_settings(rows: Rows) -> pd.DataFrame:
    """A row per length, error and method that reaches it: how much faster than SDPA, and the setting."""
    return pd.DataFrame(
        {
            "tokens": length, "error at most": target, "method": method, "times SDPA's speed": row["speedup"],
            "error": row["error"], "setting": row["name"],
        }
        for length, target in product(sorted({row["length"] for row in rows}), TARGETS)
        for method, row in sorted(fastest(rows, length, target).items(), key=lambda item: -item[1]["speedup"])
    )  # fmt: skip


def main(
    lengths: Lengths = "4096,8192,16384",
    repeats: Annotated[int, typer.Option(help="Rounds of timing for each layer; short calls get more.")] = 2,
    few: Annotated[bool, typer.Option(help="Only the forward pass of what the README shows.")] = False,
    output: Path = RESULTS / "benchmark_other_methods.json",
) -> None:
    """Measure every method, print the fastest setting for each error, and keep all as JSON and as a plot beside it."""
    kept = KeptRuns(output, {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "repeats": repeats})
    for run in kept.missing([{"length": length} for length in numbers(lengths)]):
        kept.add(*(measure_few if few else measure)(run["length"], repeats))
    if few:
        print_rows(kept)
        return
    for run in kept.missing([{"length": length, "part": TRAINING} for length in numbers(lengths)]):
        kept.add(*measure_training(run["length"], repeats))
    draw_other_methods(
        kept.rows, output.with_suffix(".png"), f"{kept.environment['device_name']}, float32, H=12, D=32"
    )
    print_table(best_settings(kept.rows), output, output.with_suffix(".png"))


if __name__ == "__main__":
    run_with_help(main, __doc__)
