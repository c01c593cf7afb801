"""Which method reaches an error in the least time: many settings of each, on a pretrained model's real inputs.

Times (clustering included, interleaved with exact attention) and errors are both taken on the queries, keys and
values which the pretrained BERT of the demo makes of novels, its positions repeated beyond 512 tokens.

    python scripts/benchmark_frontier.py          # writes scripts/results/benchmark_frontier.{json,png}

A length that the output file holds is not measured again.
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
from attention_plots import draw_frontier
from benchmark_attention import EXACT
from kept_runs import KeptRuns
from real_attention import attention_inputs
from rich.progress import track

from hf_effattn.patching.methods import MethodSettings, make_settings, run_method
from hf_effattn.reporting.bench import forward
from hf_effattn.reporting.cost import interleaved_rounds, median, median_ratio
from hf_effattn.reporting.errors import relative_error

CLUSTERS = (32, 40, 50, 64, 100, 200)
TOPK = (64, 128, 192, 256, 384)
KEY_CLUSTERS = (32, 64, 128)
TARGETS = (0.3, 0.2, 0.15, 0.1, 0.075, 0.05)


def settings_to_try(length: int) -> list[MethodSettings]:
    """Every combination; more query clusters than a sixteenth of the tokens save nothing."""
    clusters = [count for count in CLUSTERS if count <= length // 16]
    tried = [
        make_settings("i-clustered", clusters=count, topk=topk, min_length=0)
        for count, topk in product(clusters, TOPK)
    ]
    return tried + [
        make_settings("bi-clustered", clusters=count, topk=topk, key_clusters=key_clusters, min_length=0)
        for count, topk, key_clusters in product(clusters, TOPK, KEY_CLUSTERS)
    ]


def label(settings: MethodSettings) -> str:
    """Short name of a setting."""
    letters = {"C": "clusters", "k": "topk", "G": "key_clusters"}
    values = settings.to_dict()
    return " ".join(
        [settings.method] + [f"{letter}={values[name]}" for letter, name in letters.items() if name in values]
    )


def measure_length(length: int, repeats: int, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Time and error of every setting at one length."""
    layers = attention_inputs(length, device, dtype)
    middle = layers[len(layers) // 2]
    tried = {label(settings): settings for settings in settings_to_try(length)}
    calls = {EXACT: F.scaled_dot_product_attention} | {
        name: partial(run_method, settings) for name, settings in tried.items()
    }
    runs = {name: partial(forward, attend, middle) for name, attend in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    nothing = dict.fromkeys(runs, lambda: None)
    for call in runs.values():
        call()
    interleaved_rounds(runs, device, repeats, before=nothing, seconds=seconds, after_call=lambda: None)
    expected = [
        forward(F.scaled_dot_product_attention, (query.float(), key.float(), value.float()))
        for query, key, value in layers
    ]

    def error(attend: Callable[..., torch.Tensor]) -> float:
        outputs = [forward(attend, inputs) for inputs in layers]
        return sum(map(relative_error, expected, outputs)) / len(layers)

    rows = [
        {
            "length": length,
            "method": settings.method,
            "name": name,
            "clusters": settings.to_dict()["clusters"],
            "topk": settings.to_dict()["topk"],
            "key_clusters": settings.to_dict().get("key_clusters"),
            "ms": 1e3 * (median(seconds[name]) or 0.0),
            "rounds": len(seconds[name]),
            "speedup": median_ratio(seconds[EXACT], seconds[name]),
            "error": error(calls[name]),
        }
        for name, settings in tried.items()
    ]
    mark_frontier(rows)
    return rows


def mark_frontier(rows: list[dict[str, Any]]) -> None:
    """Say of every row of one length whether no setting of its method is faster and as exact."""
    for row in rows:
        rivals = [other for other in rows if other["method"] == row["method"]]
        row["on_frontier"] = not any(other["ms"] < row["ms"] and other["error"] <= row["error"] for other in rivals)


def least_times(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The fastest setting of each method that stays below each error."""
    found = []
    for length, target in product(sorted({row["length"] for row in rows}), TARGETS):
        best: dict[str, Any] = {"length": length, "error at most": target}
        for method in dict.fromkeys(row["method"] for row in rows):
            reached = [
                row for row in rows if (row["length"], row["method"]) == (length, method) and row["error"] <= target
            ]
            if reached:
                fastest = min(reached, key=lambda row: row["ms"])
                best |= {f"{method} ms": fastest["ms"], f"{method}: times faster": fastest["speedup"]}
                best[f"{method} setting"] = fastest["name"]
        found.append(best)
    return pd.DataFrame(found)


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "4096,8192",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 8,
    output: Path = Path(__file__).parent / "results" / "benchmark_frontier.json",
) -> None:
    """Measure every setting, print the least time for each error, and keep all as JSON and as a plot beside it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"batch": 1, "heads": 12, "head_dim": 32, "dtype": dtype, "repeats": repeats}
    kept = KeptRuns(output, settings, device)
    wanted = [{"length": int(part)} for part in lengths.split(",")]
    for run in track(kept.missing(wanted), description="lengths"):
        kept.add(*measure_length(run["length"], repeats, device, getattr(torch, dtype)))
    draw_frontier(kept.rows, output.with_suffix(".png"), f"{kept.environment['device_name']}, {dtype}, H=12, D=32")
    with pd.option_context("display.width", 220, "display.max_columns", 30, "display.precision", 3):
        print(least_times(kept.rows).to_string(index=False))
    print(f"written: {output} and {output.with_suffix('.png')}")


if __name__ == "__main__":
    typer.run(main)
