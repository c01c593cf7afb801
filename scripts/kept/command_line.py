"""Command lines of the measuring scripts: their help, and how they call the training scripts."""

from collections.abc import Callable, Mapping
from typing import Any

import typer


def run_with_help(main: Callable[..., None], description: str | None) -> None:
    """Call `main` as `typer.run` does, with a help that has the script's `__doc__`, its examples line by line."""
    paragraphs = (description or "").split("\n\n")
    # Behind one line alone an example is not indented: the formatter takes that from a docstring's later lines.
    examples = (" ", "python ")
    kept = ["\b\n" + paragraph if paragraph.startswith(examples) else paragraph for paragraph in paragraphs]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help="\n\n".join(kept))(main)
    app()


def command_line_of(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by name as a script takes them."""
    return [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
