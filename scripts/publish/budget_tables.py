"""The tables of budgets of error: of every head, and of heads that share one."""

from typing import Any

from hf_effattn.reporting.table import markdown

from ..benchmark import budget as benchmark_budget
from ..benchmark import layer_budgets
from ..benchmark.other_methods import TRAINING
from ..shared.markdown import number
from .cst_tables import Table, of_file


def kept_budgets(result: dict[str, Any]) -> str:
    """How many held-out heads keep a budget, calibrated alone and with a tolerance; and their times where they are."""
    errors = [row for row in result["rows"] if row["kind"] == "errors"]
    times = {(row["length"], row["call"], row.get("budget")): row for row in result["rows"] if row["kind"] == "speed"}
    checks = {(row["length"], row["budget"]): row for row in result["rows"] if row["kind"] == "check"}
    header = [
        "tokens, budget",
        "texts",
        "within",
        "worst head",
        "within, tolerance",
        "worst head, tolerance",
        "recomputed",
    ]
    header += ["exact heads", *(["speed", "check adds", "speed, one setting"] if times else [])]
    rows = []
    for _, row in benchmark_budget.coverage(errors).iterrows():
        length, budget = int(row["length"]), row["budget"]
        speeds = [number(times.get((length, call, budget)), "speedup", ".1f", "×") for call in ("per head", "uniform")]
        speeds.insert(1, number(checks.get((length, budget)), "added", ".1%"))
        forms = {"within": ".1%", "worst": ".2f", "within, tolerance": ".1%", "worst, tolerance": ".2f"}
        shown = [f"{row[name]:{form}}" for name, form in (forms | {"recomputed": ".1%", "exact heads": ".0f"}).items()]
        texts = f"{row['texts']:.0f} / {row['held out']:.0f}"
        rows.append([f"{length:,}, {budget:g}", texts, *shown, *(speeds if times else [])])
    return markdown(header, rows)


@of_file("budget")
def budgets(result: dict[str, Any]) -> Table:
    """Of an encoder."""
    note = (
        "All-MiniLM-L6-v2, 72 heads, positions repeated beyond 512. Texts: books calibrated on / other books "
        "and QMSum meetings held out. Exact heads: those for which no setting keeps the error. Speed: of attention "
        "against exact attention. Check adds: the time of a tolerance that recomputes no head. One setting: the "
        "fastest for all heads whose worst head is no worse, with the worst heads exact. "
    )
    return kept_budgets(result), note


@of_file("budget_decoder")
def budgets_of_a_decoder(result: dict[str, Any]) -> Table:
    """Of a decoder."""
    return kept_budgets(result), f"{result['settings']['model']}, strict, its heads of keys and values; as above. "


@of_file("benchmark_layer_budgets")
def layers(result: dict[str, Any]) -> Table:
    """Of heads that share a budget: speed and error, beside one setting for all and beside other methods."""
    cells = {(row["length"], row["method"], row["name"], row.get("part")): row for row in result["rows"]}
    rows = []
    for line in layer_budgets.verdicts(result["rows"]):
        length, budget = line["tokens"], line["error at most"]
        forward, training = (cells.get((length, *layer_budgets.named(budget), part)) for part in (None, TRAINING))
        other = "-" if line["which"] is None else f"{line['which']} {line['others']:.1f}×"
        rows.append([
            f"{length:,}, {budget:g}",
            number(forward, "error", ".3f"),
            number(forward, "speedup", ".1f", "×"),
            "" if training is None else f"{training['speedup']:.1f}× at {training['error']:.3f}",
            number(line, "one setting", ".1f", "×"),
            other,
        ])  # fmt: skip
    note = (
        f"Calibrated on {layer_budgets.BOOKS} books of that length; errors and times on two other novels, the mean "
        "of the six layers of all-MiniLM-L6-v2, positions repeated beyond 512, D=32, float32. Training: of settings "
        "found with `training=True`, speed of forward and backward at their error. One setting: the fastest of "
        "bi-clustered's within the error, some heads exact. Others: of the settings that are the fastest in the table "
        "of other approximations, the fastest here. "
    )
    header = ["tokens, budget", "error", "forward", "training", "one setting", "fastest other method"]
    return markdown(header, rows), note
