"""A report as one page of HTML that loads nothing from elsewhere, and the short form that notebooks show."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from ..measuring.candidates import UNPATCHED
from .findings import Findings, Measurement
from .illustrations import Section
from .numbers import NOT_FINITE, count, duration, megabytes, percent, ratio
from .pictures import new_figure
from .words import encoder_lengths, summary

NOT_MEASURED = "not measured"
MEANINGS = {
    "output change": "Output change: relative L2 change of the last hidden state, all layers replaced.",
    "embedding cosine": "Embedding cosine: of the mean-pooled last hidden state with the exact model's.",
    "attention error": "Attention error: relative L2 error of the attention output, mean over layers and heads.",
    "model speed-up": "Speed-up: exact attention's time over the method's; above 1× the method is faster.",
    "memory ratio": "Memory ratio: the method's peak memory over exact attention's; below 1× it takes less.",
}
REMARKS = {
    "min_length": "Below its min_length: a patched model runs exact attention there; the method was forced here.",
    "settings": "Is exact here: one of its counts reaches the length, so there is nothing to approximate.",
}
ENVIRONMENT = {
    "model": "Model",
    "model_type": "Model type",
    "parameters": "Parameters",
    "dtype": "Type of the weights",
    "causal": "Masks the future",
    "device": "Device",
    "device_name": "Hardware",
    "threads": "Threads",
    "platform": "Platform",
    "versions": "Versions",
    "time": "Measured at",
    "repeats": "Timed rounds",
    "baseline": "Compared with",
    "memory_measure": "Memory is",
}


@dataclass(frozen=True)
class Row:
    """One method on one input: its name, the rest of its label, what is to be noted, and a cell per column."""

    name: str
    settings: str
    note: str
    cells: list[str]


@dataclass
class Table:
    """The numbers of a report, worded.

    Args:
        columns (`list[str]`): headings of the cells.
        bodies (`list[tuple[str, list[Row]]]`): for each input what it is, and its rows.
        missing (`list[str]`): columns that were measured nowhere, which are left out.
        notes (`list[str]`): what the columns and the remarks at some methods mean.
    """

    columns: list[str]
    bodies: list[tuple[str, list[Row]]]
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A paragraph, or a list where it has items."""

    text: str = ""
    items: tuple[str, ...] = ()


def render_page(report: Findings, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        report (`Findings`): its words, numbers and environment.
        sections (`Sequence[Section]`): pictures.

    Returns:
        `str`: HTML with everything in it.
    """
    return _environment().get_template("report.html").render(
        title=f"Efficient attention in {report.environment.get('model', 'a model')}",
        complete=report.complete,
        words=word_blocks(report),
        table=number_table(report),
        facts=environment_facts(report),
        sections=sections,
    )  # fmt: skip


def render_fragment(report: Findings) -> str:
    """The words and the table of a report, for a notebook's cell."""
    parts: Any = _environment().get_template("report_parts.html").module
    return str(parts.notebook(word_blocks(report), number_table(report)))


def check_destination(path: Path) -> None:
    """Raise before a measurement where a page could not be written after it; missing folders are made.

    Args:
        path (`Path`): of the page.

    Raises:
        OSError: it is a folder, or it cannot be written there.
        ImportError: matplotlib is missing.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file, such as {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written")
    new_figure(1, 1)


def _environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(lambda name: files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def word_blocks(report: Findings) -> list[Block]:
    """The summary in paragraphs and lists."""
    blocks: list[Block] = []
    items: list[str] = []
    for line in [*summary(report).splitlines(), ""]:
        if line.startswith("- "):
            items.append(line.removeprefix("- "))
            continue
        if items:
            blocks.append(Block(items=tuple(items)))
            items = []
        if line:
            blocks.append(Block(line))
    return blocks


def environment_facts(report: Findings) -> list[tuple[str, str]]:
    """What the report was measured with, as names and values; what it does not know is left out."""
    known = [*ENVIRONMENT, *(name for name in report.environment if name not in ENVIRONMENT)]
    return [
        (ENVIRONMENT.get(name, name.replace("_", " ")), _fact(report.environment[name]))
        for name in known
        if report.environment.get(name) is not None
    ]


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def number_table(report: Findings) -> Table:
    """Every method at every input, exact attention first."""
    rows = [(m, {**report.metrics(m), "attention_error": m.mean_attention_error}) for m in report.measurements]
    names = {name: None for _, metrics in rows for name in metrics}
    shown = _columns(list(names))
    cells = [[cell(metrics) for cell in shown.values()] for _, metrics in rows]
    used = [any(row[place] is not None for row in cells) for place in range(len(shown))]
    bodies: list[tuple[str, list[Row]]] = [(_input_words(report, index), []) for index in range(len(report.inputs))]
    for (m, _), row in zip(rows, cells, strict=True):
        worded = [
            _missing_word(m, heading) if cell is None else cell
            for heading, cell, is_used in zip(shown, row, used, strict=True)
            if is_used
        ]
        name, _, settings = m.method.partition(" ")
        bodies[m.input][1].append(Row(name, settings, _note(m), worded))
    return Table(
        [heading for heading, is_used in zip(shown, used, strict=True) if is_used],
        bodies,
        [heading for heading, is_used in zip(shown, used, strict=True) if not is_used] if rows else [],
        [
            *(note for heading, note in MEANINGS.items() if used[list(shown).index(heading)]),
            *(note for why, note in REMARKS.items() if any(m.why_exact == why for m in report.measurements)),
        ],
    )


Cell = Callable[[dict[str, float | None]], str | None]


def _columns(metrics: list[str]) -> dict[str, Cell]:
    """Headings and what stands below them; logits have a column where the model returns any."""
    logits = [name.removesuffix("_argmax_agreement") for name in metrics if name.endswith("_argmax_agreement")]
    return {
        "output change": _worded("hidden_error", percent),
        "embedding cosine": _cosine,
        **{f"choices by {name} kept": _worded(f"{name}_argmax_agreement", percent) for name in logits},
        "attention error": _worded("attention_error", percent),
        "model speed-up": _worded("forward_speedup", _times),
        "attention speed-up": _worded("attention_speedup", _times),
        "memory ratio": _worded("forward_memory_ratio", _times),
        "time": _worded("forward_seconds", duration),
        "peak memory": _worded("forward_peak_bytes", lambda value: megabytes(int(value))),
    }


def _worded(name: str, words: Callable[[float], str]) -> Cell:
    def cell(metrics: dict[str, float | None]) -> str | None:
        value = metrics.get(name)
        if value is None:
            return None
        return words(value) if math.isfinite(value) else NOT_FINITE

    return cell


def _times(value: float) -> str:
    return ratio([value])


def _cosine(metrics: dict[str, float | None]) -> str | None:
    mean, lowest = metrics.get("embedding_cosine_mean"), metrics.get("embedding_cosine_min")
    if mean is None or lowest is None:
        return None
    if not math.isfinite(mean):
        return NOT_FINITE
    return f"{mean:.4f}" if mean == lowest else f"{mean:.4f} (lowest {lowest:.4f})"


def _missing_word(m: Measurement, heading: str) -> str:
    """Exact attention is what the others are compared with; of them something was not measured."""
    compared = heading not in ("time", "peak memory")
    return "reference" if m.method == UNPATCHED and compared else NOT_MEASURED


def _note(m: Measurement) -> str:
    return {"settings": "is exact here", "min_length": "below its min_length"}.get(m.why_exact or "", "")


def _input_words(report: Findings, index: int) -> str:
    measured = report.inputs[index]
    padding = measured.batch_size * measured.length - measured.valid_tokens
    words = f"{count(measured.batch_size, 'text')} of {measured.length:,} tokens{encoder_lengths([measured])}"
    return f"{words}, {measured.valid_tokens:,} without padding" if padding else words
