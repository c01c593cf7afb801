"""The live patched models, to warn where a model of the same checkpoint runs the method with other settings.

Trainers load a reference model from the checkpoint and `config._attn_implementation`, which is only the name of the
method. The settings are in the patched model and not in the checkpoint.
"""

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..ops.shared.callers import stacklevel_of_user
from .methods import Method
from .stored import FIELD, read_stored

_PATCHED: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # with the checkpoint that they are from
_COMPARED: WeakValueDictionary[int, PreTrainedConfig] = WeakValueDictionary()  # by their id, as they have no hash
# What may differ between two configs of one checkpoint.
_OF_USE = FIELD, "_name_or_path", "transformers_version", "dtype", "use_cache"


def remember(part: PreTrainedModel, model: nn.Module) -> None:
    """Remember a patched model, `part`, which is the model that was loaded or a part of it."""
    loaded = (module.config.name_or_path for module in model.modules() if isinstance(module, PreTrainedModel))
    _PATCHED[part] = next((name for name in loaded if name), "")


def warn_of_other_settings(config: PreTrainedConfig, method: Method, layers: Sequence[int] | None) -> None:
    """Warn once for a model that runs a method by its name while one of the same checkpoint has other settings.

    Args:
        config (`PreTrainedConfig`): of the model that runs it.
        method (`Method`): with the settings that it runs with.
        layers (`Sequence[int]`, *optional*): where it runs; None: everywhere.
    """
    if torch.compiler.is_compiling() or not _PATCHED or _COMPARED.get(id(config)) is config:
        return
    _COMPARED[id(config)] = config
    for model, checkpoint in list(_PATCHED.items()):
        others: Any = model.config
        stored = getattr(others, FIELD, None)
        if (
            stored is None
            or stored["method"] != method.method
            or not _is_of_one_checkpoint(config, others, checkpoint)
        ):
            continue
        other, other_layers = read_stored(stored)
        if other.method != method.method or (other, other_layers) == (method, layers):
            continue
        mine = {"layers": layers, **method.to_dict()}
        theirs = {"layers": other_layers, **other.to_dict()}
        differ = [f"{name}={value!r}"[:40] for name, value in theirs.items() if value != mine.get(name)]
        warnings.warn(
            f'"{method.method}" runs here by its name, without the settings ({", ".join(differ[:3])}) of a live '
            f"{type(model).__name__} of the same checkpoint. Patch this model alike, or use copy.deepcopy of the "
            "other: as ref_model= of a trainer",
            stacklevel=stacklevel_of_user(),
        )
        return


def _is_of_one_checkpoint(config: PreTrainedConfig, patched: PreTrainedConfig, checkpoint: str) -> bool:
    """Whether both were loaded from a checkpoint, whose name the configs of a composite model's parts do not tell."""
    if config is patched or type(config) is not type(patched) or not checkpoint:
        return False
    if config.name_or_path or patched.name_or_path:
        return bool(config.name_or_path == patched.name_or_path)
    first, second = ({k: v for k, v in side.to_dict().items() if k not in _OF_USE} for side in (config, patched))
    return first == second
