"""How to find the self-attention modules of a model, by the table of what can be patched (`table.py`).

Modules are recognised by the names of their class and of those that it inherits from, so that no modelling file of
transformers is imported. FSDP and parametrizations give a module a subclass of its class, and so may a user.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..exact.kinds import ExactKind, kind_of
from .dispatch import calls_attention_function
from .table import MODEL_TYPES, LearnedPositions, ModelType

_OWN_FORWARDS = {name: entry for entry in MODEL_TYPES.values() if entry.has_own_forward for name in entry.attention}


@dataclass(frozen=True)
class Stack:
    """The self-attention of an encoder, or decoder alone, with one config: a composite model can hold several.

    Args:
        model (`PreTrainedModel`): the outermost model with this config.
        modules (`tuple[nn.Module, ...]`): its self-attention modules, in the order of its layers. Their config is the
            model's own, but for the old composite models, which give their parts a second copy.
        layers (`tuple[tuple[int, ...], ...]`): for each module the layers it serves (ALBERT's serve several).
        depth (`int`): how many layers it has, those without attention among them.
        unknown (`dict[int, nn.Module]`): by layer, the module that stands where other layers have their
            self-attention but is not in the table, or never calls transformers' attention function.
        causal (`bool`): whether it masks the future.
        exact (`ExactKind`): which layers stay exact under every method, and what is gained in them.
    """

    model: PreTrainedModel
    modules: tuple[nn.Module, ...]
    layers: tuple[tuple[int, ...], ...]
    depth: int
    unknown: dict[int, nn.Module]
    causal: bool
    exact: ExactKind


class _Place(NamedTuple):
    """Where a module stands: in which list of layers, under which number, and by which path from there."""

    layers: nn.Module
    number: int
    path: str


# The outermost model with a config, and its self-attention modules, each with its place.
_Owner = tuple[PreTrainedModel, list[tuple[nn.Module, _Place]]]


def model_type_of(module: nn.Module) -> ModelType | None:
    """The entry of the table for a module's config, or for its class where a forward of its own may have no config."""
    entry = MODEL_TYPES.get(getattr(getattr(module, "config", None), "model_type", ""))
    entries = (_OWN_FORWARDS.get(kind.__name__) for kind in type(module).__mro__)
    return next((known for known in entries if known is not None), None) if entry is None else entry


def is_self_attention(module: nn.Module) -> bool:
    """Whether this is a self-attention module, causal or not, of a model type in the table."""
    entry = model_type_of(module)
    if entry is None:
        return False
    if not _is_named(module, entry):
        return False
    # Only the modules that call the attention function carry is_causal; wrappers of older versions do not.
    if not hasattr(module, "is_causal") and not entry.has_own_forward:
        return False
    if entry.causal:  # not the cross-attention of GPT-2
        crosses = getattr(module, "is_cross_attention", False)
        return not crosses and bool(module.is_causal or is_bidirectional(module.config))
    return not (entry.has_decoder and getattr(module, "is_decoder", False))


def _is_named(module: nn.Module, entry: ModelType) -> bool:
    """Whether the class of a module, or one that it inherits from, is in a row of the table."""
    return any(kind.__name__ in entry.attention for kind in type(module).__mro__)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether the class of a module, or one that it inherits from, is of transformers."""
    return any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def is_served(module: nn.Module) -> bool:
    """Whether this is a self-attention module that a method can take over: causal ones in decoders alone."""
    entry = model_type_of(module)
    return entry is not None and is_self_attention(module) and (entry.causal or not is_causal(module))


def is_causal(module: nn.Module) -> bool:
    """Whether an attention module masks the future."""
    return bool(getattr(module, "is_causal", False)) and not is_bidirectional(getattr(module, "config", None))


def is_bidirectional(config: Any) -> bool:
    """Whether a config makes a decoder attend in both directions, as that of EmbeddingGemma does."""
    entry = MODEL_TYPES.get(getattr(config, "model_type", ""))
    name = "" if entry is None else entry.bidirectional_config_name
    return bool(getattr(config, name, False)) or getattr(config, "is_causal", True) is False


def hides_the_future(config: Any) -> bool:
    """Whether the self-attention of a model, by its config, is that of a decoder alone."""
    entry = MODEL_TYPES.get(getattr(config, "model_type", ""))
    return entry is not None and entry.causal and not is_bidirectional(config)


def is_window_of_image(module: nn.Module, length: int) -> bool:
    """Whether a call with so many patches may be one window of an image."""
    entry = model_type_of(module)
    window = None if entry is None else entry.window_of_image
    return window is not None and length <= window(module.config)


def reads_sound(model: PreTrainedModel) -> bool:
    """Whether the model with a stack's config reads recordings."""
    return MODEL_TYPES[model.config.model_type].reads == "sound"


def find_stacks(model: nn.Module) -> list[Stack]:
    """Every encoder, or decoder alone, of the table in a model, in the order of its modules."""
    owners: list[_Owner] = []
    _collect(model, None, None, owners, set())
    return [_stack(owner, attending) for owner, attending in owners if attending]


def _collect(
    module: nn.Module, owner: _Owner | None, place: _Place | None, owners: list[_Owner], seen: set[nn.Module]
) -> None:
    """Put every self-attention module that is served to the model around it, the outermost with the same config."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, PreTrainedModel):
        place = None
        if owner is None or not _shares_config(module, owner[0]):
            owner = (module, [])
            owners.append(owner)
    if owner is not None and _is_replaceable(module, model_type_of(owner[0])):
        owner[1].append((module, _Place(module, 0, "") if place is None else place))
    for name, child in module.named_children():
        if place is not None:
            inside: _Place | None = place._replace(path=f"{place.path}.{name}".lstrip("."))
        else:  # lists of layers name them by their indices, whatever their class
            inside = _Place(module, int(name), "") if name.isdecimal() else None
        _collect(child, owner, inside, owners, seen)


def _is_replaceable(module: nn.Module, entry: ModelType | None) -> bool:
    """Whether a module is the self-attention of a model type, and a method can run in its place."""
    if entry is None or not is_served(module) or model_type_of(module) is not entry:
        return False
    return entry.has_own_forward or calls_attention_function(module)


def _stack(model: PreTrainedModel, attending: list[tuple[nn.Module, _Place]]) -> Stack:
    """The stack of these modules, its layers numbered as they stand: also where one between them has none."""
    config = model.config
    layers_at = MODEL_TYPES[config.model_type].layers
    begins: dict[nn.Module, int] = {}
    paths: dict[nn.Module, set[str]] = {}
    count = 0
    for _, (layers, _, path) in attending:
        if layers not in begins:
            begins[layers] = count
            count += 1 + max([int(name) for name, _ in layers.named_children() if name.isdecimal()], default=0)
        paths.setdefault(layers, set()).add(path)
    known = {begins[place.layers] + place.number for _, place in attending}
    unknown = {
        layer: module
        for layers, begin in begins.items()
        for name, child in layers.named_children()
        if name.isdecimal() and begin + int(name) not in known
        for module in _unknown_attention(child, paths[layers], MODEL_TYPES[config.model_type])
        for layer in layers_at(config, begin + int(name))
    }
    modules = tuple(module for module, _ in attending)
    return Stack(
        model,
        modules,
        tuple(layers_at(config, begins[place.layers] + place.number) for _, place in attending),
        1 + max(layer for place in range(count) for layer in layers_at(config, place)),
        unknown,
        any(map(is_causal, modules)),
        kind_of(config)(model, modules),
    )


def _unknown_attention(layer: nn.Module, paths: set[str], entry: ModelType) -> list[nn.Module]:
    """The modules that stand where other layers have their self-attention; not transformers' own, as in hybrids."""
    modules = dict(layer.named_modules())
    there = [modules[path] for path in sorted(paths) if path in modules]
    return [
        module
        for module in there
        if _is_named(module, entry) or not (is_of_transformers(module) or type(module).__module__.startswith("torch."))
    ]


def _shares_config(part: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Whether a part of a model has its config, or a copy of it, as LongT5's encoder has."""
    copied = type(part.config) is type(model.config) and model_type_of(model) in _OWN_FORWARDS.values()
    return part.config is model.config or copied


def longest_input(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """How many tokens the learned absolute positions of a model reach; None where it has none that are known.

    RoBERTa's `max_position_embeddings` also counts the rows up to its padding's, which no token gets.

    Args:
        model (`PreTrainedModel` or `PreTrainedConfig`): with or without a head; or its config alone.
    """
    config: Any = model if isinstance(model, PreTrainedConfig) else model.config
    entry = MODEL_TYPES.get(getattr(config, "model_type", ""))
    if entry is None or entry.learned is None:
        return None
    if model is config:
        return int(config.max_position_embeddings) - reserved_rows(entry.learned, config.pad_token_id)
    table = getattr(model.base_model.get_submodule(entry.learned.embeddings), entry.learned.table)
    return int(table.num_embeddings) - reserved_rows(entry.learned, table.padding_idx)


def reserved_rows(positions: LearnedPositions, padding: int | None) -> int:
    """Rows of the table before the first token's."""
    return padding + 1 if positions.reserved_by_padding and padding is not None else 0


def usual_length(config: Any) -> int | None:
    """The tokens of an image of the config's size, or the most tokens that the config names; None without a limit."""
    entry = MODEL_TYPES.get(getattr(config, "model_type", ""))
    if entry is not None and (entry.reads == "video" or getattr(entry.positions, "any_size", False)):
        return None  # the sizes in the config are those of one image of a clip, or no limit
    sizes = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if None not in sizes:
        image, patch = (size if isinstance(size, Iterable) else (size, size) for size in sizes)
        special = 1 if entry is None else entry.special_patches
        return special + math.prod(pixels // of_patch for pixels, of_patch in zip(image, patch, strict=True))
    longest = getattr(config, "max_source_positions", None) or getattr(config, "max_position_embeddings", None)
    return None if longest is None else int(longest)


def causal_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that mask the future."""
    return (module for module in model.modules() if is_causal(module))
