"""A file of results as the scripts that make tables of it find it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.publish import cst_tables as paper_tables

ENVIRONMENT = {
    "device_name": "a machine",
    "threads": 1,
    "versions": {"torch": "2", "transformers": "5"},
    "time": "2026-01-02T03:04",
}


def keeper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What writes a file of results with these rows and settings into the folder, where the tables look for it."""
    monkeypatch.setattr(paper_tables, "RESULTS", folder)

    def write(name: str, rows: list[dict[str, Any]], **settings: Any) -> None:
        kept = {"environment": ENVIRONMENT, "settings": settings, "rows": rows}
        (folder / f"{name}.json").write_text(json.dumps(kept))

    return write


def cells(table: str, row: str) -> list[str]:
    """The cells of the row of a table that begins so."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {row}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]
