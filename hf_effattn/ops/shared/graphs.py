"""Whether a graph is being made, which other inputs will run through: none of these inputs' values may shape it."""

import torch

from .torch_internals import is_traced as is_traced


def in_a_graph() -> bool:
    """Whether `torch.compile`, `torch.export` or `torch.jit.trace` follows what is computed."""
    return torch.compiler.is_compiling() or is_traced()


def is_exported() -> bool:
    """Whether `torch.export` is running; in versions before 2.7, which cannot tell, also `torch.compile`."""
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


@torch.compiler.assume_constant_result
def is_exported_to_onnx() -> bool:
    """Whether `torch.onnx.export` is running.

    A constant, as the compiler takes torch's own answer for False, and the exporter captures what it cannot convert.
    """
    return torch.onnx.is_in_onnx_export()
