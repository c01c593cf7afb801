"""Command lines of the measuring scripts: their help, and how they call the training scripts."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
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


def switches(low_precision: bool) -> list[str]:
    """Switches of `TrainingArguments` for this machine."""
    return [*(["--bf16"] if low_precision else []), *([] if torch.cuda.is_available() else ["--use_cpu"])]


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `typer.BadParameter` where a name is not known."""
    known = list(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {what} {unknown}; there are {known}")
