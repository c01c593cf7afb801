"""Triton's interpreter, which runs the kernels on a CPU, with its bfloat16 mended."""

import os
from typing import Any

import numpy as np
import torch


def run_kernels_on_the_cpu() -> None:
    """From now on kernels take CPU tensors; to be called before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language as tl
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: InterpreterBuilder, src: Any, dst_type: Any) -> Any:
        """The interpreter keeps bfloat16 as 16-bit integers and cuts float32 off, where GPUs round to the nearest."""
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return cast(self, src, dst_type)

    def create_dot(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter would multiply those integers."""
        if a.dtype.scalar == tl.bfloat16:
            a, b = cast_impl(self, a, tl.float32), cast_impl(self, b, tl.float32)
        return dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
