"""The cache of a decoder under both of its names: `past_key_values`, and `cache` from transformers 5.24 on."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

OLD, NEW = "past_key_values", "cache"

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

    return call
