"""The position tables of a converted model out of its checkpoint: transformers' own classes have no place for them."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .cst_positions import NAME, held_by
from .model_types import Encoder

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_positions(model: nn.Module, encoder: Encoder, name_or_path: Any, options: Mapping[str, Any]) -> None:
    """Fill the tables of a converted encoder with those of the checkpoint that it was loaded from.

    Args:
        model (`nn.Module`): the whole model.
        encoder (`Encoder`): the encoder in it; it holds tables.
        name_or_path (`str` or `os.PathLike`): a folder, or a name on the Hub.
        options (`Mapping`): keywords of `from_pretrained`, of which those for the Hub are used.

    Raises:
        ValueError: the encoder is not converted, or the checkpoint has no such tables, or of other sizes.
    """
    tables = held_by(encoder.model)
    if tables is None:
        name = type(encoder.model).__name__
        raise ValueError(f'{name} holds no {NAME}: convert it with patch_attention(model, "cst") first')
    owner = encoder.model.base_model
    path = next(path for path, module in model.named_modules() if module is owner)
    stored = _stored_tables(name_or_path, {name: options[name] for name in HUB_OPTIONS if name in options})
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
                f"and these settings need {tuple(parameter.shape)}; leave out slice_length and extension_ratio, or "
                "load it with transformers' own class and convert it anew with patch_attention"
            )
        with torch.no_grad():
            parameter.copy_(stored[key])


def _names_in_checkpoint(path: str, prefix: str, name: str) -> list[str]:
    """What a table may be called, saved with a head or without one, whichever the model now has."""
    own = f"{path}." if path else ""
    return [f"{before}{NAME}.{name}" for before in (own, f"{prefix}.{own}", own.removeprefix(f"{prefix}."))]


def _stored_tables(name_or_path: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tables in a checkpoint of one file or several, by their names there."""
    missing_is_fine: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **options, **missing_is_fine)
    names = {SAFE_WEIGHTS_NAME}
    if index is not None:
        weights: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        names = {file for key, file in weights.items() if NAME in key}
    stored: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        path = cached_file(name_or_path, name, **options, **missing_is_fine)
        if path is not None:
            with safe_open(path, framework="pt") as file:
                stored |= {key: file.get_tensor(key) for key in file.keys() if NAME in key}  # noqa: SIM118
    return stored


@contextmanager
def quiet_about_tables() -> Iterator[None]:
    """Keep transformers from reporting the tables as unexpected weights, where it reports nothing else."""

    def has_more(record: logging.LogRecord) -> bool:
        rows = [line for line in record.getMessage().splitlines() if " | " in line][1:]
        return not rows or any(NAME not in row for row in rows)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(has_more)
    try:
        yield
    finally:
        logger.removeFilter(has_more)
