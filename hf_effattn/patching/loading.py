"""`from_pretrained`: load a checkpoint and patch it again as its config says."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..atomic_files import write_atomically
from ..ops.shared.callers import stacklevel_of_user
from .methods import METHODS, Method, list_methods, methods_for, setting_names
from .methods.cst.checkpoint import HUB_OPTIONS
from .model_types.stacks import Stack, find_stacks
from .module_patch import RECORD
from .patch import apply_plans
from .planning import plan_patch, stacks_to_patch, why_never_used
from .sentence_transformers import after_loading_and_saving, is_sentence_transformer
from .stored import FIELD, SETTINGS_FILE, read_stored, saved_method

# Of weights that a method added, saved beside adapters: as transformers names variants, `model.effattn.safetensors`.
VARIANT = FIELD


def from_pretrained(
    auto_class: Any,
    name_or_path: Any,
    *,
    method: str | None = None,
    layers: Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model with `auto_class.from_pretrained` and apply the settings in its `config.effattn`.

    Explicit keywords win over the saved settings: `from_pretrained(AutoModel, path, topk=64)`. With `method` a
    checkpoint that was never patched is patched too. A checkpoint that was saved unpatched, without `method`, is an
    error rather than an exact model that looks like a patched one.

    An adapter of PEFT loads by its classes: `from_pretrained(AutoPeftModelForSequenceClassification, adapter)` patches
    the base model as the base's config says; PEFT's own `from_pretrained` gives the exact one. Adapters that
    sentence-transformers saved have the settings beside them, which win.

    Args:
        auto_class (`type`): such as `AutoModelForSequenceClassification` or `BertModel`; or `SentenceTransformer`,
            `CrossEncoder`, `SparseEncoder` of sentence-transformers, called with the path and the keywords.
        name_or_path (`str` or `os.PathLike`): a folder, or a name on the Hub.
        method (`str`, *optional*): one of `list_methods()`. Default: the saved one.
        layers (`Sequence[int]`, *optional*): the layers to patch. Default: the saved ones, or all.
        kwargs: the method's settings, and any keyword of `auto_class.from_pretrained`; nothing is added to those.

    Returns:
        The patched model; with `output_loading_info=True` a tuple with it, as from `auto_class.from_pretrained`.

    Raises:
        ValueError: no `config.effattn` and no `method`, an `attn_implementation` that is no method, settings written
            in a newer format, an unknown method or setting, layers that do not exist, a model that cannot be patched.
        TypeError: a value of the wrong type, an `auto_class` without `from_pretrained`.

    Example:
        >>> import hf_effattn
        >>> from transformers import AutoModel
        >>> model = hf_effattn.patch_attention(AutoModel.from_pretrained("BAAI/bge-m3"), "bi-clustered", topk=128)
        >>> model.save_pretrained("patched")
        >>> hf_effattn.from_pretrained(AutoModel, "patched").config.effattn["topk"]
        128
    """
    in_library = is_sentence_transformer(auto_class)
    if not in_library and not hasattr(auto_class, "from_pretrained"):
        raise TypeError(
            "the first argument must be a class with from_pretrained, such as transformers.AutoModel, or one of "
            f"sentence-transformers, got {auto_class!r}"
        )
    method, settings = _take_settings(auto_class, method, kwargs)
    overrides = _Overrides(method, layers, settings)
    if in_library:
        return _load_sentence_transformer(auto_class, name_or_path, overrides, kwargs)
    with _while_loading():
        loaded = auto_class.from_pretrained(name_or_path, **kwargs)
    model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
    if not _patch_loaded(model, name_or_path, overrides, kwargs, info):
        raise _nothing_saved(auto_class, name_or_path)
    return loaded


@dataclass(frozen=True)
class _Overrides:
    """What the caller of `from_pretrained` wants to be different from what was saved."""

    method: str | None = None
    layers: Sequence[int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def _while_loading() -> Iterator[None]:
    with ExitStack() as loading:
        for kind in METHODS.values():
            loading.enter_context(kind.while_loading())
        yield


def _patch_loaded(
    model: Any, name_or_path: Any, overrides: _Overrides, options: Mapping[str, Any], info: Any = None
) -> bool:
    """Patch a model that transformers has just loaded, as its config says and as asked; False where neither does.

    `options` are the keywords of `from_pretrained`, `info` what it reported of the weights.
    """
    kept = _kept_beside_adapters(model, name_or_path, options)
    if kept is not None:
        for stack in find_stacks(model):
            setattr(stack.model.config, FIELD, kept)
    stacks = _stacks_to_load(model, overrides.method)
    kinds = {stack.causal for stack in stacks}
    saved, plans = [], []
    for stack in stacks:
        to_apply = _method_to_apply(stack, kinds, overrides)
        if to_apply is None:
            continue
        chosen, chosen_layers = to_apply
        saved.append(saved_method(stack.model.config))
        plans.append(plan_patch(stack, chosen, chosen_layers if overrides.layers is None else overrides.layers))
    for plan in plans:
        never_used = why_never_used(plan)
        if never_used is not None:
            warnings.warn(never_used, stacklevel=3)
    apply_plans(plans)
    for plan, before in zip(plans, saved, strict=True):
        if before == plan.method.method:
            base, checkpoint, hub = _with_tables(model, name_or_path, options, kept=kept is not None)
            plan.method.from_checkpoint(base, plan.stack, checkpoint, hub)
            if info is not None and plan.method.parameters_name:  # transformers reported before they were loaded
                name, unexpected = plan.method.parameters_name, info["unexpected_keys"]
                info["unexpected_keys"] = type(unexpected)(key for key in unexpected if name not in key.split("."))
        elif before in METHODS and METHODS[before].parameters_name:
            warnings.warn(
                f'{name_or_path} was converted to "{before}"; patched with "{plan.method.method}" instead, it is '
                f"without the {METHODS[before].parameters_name} that it was trained with. Leave out method= to load "
                "it as it was saved",
                stacklevel=3,
            )
    return bool(plans)


# What `from_pretrained` was asked for while a class of sentence-transformers loads its parts.
_overrides: ContextVar[_Overrides | None] = ContextVar("overrides", default=None)


def _load_sentence_transformer(kind: Any, name_or_path: Any, overrides: _Overrides, kwargs: dict[str, Any]) -> Any:
    token = _overrides.set(overrides)
    try:
        model = kind(str(name_or_path), **kwargs)
    finally:
        _overrides.reset(token)
    if not any(RECORD in vars(module) for module in model.modules()):
        raise _nothing_saved(kind, name_or_path)
    return model


def patch_part(model: PreTrainedModel, name_or_path: Any, options: Mapping[str, Any]) -> None:
    """Patch a transformers model that sentence-transformers has loaded, as it was saved, or as `from_pretrained` asks.

    One for which `attn_implementation` names an attention of transformers stays exact.

    Args:
        model (`PreTrainedModel`): just loaded.
        name_or_path (`str` or `os.PathLike`): a folder, or a name on the Hub.
        options (`Mapping`): keywords of the class's `from_pretrained`.

    Raises:
        ValueError: as `from_pretrained`.
    """
    overrides = _overrides.get() or _Overrides()
    implementation = options.get("attn_implementation")
    if overrides.method is None and implementation is not None and implementation not in list_methods():
        return
    _patch_loaded(model, name_or_path, overrides, options)


def keep_beside_adapters(model: Any, folder: Path) -> None:
    """Write how a model is patched, and what the patch added to its weights, beside adapters that were saved.

    Transformers saves adapters alone: neither the configuration, which says it elsewhere, nor other weights.

    Args:
        model (`nn.Module`): a transformers model that sentence-transformers has just saved, or PEFT's around one.
        folder (`Path`): where.
    """
    if not getattr(model, "peft_config", None):
        return
    model = _without_peft(model)
    stacks = find_stacks(model)
    stored: list[Any] = [getattr(stack.model.config, FIELD, None) for stack in stacks]
    if not any(stored):
        return
    if any(other != stored[0] for other in stored):
        warnings.warn(
            f"{folder} holds adapters alone, and parts of {type(model).__name__} are patched in ways of their own: "
            "loaded, it will be as its base was saved. Patch it again after loading, or merge the adapters",
            stacklevel=stacklevel_of_user(),
        )
        return
    write_atomically(folder / SETTINGS_FILE, lambda file: file.write(json.dumps(stored[0], indent=1).encode()))
    added = {}
    for stack in stacks:
        owner, name = stack.model.base_model, METHODS[stored[0]["method"]].parameters_name
        tables: Any = owner._modules.get(name)
        if tables is None:
            continue
        path = next(path for path, module in model.named_modules() if module is owner)
        # PEFT's `modules_to_save` wraps them, and answers with those that learn.
        for leaf in {parameter.rpartition(".")[2] for parameter, _ in tables.named_parameters()}:
            key = ".".join(filter(None, (path, name, leaf)))
            added[key] = getattr(tables, leaf).detach().cpu().contiguous()
    if added:
        save_file(added, folder / f"model.{VARIANT}.safetensors", metadata={"format": "pt"})


after_loading_and_saving(patch_part, keep_beside_adapters, _while_loading)


def _kept_beside_adapters(model: Any, name_or_path: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings that `keep_beside_adapters` wrote; None without adapters or such settings."""
    if not getattr(model, "peft_config", None):
        return None
    hub = {name: options[name] for name in HUB_OPTIONS if name in options}
    path = cached_file(name_or_path, SETTINGS_FILE, **hub, _raise_exceptions_for_missing_entries=False)
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _without_peft(model: Any) -> Any:
    """The transformers model that PEFT is around; transformers puts adapters in itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _with_tables(
    model: Any, name_or_path: Any, options: Mapping[str, Any], *, kept: bool
) -> tuple[Any, Any, Mapping[str, Any]]:
    """The model without PEFT's around it, the checkpoint with what a method added to it, and the options to read that.

    Of adapters it is the checkpoint of the base, which they only name, unless it was `kept` beside them.
    """
    if not getattr(model, "peft_config", None):
        return model, name_or_path, options
    base = _without_peft(model)
    if kept:
        return base, name_or_path, {**options, "variant": VARIANT}
    adapter = next(iter(model.peft_config.values()))
    trained = {name for kind in METHODS.values() if (name := kind.parameters_name)} & set(
        adapter.modules_to_save or ()
    )
    if trained:  # PEFT has looked for them in the exact model, and passed over what it did not find
        raise ValueError(
            f"the adapter {name_or_path} holds the {min(trained)} that were trained with it, and the exact model that "
            f"PEFT puts it on has none: base = hf_effattn.from_pretrained(auto_class, "
            f'"{adapter.base_model_name_or_path}"), then PeftModel.from_pretrained(base, "{name_or_path}")'
        )
    others = {name: value for name, value in options.items() if name not in ("revision", "subfolder")}
    return base, adapter.base_model_name_or_path, others | {"revision": adapter.revision}


def _take_settings(auto_class: Any, method: str | None, kwargs: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The method that is asked for and the settings of methods, out of the keywords of `from_pretrained`."""
    implementation = kwargs.pop("attn_implementation", None)
    # A tuple of names, for transformers also takes a dict, with an implementation for each part of a model.
    if implementation is not None and (implementation not in list_methods() or method not in (None, implementation)):
        raise ValueError(
            f"attn_implementation={implementation!r} contradicts what hf_effattn.from_pretrained is for, a patched "
            f"model; leave it out, name one of {list_methods()}, or load with {auto_class.__name__}.from_pretrained"
        )
    method = method or implementation
    kinds = (False, True)
    known = {name for method_name in METHODS for causal in kinds for name in setting_names(method_name, causal=causal)}
    settings = {name: kwargs.pop(name) for name in sorted(known) if name in kwargs}
    if method is not None:
        methods_for(method, kinds, **settings)  # a mistake in the settings is cheaper to learn before the weights load
    return method, settings


def _stacks_to_load(model: Any, method: str | None) -> list[Stack]:
    """The stacks that were saved patched; where none was, all of them if a method is asked for, or else none."""
    all_stacks = find_stacks(model)
    configs = (model.config, *(stack.model.config for stack in all_stacks))
    if method is None and all(getattr(config, FIELD, None) is None for config in configs):
        return []
    stacks = stacks_to_patch(model, method or saved_method(model.config) or list_methods()[0])
    return [stack for stack in stacks if getattr(stack.model.config, FIELD, None) is not None] or stacks


def _nothing_saved(auto_class: Any, name_or_path: Any) -> ValueError:
    name = auto_class.__name__
    plain = name if is_sentence_transformer(auto_class) else f"{name}.from_pretrained"
    return ValueError(
        f"{name_or_path} was saved without hf_effattn settings (its config has no {FIELD!r}); name a method, "
        f'for example from_pretrained({name}, ..., method="i-clustered"), or load it with {plain} for exact attention'
    )


def _method_to_apply(
    stack: Stack, kinds: set[bool], overrides: _Overrides
) -> tuple[Method, Sequence[int] | None] | None:
    """The saved settings with the overrides; where another method is asked for, its own and the saved layers.

    None where the settings asked for are those of other `kinds` of stacks in the model.
    """
    stored = getattr(stack.model.config, FIELD, None)
    saved = stored if isinstance(stored, dict) else {}
    if overrides.method is None or (stored is not None and saved.get("method", overrides.method) == overrides.method):
        return read_stored(stored, overrides.method, causal=stack.causal, **overrides.settings)
    chosen = methods_for(overrides.method, kinds, **overrides.settings).get(stack.causal)
    return None if chosen is None else (chosen, saved.get("layers"))
