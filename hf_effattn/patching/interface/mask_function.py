"""The mask function that transformers calls for a method, and what it makes of transformers' masks.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from ...ops.shared.callers import stacklevel_of_user
from ...ops.shared.graphs import in_a_graph
from ..exact.query_chunks import added_mask
from ..exact.windows import IN_BLOCKS, hides_keys, mask_of_blocks, sees_all, window_of
from ..methods import list_methods
from ..model_types.stacks import hides_the_future
from ..model_types.table import MODEL_TYPES, NOT_SERVED
from ..parallel_state import check_tokens_undivided
from ..transformers_internals import implementation_of
from .settings import unsupported_error


def padding_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int,
    q_offset: int | torch.Tensor = 0,
    mask_function: Callable = causal_mask_function,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The key mask of plain self-attention, bidirectional or causal, and transformers' dense mask of anything else.

    Args:
        batch_size (`int`): `B`.
        kv_length (`int`): `M`.
        q_length (`int`): `N`.
        q_offset (`int`): position of the first query; above 0 where a cache holds earlier keys.
        mask_function (`Callable`): transformers' rule for who sees whom, before padding.
        kwargs: transformers' further arguments, handed on.

    Returns:
        `torch.Tensor`, *optional*: bool `(B, N)`, `(B, 1, N, M)` or, of a sliding window, what `mask_of_blocks` gives,
        True = attend; None where nothing is masked but the future. With a causal `(B, N)`, or None, the queries' own
        keys are the first `N`, whatever room a cache has. Of models that add it to scores of their own, `(B, 1, 1, N)`
        or, of types that are not in the table, `(B, 1, N, M)`, to be added.

    Raises:
        ValueError: a model type that is known and not served, which may hear of the method by its mask alone; texts
            divided by tokens, by what may have taken the place of the attention function.
    """
    if not torch.compiler.is_compiling():
        check_tokens_undivided((), implementation_of(kwargs.get("config")))
    kwargs |= {"batch_size": batch_size, "kv_length": kv_length, "q_offset": q_offset, "mask_function": mask_function}
    entry = MODEL_TYPES.get(getattr(kwargs.get("config"), "model_type", ""))
    if entry is None and not _is_composite(kwargs.get("config")):
        return _mask_of_unknown(q_length, **kwargs)
    causal = hides_the_future(kwargs.get("config"))
    if causal and _hides_the_future_only(mask_function, q_length, kwargs["config"]):
        if 1 < q_length <= kv_length and _is_first(q_offset) and not kwargs.get("kv_offset"):
            return _prompt_mask(kwargs.get("attention_mask"), q_length)
    elif entry is not None and q_length == kv_length and sees_all(mask_function):
        # All rows of a padding mask are alike, so one row is made, which is O(M). transformers decides in it whether
        # any mask is needed.
        plain = {"mask_function": bidirectional_mask_function, "use_vmap": False}
        row = sdpa_mask(q_length=1, **{"allow_is_bidirectional_skip": True} | kwargs | plain)
        if row is not None and entry.exact_kind == "biases":  # patched and unpatched layers both read it
            return added_mask(row, kwargs.get("dtype", torch.float32))
        return None if row is None else row[:, 0, 0, :]
    elif entry is not None and q_length == kv_length and _is_first(q_offset) and not kwargs.get("kv_offset"):
        key_mask, device = kwargs.get("attention_mask"), kwargs.get("device", "cpu")
        if key_mask is not None and key_mask.ndim == IN_BLOCKS:  # generate has made it, for a static cache
            return key_mask
        mask = mask_of_blocks(
            mask_function, key_mask, causal=causal, batch_size=batch_size, length=q_length, device=device
        )
        if mask is not None:
            return mask
    if entry is not None and entry.has_own_forward:  # a call of its decoder, which may not say that it is one
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(q_length=q_length, **kwargs)


def _is_composite(config: Any) -> bool:
    """Whether a config may be that of a model around some that are served."""
    return bool(getattr(config, "sub_configs", None)) and config.model_type not in NOT_SERVED


def _mask_of_unknown(q_length: int, **kwargs: Any) -> torch.Tensor:
    """The mask of a model type outside the table. A model that calls no attention function adds it to its scores."""
    config = kwargs.get("config")
    method, model_type = implementation_of(config), getattr(config, "model_type", "unknown")
    if method in list_methods():
        if model_type in NOT_SERVED:
            name = f"{type(config).__name__.removesuffix('Config')}Model"
            raise ValueError(unsupported_error(method, name, model_type))
        if not torch.compiler.is_compiling():
            warnings.warn(
                f'"{method}" does not know the model type "{model_type}", whose attention stays exact',
                stacklevel=stacklevel_of_user(),
            )
    return eager_mask(q_length=q_length, **kwargs)


def _hides_the_future_only(mask_function: Callable, length: int, config: Any) -> bool:
    """Whether queries see all earlier keys, by a causal mask or by a window that no input of the model exceeds."""
    if mask_function is causal_mask_function:
        return True
    window = window_of(mask_function)
    return window is not None and not hides_keys(1 + window.before, length, config)


def _is_first(position: int | torch.Tensor) -> bool:
    """Whether the queries begin the sequence. A static cache keeps it in a tensor, which a graph cannot read."""
    if isinstance(position, torch.Tensor):
        return not in_a_graph() and int(position) == 0
    return position == 0


def _prompt_mask(mask: torch.Tensor | None, q_length: int) -> torch.Tensor | None:
    """The key mask `(B, N)` of queries that are the first `N` tokens; None where none is masked."""
    if mask is None:
        return None
    mask = mask[:, :q_length].bool()
    return None if not in_a_graph() and mask.all() else mask
