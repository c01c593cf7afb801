"""What the commands share: mistakes told in a line instead of a traceback, and values read from the command line."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from safetensors import SafetensorError

from .. import settings_parsing


@contextmanager
def mistakes_in_words() -> Iterator[None]:
    """Leave with status 1 and a line that names the mistake; with 130 on Ctrl-C."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has enough; typer leaves quietly
    except SafetensorError as error:
        _leave(f"the weights cannot be read, a *.safetensors is damaged or not whole ({error})")
    except (ValueError, TypeError, OSError, ImportError) as error:
        _leave(str(error))
    except KeyboardInterrupt:
        typer.secho("Interrupted; nothing more was written.", err=True)
        raise typer.Exit(130) from None


def _leave(mistake: str) -> NoReturn:
    typer.secho(f"Error: {mistake}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1) from None


def lines_of_progress() -> Callable[[int, int, str], None] | None:
    """A function that prints a line per step on stderr, of `(done, total, what)`; None in a terminal, for a bar."""
    if sys.stderr.isatty():
        return None
    return lambda done, total, what: typer.echo(f"{done}/{total} {what}", err=True)


def lengths_of(text: str | None) -> tuple[int, ...] | None:
    """Numbers of tokens, written with commas.

    Raises:
        typer.BadParameter: something else.
    """
    if text is None:
        return None
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"give numbers of tokens with commas, such as 128,512,4096; got {text!r}") from None
    if min(lengths) < 1:
        raise typer.BadParameter(f"every length must be above 0, got {min(lengths)}")
    return lengths


def method_of(text: str) -> dict[str, Any]:
    """A method with its settings, as `settings_parsing.method_of` reads them.

    Raises:
        typer.BadParameter: a setting without a value.
    """
    try:
        return settings_parsing.method_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def with_positions(model: Any, length: int) -> Any:
    """The model, its positions repeated where it takes fewer tokens, which is said."""
    from ..patching import extend_positions
    from ..patching.model_types.stacks import longest_input

    positions = longest_input(model)
    if positions is None or length <= positions:
        return model
    typer.secho(f"The model knows {positions} positions; beyond, they are repeated.", err=True)
    return extend_positions(model, length)


def check_output_folder(folder: Path | None) -> None:
    """Raise before the work where its results could not be written after it."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: {folder} is a file; name a folder")


def check_output_file(file: Path | None) -> None:
    """As `check_output_folder`, for a file."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ValueError(f"--output: {file} is no file in a folder that exists")
