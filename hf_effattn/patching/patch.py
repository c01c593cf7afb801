"""`patch_attention` and `unpatch_attention`: a method on and off, on one model instance."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from .interface.whole_texts import tell_whole_texts
from .measurements import forget_measurements
from .methods import METHODS, list_methods
from .methods.base import quoted
from .model_types.stacks import find_stacks, hides_the_future, is_causal
from .module_patch import RECORD, ModulePatch
from .parallel_state import for_this_process
from .patched_models import remember
from .planning import PatchPlan, check_model, plan_patches
from .snapshot import Snapshot
from .stored import FIELD, base_model_of, read_settings, write_stored
from .transformers_internals import implementation_of

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
            (0 forces the method at every length), `tolerance` (the error allowed, checked in every pass), `cuda_graph`
            (`"auto"`: replay it as CUDA graphs); in decoders `exact_keys`, `key_clusters`, `segment_length`, `window`;
            for `"cst"` `slice_length`, `extension_ratio`, `composition`. They win over those of `settings`. Of a model
            with encoders and decoders those parts are patched that have all of them.

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

    Example:
        >>> import hf_effattn
        >>> from transformers import AutoModel, AutoTokenizer
        >>> tokenizer, model = AutoTokenizer.from_pretrained("BAAI/bge-m3"), AutoModel.from_pretrained("BAAI/bge-m3")
        >>> model = hf_effattn.patch_attention(model, "bi-clustered", topk=128)
        >>> inputs = tokenizer(open("long.txt").read(), return_tensors="pt", truncation=True, max_length=8192)
        >>> outputs = model(**inputs)
        >>> model.config.effattn["topk"]
        128
    """
    if settings is not None:
        method, stored_layers, overrides = read_settings(settings, method, **overrides)
        layers = stored_layers if layers is None else layers
    elif method is None:
        raise ValueError(
            f"name a method, one of {quoted(list_methods())}, or give settings= that hf_effattn.calibrate found"
        )
    plans = plan_patches(model, method, overrides, layers)
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

    Example:
        >>> import hf_effattn
        >>> from transformers import AutoModel
        >>> model = hf_effattn.patch_attention(AutoModel.from_pretrained("BAAI/bge-m3"), "i-clustered")
        >>> hf_effattn.unpatch_attention(model).config._attn_implementation
        'sdpa'
    """
    check_model(model)
    for stack in find_stacks(model):
        config = stack.model.config
        patches = [vars(module).pop(RECORD) for module in stack.modules if RECORD in vars(module)]
        for module in stack.modules:
            forget_measurements(module)
        ours = implementation_of(config) in list_methods() or bool(patches and stack.exact.has_own_forward)
        for kind in METHODS.values():
            kind.detach(stack.model)
        tell_whole_texts(stack.model.base_model, False)
        if ours:
            stack.exact.switch(patches[0].previous if patches else stack.exact.baseline, on=False)
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
    current = implementation_of(config)
    exact = plan.stack.exact.baseline if current in list_methods() else current
    base = plan.stack.model.base_model
    for kind in METHODS.values():
        if kind.parameters_name in base._modules and not isinstance(plan.method, kind):
            kind.detach(plan.stack.model)
    if plan.parameters is not None:
        plan.method.attach(plan.stack.model, plan.parameters)
    tell_whole_texts(base, hides_the_future(config) and not plan.method.stays_exact)
    plan.stack.exact.switch(plan.method.method, on=True)
    setattr(config, FIELD, write_stored(plan.method, plan.layers, base_model_of(config)))
    for module, served, patched in zip(plan.stack.modules, plan.stack.layers, plan.patched, strict=True):
        earlier = vars(module).get(RECORD)
        previous = exact if earlier is None or current not in list_methods() else earlier.previous
        owner = None if plan.parameters is None else base
        forget_measurements(module)
        of_layers = plan.method.for_layers(served) if patched else None
        chosen = for_this_process(of_layers, module, plan.stack.model.tp_size)
        setattr(module, RECORD, ModulePatch(chosen, previous, owner, len(served), is_causal(module)))
