"""The backward ops of the package, caught where autograd calls them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class BackwardCalls(TorchDispatchMode):
    """Keeps the arguments of every backward op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hf_effattn" and "backward" in str(func):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def check_backward_ops(run: Callable[[], Any]) -> list[str]:
    """Check that each backward op that `run` calls changes no argument and returns what its fake promises.

    `torch.compile` plans with the fake's shapes, dtypes and strides, and stops where the op returns others.

    Returns:
        The names of the ops.
    """
    with BackwardCalls() as caught:
        run()
    for op, args, kwargs in caught.calls:
        torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    return [op.name() for op, _, _ in caught.calls]
