"""`patch_attention` and `unpatch_attention`: a method on and off, on one model instance."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from .interface.whole_texts import tell_whole_texts
from .measurements import forget_measurements
from .methods import METHODS, list_methods, methods_for, setting_names
from .methods.base import quoted
from .model_types.stacks import (
    Stack,
    attends_itself,
    bends_scores,
    find_stacks,
    hides_the_future,
    is_causal,
    reads_together,
)
from .module_patch import RECORD, ModulePatch
from .patched_models import remember
from .planning import (
    PatchPlan,
    check_model,
    check_not_wrapped,
    plan_patch,
    stacks_to_patch,
    warn_of_decoder_loss,
    warn_of_losses,
    warn_of_unknown_attention,
    why_never_used,
)
from .sentence_transformers import cut_at
from .snapshot import Snapshot
from .stored import FIELD, base_model_of, read_settings, write_stored

Model = TypeVar("Model", bound=nn.Module)


def patch_attention(
    model: Model,
    method: str | None = None,
    *,
    layers: Sequence[int] | None = None,
    settings: Any = None,
    **overrides: Any,
) -> Model:
    """Replace the self-attention of a pretrained encoder, or decoder alone, by an efficient method, in place.

    The weights stay as they are; `"cst"`, a conversion that is to be fine-tuned, adds position embeddings to them, in
    `hf_effattn_cst` of the model without its head, which are trained and saved with the model. The settings are
    written to `model.config.effattn`, which `save_pretrained` keeps (load with `hf_effattn.from_pretrained`); without
    this package such a checkpoint loads as the exact model. Patching a patched model replaces its settings. Models
    that mask the future run the method's causal form, in which no token changes what comes before it; when they
    generate, the prompt runs by the method and what follows exactly over the cache (`"cst"`: by the method too).
    Cross-attention, packed sequences, dense 4-D masks, sliding-window layers, short inputs and inputs of no more
    tokens than `clusters` or `topk` stay exact; of a sliding window only what it holds is computed, so that those
    layers differ by rounding. In a composite model every encoder that is served is patched; hand over a part, such as
    `model.encoder`, to patch that one alone. As everywhere in transformers, models built from one config object share
    their attention implementation: give each its own (`copy.deepcopy(config)`).

    Args:
        model (`PreTrainedModel`): an encoder or decoder of a served model type, with or without a head; or a
            `SentenceTransformer`, `CrossEncoder` or `SparseEncoder`, of which every transformers model is patched.
        method (`str`): one of `list_methods()`. To be left out where `settings` name it.
        layers (`Sequence[int]`, *optional*): the layers to patch, from 0; negative ones count from the
            last. Default: all, or those of `settings`.
        settings (`Calibration`, `dict`, `str` or `os.PathLike`, *optional*): settings that were found before: what
            `hf_effattn.calibrate` returned, the file or folder that it was saved to, or a repository on the Hub with
            it (`effattn.json`, or else `config.json` of a patched model). They serve every fine-tune of the model.
        overrides: the method's settings, such as `clusters`, `topk`, `clustering`, `iterations`, `seed`, `min_length`
            (0 forces the method at every length), `tolerance` (the error allowed, checked in every pass); in decoders
            `exact_keys`, `key_clusters`, `segment_length`, `window`; for `"cst"` `slice_length`, `extension_ratio`,
            `composition`. They win over those of `settings`. Of a model with encoders and decoders those parts are
            patched that have all of them.

    Returns:
        The same `model`.

    Warns, before anything changes, where a language model loses more by the method than by calibrated settings; where
    a trained conversion loses its position embeddings, because it becomes one with other slices or none, or is without
    them since transformers' own `from_pretrained` loaded it; and where every input that the model takes would still
    run exact attention.

    Raises:
        ValueError: neither method nor settings, settings of another model or written by a newer version, an unknown
            method or setting, a value outside its range, layers that do not exist, a model of a
            type that is not served, or not when it is causal, or without attention to patch, or whose config has
            `output_attentions=True`, or a conversion of what DDP or FSDP has wrapped. The model is then unchanged.
        TypeError: a value of the wrong type, something that is not a model.
        OSError: `settings` that cannot be read.
    """
    if settings is not None:
        method, stored_layers, overrides = read_settings(settings, method, **overrides)
        layers = stored_layers if layers is None else layers
    elif method is None:
        raise ValueError(
            f"name a method, one of {quoted(list_methods())}, or give settings= that hf_effattn.calibrate found"
        )
    setting_names(method)  # of an unknown method no model is to blame
    stacks = stacks_to_patch(model, method)
    chosen = methods_for(method, {stack.causal for stack in stacks}, **overrides)
    fitting = [(stack, chosen[stack.causal]) for stack in stacks if stack.causal in chosen]
    made_for = [(stack, own) for stack, own in fitting if own.is_for(stack)]  # of several parts the calibrated one
    plans = [plan_patch(stack, own, layers) for stack, own in made_for or fitting]
    for plan in plans:
        check_not_wrapped(model, plan)
    for plan in plans:
        warn_of_losses(plan)
        warn_of_unknown_attention(plan)
        never_used = why_never_used(plan, cut_at(model))
        if never_used is None:
            warn_of_decoder_loss(plan)
        else:
            warnings.warn(never_used, stacklevel=2)
    apply_plans(plans)
    for plan in plans:
        remember(plan.stack.model, model)
    return model


def unpatch_attention(model: Model) -> Model:
    """Give a model back the attention it had before it was patched, bit for bit; a model never patched stays as it is.

    What transformers alone loaded from a patched model's folder is exact already, and loses `config.effattn` too.

    Args:
        model (`PreTrainedModel`): the model, or a part of it, that `patch_attention` or
            `attn_implementation=` changed; or a model of sentence-transformers.

    Returns:
        The same `model`, with its earlier attention implementation and without `config.effattn` and what the method
        added to its parameters.

    Raises:
        TypeError: something that is not a model.
    """
    check_model(model)
    for stack in find_stacks(model):
        config = stack.model.config
        patches = [vars(module).pop(RECORD) for module in stack.modules if RECORD in vars(module)]
        for module in stack.modules:
            forget_measurements(module)
        ours = config._attn_implementation in list_methods() or bool(patches and attends_itself(stack.model))
        for kind in METHODS.values():
            kind.detach(stack.model)
        tell_whole_texts(stack.model.base_model, False)
        if ours:
            set_implementation(stack, patches[0].previous if patches else exact_implementation(stack))
        if hasattr(config, FIELD):
            delattr(config, FIELD)
    return model


def apply_plans(plans: Sequence[PatchPlan]) -> None:
    """Carry out the plans; when one fails, undo them all."""
    snapshots = [Snapshot.of(plan.stack.model) for plan in plans]
    try:
        for plan in plans:
            _apply(plan)
    except BaseException:
        for snapshot in snapshots:
            snapshot.restore()
        raise


def _apply(plan: PatchPlan) -> None:
    config = plan.stack.model.config
    current = config._attn_implementation
    exact = exact_implementation(plan.stack) if current in list_methods() else current
    for kind in METHODS.values():
        if not isinstance(plan.method, kind):
            kind.detach(plan.stack.model)
    plan.method.attach(plan.stack.model, plan.parameters)
    tell_whole_texts(plan.stack.model.base_model, hides_the_future(config) and not plan.method.stays_exact)
    set_implementation(plan.stack, plan.method.method)
    setattr(config, FIELD, write_stored(plan.method, plan.layers, base_model_of(config)))
    for module, served, patched in zip(plan.stack.modules, plan.stack.layers, plan.patched, strict=True):
        earlier = vars(module).get(RECORD)
        previous = exact if earlier is None or current not in list_methods() else earlier.previous
        owner = None if plan.parameters is None else plan.stack.model.base_model
        forget_measurements(module)
        chosen = plan.method.for_layers(served) if patched else None
        setattr(module, RECORD, ModulePatch(chosen, previous, owner, len(served), is_causal(module)))


def exact_implementation(stack: Stack) -> str:
    """What a stack runs that nothing else is known of; transformers' SDPA path has no attention sinks or softcap."""
    return "eager" if any(map(bends_scores, stack.modules)) or not stack.model._supports_sdpa else "sdpa"


def set_implementation(stack: Stack, implementation: str, *, apart: bool | None = None) -> None:
    """Set the attention implementation of a stack, also in a copy of the config that its modules hold.

    `apart`: whether layers are told of each image instead of a mask. Default: of a method.
    """
    if attends_itself(stack.model):
        from .exact.architectures import run_own  # reads modelling files of transformers, which others go without

        run_own(stack, implementation, patched=implementation in list_methods())
        # Its config keeps its own, unless transformers' switch has set another, which a decoder beside it may call.
        if implementation in list_methods() or stack.model.config._attn_implementation not in list_methods():
            return
    if reads_together(stack.model):
        from .exact.architectures.pixtral import read_apart

        read_apart(stack.model, apart=implementation in list_methods() if apart is None else apart)
    stack.model.set_attn_implementation(implementation)
    for module in stack.modules:
        config: Any = getattr(module, "config", stack.model.config)
        if config is not stack.model.config:
            config._attn_implementation = implementation
