"""In which dtypes matrices are multiplied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in PRODUCTS:
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@contextmanager
def product_dtypes() -> Iterator[list[torch.dtype]]:
    """A list of the dtypes of all products within it, backward passes included, but those inside of custom ops."""
    with _Products() as mode:
        yield mode.dtypes
