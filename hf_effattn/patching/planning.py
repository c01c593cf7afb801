"""What patching will change, decided and checked before anything does."""

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ..ops.shared.callers import stacklevel_of_user
from .adapters import has_adapters
from .interface.settings import causal_error, unsupported_error
from .methods import DECODER_METHODS, METHODS, Method, methods_for, setting_names
from .methods.crossover import why_never
from .model_types.stacks import (
    Stack,
    causal_modules,
    find_stacks,
    longest_input,
    usual_length,
)
from .model_types.table import MODEL_TYPES, NOT_SERVED, WHAT_IS_SERVED
from .module_patch import RECORD
from .parallel_state import check_tokens_undivided, for_this_process, head_share
from .sentence_transformers import cut_at, is_sentence_transformer, models_inside
from .stored import check_layers, saved_method
from .transformers_internals import can_set_implementation


@dataclass(frozen=True)
class PatchPlan:
    """Everything that patching one stack will change, decided before anything changes.

    Args:
        stack (`Stack`): what to patch.
        method (`Method`): of the modules that are patched.
        patched (`tuple[bool, ...]`): for each module of the stack whether it is patched.
        layers (`tuple[int, ...]`, *optional*): the layers to store in the config; None means all.
        parameters (`nn.Module`, *optional*): what the method adds, or what of its kind is already there.
    """

    stack: Stack
    method: Method
    patched: tuple[bool, ...]
    layers: tuple[int, ...] | None
    parameters: nn.Module | None


def plan_patches(model: nn.Module, method: str, settings: dict[str, Any], layers: Any) -> list[PatchPlan]:
    """Decide everything that a patch will change in a model, and warn of what it loses and of what does nothing.

    Raises:
        ValueError, TypeError: as `patch_attention`.
    """
    setting_names(method)  # of an unknown method no model is to blame
    stacks = stacks_to_patch(model, method)
    chosen = methods_for(method, {stack.causal for stack in stacks}, **settings)
    fitting = [(stack, chosen[stack.causal]) for stack in stacks if stack.causal in chosen]
    if len(fitting) > 1:  # settings of heads are for the part that was calibrated
        fitting = [(stack, stack_method) for stack, stack_method in fitting if stack_method.is_for(stack)] or fitting
    plans = [plan_patch(stack, stack_method, layers) for stack, stack_method in fitting]
    for plan in plans:
        _check_not_wrapped(model, plan)
    cut = None if isinstance(model, PreTrainedModel) else cut_at(model)
    for plan in plans:
        _warn_of_losses(plan)
        _warn_of_unknown_attention(plan)
        never_used = why_never_used(plan, cut)
        if never_used is None:
            _warn_of_decoder_loss(plan)
        else:
            warnings.warn(never_used, stacklevel=stacklevel_of_user())
    return plans


def stacks_to_patch(model: nn.Module, method: str) -> list[Stack]:
    """The stacks of a model that a method can serve; raises where there is none, saying why."""
    check_model(model)
    inside = [model] if isinstance(model, PreTrainedModel) else models_inside(model)
    return [stack for transformers_model in inside for stack in _stacks_of(transformers_model, method)]


def _stacks_of(model: nn.Module, method: str) -> list[Stack]:
    stacks = find_stacks(model)
    for stack in stacks:
        _check_dispatch(stack.model, method)
    if stacks:
        return stacks
    name = type(model).__name__
    pretrained = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if pretrained is None:
        raise ValueError(
            f"{name} has no attention to patch: it holds no transformers model. Pass the model that from_pretrained "
            f"returned; {WHAT_IS_SERVED}"
        )
    model_type = getattr(pretrained.config, "model_type", "unknown")
    if model_type in NOT_SERVED:
        raise ValueError(unsupported_error(method, name, model_type))
    _check_dispatch(pretrained, method)
    known = model_type in MODEL_TYPES
    # One with a cross-attending decoder is not refused for that: its encoder would not be served either.
    decoder_alone = known or not getattr(pretrained.config, "is_encoder_decoder", False)
    if decoder_alone and next(causal_modules(model), None) is not None:
        raise ValueError(causal_error(method, name))
    if not known:
        raise ValueError(unsupported_error(method, name, model_type))
    entry = MODEL_TYPES[model_type]
    said = {
        f"{type(module).__name__} says is_causal={module.is_causal}"
        for module in model.modules()
        if hasattr(module, "is_causal")
    }
    raise ValueError(
        f"{name} has no attention to patch: none of its modules calls transformers' attention function and is the "
        f'self-attention that "{model_type}" has there '
        f"({', '.join(entry.attention)}{', is_causal=True' if entry.causal else ''}); "
        f"{', '.join(sorted(said)) or 'none of them says is_causal'}"
    )


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"model must be a transformers model, got {name}; load it with from_pretrained, or pass the one that this "
            "holds"
        )


def not_a_model(model: Any) -> TypeError:
    """What to raise where a transformers model itself is needed, and not what is around one."""
    return TypeError(
        f"model must be a transformers model as from_pretrained returns it, got {type(model).__name__}; of a wrapped "
        "or compiled model pass the model inside"
    )


def _check_dispatch(model: PreTrainedModel, method: str) -> None:
    entry = MODEL_TYPES.get(model.config.model_type)
    if not can_set_implementation(type(model)) and not (entry is not None and entry.has_own_forward):
        raise ValueError(
            f"{type(model).__name__} does not dispatch its attention through transformers' AttentionInterface in "
            f'transformers {transformers.__version__}, so "{method}" cannot take its place. A newer transformers may '
            f"dispatch it; {WHAT_IS_SERVED}"
        )


def plan_patch(stack: Stack, method: Method, layers: Any) -> PatchPlan:
    """Decide which modules of a stack are patched; raises where `layers` cannot be had."""
    name = type(stack.model).__name__
    if getattr(stack.model.config, "output_attentions", False):
        raise ValueError(
            f"the config of {name} has output_attentions=True, with which transformers saves no patched model. Leave "
            "it out of from_pretrained (or set model.config.output_attentions = False), and pass "
            "output_attentions=True to the call instead"
        )
    stack.exact.check()
    method.check_stack(stack)
    check_tokens_undivided(stack.modules, method.method)
    _check_heads_divide(stack, method)
    if layers is not None and method.stays_exact:
        raise ValueError(f'"{method.method}" approximates no layer, whichever are chosen: leave layers out')
    full = [stack.exact.serves(module) for module in stack.modules]
    parameters = method.parameters_for(stack) if method.parameters_name else None
    if layers is not None and not any(full):
        raise ValueError(f"{name} has no attention to patch: all its layers {stack.exact.why} and stay exact")
    if layers is None:
        return PatchPlan(stack, method, tuple(full), None, parameters)
    chosen = check_layers(layers, stack.depth)
    without = [layer for layer in chosen if not any(layer in served for served in stack.layers)]
    if without:
        unknown = stack.unknown.get(without[0])
        lacks = "no attention" if unknown is None else f"attention of its own ({type(unknown).__name__})"
        raise ValueError(
            f"layer {without[0]} of {name} has {lacks}; its layers with full attention are {_full_layers(stack)}"
        )
    patched = []
    for served, is_full in zip(stack.layers, full, strict=True):
        wanted = [layer for layer in served if layer in chosen]
        if wanted and not is_full:
            raise ValueError(
                f"layer {wanted[0]} of {name} sees a sliding window only and stays exact; its layers with full "
                f"attention are {_full_layers(stack)}"
            )
        if wanted and len(wanted) < len(served):
            raise ValueError(
                f"layers {list(served)} of {name} share one attention module; choose all of them or none, got {wanted}"
            )
        patched.append(bool(wanted))
    return PatchPlan(stack, method, tuple(patched), chosen, parameters)


def _check_heads_divide(stack: Stack, method: Method) -> None:
    """Raise where a model is divided among processes by its heads, and the method cannot be divided alike."""
    for module, served in zip(stack.modules, stack.layers, strict=True):
        share = head_share(module, stack.model.tp_size)
        if share is not None and method.parameters_name:
            raise ValueError(
                f'"{method.method}" adds parameters, and {type(stack.model).__name__} is divided among {share.ranks} '
                "processes, which would not have them in common: train it on one process, or by FSDP or DDP"
            )
        for_this_process(method.for_layers(served), module, stack.model.tp_size)


def _full_layers(stack: Stack) -> list[int]:
    both = zip(stack.modules, stack.layers, strict=True)
    return [layer for module, served in both if stack.exact.serves(module) for layer in served]


def _check_not_wrapped(model: nn.Module, plan: PatchPlan) -> None:
    """Raise where parameters come too late for what is around the model, or in it, to keep them alike or save them."""
    if plan.parameters is None or plan.parameters in model.modules():
        return
    name = plan.method.parameters_name
    if has_adapters(model) and not is_sentence_transformer(model):  # whose saving writes them beside the adapter
        raise ValueError(
            f'"{plan.method.method}" adds parameters, {name}, which adapters are saved without. Patch the model '
            f'first, then put adapters on it, with modules_to_save=["{name}"] to train both'
        )
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrappers = DistributedDataParallel, FSDPModule, FullyShardedDataParallel
    wrapper = next((type(module).__name__ for module in model.modules() if isinstance(module, wrappers)), None)
    if wrapper is not None:
        raise ValueError(
            f'"{plan.method.method}" adds parameters, of which the {wrapper} around the model would not know: each '
            "process would train its own. Patch the model first, then wrap it"
        )


def _warn_of_losses(plan: PatchPlan) -> None:
    """Say what a stack that was converted, and trained, would lose."""
    named = saved_method(plan.stack.model.config)
    patched = any(RECORD in vars(module) for module in plan.stack.modules)
    for name, kind in METHODS.items():
        saved = name == named and not patched
        if not saved and kind.parameters_name not in plan.stack.model.base_model._modules:
            continue
        loss = kind.lost_by(plan.stack, plan.method, plan.parameters, saved=saved)
        if loss is not None:
            warnings.warn(loss, stacklevel=stacklevel_of_user())


def _warn_of_unknown_attention(plan: PatchPlan) -> None:
    """Say which layers, of those that are to be patched, have attention that no method can take the place of."""
    left = plan.stack.unknown
    if not left or plan.layers is not None or plan.method.stays_exact:
        return
    names = sorted({type(module).__name__ for module in left.values()})
    config: Any = plan.stack.model.config
    warnings.warn(
        f'{", ".join(names)} in layers {sorted(left)} stays as it is: "{plan.method.method}" replaces what calls '
        "transformers' attention function and inherits from "
        f"{' or '.join(MODEL_TYPES[config.model_type].attention)}. Let it do both, or choose other layers",
        stacklevel=stacklevel_of_user(),
    )


def _warn_of_decoder_loss(plan: PatchPlan) -> None:
    """Say so where a language model loses more by the method than it need."""
    losses = [kind.decoder_loss for kind in DECODER_METHODS.values() if kind.decoder_loss is not None]
    loss, least = plan.method.decoder_loss, min(losses)
    if loss is None or loss == least:
        return
    warnings.warn(
        f'"{plan.method.method}" with the same settings for all heads raised the perplexity of SmolLM2-135M by '
        f"{loss:.1%}, with settings that hf_effattn.calibrate found for each head by {least:.1%} (worst text). "
        "Pass settings=hf_effattn.calibrate(model, inputs, max_error=0.11), with inputs like yours.",
        stacklevel=stacklevel_of_user(),
    )


def why_never_used(plan: PatchPlan, cut: tuple[int, str] | None = None) -> str | None:
    """What to warn of where exact attention runs on every input that the model takes, or a `cut` leaves; else None.

    `cut` is what `cut_at` says of a model of sentence-transformers around it.
    """
    config, method = plan.stack.model.config, plan.method
    exact = plan.stack.exact
    nothing_to_approximate, gains = not any(map(exact.serves, exact.modules)), exact.gains()
    if method.stays_exact and gains:
        return None
    if method.stays_exact or (nothing_to_approximate and not gains):
        return (
            f"The patch will do nothing: no layer of {type(plan.stack.model).__name__} has a sliding window, biases "
            "of distances or attention sinks, nor several images under one mask."
        )
    if nothing_to_approximate:
        return (
            f"The patch will approximate nothing: all layers of {type(plan.stack.model).__name__} "
            f"{exact.why}. They run exactly, {exact.saves}, which takes less time on longer inputs."
        )
    kind = plan.stack.model.device.type
    if kind == "meta":  # where it will run is not known yet
        return None
    does = "approximate nothing, and gain in layers with windows only" if exact.windows else "do nothing"
    shortest = method.shortest_length(kind)
    if shortest is None:
        return f"The patch will {does}: {why_never(method.method, kind)}."
    if method.is_exact(sys.maxsize, kind):
        return f"The patch will {does}: by its settings every head attends exactly."
    extendable = longest_input(config)
    longest = extendable or usual_length(config)
    if cut is not None and longest is not None and cut[0] >= longest:
        cut = None
    if cut is not None:
        longest = cut[0]
    if longest is None or not method.is_exact(longest, kind):
        return None
    longer = "For longer inputs call extend_positions; to" if extendable else "To"
    if cut is not None:
        longer = f"For longer inputs {'call extend_positions' if extendable else f'set {cut[1]}'}; to"
    if longest < shortest:
        why = f"starts at {shortest:,}, because exact attention is faster below"
        fewer = "" if extendable or cut is not None else "To start earlier give fewer clusters; to"
        advice = f"{fewer or longer} force the method pass min_length=0"
    else:
        why = "has nothing to approximate in so few"
        advice = f"{longer} approximate these give smaller counts"
    return (
        f'The patch will {does}: this model takes at most {longest:,} tokens, and "{method.method}" with these '
        f"settings {why}. {advice}."
    )
