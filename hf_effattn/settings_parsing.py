"""Settings as a command line writes them."""

import json
from collections.abc import Mapping
from typing import Any


def value_of(text: str) -> Any:
    """A setting's value: JSON, Python's True, False and None, or else the word itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def method_of(text: str) -> dict[str, Any]:
    """A method with its settings, written `i-clustered clusters=100 topk=32`, as `report` takes it.

    Raises:
        ValueError: a setting without a value.
    """
    method, *settings = text.split() or [""]
    fields: dict[str, Any] = {"method": method}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not value:
            raise ValueError(f"a setting is written name=value, got {setting!r} in {text!r}")
        fields[name] = value_of(value)
    return fields


def method_text(method: str, settings: Mapping[str, Any]) -> str:
    """A method with its settings as `method_of` reads them."""
    return " ".join([method, *(f"{name}={_typed(value)}" for name, value in settings.items())])


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return json.dumps(value, separators=(",", ":"))


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from a command line: a JSON object, or `name=value,name=value` with JSON values or plain words.

    Raises:
        ValueError: a setting without a value.
    """
    if text.lstrip().startswith("{"):
        settings: dict[str, Any] = json.loads(text)
        return settings
    settings = {}
    for pair in filter(None, text.split(",")):
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"settings are written name=value,name=value or as JSON, got {pair!r}")
        settings[name.strip()] = value_of(value)
    return settings
