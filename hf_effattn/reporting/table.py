"""A report as a table in Markdown, one row per method and length, for model cards."""

import math
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

from .findings import Findings
from .numbers import NOT_FINITE, count, megabytes, percent

# Metric of `Report.rows`, heading, and how the mean over the inputs of a length is written.
COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("attention_error", "attention error", percent),
    ("hidden_error", "output error", percent),
    ("embedding_cosine_mean", "cosine", lambda value: f"{value:.4f}" if math.isfinite(value) else NOT_FINITE),
    ("forward_speedup", "model speed", "{:.2f}×".format),
    ("attention_speedup", "attention speed", "{:.2f}×".format),
    ("forward_peak_bytes", "peak memory", megabytes),
)
FORCED = "¹"
MEANING = (
    "Errors: relative L2 change of the attention output and of the last hidden state. Cosine: of the mean-pooled "
    "embedding. Speed: exact attention's time over the method's. Memory: added by a forward pass at its peak."
)


def report_table(report: Findings) -> tuple[list[str], list[list[str]]]:
    """What was measured of every method at every length; means where there were several inputs of a length.

    Args:
        report (`Findings`): from `hf_effattn.report`.

    Returns:
        `(list[str], list[list[str]])`: headings, and rows as long. A column that nothing was measured for is left out,
        an empty cell was not measured. `FORCED` marks methods that a patched model would not run at that length.
    """
    values: dict[tuple[int, str], dict[str, list[float]]] = {}
    forced = set()
    for row in report.rows():
        key = (row["length"], row["method"])
        values.setdefault(key, {}).setdefault(row["metric"], []).append(row["value"])
        if row["why_exact"] == "min_length":
            forced.add(key)
    shown = [column for column in COLUMNS if any(column[0] in numbers for numbers in values.values())]
    rows = []
    for (length, method), numbers in sorted(values.items(), key=lambda item: item[0][0]):
        mark = f" {FORCED}" if (length, method) in forced else ""
        cells = [write(fmean(numbers[metric])) if metric in numbers else "" for metric, _, write in shown]
        rows.append([f"{length:,}", f"{method}{mark}", *cells])
    return ["tokens", "method", *(heading for _, heading, _ in shown)], rows


def table_note(report: Findings) -> str:
    """What has to stand below the table: the machine, the versions, the day, and what the marks mean."""
    at = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in at["versions"].items())
    where = f"{at['device_name']}, {count(at['threads'], 'thread')}" if at["device"] == "cpu" else at["device_name"]
    measured = f"{at['model']}, {at['dtype']}, {where}; {versions}; {at['time'].split('T')[0]}."
    return f"{MEANING} {measured}{forced_note(report)}"


def forced_note(report: Findings) -> str:
    """What `FORCED` means, where the table has it."""
    if not any(m.why_exact == "min_length" for m in report.measurements):
        return ""
    return f" {FORCED} forced here: a patched model runs exact attention at this length (`min_length`)."


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] | None = None) -> str:
    """A Markdown table.

    Args:
        header (`Sequence[str]`): the headings.
        rows (`Sequence[Sequence[str]]`): cells, as many per row.
        right (`Collection[int]`, *optional*): columns to align to the right. Default: all but the first.
    """
    aligned = range(1, len(header)) if right is None else right
    rule = ["---:" if column in aligned else "---" for column in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])
