"""`patch_attention` and `unpatch_attention`: a method on and off, on one model instance."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import PreTrainedModel

from .attention import causal_error, unsupported_error
from .extending import longest_input
from .methods import METHODS, MethodSettings, list_methods, make_settings
from .methods.base import RECORD, ModulePatch
from .methods.cst.positions import NAME, held_by, hold
from .methods.drafts import watch_for_drafts
from .model_types import (
    MODEL_TYPES,
    Encoder,
    causal_modules,
    find_encoders,
    is_causal,
    is_sliding_window,
    supported_model_types,
)
from .snapshot import Snapshot
from .stored import FIELD, base_model_of, check_layers, write_stored

Model = TypeVar("Model", bound=nn.Module)


def patch_attention(model: Model, method: str, *, layers: Sequence[int] | None = None, **settings: Any) -> Model:
    """Replace the self-attention of a pretrained encoder, or decoder alone, by an efficient method, in place.

    The weights stay as they are; `"cst"`, a conversion that is to be fine-tuned, adds position embeddings to them, in
    `hf_effattn_cst` of the model without its head, which are trained and saved with the model. The settings are
    written to `model.config.effattn`, which `save_pretrained` keeps (load with `hf_effattn.from_pretrained`); without
    this package such a checkpoint loads as the exact model. Patching a patched model replaces its settings. Models
    that mask the future run the method's causal form, in which no token changes what comes before it; when they
    generate, the prompt runs by the method and what follows exactly over the cache (`"cst"`: by the method too).
    Cross-attention, packed sequences, dense 4-D masks, sliding-window layers, short inputs and inputs of no more
    tokens than `clusters` or `topk` stay exact. In a composite model every encoder that is served is patched; hand
    over a part, such as `model.encoder`, to patch that one alone. As everywhere in transformers, models built from one
    config object share their attention implementation: give each its own (`copy.deepcopy(config)`).

    Args:
        model (`PreTrainedModel`): an encoder or decoder of a served model type, with or without a head.
        method (`str`): one of `list_methods()`.
        layers (`Sequence[int]`, *optional*): the layers to patch, from 0; negative ones count from the
            last. Default: all.
        settings: the method's settings, such as `clusters`, `topk`, `clustering`, `iterations`, `seed`, `min_length`
            (0 forces the method at every length); for `"cst"` `slice_length`, `extension_ratio`, `composition`.

    Returns:
        The same `model`.

    Warns, before anything changes, where a trained conversion loses its position embeddings, because it becomes one
    with other slices or none, or is without them since transformers' own `from_pretrained` loaded it; and where every
    input that the model takes would still run exact attention.

    Raises:
        ValueError: an unknown method or setting, a value outside its range, layers that do not exist, a model of a
            type that is not served, or not when it is causal, or without attention to patch, or whose config has
            `output_attentions=True`. The model is then unchanged.
        TypeError: a value of the wrong type, something that is not a model.
    """
    chosen = make_settings(method, **settings)
    plans = [plan_patch(encoder, chosen, layers) for encoder in encoders_to_patch(model, method)]
    for plan in plans:
        held = held_by(plan.encoder.model)
        if held is not None and held is not plan.added and held.is_trained:
            warnings.warn(_left_out(plan), stacklevel=2)
        elif held is None and _was_converted(plan.encoder):
            warnings.warn(_not_loaded(plan), stacklevel=2)
        warn_if_never_used(plan)
    apply_plans(plans)
    return model


def unpatch_attention(model: Model) -> Model:
    """Give a model back the attention it had before it was patched, bit for bit; a model never patched stays as it is.

    What transformers alone loaded from a patched model's folder is exact already, and loses `config.effattn` too.

    Args:
        model (`PreTrainedModel`): the model, or a part of it, that `patch_attention` or
            `attn_implementation=` changed.

    Returns:
        The same `model`, with its earlier attention implementation and without `config.effattn` and what the method
        added to its parameters.

    Raises:
        TypeError: something that is not a model.
    """
    _check_model(model)
    for encoder in find_encoders(model):
        patches = [vars(module).pop(RECORD) for module in encoder.modules if RECORD in vars(module)]
        ours = encoder.model.config._attn_implementation in list_methods()
        hold(encoder.model, None)
        watch_for_drafts(encoder.model, False)
        if ours:
            set_implementation(encoder, patches[0].previous if patches else "sdpa")
        if hasattr(encoder.model.config, FIELD):
            delattr(encoder.model.config, FIELD)
    return model


@dataclass(frozen=True)
class PatchPlan:
    """Everything that patching one encoder will change, decided before anything changes.

    Args:
        encoder (`Encoder`): what to patch.
        settings (`MethodSettings`): of the modules that are patched.
        patched (`tuple[bool, ...]`): for each module of the encoder whether it is patched.
        layers (`tuple[int, ...]`, *optional*): the layers to store in the config; None means all.
        added (`nn.Module`, *optional*): the parameters that the method adds, or those of their kind already there.
    """

    encoder: Encoder
    settings: MethodSettings
    patched: tuple[bool, ...]
    layers: tuple[int, ...] | None
    added: nn.Module | None


def encoders_to_patch(model: nn.Module, method: str) -> list[Encoder]:
    """The encoders of a model that a method can serve; raises where there is none, saying why."""
    _check_model(model)
    encoders = find_encoders(model)
    for encoder in encoders:
        _check_dispatch(encoder.model, method)
    if encoders:
        return encoders
    name = type(model).__name__
    pretrained = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if pretrained is None:
        raise ValueError(
            f"{name} has no attention to patch: it holds no transformers model. Pass the model that from_pretrained "
            f"returned, of one of the types {supported_model_types()}"
        )
    model_type = getattr(pretrained.config, "model_type", "unknown")
    _check_dispatch(pretrained, method)
    known = model_type in MODEL_TYPES
    # One with a cross-attending decoder is not refused for that: its encoder would not be served either.
    decoder_alone = known or not getattr(pretrained.config, "is_encoder_decoder", False)
    if decoder_alone and next(causal_modules(model), None) is not None:
        raise ValueError(causal_error(method, name))
    if not known:
        raise ValueError(unsupported_error(method, name, model_type))
    raise ValueError(
        f'{name} has no attention to patch: none of its modules is the self-attention that "{model_type}" has in '
        f"transformers ({', '.join(MODEL_TYPES[model_type].attention)})"
    )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a transformers model, got {name}; load it with from_pretrained")


def _check_dispatch(model: PreTrainedModel, method: str) -> None:
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not dispatch its attention through transformers' AttentionInterface in "
            f'transformers {transformers.__version__}, so "{method}" cannot take its place (a newer transformers may '
            f"dispatch it); served are {supported_model_types()}"
        )


def plan_patch(encoder: Encoder, settings: MethodSettings, layers: Any) -> PatchPlan:
    """Decide which modules of an encoder are patched; raises where `layers` cannot be had."""
    name = type(encoder.model).__name__
    if getattr(encoder.model.config, "output_attentions", False):
        raise ValueError(
            f"the config of {name} has output_attentions=True, which transformers saves with eager attention only: a "
            "patched model could not be saved. Set model.config.output_attentions = False (leave it out of "
            "from_pretrained) and pass output_attentions=True to the call instead"
        )
    settings.check_encoder(encoder)
    if any(is_causal(module) for module in encoder.modules):
        settings.check_causal(encoder.modules[0])
    full = [not is_sliding_window(module) for module in encoder.modules]
    if not any(full):
        raise ValueError(f"{name} has no attention to patch: all its layers see a sliding window only and stay exact")
    if layers is None:
        return PatchPlan(encoder, settings, tuple(full), None, settings.added_to(encoder))
    chosen = check_layers(layers, 1 + max(max(served) for served in encoder.layers))
    patched = []
    for served, is_full in zip(encoder.layers, full, strict=True):
        wanted = [layer for layer in served if layer in chosen]
        if wanted and not is_full:
            raise ValueError(
                f"layer {wanted[0]} of {name} sees a sliding window only and stays exact; its layers with full "
                f"attention are {_full_layers(encoder)}"
            )
        if wanted and len(wanted) < len(served):
            raise ValueError(
                f"layers {list(served)} of {name} share one attention module; choose all of them or none, got {wanted}"
            )
        patched.append(bool(wanted))
    return PatchPlan(encoder, settings, tuple(patched), chosen, settings.added_to(encoder))


def _left_out(plan: PatchPlan) -> str:
    method = plan.settings.method
    new = "this conversion has other slices, whose positions begin at 0" if method == "cst" else f'"{method}" has none'
    return (
        f"the trained position tables ({NAME}) that {type(plan.encoder.model).__name__} was converted with are left "
        f"out: {new}. Keep its slice_length and extension_ratio to keep them, or load the saved model anew with "
        "hf_effattn.from_pretrained to have them back"
    )


def _was_converted(encoder: Encoder) -> bool:
    """Whether the config alone says so: a model that is patched says it in its modules too."""
    stored = getattr(encoder.model.config, FIELD, None)
    method = METHODS.get(stored.get("method", "")) if isinstance(stored, dict) else None
    patched = any(RECORD in vars(module) for module in encoder.modules)
    return method is not None and method.needs_fine_tuning and not patched


def _not_loaded(plan: PatchPlan) -> str:
    return (
        f"{type(plan.encoder.model).__name__} was saved as a conversion, and is without the position tables ({NAME}) "
        "that it was trained with: transformers' own from_pretrained leaves them out. Load it with "
        "hf_effattn.from_pretrained to have them"
    )


def _full_layers(encoder: Encoder) -> list[int]:
    both = zip(encoder.modules, encoder.layers, strict=True)
    return [layer for module, served in both if not is_sliding_window(module) for layer in served]


def apply_plans(plans: Sequence[PatchPlan]) -> None:
    """Carry out the plans; when one fails, undo them all."""
    snapshots = [Snapshot.of(plan.encoder.model) for plan in plans]
    try:
        for plan in plans:
            _apply(plan)
    except BaseException:
        for snapshot in snapshots:
            snapshot.restore()
        raise


def warn_if_never_used(plan: PatchPlan) -> None:
    """Say so where exact attention runs on every input that the model takes."""
    config, settings = plan.encoder.model.config, plan.settings
    extendable = longest_input(config)
    longest = extendable or _usual_length(config)
    kind = plan.encoder.model.device.type
    causal = any(is_causal(module) for module in plan.encoder.modules)
    if longest is None or not settings.is_exact(longest, longest, kind, causal=causal):
        return
    shortest = settings.shortest_length(kind, causal=causal)
    longer = "longer inputs (hf_effattn.extend_positions), " if extendable else ""
    if longest < shortest:
        why = f"exact attention runs below {shortest:,}, where it is faster"
        advice = f"Give fewer clusters, {longer}or min_length=0 to have the method"
    else:
        why = "that is too few to approximate anything"
        advice = f"Give {longer and longer + 'or '}smaller ones"
    warnings.warn(
        f"{type(plan.encoder.model).__name__} is made for {longest:,} tokens at most, and with these settings of "
        f'"{settings.method}" {why}: nothing changes. {advice}',
        stacklevel=3,
    )


def _usual_length(config: Any) -> int | None:
    """The tokens of a model's usual image, or the most of one whose positions are computed or fixed."""
    sizes = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if None not in sizes:
        image, patch = (size if isinstance(size, Iterable) else (size, size) for size in sizes)
        special = 2 if config.model_type == "deit" else 1
        return special + math.prod(pixels // of_patch for pixels, of_patch in zip(image, patch, strict=True))
    longest = getattr(config, "max_source_positions", None) or getattr(config, "max_position_embeddings", None)
    return None if longest is None else int(longest)


def _apply(plan: PatchPlan) -> None:
    config = plan.encoder.model.config
    current = config._attn_implementation
    exact = "sdpa" if current in list_methods() else current
    hold(plan.encoder.model, plan.added)
    watch_for_drafts(plan.encoder.model, plan.settings.clusters_prompts)
    set_implementation(plan.encoder, plan.settings.method)
    setattr(config, FIELD, write_stored(plan.settings, plan.layers, base_model_of(config)))
    for module, patched in zip(plan.encoder.modules, plan.patched, strict=True):
        earlier = vars(module).get(RECORD)
        previous = exact if earlier is None or current not in list_methods() else earlier.previous
        owner = None if plan.added is None else plan.encoder.model.base_model
        setattr(module, RECORD, ModulePatch(plan.settings if patched else None, previous, owner))


def set_implementation(encoder: Encoder, implementation: str) -> None:
    """Set the attention implementation of an encoder, also in a copy of the config that its modules hold."""
    encoder.model.set_attn_implementation(implementation)
    for module in encoder.modules:
        config: Any = module.config
        if config is not encoder.model.config:
            config._attn_implementation = implementation
