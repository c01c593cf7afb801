"""Autocast as CUDA has it, on CPU tensors: more operations are taken to float32 there than on a CPU.

Code that is right under a CPU's autocast may hand two dtypes to one operation on a GPU. The lists are those of
torch's documentation on autocast, less what a CPU's autocast takes to float32 too and what no model here has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

LOW = (torch.bfloat16, torch.float16)
# Arguments in 16 bits are cast to float32.
CAST = (
    *("acos", "asin", "cosh", "cosine_similarity", "erfinv", "exp", "expm1", "layer_norm", "log", "log10"),
    *("log1p", "log2", "logsumexp", "native_layer_norm", "pow.Scalar", "pow.Tensor_Scalar"),
    *("pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "softplus", "tan"),
)
# The result is asked for in float32.
SET_DTYPE = (
    *("cumprod", "cumsum", "linalg_vector_norm", "log_softmax.int", "softmax.int", "sum"),
    "sum.dim_IntList",
)
# Another overload, which takes the dtype.
NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}


def overload_of(name: str) -> Any:
    """The operation `name` or `name.overload` of `aten`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LOW


def _cast(name: str) -> Any:
    operation = overload_of(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            args = tuple(value.float() if _is_low(value) else value for value in args)
            return operation(*args, **kwargs)

    return kernel


def _set_dtype(name: str) -> Any:
    operation = overload_of(name)

    def kernel(first: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if "softmax" in name:  # its dtype is no keyword
                dtype = args[1] if len(args) > 1 else dtype
                return operation(first, args[0], torch.float32 if dtype is None and _is_low(first) else dtype)
            return operation(
                first, *args, dtype=torch.float32 if dtype is None and _is_low(first) else dtype, **kwargs
            )

    return kernel


def _norm(name: str) -> Any:
    operation = overload_of(name)
    with_dtype = overload_of(f"norm.{NORMS[name]}")

    def kernel(first: torch.Tensor, *args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if not _is_low(first):
                return operation(first, *args)
            return with_dtype(first, *(args or (2,)), dtype=torch.float32)

    return kernel


@contextmanager
def autocast_of_a_gpu() -> Iterator[None]:
    """`torch.autocast("cpu", ...)` within it takes to float32 what `torch.autocast("cuda", ...)` does."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for names, make in ((CAST, _cast), (SET_DTYPE, _set_dtype), (NORMS, _norm)):
            for name in names:
                library.impl(name, make(name), "AutocastCPU")
        yield
    finally:
        library._destroy()
