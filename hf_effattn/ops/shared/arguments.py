"""Argument checks and the choice of backend, shared by every op.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim, `C` clusters.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any

import torch
from torch.autograd import forward_ad

from .callers import stacklevel_of_user
from .torch_internals import is_followed_by_func

BACKENDS = ("reference", "batched", "triton")
HAS_TRITON = find_spec("triton") is not None
OLDEST_TRITON = 3, 4  # has all that the kernels use
LARGEST_KERNEL_DIM = 256  # a row of a tile must fit into a chip's registers and shared memory
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LABELS = {"query": ("labels", "clusters"), "key": ("key_labels", "key_clusters")}  # names of the arguments
Form = Callable[..., Any]


def choose_backend(
    backend: str | None, forms: tuple[Form, Form, Form], *differentiable: torch.Tensor, any_width: bool = False
) -> Form:
    """The implementation to run, out of `(reference, batched, triton)`: the one asked for, else the fastest.

    `differentiable` are the tensors that a derivative may flow to, the query first. The fast forms have a backward
    pass and no forward-mode derivative, which torch would silently take for 0: where a tangent is carried they raise.
    `any_width`: the kernels read the last dimension in parts, so that it has no limit.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))} or None, got {backend!r}")
    reference, batched, triton = forms
    if backend == "reference":
        return reference
    if not torch.compiler.is_compiling():
        _check_derivatives(differentiable)
    problem = kernel_problem(*differentiable, any_width=any_width)
    if backend == "triton" and problem is not None:
        raise ValueError(f'backend="triton" cannot run here: {problem}; use backend="batched"')
    if backend is None and problem is not None and differentiable[0].is_cuda and not torch.compiler.is_compiling():
        # Python shows an equal warning from one place once.
        warnings.warn(f"attention on a GPU runs the slower PyTorch form: {problem}", stacklevel=stacklevel_of_user())
    if problem is None and (backend == "triton" or differentiable[0].is_cuda):
        return triton
    return batched


def _check_derivatives(tensors: Sequence[torch.Tensor]) -> None:
    """Raise where a derivative is asked for that the fast forms have not."""
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ValueError(
            'forward-mode derivatives (jvp) need backend="reference"; the fast forms have reverse mode only'
        )
    # torch.library registers backward passes in a way that torch.func does not take.
    if any(is_followed_by_func(x) for x in tensors):
        raise ValueError(
            'torch.func.grad and its kin (vjp, per-sample gradients) need backend="reference", or a model with exact '
            "attention (unpatch_attention); the fast forms have loss.backward() and torch.autograd.grad"
        )


def kernel_problem(*tensors: torch.Tensor, any_width: bool = False) -> str | None:
    """Why the Triton kernels cannot take these tensors `(..., D)`, or None where they can."""
    if not HAS_TRITON:
        return "the package triton is not installed (pip install triton)"
    if not tensors[0].is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {tensors[0].device}, the kernels need a GPU (or TRITON_INTERPRET=1, to test them)"
    if _triton_version() < OLDEST_TRITON:
        return f"the kernels need triton {_as_text(OLDEST_TRITON)} or newer, got {_as_text(_triton_version())}"
    if tensors[0].dtype not in KERNEL_DTYPES:
        return f"the kernels take {', '.join(str(dtype) for dtype in KERNEL_DTYPES)}, got {tensors[0].dtype}"
    largest = max(tensor.shape[-1] for tensor in tensors)
    if largest > LARGEST_KERNEL_DIM and not any_width:
        return f"the kernels take a head_dim up to {LARGEST_KERNEL_DIM}, got {largest}"
    if any(abs(tensor.stride(-1)) * tensor.shape[-1] >= 2**31 for tensor in tensors):
        return "the numbers of a row lie further apart in memory than the kernels can count; use .contiguous()"
    return None


@cache
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def _as_text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def check_count(name: str, value: int, *, minimum: int = 1) -> None:
    """Raise unless `value` is an int of at least `minimum`; an exported length is a symbol of one."""
    if not isinstance(value, (Integral, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_counts(*, minimum: int = 1, **counts: int) -> None:
    """`check_count` of several, by name."""
    for name, value in counts.items():
        check_count(name, value, minimum=minimum)


def check_number(name: str, value: float, *, minimum: float | None = None) -> None:
    """Raise unless `value` is a number, and at least `minimum` where there is one; NaN is not."""
    if not isinstance(value, (Real, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if minimum is not None and not value >= minimum:
        raise ValueError(f"{name} must be at least {minimum:g}, got {value}")


def check_floats(name: str, tensor: torch.Tensor, sizes: str) -> None:
    """Raise unless `tensor` is of floating-point numbers and has the dimensions of `sizes`, such as `"(B, N, D)"`."""
    dimensions = sizes.count(",") + 1
    if tensor.ndim != dimensions:
        raise ValueError(f"{name} must have {dimensions} dimensions {sizes}, got {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def check_alike(name: str, tensor: torch.Tensor, of: str, like: torch.Tensor) -> None:
    """Raise unless `tensor` shares dtype and device with `like`, which is called `of`."""
    if tensor.dtype != like.dtype or tensor.device != like.device:
        kinds = f"{tensor.dtype} on {tensor.device} beside {like.dtype} on {like.device}"
        raise ValueError(f"{name} must share dtype and device with {of}, got {kinds}")


def check_query_key_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise unless query `(B, H, N, D)`, key `(B, H or a divisor, M, D)` and value `(..., M, Dv)` fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        check_floats(name, tensor, "(B, H, length, head_dim)")
        if tensor.dtype.itemsize < 2 or tensor.layout != torch.strided:
            raise TypeError(f"{name} must be dense and of 16 bits or more, got {tensor.layout} of {tensor.dtype}")
        check_alike(name, tensor, "query", query)
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(f"key {tuple(key.shape)} must agree with query {tuple(query.shape)} in B and head_dim")
    if min(query.shape[1], key.shape[1], query.shape[3], value.shape[3]) == 0:
        raise ValueError("query, key and value need at least one head and one dimension")
    check_heads(query, key)
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value {tuple(value.shape)} must agree with key {tuple(key.shape)} in B, H and length")


def check_heads(query: torch.Tensor, key: torch.Tensor) -> None:
    """Raise unless the heads of `key` are as many as those of `query`, or divide them (grouped-query layout)."""
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"key must have as many heads as query, {query.shape[1]}, or a number that divides it, got {key.shape[1]}"
        )


def check_mask(name: str, mask: torch.Tensor | None, tensor: torch.Tensor, of: int = 2) -> None:
    """Raise unless `mask` is None or boolean `(B, length)` for `tensor` `(B, H, length, D)`; `of` 1: `(B, H)`."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean (True = attend), got {mask.dtype}; use mask.bool() for a 0/1 mask")
    expected, sizes = (tensor.shape[0], tensor.shape[of]), "(B, heads of key)" if of == 1 else "(B, length)"
    if tuple(mask.shape) != expected:
        raise ValueError(f"{name} must have shape {sizes} = {expected}, got {tuple(mask.shape)}")
    if mask.device != tensor.device:
        raise ValueError(f"{name} is on {mask.device}, the tensors on {tensor.device}")


def check_labels(labels: torch.Tensor, rows: torch.Tensor, *, of: str = "query") -> None:
    """Raise unless `labels` is an integer tensor `(B, H, N)`, for rows `(B, H, N, D)` of the query or the key."""
    check_integers(LABELS[of][0], labels, tuple(rows.shape[:3]), rows, of=of)


def check_integers(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor, *, of: str = "query"
) -> None:
    """Raise unless `tensor` holds integers of the given shape on the device of `like`, which is called `of`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape} like {of}, got {tuple(tensor.shape)}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {of}, got {tensor.device}")


def check_label_range(labels: torch.Tensor, clusters: int, *, of: str = "query") -> None:
    """Raise unless the labels lie in `0 .. clusters - 1`; called inside the ops, where values exist when compiled."""
    if labels.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in labels.aminmax())
    if smallest < 0 or largest >= clusters:
        name, count = LABELS[of]
        raise ValueError(f"{name} must lie in 0 .. {count} - 1 = {clusters - 1}, got {smallest} .. {largest}")


def check_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
) -> None:
    """Raise unless the arguments that every attention over clusters has fit together."""
    check_query_key_value(query, key, value)
    check_mask("key_mask", key_mask, key)
    check_mask("query_mask", query_mask, query)
    check_labels(labels, query)
