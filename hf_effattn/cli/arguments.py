"""What the commands share: mistakes told in a line instead of a traceback, and values read from the command line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def mistakes_in_words() -> Iterator[None]:
    """Leave with status 1 and a line that says what is wrong; with 130 on Ctrl-C."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("Interrupted; nothing more was written.", err=True)
        raise typer.Exit(130) from None


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
    """A method with its settings, written `i-clustered clusters=100 topk=32`, as `report` takes it.

    Raises:
        typer.BadParameter: a setting without a value.
    """
    method, *settings = text.split() or [""]
    found: dict[str, Any] = {"method": method}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not value:
            raise typer.BadParameter(f"a setting is written name=value, got {setting!r} in {text!r}")
        found[name] = value_of(value)
    return found


def value_of(text: str) -> Any:
    """A setting's value: JSON, Python's True, False and None, or else the word itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)
