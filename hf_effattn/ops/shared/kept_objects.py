"""Objects that a forward pass leaves to its backward pass, as tensors: the only thing that an op can return.

Autograd then keeps them as it keeps every tensor, so that checkpoints, hooks and `retain_graph` work.
"""

import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    """Puts every memory that tensors share into a list once, and into the pickle where they lie in it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.memories: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        storage = obj.untyped_storage()
        place = self._places.setdefault(storage.data_ptr(), len(self.memories)) if len(storage) else len(self.memories)
        if place == len(self.memories):
            count = len(storage) // obj.itemsize
            self.memories.append(obj.new_empty(0).set_(storage, 0, (count,), (1,)))
        return place, tuple(obj.shape), obj.stride(), obj.storage_offset()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memories: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.memories = memories

    def persistent_load(self, pid: Any) -> torch.Tensor:
        place, shape, stride, offset = pid
        return self.memories[place].as_strided(shape, stride, offset)


def as_tensors(kept: Any) -> list[torch.Tensor]:
    """Any object of plain classes as tensors, none of which shares memory with another; nothing is copied."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(kept)
    return [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8), *pickler.memories]


def from_tensors(tensors: list[torch.Tensor]) -> Any:
    """What `as_tensors` was given; its tensors must not be written to."""
    structure, *memories = tensors
    return _Unpickler(io.BytesIO(structure.numpy().tobytes()), memories).load()
