"""Objects that a forward pass leaves to its backward pass, as tensors: the only thing that an op can return.

Autograd then keeps them as it keeps every tensor, so that checkpoints, hooks and `retain_graph` work.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch


def as_tensors(kept: list[Any]) -> list[torch.Tensor]:
    """Objects of plain classes as tensors, none of which shares memory with another; nothing is copied.

    The first is their structure as JSON; then every memory that their tensors share, once.
    """
    memories: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def encoded(obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            storage = obj.untyped_storage()
            # Tensors without memory all have the same address.
            place = places.setdefault(storage.data_ptr(), len(memories)) if len(storage) else len(memories)
            if place == len(memories):
                count = len(storage) // obj.itemsize
                memories.append(obj.new_empty(0).set_(storage, 0, (count,), (1,)))
            return {"memory": place, "view": [list(obj.shape), list(obj.stride()), obj.storage_offset()]}
        if obj is None or isinstance(obj, bool | int | float | str):
            return obj
        if isinstance(obj, list | tuple):
            return [encoded(member) for member in obj]
        return {"class": type(obj).__name__, "fields": {name: encoded(value) for name, value in vars(obj).items()}}

    structure = json.dumps(encoded(kept)).encode()
    return [torch.frombuffer(bytearray(structure), dtype=torch.uint8), *memories]


def from_tensors(tensors: list[torch.Tensor], classes: Iterable[type[Any]]) -> list[Any]:
    """The objects of these classes that `as_tensors` was given, tuples as lists; do not write to their tensors."""
    structure, *memories = tensors
    by_name = {cls.__name__: cls for cls in classes}

    def decoded(obj: Any) -> Any:
        if isinstance(obj, list):
            return [decoded(member) for member in obj]
        if not isinstance(obj, dict):
            return obj
        if "memory" in obj:
            return memories[obj["memory"]].as_strided(*obj["view"])
        kind = by_name[obj["class"]]
        made = object.__new__(kind)
        vars(made).update({name: decoded(value) for name, value in obj["fields"].items()})
        return made

    objects: list[Any] = decoded(json.loads(structure.numpy().tobytes()))
    return objects
