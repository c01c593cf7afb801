"""The attention methods by name."""

from dataclasses import fields
from typing import Any

from .base import Method, closest, quoted
from .clustered import BiClustered, Clustered, ImprovedClustered
from .cst import CompositeSlices
from .exact import Exact
from .per_head import PerHead

__all__ = [
    "METHODS",
    "Method",
    "list_methods",
    "make_method",
    "setting_names",
]

METHODS: dict[str, type[Method]] = {
    kind.method: kind for kind in (Clustered, ImprovedClustered, BiClustered, PerHead, CompositeSlices, Exact)
}
# Listed once: torch.compile cannot trace dataclasses.fields of a class.
SETTING_NAMES = {name: tuple(field.name for field in fields(kind)) for name, kind in METHODS.items()}


def list_methods() -> tuple[str, ...]:
    """Name the attention methods that `patch_attention` takes.

    Returns:
        `tuple[str, ...]`: the names, `"clustered"` first. `attn_implementation=` takes them too, but for `"cst"`, a
        conversion that adds parameters, and `"per-head"`, whose settings come from `hf_effattn.calibrate`.
    """
    return tuple(METHODS)


def setting_names(method: str) -> tuple[str, ...]:
    """The names of a method's settings; ValueError with the closest name where the method is unknown."""
    if not isinstance(method, str):
        raise TypeError(f"method must be the name of one, {quoted(METHODS)}; got {method!r}")
    if method not in METHODS:
        raise ValueError(
            f"unknown attention method {method!r}{closest(method, METHODS)}; choose one of {quoted(METHODS)}"
        )
    return SETTING_NAMES[method]


def make_method(method: str, **settings: Any) -> Method:
    """A method with its settings, validated.

    Args:
        method (`str`): one of `list_methods()`.
        settings: the method's fields; those not given keep their defaults.

    Returns:
        `Method`: frozen; equal settings compare equal.

    Raises:
        ValueError: an unknown method or setting (the closest name is suggested), a value outside its range.
        TypeError: a value of the wrong type.
    """
    names = setting_names(method)
    for name in settings:
        if name not in names:
            raise ValueError(
                f"{method!r} has no setting {name!r}{closest(name, names)}; its settings are {quoted(names)}"
            )
    return METHODS[method](**settings)
