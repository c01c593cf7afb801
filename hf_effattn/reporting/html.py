"""A report as one page of HTML that loads nothing from elsewhere, and the short form that notebooks show."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from .findings import Findings
from .illustrations import Section
from .pictures import new_figure
from .table import MEANING, forced_note, report_table
from .words import summary


def render_page(report: Findings, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        report (`Findings`): its words, numbers and environment.
        sections (`Sequence[Section]`): pictures.

    Returns:
        `str`: HTML with everything in it.
    """
    return _template("report.html").render(
        title=f"Efficient attention in {report.environment.get('model', 'a model')}",
        complete=report.complete,
        facts=environment_facts(report),
        sections=sections,
        **_words_and_numbers(report),
    )


def render_fragment(report: Findings) -> str:
    """The words and the table of a report, for a notebook's cell."""
    return _template("report_parts.html").render(**_words_and_numbers(report))


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


def environment_facts(report: Findings) -> list[tuple[str, str]]:
    """What the report was measured with, as names and values; what it does not know is left out."""
    facts = report.environment.items()
    return [(name.replace("_", " "), _fact(value)) for name, value in facts if value is not None]


def _template(name: str) -> jinja2.Template:
    loader = jinja2.FunctionLoader(lambda file: files(__package__).joinpath(file).read_text(encoding="utf-8"))
    options: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **options).get_template(name)


def _words_and_numbers(report: Findings) -> dict[str, Any]:
    header, rows = report_table(report)
    return {"words": summary(report), "header": header, "rows": rows, "note": MEANING + forced_note(report)}


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
