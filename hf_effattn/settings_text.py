"""Settings as a command line writes them."""

import json
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
    # With commas, as the training scripts take them, too; inside a list they belong to it.
    method, *settings = (text if "[" in text else text.replace(",", " ")).split() or [""]
    found: dict[str, Any] = {"method": method}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not value:
            raise ValueError(f"a setting is written name=value, got {setting!r} in {text!r}")
        found[name] = value_of(value)
    return found


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
