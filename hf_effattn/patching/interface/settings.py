"""The method of an attention module with its settings, from its patch or its config, and why there is none."""

import warnings
from typing import Any

import torch
from torch import nn

from ...ops.shared.callers import stacklevel_of_user
from ..methods import METHODS, Method, make_method
from ..model_types.stacks import (
    hides_the_future,
    is_causal,
    is_of_transformers,
    is_self_attention,
    is_served,
    model_type_of,
)
from ..model_types.table import DECODERS, NOT_SERVED, WHAT_IS_SERVED
from ..module_patch import RECORD, ModulePatch
from ..parallel_state import for_this_process
from ..patched_models import warn_of_other_settings
from ..stored import FIELD, check_layers, read_stored


def method_for(module: nn.Module, method: str) -> Method | None:
    """The method of a module: its own patch's, else those of `config.effattn`; None where it stays exact.

    Raises:
        ValueError: a causal module, a model type outside the table, or settings that were made for another method.
    """
    if not is_self_attention(module):
        if model_type_of(module) is None:
            raise ValueError(_not_served(module, method))
        if not is_of_transformers(module):
            _say_unknown(module, method)
        return None  # cross-attention, or the decoder beside an encoder
    if not is_served(module):
        raise ValueError(causal_error(method, type(module).__name__))
    patch: ModulePatch | None = getattr(module, RECORD, None)
    if patch is None and METHODS[method].needs_fine_tuning:
        raise ValueError(
            f'"{method}" adds parameters to a model, which attn_implementation= and config.effattn cannot: convert it '
            f'with patch_attention(model, "{method}", ...), and load a converted one with hf_effattn.from_pretrained'
        )
    chosen = patch.method if patch is not None else _method_from_config(module, method)
    if chosen is not None and chosen.method != method:
        raise ValueError(
            f'attn_implementation is "{method}", but the settings in config.effattn are those of '
            f'"{chosen.method}"; change the method with patch_attention(model, "{method}", ...)'
        )
    return chosen


def _say_unknown(module: nn.Module, method: str) -> None:
    """Warn of a class of attention that is not transformers' and may be a layer's self-attention."""
    entry = model_type_of(module)
    if entry is None or torch.compiler.is_compiling():
        return
    warnings.warn(
        f'{type(module).__name__} attends exactly: "{method}" replaces what inherits from '
        f"{' or '.join(entry.attention)}. Let it inherit from it where it is self-attention",
        stacklevel=stacklevel_of_user(),
    )


def _method_from_config(module: nn.Module, method: str) -> Method | None:
    stored, causal = getattr(module.config, FIELD, None), hides_the_future(module.config)
    if stored is None:
        by_default = make_method(method, causal=causal)
        warn_of_other_settings(module.config, by_default, None)
        return by_default.for_layers(())  # raises where each layer needs settings of its own
    chosen, layers = read_stored(stored, method, causal=causal)
    warn_of_other_settings(module.config, chosen, layers)
    if layers is None and not chosen.differs_by_layer:
        return chosen
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(
            f"config.effattn tells layers apart, but a {type(module).__name__} does not know its own index; use "
            "patch_attention or hf_effattn.from_pretrained, which count the layers"
        )
    config: Any = module.config
    selected = layers is None or index in check_layers(layers, config.num_hidden_layers)
    return for_this_process(chosen.for_layers((index,)) if selected else None, module)


def causal_error(method: str, name: str) -> str:
    """Why a method refuses a model that masks the future, and what to do."""
    return (
        f'{name} is causal, and "{method}" serves causal attention in {DECODERS} only; in others its clusters could '
        'mix later tokens into earlier ones. Keep attn_implementation="sdpa"'
    )


def unsupported_error(method: str, name: str, model_type: str) -> str:
    """Why a method refuses a model type that is not in the table, and what to do."""
    if model_type in NOT_SERVED:
        return (
            f'"{method}" does not serve {name}: its model type "{model_type}" {NOT_SERVED[model_type]}. Leave this '
            f"model as it is; {WHAT_IS_SERVED}"
        )
    return (
        f'"{method}" does not know {name} (model type "{model_type}"), so it cannot tell its self-attention from '
        f'other attention. Keep attn_implementation="sdpa" for this model; {WHAT_IS_SERVED}'
    )


def _not_served(module: nn.Module, method: str) -> str:
    name, model_type = type(module).__name__, getattr(module.config, "model_type", "unknown")
    if is_causal(module) and model_type not in NOT_SERVED:
        return causal_error(method, name)
    return unsupported_error(method, name, model_type)
