"""Slice attention: the local attention of the Composite Slice Transformer and the slice embeddings it leaves."""

from numbers import Real
from typing import Any

import torch

from ..shared.arguments import check_alike, check_count, check_mask, check_query_key_value, choose_backend
from ..shared.dropout import draw_seed
from . import batched, reference


def _triton(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from . import triton

    return triton.slice_attention(*arguments)


def extension_tokens(slice_length: int, extension_ratio: float) -> int:
    """How many keys of each neighbour a slice sees, `(α − 1) L / 2`, after checking both numbers.

    Args:
        slice_length (`int`): `L`.
        extension_ratio (`float`): `α`, from 1 (no extension) to 3 (both neighbours whole).

    Returns:
        `int`: the keys on one side.

    Raises:
        ValueError: a slice length below 1, a ratio outside [1, 3] or one that would cut a token in half.
        TypeError: a slice length that is no int, a ratio that is no number.
    """
    check_count("slice_length", slice_length)
    if not isinstance(extension_ratio, Real) or isinstance(extension_ratio, bool):
        raise TypeError(f"extension_ratio must be a number, got {type(extension_ratio).__name__}")
    if not 1 <= extension_ratio <= 3:
        raise ValueError(f"extension_ratio must lie in [1, 3], got {extension_ratio}")
    tokens = (float(extension_ratio) - 1) * slice_length / 2
    if abs(tokens - round(tokens)) > 1e-6:
        raise ValueError(
            f"extension_ratio {extension_ratio} takes {tokens:g} tokens of each neighbour of {slice_length} tokens; "
            f"it must be a whole number: choose a ratio of 1 + 2 · tokens / {slice_length}"
        )
    return round(tokens)


def slice_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    slice_length: int,
    extension_ratio: float = 1,
    causal: bool = False,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    sink_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Attention inside slices of the sequence, extended into their neighbours, with the mean of every slice's output.

    Source: Lee 2023, Eq. 8, 11, 12 and 14 and the masked mean before Eq. 9. Keys beyond the ends of the sequence are
    left out, where the paper's zeros would still get weight. Time and memory are O(N · αL).

    Sizes: `B` batch, `H` heads, `N` length, `D` head_dim of query and key, `Dv` of value, `L` slice length.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, heads, N, D)`, any strides; `heads` is `H` or divides it (grouped-query layout).
        value (`torch.Tensor`): `(B, heads, N, Dv)`, any strides.
        slice_length (`int`): `L`, at least 1. The last slice may be short.
        extension_ratio (`float`): `α` in [1, 3]: a slice sees `(α − 1) L / 2` keys of each neighbour.
        causal (`bool`): a query sees no later key, and the extension is to the left only (Eq. 12).
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token; other rows are no keys and get 0.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        query_positions (`torch.Tensor`, *optional*): `P_l W_q` `(H, L, D)`, added to the queries of every slice.
        key_positions (`torch.Tensor`, *optional*): `P_l,ext W_k` `(heads, αL, D)`, added to the keys of every
            extended slice; its last `(α − 1) L / 2` rows are not used when causal.
        sink_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = a key that every slice sees, once: inside a
            window it is a key like any other, elsewhere it comes without a position term. Causal: only earlier ones.
        dropout_p (`float`): dropout on the attention weights, drawn from torch's global state.
        return_lse (`bool`): also return the logarithm of the sum of the exponentials of each query's scores.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        `tuple[torch.Tensor, ...]`: the output `(B, H, N, Dv)`, 0 in masked rows; the masked mean of each slice's
        output `(B, H, ⌈N / L⌉, Dv)`, 0 for slices without a token; with `return_lse` also `(B, H, N)` in float32
        (float64 for float64 inputs), in masked rows the lowest finite number.

    Raises:
        ValueError: sizes, devices or dtypes that do not fit together, a slice length below 1, an extension ratio
            outside [1, 3] or in half tokens, a `dropout_p` outside [0, 1), an unknown backend.
        TypeError: a mask that is not boolean, a slice length that is not an int.

    Example:
        >>> import torch
        >>> from hf_effattn.ops import slice_attention
        >>> query, key, value = torch.randn(3, 1, 12, 4096, 64)
        >>> [part.shape for part in slice_attention(query, key, value, slice_length=32, extension_ratio=2)]
        [torch.Size([1, 12, 4096, 64]), torch.Size([1, 12, 128, 64])]
    """
    extension = extension_tokens(slice_length, extension_ratio)
    check_query_key_value(query, key, value)
    H, N, D = query.shape[1:]
    if key.shape[2] != N:
        raise ValueError(f"slice_attention is self-attention: query has {N} rows and key {key.shape[2]}")
    check_mask("key_mask", key_mask, key)
    check_mask("sink_mask", sink_mask, key)
    window = slice_length + 2 * extension
    _check_positions("query_positions", query_positions, (H, slice_length, D), query)
    _check_positions("key_positions", key_positions, (key.shape[1], window, D), query)
    forms = reference.slice_attention, batched.slice_attention, _triton
    given = [x for x in (query, key, value, query_positions, key_positions) if x is not None]
    run = choose_backend(backend, forms, *given)
    if slice_length >= N:
        # One slice sees everything: no neighbour is left, and no key is a sink that it does not see already.
        sink_mask, slice_length = None, max(1, N)
        if query_positions is not None:
            query_positions = query_positions[:, :slice_length]
        if key_positions is not None:
            key_positions = key_positions[:, extension : extension + slice_length]
        extension = 0
    scale = D**-0.5 if scale is None else float(scale)
    optional = query_positions, key_positions, sink_mask, dropout_p, draw_seed(dropout_p, query.device)
    output, pooled, lse = run(query, key, value, slice_length, extension, causal, key_mask, scale, *optional)
    return (output, pooled, lse) if return_lse else (output, pooled)


def _check_positions(
    name: str, positions: torch.Tensor | None, expected: tuple[int, int, int], query: torch.Tensor
) -> None:
    if positions is None:
        return
    if tuple(positions.shape) != expected:
        raise ValueError(f"{name} must have shape (heads, rows, head_dim) = {expected}, got {tuple(positions.shape)}")
    check_alike(name, positions, "query", query)
