"""What attention modules measured of their heads' errors, kept beside the model.

Sizes: `B` batch, `H` heads.
"""

from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

RECORD = "_effattn"  # the attribute of a module with its `ModulePatch`


class MeasuredError(NamedTuple):
    """What a forward pass measured of a layer, for each text and head.

    Args:
        error (`torch.Tensor`): `(B, H)`, the relative L2 error of the method's output on the sampled queries: an
            estimate from 64 of them, or from 16 where these showed the head well within the tolerance.
        bound (`torch.Tensor`): `(B, H)`, the same with the margin for what a sample does not see; beside the
            tolerance, it decides.
        exact (`torch.BoolTensor`): `(B, H)`, which heads were computed exactly because of it.
    """

    error: torch.Tensor
    bound: torch.Tensor
    exact: torch.Tensor


class Measurements:
    """What the last forward pass measured of a module, in the order of its calls: no state of the model.

    A copy has none, and a pickle is the same before and after a call: `datasets.map` tells functions apart by it.
    """

    calls: tuple[MeasuredError | None, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Measurements, ()


# Of modules that run a method by its name alone, and of DataParallel's replicas, which share the record of theirs.
# Others are not kept here: a compiled graph would be made anew whenever another module comes or goes.
_WITHOUT_RECORD: WeakKeyDictionary[nn.Module, Measurements] = WeakKeyDictionary()


def measurements_of(module: nn.Module) -> Measurements:
    """Where a module keeps what is measured of it."""
    patch = getattr(module, RECORD, None)
    if patch is not None and not getattr(module, "_is_replica", False):
        return cast(Measurements, patch.measured)
    if module not in _WITHOUT_RECORD:
        _WITHOUT_RECORD[module] = Measurements()
    return _WITHOUT_RECORD[module]


def forget_measurements(module: nn.Module) -> None:
    """Forget what a module measured by the name of a method alone."""
    _WITHOUT_RECORD.pop(module, None)
