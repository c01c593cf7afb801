"""The position tables of a converted model out of its checkpoint: transformers' own classes have no place for them."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ...model_types.stacks import Stack
from .positions import NAME, held_by

HINT = (
    "this model was converted by hf_effattn; loaded like this, it has the exact attention that it had before. "
    "hf_effattn.from_pretrained(auto_class, name_or_path) loads it as it was saved."
)
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_positions(model: nn.Module, stack: Stack, name_or_path: Any, options: Mapping[str, Any]) -> None:
    """Fill the tables of a converted stack with those of the checkpoint that it was loaded from.

    Args:
        model (`nn.Module`): the whole model.
        stack (`Stack`): the stack in it; it holds tables.
        name_or_path (`str` or `os.PathLike`): a folder, or a name on the Hub.
        options (`Mapping`): keywords of `from_pretrained`, of which those for the Hub are used.

    Raises:
        ValueError: the stack is not converted, or the checkpoint has no such tables, or of other sizes.
    """
    tables = held_by(stack.model)
    if tables is None:
        name = type(stack.model).__name__
        raise ValueError(f'{name} holds no {NAME}: convert it with patch_attention(model, "cst") first')
    owner = stack.model.base_model
    path = next(path for path, module in model.named_modules() if module is owner)
    hub_options = {name: options[name] for name in HUB_OPTIONS if name in options}
    stored = _stored_tables(name_or_path, options.get("variant"), hub_options)
    if stored is None:
        raise ValueError(
            f'{name_or_path} says in its config that it was converted to "cst", but it has no safetensors, and no '
            f"{NAME} is read from other files: load it where it was made and save it anew with save_pretrained, or "
            "load it with transformers' own class and convert it anew with patch_attention"
        )
    for name, parameter in tables.named_parameters():
        key = next((key for key in _names_in_checkpoint(path, owner.base_model_prefix, name) if key in stored), None)
        if key is None:
            raise ValueError(
                f'{name_or_path} says in its config that it was converted to "cst", but its weights hold no '
                f"{NAME}.{name}: save the converted model itself with save_pretrained, as model.safetensors; or load "
                "it with transformers' own class and convert it anew with patch_attention"
            )
        if stored[key].shape != parameter.shape:
            raise ValueError(
                f"{name_or_path} was converted with other settings: its {key} has shape {tuple(stored[key].shape)}, "
                f"and these settings need {tuple(parameter.shape)}; leave out slice_length, extension_ratio and "
                "max_position_embeddings, which it has fixed, or load it by transformers and convert it anew"
            )
        with torch.no_grad():
            parameter.copy_(stored[key])
    # Where adapters were loaded they alone are trained, and saved: what is loaded after them is frozen as the rest is.
    tables.requires_grad_(any(weight.requires_grad for weight in owner.get_input_embeddings().parameters()))


def _names_in_checkpoint(path: str, prefix: str, name: str) -> list[str]:
    """What a table may be called, saved with a head or without one, whichever the model now has."""
    start = f"{path}." if path else ""
    return [f"{before}{NAME}.{name}" for before in (start, f"{prefix}.{start}", start.removeprefix(f"{prefix}."))]


def _stored_tables(name_or_path: Any, variant: str | None, options: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """All tables in a checkpoint of one file or several, by their names there; None if it is not of safetensors."""

    def cached(name: str) -> str | None:
        return cached_file(name_or_path, name, **options, _raise_exceptions_for_missing_entries=False)

    def of_variant(name: str) -> str:
        stem, _, ending = name.rpartition(".")
        return f"{stem}.{variant}.{ending}" if variant else name

    index = cached(of_variant(SAFE_WEIGHTS_INDEX_NAME))
    names = {of_variant(SAFE_WEIGHTS_NAME)}
    if index is not None:
        weights: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        names = {file for key, file in weights.items() if NAME in key}
    paths = [path for path in map(cached, sorted(names)) if path is not None]
    if index is None and not paths:
        return None
    stored: dict[str, torch.Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            stored |= {key: file.get_tensor(key) for key in file.keys() if NAME in key}  # noqa: SIM118
    return stored


_quiet = ContextVar("quiet", default=False)


@contextmanager
def quiet_about_tables() -> Iterator[None]:
    """Keep the tables out of what transformers reports as unexpected: they are loaded after it, or warned about."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def explain_report(record: logging.LogRecord) -> bool:
    """A filter for what transformers logs while it loads: says of a converted model how to load it as one.

    transformers' own classes have no place for the tables. They load the exact model, name the tables as unexpected,
    and say that those can be ignored, which is true only where the exact model is wanted.
    """
    lines = record.getMessage().splitlines()
    rows = [line for line in lines if " | " in line][1:]
    ours = [row for row in rows if NAME in row]
    if not ours:
        return True
    if not _quiet.get():
        record.msg, record.args = "\n".join([*lines, f"- {NAME}:\t{HINT}"]), ()
        return True
    record.msg, record.args = "\n".join(line for line in lines if line not in ours), ()
    return len(ours) < len(rows)


logging.getLogger("transformers.modeling_utils").addFilter(explain_report)
