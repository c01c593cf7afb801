"""Parts of the tables in the README and the model cards."""

from typing import Any

import pandas as pd

from hf_effattn.reporting.table import markdown


def machine(environment: dict[str, Any], more: str = "") -> str:
    """The line under a table."""
    versions = environment["versions"]
    day = environment["time"].split("T")[0]
    threads = "1 thread" if environment["threads"] == 1 else f"{environment['threads']} threads"
    return (
        f"\n\n<sub>{more}{environment['device_name']}, {threads}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {day}</sub>"
    )


def of_frame(frame: pd.DataFrame) -> str:
    """A table of texts as Markdown, its index as the first column."""
    rows = [[str(name), *map(str, cells)] for name, cells in zip(frame.index, frame.to_numpy(), strict=True)]
    return markdown(["", *map(str, frame.columns)], rows)


def number(row: dict[str, Any] | None, field: str, form: str, unit: str = "") -> str:
    """A cell of a table, empty where nothing was measured."""
    value = None if row is None else row.get(field)
    return "" if value is None else f"{value:{form}}{unit}"


def by_length(
    shown: list[dict[str, Any]], field: str, lines: list[tuple[str, str, str, str]]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table with a column per length: for every value of `field` the lines
    (what is put behind the value, field of the number, its format, its unit)."""
    lengths = sorted({row["length"] for row in shown})
    cells = {(row[field], row["length"]): row for row in shown}
    rows = [
        [f"{name}{more}"] + [number(cells.get((name, length)), what, form, unit) for length in lengths]
        for name in dict.fromkeys(row[field] for row in shown)
        for more, what, form, unit in lines
    ]
    return ["tokens", *[f"{length:,}" for length in lengths]], rows
