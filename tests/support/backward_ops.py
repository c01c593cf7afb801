"""The registered ops of the package, forward and backward, caught where torch calls them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class OpCalls(TorchDispatchMode):
    """Keeps the arguments of every op of the package that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hf_effattn":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def learned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it was before autograd took it apart."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def check_ops(run: Callable[[], Any]) -> list[str]:
    """Check that each op that `run` calls changes no argument and returns what its fake promises.

    `torch.compile` plans with the fake's shapes, dtypes and strides, and stops where the op returns others. Numbers of
    two calls are not compared: what kernels leave unwritten differs.

    Returns:
        The names of the ops.
    """
    with OpCalls() as caught:
        run()
    for op, args, kwargs in caught.calls:
        if "_backward" in op.name():
            torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
        else:
            args, kwargs = tree_map_only(torch.Tensor, learned, (args, kwargs))
            # What is kept for the way back is a list as long as there are chunks, which no fake tensor could tell.
            args = [False if arg.name == "keep" else x for arg, x in zip(op._schema.arguments, args, strict=False)]
            tests = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(op, args, kwargs, test_utils=tests)
    return [op.name() for op, _, _ in caught.calls]
