"""What the settings of all attention methods share: one frozen dataclass each, validated once.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.

A method is a subclass of `MethodSettings` with its line in `methods.METHODS`: its fields are what a user may set,
`group` makes everything that carries no gradient (labels), `attend` runs the op. A method that adds parameters to a
model says so in `added_to`.
"""

import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, ClassVar

import torch
from torch import nn

from ..model_types import Encoder

_MEASURED = json.loads(files(__package__).joinpath("crossover.json").read_text())
CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["min_length"]
CAUSAL_CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["causal_min_length"]
# Of the lengths measured elsewhere, for a device that has none of its own: an accelerator multiplies so much faster
# than it starts the many short steps of a clustering, and of the causal forms, that exact attention wins for longer.
# Cautious estimates from the steps and bytes on an H200.
UNMEASURED, CAUSAL_UNMEASURED = 4, 8
RECORD = "_effattn"


@dataclass(frozen=True, kw_only=True)
class MethodSettings(ABC):
    """What every method can be told.

    Args:
        min_length (`int`, *optional*): inputs shorter than this many tokens run exact attention. Default: the length
            from which the method is faster with these settings, from what was measured on this kind of device
            (`crossover.json`; where nothing was, 4 times the length measured on others, 8 times where the future is
            masked); 0 forces the method.
    """

    method: ClassVar[str]
    summary: ClassVar[str]  # half a sentence, for a reader who has to choose
    needs_fine_tuning: ClassVar[bool] = False  # it changes what the model computes, and is trained into it
    price: ClassVar[tuple[str, ...]] = ()  # the settings that the method's time grows with, at most in proportion
    purpose: ClassVar[dict[str, str]] = {
        "min_length": "inputs with fewer tokens run exact attention; None: the measured length, 0: force the method"
    }

    min_length: int | None = None

    def __post_init__(self) -> None:
        if self.min_length is not None:
            self._check_int("min_length", minimum=0)

    def is_exact(self, query_length: int, key_length: int, device_type: str, *, causal: bool = False) -> bool:
        """Whether exact attention runs instead: the input is short, so the method would save nothing."""
        return query_length < self.shortest_length(device_type, causal=causal)

    def shortest_length(self, device_type: str, *, causal: bool = False) -> int:
        """The number of tokens from which the method runs on this kind of device ("cpu", "cuda", ...)."""
        if self.min_length is not None:
            return self.min_length
        crossover = CAUSAL_CROSSOVER if causal else CROSSOVER
        if device_type in crossover:
            return self._crossover(crossover[device_type])
        longest = max(self._crossover(measured) for measured in crossover.values())
        return longest * (CAUSAL_UNMEASURED if causal else UNMEASURED)

    def _crossover(self, measured: list[dict[str, Any]]) -> int:
        """The least of what the measured settings promise for these: each as it is, or grown with its price."""
        promised = []
        for row in measured:
            if row["method"] == self.method:
                dearer = max((getattr(self, name) / row[name] for name in self.price), default=1.0)
                promised.append(math.ceil(row["min_length"] * max(1.0, dearer)))
        return min(promised)

    @property
    def clusters_prompts(self) -> bool:
        """Whether the last token of a prompt alone is to be read, as its clusters have seen all tokens."""
        return False

    def check_encoder(self, encoder: Encoder) -> None:  # noqa: B027
        """Raise where the method cannot serve an encoder that others can."""

    def added_to(self, encoder: Encoder) -> nn.Module | None:
        """The module with the parameters that the method adds to an encoder; None where it adds none."""
        return None

    @abstractmethod
    def group(self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """What the method decides about the input before it attends, without gradient."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: tuple[torch.Tensor, ...],
        *,
        key_mask: torch.Tensor | None,
        scale: float | None,
        dropout_p: float,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        """Attention with the groups that `group` returned, `(B, H, N, Dv)`; `module`: the attention module."""

    def check_causal(self, module: nn.Module | None) -> None:  # noqa: B027
        """Raise where the settings ask for something that the causal form of an attention module has not."""

    def check_weights(self) -> None:  # noqa: B027
        """Raise where what the method computes is no matrix of weights on the values."""

    @abstractmethod
    def attend_causal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        key_mask: torch.Tensor | None,
        scale: float | None,
        dropout_p: float = 0.0,
        prompt: bool = False,
        training: bool = False,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        """Causal self-attention, `(B, H, N, Dv)`; `prompt`: only what follows the last token will be read."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return asdict(self)

    def _check_int(self, name: str, *, minimum: int, maximum: int | None = None) -> None:
        """Store the field as a plain int (a numpy int is no JSON value), or raise."""
        value = getattr(self, name)
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}: {self.purpose[name]}")
        if number < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {number}: {self.purpose[name]}")
        if maximum is not None and number > maximum:
            raise ValueError(f"{name} must be at most {maximum}, got {number}: {self.purpose[name]}")
        object.__setattr__(self, name, number)

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(
                f"{name} must be one of {quoted(choices)}, got {value!r}{closest(value, choices)}: "
                f"{self.purpose[name]}"
            )


@dataclass(frozen=True, kw_only=True)
class MethodOverCache(MethodSettings):
    """A method with a form for what a causal model writes after its prompt; any other attends exactly then."""

    @abstractmethod
    def attend_over_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        scale: float | None,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        """Causal attention of the last tokens over a cache, `(B, H, N, Dv)`.

        `mask` `(B, 1, N, M)`: which keys a query sees; None where its one query sees all of them.
        """


@dataclass(frozen=True)
class ModulePatch:
    """What `patch_attention` leaves on an attention module, as the plain attribute `RECORD`.

    Args:
        settings (`MethodSettings`, *optional*): None where the module stays exact.
        previous (`str`): the attention implementation before the first patch.
        owner (`nn.Module`, *optional*): the model without its head, which holds the parameters that the method added.
            They are looked up there at every call, for adapters (PEFT's `modules_to_save`) put copies in their place.
    """

    settings: MethodSettings | None
    previous: str
    owner: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModulePatch":
        """In the copy of a model its copy is the owner; the copy of a layer alone keeps the owner that it had."""
        return replace(self, owner=memo.get(id(self.owner), self.owner))


def quoted(names: Sequence[str] | dict[str, Any]) -> str:
    """The names in quotes, for a message."""
    return ", ".join(f'"{name}"' for name in names)


def closest(name: object, names: Sequence[str] | dict[str, Any]) -> str:
    """The name that was probably meant, for a message; empty where none is near."""
    matches = get_close_matches(str(name), list(names), n=1)
    return f' (did you mean "{matches[0]}"?)' if matches else ""
