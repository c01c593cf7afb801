"""What a patch leaves on an attention module: a record, and another class where it attends itself."""

from dataclasses import dataclass, field, replace
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from .measurements import RECORD as RECORD
from .measurements import Measurements
from .transformers_internals import FORWARDS

# What stands before a class of transformers: to mypy a module too, which `super()` is then.
if TYPE_CHECKING:
    from .methods.base import Method  # methods look at the patch of a module

    ModuleMixin = nn.Module
else:
    ModuleMixin = object


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
        measured (`Measurements`): with a tolerance, what the last pass measured.
    """

    method: "Method | None"
    previous: str
    owner: nn.Module | None = None
    calls: int = 1
    causal: bool = False
    measured: Measurements = field(default_factory=Measurements, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModulePatch":
        """In the copy of a model its copy is the owner; the copy of a layer alone keeps the owner that it had."""
        return replace(self, owner=memo.get(id(self.owner), self.owner), measured=Measurements())


def swap_class(module: nn.Module, exact: type[nn.Module], patched: type[nn.Module], *, on: bool) -> None:
    """Give a module the class of a patch, or take it back.

    FSDP and users give modules a subclass of their class: it stays what it is in all else.

    Args:
        module (`nn.Module`): of the class `exact`, or of a subclass.
        exact (`type`): of transformers.
        patched (`type`): a subclass of it.
        on (`bool`): whether to give or to take.
    """
    kind: Any = type(module)
    theirs: Any = exact
    ours: Any = patched  # to mypy, classes of modules have no hash
    if on and not issubclass(kind, ours):
        change_class(module, ours if kind is theirs else _joined(kind, ours))
    elif not on and issubclass(kind, ours):
        change_class(module, _without(kind, theirs, ours))


@cache
def _joined(kind: Any, patched: Any) -> Any:
    """A class whose instances are of both, and whose `super().forward` in `kind` calls that of `patched`."""
    return type(kind.__name__, (kind, patched), {"__doc__": kind.__doc__})


@cache
def _without(kind: Any, exact: Any, patched: Any) -> Any:
    """The class without that of the patch among those it inherits from."""
    if kind is patched or not issubclass(kind, patched):
        return exact if kind is patched else kind
    if kind.__module__ == __name__:  # from `_joined`
        return kind.__bases__[0]
    # What came after the patch, as FSDP's does: the same over another base.
    bases = tuple(_without(base, exact, patched) for base in kind.__bases__)
    namespace = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace(patched.__name__, exact.__name__), bases, namespace)


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class, also what accelerate's hooks keep of the one that it had (`device_map`)."""
    before, module.__class__ = type(module), kind
    for name in FORWARDS:
        kept = vars(module).get(name)
        if isinstance(kept, MethodType) and kept.__self__ is module and kept.__func__ is before.forward:
            vars(module)[name] = MethodType(kind.forward, module)
