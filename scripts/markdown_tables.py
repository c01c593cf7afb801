"""What the tables in the README and the model cards share."""

from typing import Any


def machine(environment: dict[str, Any], more: str = "") -> str:
    """The line under a table."""
    versions = environment["versions"]
    day = environment["time"].split("T")[0]
    threads = "1 thread" if environment["threads"] == 1 else f"{environment['threads']} threads"
    return (
        f"\n\n<sub>{more}{environment['device_name']}, {threads}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {day}</sub>"
    )


def number(row: dict[str, Any] | None, field: str, form: str, unit: str = "") -> str:
    """A cell of a table, empty where nothing was measured."""
    value = None if row is None else row.get(field)
    return "" if value is None else f"{value:{form}}{unit}"
