"""`config.effattn`: the settings as a dict of JSON values, all that `save_pretrained` keeps of a patch; its files."""

import json
import operator
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from .methods import METHODS, Method, make_method, other_kind, setting_names

FIELD = "effattn"
FORMAT_VERSION = 3  # before it settings had other names, and those of decoders meant other numbers
SETTINGS_FILE = "effattn.json"
BASE_MODEL = "base_model"


def write_stored(method: Method, layers: Iterable[int] | None, base_model: str | None = None) -> dict[str, Any]:
    """The dict for `config.effattn`; `layers` None means all, `base_model` is the exact model's id on the Hub."""
    return {
        "version": FORMAT_VERSION,
        "method": method.method,
        "layers": None if layers is None else list(layers),
        **({} if base_model is None else {BASE_MODEL: base_model}),
        **method.to_dict(),
    }


def base_model_of(config: Any) -> str | None:
    """The id on the Hub of the exact model: as stored when it was patched, or where a model comes from that never was.

    Args:
        config (`PreTrainedConfig`): of the model.
    """
    stored = getattr(config, FIELD, None)
    if stored is not None:
        return stored.get(BASE_MODEL) if isinstance(stored, dict) else None
    origin = str(config._name_or_path or "")
    return None if not origin or Path(origin).is_absolute() or Path(origin).exists() else origin


def saved_method(config: Any) -> str | None:
    """The method that `config.effattn` names, known or not; None where it names none."""
    stored = getattr(config, FIELD, None)
    named = stored.get("method") if isinstance(stored, dict) else None
    return named if isinstance(named, str) else None


def read_stored(
    stored: object, method: str | None = None, *, causal: bool | None = None, **overrides: Any
) -> tuple[Method, Any]:
    """The method and layers from `config.effattn`.

    Args:
        stored (`dict`): the field; one written by hand may leave out any key.
        method (`str`, *optional*): the method where the dict names none.
        causal (`bool`, *optional*): whether the model is a decoder. Default: as the dict says.
        overrides: settings that win over the dict's.

    Returns:
        `(Method, list[int] | None)`: the method with its settings, and the layers as they stand in the dict.

    Raises:
        ValueError: written in another format, no method, an unknown method, a value outside its range, settings of
            an encoder in a decoder or the other way round.
        TypeError: not a dict, a value of the wrong type, layers that are no list of ints.

    Fields that this version does not know are ignored with a warning that names them.
    """
    method, layers, settings = read_fields(stored, method)
    settings |= overrides
    if causal is not None and settings.setdefault("causal", causal) is (not causal):
        raise ValueError(other_kind(causal=causal))
    return make_method(method, **settings), layers


def read_fields(stored: object, method: str | None = None) -> tuple[str, Any, dict[str, Any]]:
    """What `read_stored` makes its method of: its name, the layers as they stand in the dict, and the settings."""
    if not isinstance(stored, dict):
        raise TypeError(
            f"config.effattn must be a dict such as {{'method': 'i-clustered', 'clusters': 100}}, got {stored!r}"
        )
    values = dict(stored)
    version = values.pop("version", FORMAT_VERSION)
    if not isinstance(version, int) or isinstance(version, bool):
        raise TypeError(
            f"config.effattn['version'] must be an int, got {version!r}; this package writes {FORMAT_VERSION}"
        )
    if version > FORMAT_VERSION:
        raise ValueError(
            f"config.effattn was written by a newer hf_effattn (format {version}, this one reads {FORMAT_VERSION}): "
            "update hf_effattn, or delete the field and call patch_attention with new settings"
        )
    if version < FORMAT_VERSION:
        raise ValueError(
            f"config.effattn was written by an older hf_effattn (format {version}, this one reads {FORMAT_VERSION}), "
            "whose settings had other names and meanings: delete the field, patch the exact model again, and "
            "calibrate again what hf_effattn.calibrate had found"
        )
    method = values.pop("method", method)
    if method is None:
        raise ValueError("config.effattn names no method; add one, for example {'method': 'i-clustered'}")
    layers = values.pop("layers", None)
    if layers is not None:
        _check_layers_listed(layers, "give a list of layer indices such as [0, 1], or null for all")
    values.pop(BASE_MODEL, None)
    names = ("causal", *setting_names(method), *setting_names(method, causal=True))
    unknown = sorted(set(values) - set(names))
    if unknown:
        warnings.warn(
            f"config.effattn has fields that this hf_effattn does not know and ignores: {', '.join(unknown)}. "
            f"{method!r} knows {', '.join(dict.fromkeys(names))}",
            stacklevel=2,
        )
    return method, layers, {name: value for name, value in values.items() if name in names}


def read_settings(settings: Any, method: str | None = None, **overrides: Any) -> tuple[str, Any, dict[str, Any]]:
    """Settings from wherever they were kept, as `read_fields` gives them.

    Args:
        settings (`dict`, `str`, `os.PathLike` or an object with `to_dict`): the dict itself, a JSON file, a folder, or
            a repository on the Hub.
        method (`str`, *optional*): the method where the settings name none; another than theirs is refused.
        overrides: settings that win.

    Raises:
        ValueError: as `read_fields`; a file without settings, or with those of another method.
        OSError: nothing to be read there.
    """
    where = "settings"
    if isinstance(settings, str | os.PathLike):
        where = str(settings)
        if where in METHODS and not Path(where).exists():
            raise ValueError(f'settings="{where}" names a method, not a place: give it as method="{where}"')
        settings = _read_file(Path(where))
    elif hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, Mapping) or "method" not in settings:
        raise ValueError(
            f"{where} holds no settings of hf_effattn: give what hf_effattn.calibrate returned, its file, or a "
            "patched model's folder or repository"
        )
    named = settings["method"]
    if method not in (None, named):
        raise ValueError(f'{where} holds settings of "{named}", and the method asked for is "{method}": leave one out')
    method, layers, fields = read_fields(dict(settings), method)
    return method, layers, fields | overrides


def _read_file(path: Path) -> Any:
    """The settings in a JSON file, in a folder or in a repository on the Hub."""
    if path.is_dir():
        path = path / (SETTINGS_FILE if (path / SETTINGS_FILE).is_file() else "config.json")
    if not path.is_file():
        if path.suffix == ".json" or path.is_absolute():
            raise FileNotFoundError(
                f"there are no settings at {path}: name the file that hf_effattn.calibrate saved, or the folder or "
                "repository of a patched model"
            )
        path = _from_hub(str(path))
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): name the file that hf_effattn.calibrate saved") from None
    return stored.get(FIELD) if isinstance(stored, dict) and path.name == "config.json" else stored


def _from_hub(name: str) -> Path:
    settings_file = cached_file(name, SETTINGS_FILE, _raise_exceptions_for_missing_entries=False)
    return Path(settings_file or cached_file(name, "config.json"))


def check_layers(layers: Any, count: int) -> tuple[int, ...]:
    """Layer indices in rising order, those from the end made positive; raises unless they name layers of the model.

    Args:
        layers (`Iterable[int]`): indices from 0; negative ones count from the last layer.
        count (`int`): how many layers the model has.
    """
    hint = f"give a list of layer indices from 0 to {count - 1}, negative ones count from the end"
    indices = []
    for index in _check_layers_listed(layers, hint):
        if not -count <= index < count:
            raise ValueError(f"layers has {index}, but the model has {count} layers; {hint}")
        indices.append(index % count)
    if not indices:
        raise ValueError(f"layers is empty, so nothing would be patched; {hint}, or leave it out for all layers")
    if len(set(indices)) < len(indices):
        raise ValueError(f"layers names a layer twice: {list(layers)}; {hint}")
    return tuple(sorted(indices))


def _check_layers_listed(layers: Any, hint: str) -> list[int]:
    """The layers as a list of ints, whatever the model has; raises where they are none."""
    if isinstance(layers, str | bytes | Mapping) or not isinstance(layers, Iterable):
        raise TypeError(f"layers must be a list of ints or None for all, got {layers!r}; {hint}")
    indices = []
    for layer in layers:
        try:
            index = operator.index(layer)
        except TypeError:
            index = None
        if index is None or isinstance(layer, bool):
            raise TypeError(f"layers must hold ints, got {layer!r}; {hint}")
        indices.append(index)
    return indices
