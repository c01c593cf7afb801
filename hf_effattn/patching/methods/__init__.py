"""The attention methods by name."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from .base import Method, closest, quoted
from .causal import CausalBiClustered, CausalClustered, CausalImprovedClustered
from .clustered import BiClustered, Clustered, ImprovedClustered
from .cst import CompositeSlices
from .exact import Exact
from .per_head import CausalPerHead, PerHead

__all__ = [
    "DECODER_METHODS",
    "METHODS",
    "Method",
    "list_methods",
    "make_method",
    "methods_for",
    "setting_names",
]

METHODS: dict[str, type[Method]] = {
    kind.method: kind for kind in (Clustered, ImprovedClustered, BiClustered, PerHead, CompositeSlices, Exact)
}
# By the same names, the settings of models that mask the future.
DECODER_METHODS: dict[str, type[Method]] = METHODS | {
    kind.method: kind for kind in (CausalClustered, CausalImprovedClustered, CausalBiClustered, CausalPerHead)
}
# Listed once: torch.compile cannot trace dataclasses.fields of a class.
SETTING_NAMES = {
    causal: {name: tuple(field.name for field in fields(kind)) for name, kind in kinds.items()}
    for causal, kinds in ((False, METHODS), (True, DECODER_METHODS))
}


def list_methods() -> tuple[str, ...]:
    """Name the attention methods that `patch_attention` takes.

    Returns:
        `tuple[str, ...]`: the names, `"clustered"` first. `attn_implementation=` takes them too, but for `"cst"`, a
        conversion that adds parameters, and `"per-head"`, whose settings come from `hf_effattn.calibrate`.
    """
    return tuple(METHODS)


def setting_names(method: str, *, causal: bool = False) -> tuple[str, ...]:
    """The names of a method's settings; ValueError with the closest name where the method is unknown."""
    if not isinstance(method, str):
        raise TypeError(f"method must be the name of one, {quoted(METHODS)}; got {method!r}")
    if method not in METHODS:
        raise ValueError(
            f"unknown attention method {method!r}{closest(method, METHODS)}; choose one of {quoted(METHODS)}"
        )
    return SETTING_NAMES[causal][method]


def make_method(method: str, *, causal: bool = False, **settings: Any) -> Method:
    """A method with its settings, validated.

    Args:
        method (`str`): one of `list_methods()`.
        causal (`bool`): whether the settings are those of decoders, which have others than encoders.
        settings: the method's fields; those not given keep their defaults.

    Returns:
        `Method`: frozen; equal settings compare equal.

    Raises:
        ValueError: an unknown method or setting (the closest name is suggested), a value outside its range.
        TypeError: a value of the wrong type.
    """
    if not isinstance(causal, bool):
        raise ValueError(f"causal says whether the settings are a decoder's, True or False, got {causal!r}")
    names = setting_names(method, causal=causal)
    for name in settings:
        if name not in names:
            raise UnknownSettingError(_unknown_setting(method, name, causal))
    return (DECODER_METHODS if causal else METHODS)[method](**settings)


def methods_for(method: str, kinds: Iterable[bool], **settings: Any) -> dict[bool, Method]:
    """The method for encoders (False), decoders (True) or both, with the settings: without a kind that lacks one.

    Raises:
        ValueError, TypeError: as `make_method`, where the settings fit no kind.
    """
    methods: dict[bool, Method] = {}
    errors: list[ValueError | TypeError] = []
    for causal in sorted(kinds):
        try:
            methods[causal] = make_method(**{"method": method, "causal": causal, **settings})
        except (ValueError, TypeError) as error:
            errors.append(error)
    if not methods:
        raise next((error for error in errors if not isinstance(error, UnknownSettingError)), errors[0])
    fitting = {causal: candidate for causal, candidate in methods.items() if candidate.causal in (None, causal)}
    if not fitting:
        raise ValueError(other_kind(causal=not settings["causal"]))
    return fitting


def other_kind(*, causal: bool) -> str:
    """Why the settings of the one kind of models are refused for the other, which masks the future or not."""
    theirs, ours = ("an encoder", "a decoder") if causal else ("a decoder", "an encoder")
    return (
        f"the settings are those of {theirs}, and this is {ours}, whose settings mean other numbers: leave them out, "
        'or give its own, which "effattn methods" lists'
    )


class UnknownSettingError(ValueError):
    """A setting that a method has not, for the kind of model that it is to run in."""


def _unknown_setting(method: str, name: str, causal: bool) -> str:
    names = setting_names(method, causal=causal)
    kind, other = ("decoders", "encoders") if causal else ("encoders", "decoders")
    if name not in setting_names(method, causal=not causal):
        return f"{method!r} has no setting {name!r}{closest(name, names)}; its settings are {quoted(names)}"
    only_here = [setting for setting in names if setting not in setting_names(method, causal=not causal)]
    said = f"{method!r} has no setting {name!r} in {kind}, only in {other}; {kind} have"
    return f"{said} {quoted(only_here or names)}"
