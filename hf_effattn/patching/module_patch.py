"""What a patch leaves on an attention module: a record, and another class where it attends itself."""

from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:  # methods look at the patch of a module
    from .methods.base import Method

RECORD = "_effattn"


@dataclass(frozen=True)
class ModulePatch:
    """What `patch_attention` leaves on an attention module, as the plain attribute `RECORD`.

    Args:
        method (`Method`, *optional*): None where the module stays exact.
        previous (`str`): the attention implementation before the first patch.
        owner (`nn.Module`, *optional*): the model without its head, which holds the parameters that the method added.
            They are looked up there at every call, for adapters (PEFT's `modules_to_save`) put copies in their place.
        calls (`int`): how often a forward pass calls the module: the layers that it serves.
        causal (`bool`): whether it masked the future when it was patched.
    """

    method: "Method | None"
    previous: str
    owner: nn.Module | None = None
    calls: int = 1
    causal: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModulePatch":
        """In the copy of a model its copy is the owner; the copy of a layer alone keeps the owner that it had."""
        return replace(self, owner=memo.get(id(self.owner), self.owner))


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class, also what accelerate's hooks keep of the one that it had (`device_map`)."""
    before, module.__class__ = type(module), kind
    for name in ("forward", "_old_forward"):
        kept = vars(module).get(name)
        if isinstance(kept, MethodType) and kept.__self__ is module and kept.__func__ is before.forward:
            vars(module)[name] = MethodType(kind.forward, module)
