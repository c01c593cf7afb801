"""The cache of a decoder under both of its names: `past_key_values`, and `cache` from transformers 5.24 on."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

from transformers.modeling_outputs import BaseModelOutputWithPast

OLD, NEW = "past_key_values", "cache"
# As the outputs of the installed transformers name it, which warn of the old name where they have the new one.
IN_OUTPUTS = NEW if NEW in {field.name for field in fields(BaseModelOutputWithPast)} else OLD

Returned = TypeVar("Returned")


def takes_cache(method: Callable[..., Returned]) -> Callable[..., Returned]:
    """A method that takes `past_key_values`, and takes it as `cache` too.

    Raises:
        ValueError: both are given.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Returned:
        if NEW in kwargs:
            cache = kwargs.pop(NEW)
            if kwargs.get(OLD) is not None:
                raise ValueError(f"give {OLD} or {NEW}, two names of one argument, not both")
            if cache is not None:
                kwargs[OLD] = cache
        return method(*args, **kwargs)

    # `generate` looks in the signature for what it may hand on.
    both = signature(method)
    parameters = [parameter for parameter in both.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    rest = [parameter for parameter in both.parameters.values() if parameter.kind is Parameter.VAR_KEYWORD]
    named = Parameter(NEW, Parameter.KEYWORD_ONLY, default=None)
    call.__signature__ = both.replace(parameters=[*parameters, named, *rest])  # type: ignore[attr-defined]
    return call


def named_for_output(cache: Any) -> dict[str, Any]:
    """A cache as keyword of an output."""
    return {IN_OUTPUTS: cache}


def cache_of(output: Any) -> Any:
    """The cache in an output."""
    return getattr(output, IN_OUTPUTS)
