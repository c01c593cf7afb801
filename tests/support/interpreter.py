"""Triton's interpreter, which runs the kernels on a CPU, with its bfloat16 mended and without what it does twice."""

import math
import os
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def run_kernels_on_the_cpu() -> None:
    """From now on kernels take CPU tensors; to be called before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is None:
        return
    mend_bfloat16()
    mend_masks()
    remember()
    remember_types()


def mend_bfloat16() -> None:
    """Casts round as GPUs do, and products are those of the numbers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

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


def mend_masks() -> None:
    """A comparison of numbers stays a mask where it meets a block: Triton 3.9 makes integers, which it refuses."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, *given: Any) -> Any:
        (number,) = (handle for handle in given if isinstance(handle, TensorHandle))
        block = splat(self, *given)
        return TensorHandle(block.data.astype(number.data.dtype), block.dtype)

    InterpreterBuilder.create_splat = create_splat


def remember() -> None:
    """Half of the interpreter's time: it patches the language at every call of a function and undoes it per launch."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import ReduceOps

    # One function that sees all of the language gets it patched for good.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patched = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: patched

    numpy_type, reduce = interpreter._get_np_dtype, ReduceOps.apply_impl
    types: dict[str, np.dtype] = {}

    def np_dtype(kind: Any) -> np.dtype:
        """For every answer a table of all types would be built."""
        name = kind.scalar.name
        if name not in types:
            types[name] = numpy_type(kind)
        return types[name]

    def apply_impl(self: ReduceOps, input: Any) -> Any:
        """Sums by exclusive or, of which `tl.sort` is made, go number by number otherwise."""
        if self.combine_fn == tl.standard._xor_combine:
            data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(data, input[0].dtype)
        return reduce(self, input)

    interpreter._get_np_dtype, ReduceOps.apply_impl = np_dtype, apply_impl
    # Every sum and product would be done in 64 bits too, and what that shows be dropped: `debug` is off.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """Half of what is left: every result would have its shape checked, named and wrapped anew."""
    import triton.language as tl

    try:
        from triton.language.semantic import TritonSemantic
    except ImportError:  # that of torch 2.6 works another way, and more slowly
        return
    make_type, broadcast, equal = tl.block_type.__init__, TritonSemantic.broadcast_impl_value, tl.dtype.__eq__
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    # One object for each shape: equal shapes are then the same.
    shapes: dict[tuple[int, ...], Any] = {(): tl.tuple([])}
    of_tensors: dict[int, tuple[Any, tl.constexpr]] = {}
    of_elements: dict[tuple[str, int], tl.block_type] = {}

    def type_of_block(self: tl.block_type, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, sizes
        if key not in types:
            make_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def with_element_ty(self: tl.block_type, scalar_ty: Any) -> tl.block_type:
        key = scalar_ty.name, id(self.shape)
        if key not in of_elements:
            of_elements[key] = tl.block_type(scalar_ty, self.shape)
        return of_elements[key]

    def tensor(self: tl.tensor, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else shapes[()]
        if id(shape) not in of_tensors:
            of_tensors[id(shape)] = (
                tl.tuple([tl.constexpr(size) for size in shape]),
                tl.constexpr(math.prod(shape)),
            )
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[id(shape)]

    def broadcast_impl_value(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() == right.is_block() and (not left.is_block() or left.shape is right.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.block_type.with_element_ty = type_of_block, with_element_ty
    tl.tensor.__init__, tl.dtype.__eq__ = tensor, lambda self, other: self is other or equal(self, other)
    TritonSemantic.broadcast_impl_value = broadcast_impl_value
