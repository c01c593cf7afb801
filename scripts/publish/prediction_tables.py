"""The table of what an H100 would gain, predicted: `scripts/results/predictions.json` beside the goals.

`predictions_before.json` has what a review predicted of the kernels that were replaced, by a model of its own.
"""

import json
from pathlib import Path
from typing import Any

from hf_effattn.reporting.table import markdown

PREDICTIONS = Path(__file__).resolve().parents[1] / "results" / "predictions.json"
BEFORE = PREDICTIONS.with_name("predictions_before.json")
FORWARD, BOTH = "forward_speedup", "forward_backward_speedup"
COLUMNS = ((4096, FORWARD), (16384, FORWARD), (65536, FORWARD), (4096, BOTH), (16384, BOTH))
# How many times faster than exact attention a method is to be.
GOALS: dict[str, dict[tuple[int, str], float]] = {
    "i-clustered": {(4096, FORWARD): 1.3, (16384, FORWARD): 12, (65536, FORWARD): 80, (16384, BOTH): 8},
    "bi-clustered": {(16384, FORWARD): 8, (65536, FORWARD): 45, (16384, BOTH): 8},
    "cst": {(16384, BOTH): 10},
}


def predictions() -> str:
    """Times faster than exact attention, and whether each goal is reached; or that nothing was predicted."""
    if not PREDICTIONS.exists():
        return "Not predicted yet: `python -m scripts.benchmark.predictions`."
    result = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    found = {(row["method"], row["length"]): row for row in result["rows"]}
    before = json.loads(BEFORE.read_text(encoding="utf-8"))
    earlier = {(row["method"], row["length"]): row for row in before["rows"]}
    names = {FORWARD: "forward", BOTH: "and backward"}
    header = [
        "prediction",
        *(f"{length:,}: {names[field]}" for length, field in COLUMNS),
        "launches",
        "before: forward",
    ]
    rows = []
    for method in dict.fromkeys(row["method"] for row in result["rows"]):
        goals = GOALS[method.split()[0]]
        cells = [cell(found.get((method, length)), field, goals.get((length, field))) for length, field in COLUMNS]
        row = found.get((method, 16384))
        launches = f"{row['forward_launches']} + {row['backward_launches']}" if row else ""
        ratios = (earlier.get((method.split()[0], length)) for length, field in COLUMNS if field == FORWARD)
        was = " / ".join("?" if one is None else f"{one['forward_speedup']:g}×" for one in ratios)
        rows.append([method, *cells, launches, was])
    settings = result["settings"]
    note = (
        "\n\n<sub>**Predictions, no GPU has run this**: times faster than exact attention (FlashAttention 3 at 475 "
        "TFLOP/s forward, 400 backward) on an H100, clustering included, from the bytes, products and waiting of the "
        "programs (`scripts/benchmark/predictions.py`), ±40 % and more. In brackets the goal. "
        f"B={settings['batch']}, H={settings['heads']}, D={settings['head_dim']}, 16-bit, random inputs, no head "
        "exact, a CUDA graph; launches at 16,384, torch's own included. Before: what a review predicted, by a model "
        f"of its own, of the kernels of {before['commit']}, at the lengths in their order; bi-clustered was of order "
        "zero then, C=k=G=128.</sub>"
    )
    return markdown(header, rows) + note


def cell(row: dict[str, Any] | None, field: str, goal: float | None) -> str:
    """A ratio and its goal; empty where nothing was predicted."""
    if row is None or field not in row:
        return ""
    shown = f"{row[field]:.1f}×"
    if goal is None:
        return shown
    return f"{shown} ({goal}: {'reached' if row[field] >= goal else '**missed**'})"
