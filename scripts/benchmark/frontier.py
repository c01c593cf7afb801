"""Which method reaches an error in the least time? Many settings of each, on a pretrained model's real inputs.

Times (clustering included, interleaved with the exact kernels of the machine) and errors are both taken on the
queries, keys and values which the pretrained BERT of the demo makes of novels, its positions repeated beyond 512
tokens. Where that is not at hand (`scripts/benchmark/_inputs.py`) the inputs are random, and the errors null.

    python -m scripts.benchmark.frontier          # writes scripts/results/benchmark_frontier.json

A length that the output file holds is not measured again.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from hf_effattn.measuring.bench import exact_output, forward, measure_shape, random_inputs
from hf_effattn.measuring.candidates import name_settings
from hf_effattn.measuring.errors import relative_error
from hf_effattn.patching.methods import Method, make_method

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table
from ._inputs import HEAD_DIM, HEADS, attention_inputs
from ._timing import Lengths, Repeats, Rows, keep_missing, numbers

CLUSTERS = (32, 64, 100, 200)
TOPK = (32, 64, 192, 384)
# Of bi-clustered attention, whose heads with a large predicted error are exact.
BI_CLUSTERS = (24, 32, 48, 64, 96, 128)
BI_TOPK = (32, 64, 96, 128)
KEY_CLUSTERS = (32, 64)
TARGETS = (0.3, 0.2, 0.15, 0.1, 0.075, 0.05, 0.03)


def make(clusters: int, topk: int, key_clusters: int | None) -> Method:
    """I-clustered attention, with `key_clusters` bi-clustered."""
    if key_clusters is None:
        return make_method("i-clustered", clusters=clusters, topk=topk, min_length=0)
    return make_method("bi-clustered", clusters=clusters, topk=topk, key_clusters=key_clusters, min_length=0)


def settings_to_try(length: int) -> list[Method]:
    """Every combination. More query clusters than a sixteenth of the tokens save nothing."""
    sizes = [*product(CLUSTERS, TOPK, (None,)), *product(BI_CLUSTERS, BI_TOPK, KEY_CLUSTERS)]
    return [make(*size) for size in sizes if size[0] <= length // 16]


def measure_length(length: int, repeats: int, device: torch.device, dtype: torch.dtype) -> Rows:
    """Time and error of every setting at one length; a setting that does not run there has no row."""
    layers = attention_inputs(length, device, dtype)
    timed = layers[len(layers) // 2] if layers else random_inputs(1, length, HEADS, HEAD_DIM, dtype, device)
    tried = {name_settings(settings): settings for settings in settings_to_try(length)}
    measured, calls = measure_shape(tried, timed, {"forward": repeats})
    for name, reason in measured[0]["refused"].items():
        print(f"{length:,} tokens: no {name}: {reason}")
    expected = [exact_output(inputs) for inputs in layers]

    def error(attend: Callable[..., torch.Tensor]) -> float | None:
        outputs = [forward(attend, inputs) for inputs in layers]
        return sum(map(relative_error, expected, outputs)) / len(layers) if layers else None

    rows = []
    for row in measured:
        if row["exact"] or "forward_ms" not in row:
            continue
        times = {field.removeprefix("forward_"): value for field, value in row.items() if field.startswith("forward_")}
        sizes = {field: tried[row["method"]].to_dict().get(field) for field in ("clusters", "topk", "key_clusters")}
        named = {"length": length, "method": tried[row["method"]].method, "name": row["method"]}
        rows.append(named | sizes | times | {"error": error(calls[row["method"]])})
    mark_frontier(rows)
    return rows


def mark_frontier(rows: list[dict[str, Any]]) -> None:
    """Say of every row of one length whether no setting of its method is faster and as exact."""
    for row in rows:
        same_method = [other for other in rows if other["method"] == row["method"]]
        row["on_frontier"] = row["error"] is not None and not any(
            other["ms"] < row["ms"] and other["error"] <= row["error"] for other in same_method
        )


def least_times(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The fastest setting of each method that stays below each error."""
    found = []
    for length, target in product(sorted({row["length"] for row in rows}), TARGETS):
        best: dict[str, Any] = {"length": length, "error at most": target}
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if (row["length"], row["method"]) == (length, method)]
            reached = [row for row in mine if row["error"] is not None and row["error"] <= target]
            if reached:
                # Times of different rounds compare as ratios to the exact attention beside them.
                fastest = max(reached, key=lambda row: (row["speedup"] or 0.0, -row["ms"]))
                best |= {f"{method} ms": fastest["ms"], f"{method}: times faster": fastest["speedup"]}
                best[f"{method} setting"] = fastest["name"]
        found.append(best)
    return pd.DataFrame(found)


def main(
    lengths: Lengths = "4096,8192",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    repeats: Repeats = 8,
    output: Path = RESULTS / "benchmark_frontier.json",
) -> None:
    """Measure every setting, print the least time for each error, and keep all as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": dtype, "repeats": repeats}
    kept = KeptRuns(output, settings, device)
    runs = [{"length": length} for length in numbers(lengths)]
    chosen = getattr(torch, dtype)
    keep_missing(kept, runs, lambda run: measure_length(run["length"], repeats, device, chosen), "lengths")
    print_table(least_times(kept.rows), output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
