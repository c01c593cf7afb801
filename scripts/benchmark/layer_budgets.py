"""What does a budget of error over layers gain, beside one setting for all heads, and beside others' methods?

Settings of every head are found as `hf_effattn.calibrate(…, error_of="layer")` finds them, on books; errors and times
are those of `scripts/benchmark/other_methods.py`, on its held-out novels: all heads of a layer together, the mean of
the layers. In the same rounds run what was the fastest setting of each method for an error in
`benchmark_other_methods.json`, which may come from another machine. Both passes are timed of a few, beside settings
found with `training=True`.

    python -m scripts.benchmark.layer_budgets            # writes scripts/results/benchmark_layer_budgets.json

What the output file holds is not measured again.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from rich.progress import track

from hf_effattn import extend_positions
from hf_effattn.measuring.bench import Attend, Inputs
from hf_effattn.measuring.candidate_errors import CandidateErrors, default_candidates
from hf_effattn.measuring.choosing import OfLayers, held_out_coverage, least_margin
from hf_effattn.measuring.recording import Measured, recording
from hf_effattn.patching.methods import make_method
from hf_effattn.patching.methods.per_head import PerHead
from hf_effattn.reporting.calibration import COVERAGE
from hf_effattn.samples.model import load_model

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table
from ._inputs import HEAD_DIM, HEADS, held_out_inputs
from ._timing import Lengths, Rows, numbers
from .budget import CALIBRATED, tokens_of
from .other_methods import (
    CURVES,
    OURS,
    TARGETS,
    Name,
    fastest,
    few_calls,
    label,
    measured_rows,
    settings_to_try,
)

METHOD = "bi-clustered, calibrated over layers"
BOOKS = 4
TRAINED_BUDGETS = (0.2, 0.1, 0.05)
OTHER_METHODS = RESULTS / "benchmark_other_methods.json"


def named(budget: float) -> Name:
    return METHOD, f"max_error={budget:g}"


@torch.no_grad()
def errors_of_books(length: int, *, training: bool) -> tuple[CandidateErrors, torch.Tensor]:
    """What every candidate costs on books, and its shares of the layers' errors, `(T, R, L, H)`.

    `training`: what both passes cost, too.
    """
    model, tokenizer, _ = load_model(None)
    candidates = [make_method(**kwargs, min_length=0) for kwargs in default_candidates(causal=False, error_of="layer")]
    errors = CandidateErrors(candidates, training=training)
    for book in track(CALIBRATED[:BOOKS], description=f"{length:,} tokens: calibration"):
        tokens = tokens_of(tokenizer, "calibrated", book, length)
        if length > model.config.max_position_embeddings:
            extend_positions(model, length)
        with recording(Measured.of(model), errors.watch):
            model(input_ids=tokens)
        errors.first_text = len(errors.errors)
    return errors, errors.stacked(model.config.num_hidden_layers)[1]


def within(budget: float, errors: CandidateErrors, shares: torch.Tensor, *, training: bool = False) -> dict[str, Any]:
    """The settings for a budget, the margin, and the part of the books that stay within it when left out."""
    rule = OfLayers(errors.costs(training=training))
    margin = least_margin(shares, budget, COVERAGE, rule)
    table = rule.choose(shares, budget, margin).tolist()
    return {
        "settings": PerHead(candidates=errors.candidates, heads=table, min_length=0),
        "budget": budget, "heads": table, "margin": margin,
        "left_out": held_out_coverage(shares, budget, margin, rule),
    }  # fmt: skip


def by_layer(heads: PerHead, layers: list[Inputs]) -> list[Attend]:
    """What every layer runs."""
    methods = [heads.for_layers((layer,)) for layer in range(len(layers))]
    return [F.scaled_dot_product_attention if method is None else method.run for method in methods]


def best_of_others(rows: Rows, length: int) -> dict[Name, Attend]:
    """The settings that were the fastest of their method for an error, of all methods that no table is for."""
    names = {(row["method"], row["name"]) for target in TARGETS for row in fastest(rows, length, target).values()}
    return {
        (method, label(settings)): make(**settings)
        for method, (make, _) in CURVES.items()
        for settings in settings_to_try(method, length)
        if (method, label(settings)) in names
    }


def measure(length: int, repeats: int, rows_of_others: Rows) -> Rows:
    """Errors and times at a length, forward, and of both passes."""
    of_books = errors_of_books(length, training=True)
    tables = {budget: within(budget, *of_books) for budget in TARGETS}
    trained_tables = {budget: within(budget, *of_books, training=True) for budget in TRAINED_BUDGETS}
    layers = held_out_inputs(length)
    others = {name: [attend] * len(layers) for name, attend in best_of_others(rows_of_others, length).items()}

    def rows_of(calls: dict[Name, list[Attend]], tables: dict[float, dict[str, Any]], *, training: bool) -> Rows:
        about = {named(budget): table for budget, table in tables.items()}
        heads = {name: by_layer(table.pop("settings"), layers) for name, table in about.items()}
        rows = measured_rows(length, heads | calls, layers, repeats, training=training)
        return [row | about.get((row["method"], row["name"]), {}) for row in rows]

    forward_rows = rows_of(others, tables, training=False)
    return forward_rows + rows_of(few_calls(len(layers)), trained_tables, training=True)


def verdicts(rows: Rows) -> Rows:
    """For every length and error: the calibrated speed, the best of one setting, the best of others; forward."""
    lines = []
    for length in sorted({row["length"] for row in rows}):
        for target in TARGETS:
            best = fastest(rows, length, target)
            others = {name: row["speedup"] for name, row in best.items() if name not in (METHOD, *OURS)}
            other = max(others, key=lambda name: others[name], default=None)
            uniform = [best[name]["speedup"] for name in OURS if name in best]
            lines.append({
                "tokens": length, "error at most": target,
                "calibrated": best[METHOD]["speedup"] if METHOD in best else None,
                "one setting": max(uniform, default=None),
                "others": None if other is None else others[other], "which": other,
            })  # fmt: skip
    return lines


def main(
    lengths: Lengths = "4096,8192,16384",
    repeats: Annotated[int, typer.Option(help="Rounds of timing for each layer; short calls get more.")] = 2,
    output: Path = RESULTS / "benchmark_layer_budgets.json",
) -> None:
    """Measure every length, print what a budget over layers gains, and keep all as JSON."""
    kept = KeptRuns(output, {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "repeats": repeats})
    rows_of_others = json.loads(OTHER_METHODS.read_text(encoding="utf-8"))["rows"]
    for run in kept.missing([{"length": length} for length in numbers(lengths)]):
        kept.add(*measure(run["length"], repeats, rows_of_others))
    print_table(pd.DataFrame(verdicts(kept.rows)), output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
