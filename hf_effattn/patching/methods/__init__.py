"""The attention methods by name, and self-attention by one of them.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .base import MethodSettings, closest, quoted
from .clustered import BiClusteredSettings, ClusteredSettings, ImprovedClusteredSettings
from .cst import SliceSettings

__all__ = [
    "METHODS",
    "MethodSettings",
    "attend",
    "attention_matrix",
    "find_groups",
    "implied_weights",
    "list_methods",
    "make_settings",
    "run_method",
    "setting_names",
]

METHODS: dict[str, type[MethodSettings]] = {
    settings.method: settings
    for settings in (ClusteredSettings, ImprovedClusteredSettings, BiClusteredSettings, SliceSettings)
}
# Listed once: torch.compile cannot trace dataclasses.fields of a class.
SETTING_NAMES = {name: tuple(field.name for field in fields(settings)) for name, settings in METHODS.items()}


def list_methods() -> tuple[str, ...]:
    """Name the attention methods that `patch_attention` takes.

    Returns:
        `tuple[str, ...]`: the names, `"clustered"` first. `attn_implementation=` takes them too, but for `"cst"`, a
        conversion that adds parameters.
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


def make_settings(method: str, **settings: Any) -> MethodSettings:
    """The validated settings of a method.

    Args:
        method (`str`): one of `list_methods()`.
        settings: the method's fields; those not given keep their defaults.

    Returns:
        `MethodSettings`: frozen; equal settings compare equal.

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


def run_method(
    settings: MethodSettings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
    module: nn.Module | None = None,
) -> torch.Tensor:
    """Self-attention by a method, its clustering included; exact attention where the method would save nothing.

    Args:
        settings (`MethodSettings`): from `make_settings`.
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, H, N, D)`, any strides.
        value (`torch.Tensor`): `(B, H, N, Dv)`, any strides.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = attend; it masks the same rows of the queries.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights.
        causal (`bool`): whether no query sees a later key; as a prompt, where the settings say `causal="prefill"`.
        module (`nn.Module`, *optional*): the attention module, for methods that use its weights.

    Returns:
        `torch.Tensor`: `(B, H, N, Dv)`. Masked rows are 0 where the method ran.

    Raises:
        ValueError: more queries than keys or fewer, sizes that do not fit together.
        TypeError: a mask that is not boolean.
    """
    if settings.is_exact(query.shape[2], key.shape[2], query.device.type, causal=causal):
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if causal and mask is not None:
            mask = mask & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "is_causal": causal and mask is None}
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=gqa, **options)
    if causal:
        return settings.attend_causal(
            query, key, value, key_mask=key_mask, scale=scale, dropout_p=dropout_p, prompt=True, module=module
        )
    groups = find_groups(settings, query, key, key_mask)
    return attend(
        settings, query, key, value, groups, key_mask=key_mask, scale=scale, dropout_p=dropout_p, module=module
    )


def find_groups(
    settings: MethodSettings, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The groups of self-attention's queries; they carry no gradient."""
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{settings.method!r} serves self-attention, where queries and keys are as many; got {query.shape[2]} "
            f"queries and {key.shape[2]} keys"
        )
    with torch.no_grad():
        return settings.group(query.detach(), key.detach(), key_mask)


def attend(
    settings: MethodSettings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: tuple[torch.Tensor, ...],
    *,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    module: nn.Module | None = None,
) -> torch.Tensor:
    """Self-attention with given groups, `(B, H, N, Dv)`."""
    options: dict[str, Any] = {"key_mask": key_mask, "scale": scale, "dropout_p": dropout_p, "module": module}
    return settings.attend(query, key, value, groups, **options)


def attention_matrix(
    settings: MethodSettings,
    query: torch.Tensor,
    key: torch.Tensor,
    groups: tuple[torch.Tensor, ...],
    *,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    module: nn.Module | None = None,
) -> torch.Tensor:
    """The attention weights that the approximation implies, `(B, H, N, M)`."""
    options: dict[str, Any] = {"key_mask": key_mask, "scale": scale, "module": module}
    return implied_weights(
        settings, query, key, lambda values: attend(settings, query, key, values, groups, **options)
    )


def implied_weights(
    settings: MethodSettings, query: torch.Tensor, key: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The weights `(B, H, N, M)` of an attention that gives none: what `run` makes of an identity as values.

    Raises:
        ValueError: the settings compute no such weights.
    """
    settings.check_weights()
    identity = torch.eye(key.shape[2], dtype=query.dtype, device=query.device)
    return run(identity.expand(*key.shape[:2], -1, -1))
