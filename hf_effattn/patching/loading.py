"""`from_pretrained`: load a checkpoint and patch it again as its config says."""

import warnings
from collections.abc import Sequence
from typing import Any

from .methods import METHODS, MethodSettings, list_methods, make_settings, setting_names
from .methods.cst import SliceSettings
from .methods.cst.checkpoint import load_positions, quiet_about_tables
from .methods.cst.positions import NAME, held_by
from .patch import apply_plans, encoders_to_patch, plan_patch, warn_if_never_used
from .stored import FIELD, read_stored


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

    Args:
        auto_class (`type`): such as `AutoModelForSequenceClassification` or `BertModel`.
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
    """
    if not hasattr(auto_class, "from_pretrained"):
        raise TypeError(
            "the first argument must be a class with from_pretrained, such as transformers.AutoModel, "
            f"got {auto_class!r}"
        )
    implementation = kwargs.pop("attn_implementation", None)
    # A tuple of names, for transformers also takes a dict, with an implementation for each part of a model.
    if implementation is not None and (implementation not in list_methods() or method not in (None, implementation)):
        raise ValueError(
            f"attn_implementation={implementation!r} contradicts what hf_effattn.from_pretrained is for, a patched "
            f"model; leave it out, name one of {list_methods()}, or load with {auto_class.__name__}.from_pretrained"
        )
    method = method or implementation
    known = {name for any_method in METHODS for name in setting_names(any_method)}
    settings = {name: kwargs.pop(name) for name in sorted(known) if name in kwargs}
    if method is not None:
        make_settings(method, **settings)  # a mistake in the settings is cheaper to learn before the weights load

    with quiet_about_tables():
        loaded = auto_class.from_pretrained(name_or_path, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    stored = getattr(model.config, FIELD, None)
    named = stored.get("method") if isinstance(stored, dict) else None
    encoders = encoders_to_patch(model, method or named or list_methods()[0])
    saved = [encoder for encoder in encoders if getattr(encoder.model.config, FIELD, None) is not None]
    if not saved and method is None:
        raise ValueError(
            f"{name_or_path} was saved without hf_effattn settings (its config has no {FIELD!r}); name a method, "
            f'for example from_pretrained({auto_class.__name__}, ..., method="i-clustered"), or load it with '
            f"{auto_class.__name__}.from_pretrained for exact attention"
        )
    plans, converted, left_out = [], [], []
    for encoder in saved or encoders:
        stored = getattr(encoder.model.config, FIELD, None)
        chosen, chosen_layers = _settings_to_apply(stored, method, settings)
        plans.append(plan_patch(encoder, chosen, chosen_layers if layers is None else layers))
        saved_method = stored.get("method") if isinstance(stored, dict) else None
        if saved_method == chosen.method:
            converted.append(encoder)
        elif saved_method == SliceSettings.method:
            left_out.append(chosen.method)
    for plan in plans:
        warn_if_never_used(plan)
    apply_plans(plans)
    for encoder in converted:
        if held_by(encoder.model) is not None:
            load_positions(model, encoder, name_or_path, kwargs)
            if isinstance(loaded, tuple):  # transformers reported before they were loaded
                unexpected = loaded[1]["unexpected_keys"]
                loaded[1]["unexpected_keys"] = type(unexpected)(
                    key for key in unexpected if NAME not in key.split(".")
                )
    for other_method in left_out:
        warnings.warn(
            f'{name_or_path} was converted to "{SliceSettings.method}"; patched with "{other_method}" instead, it is '
            f"without the {NAME} that it was trained with. Leave out method= to load it as it was saved",
            stacklevel=2,
        )
    return loaded


def _settings_to_apply(
    stored: Any, method: str | None, overrides: dict[str, Any]
) -> tuple[MethodSettings, Sequence[int] | None]:
    """The saved settings with the overrides; where another method is asked for, its own and the saved layers."""
    saved = stored if isinstance(stored, dict) else {}
    if method is not None and (stored is None or saved.get("method", method) != method):
        return make_settings(method, **overrides), saved.get("layers")
    return read_stored(stored, method, **overrides)
