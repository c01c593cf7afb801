"""Exact attention that is cheaper than transformers' own, as a method of patching."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .base import Groups, Method, Options, attend_exactly


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Nothing is approximated: layers with sliding windows run in blocks, those with attention sinks on SDPA's kernel.

    Every method does so beside its own part (`patching/exact/`). Outputs differ from the model's own by rounding, at
    every length.

    Args:
        min_length (`int`, *optional*): without effect, as the windows decide from which length blocks gain.
    """

    method: ClassVar[str] = "exact"
    summary: ClassVar[str] = "approximates nothing; of windows and biases only what is needed is computed"
    stays_exact: ClassVar[bool] = True

    def counts_reach(self, length: int) -> bool:
        return True

    def shortest_length(self, device_type: str) -> int | None:
        return None

    def for_layers(self, layers: Sequence[int]) -> None:
        return None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, groups: Groups = ()
    ) -> torch.Tensor:
        return attend_exactly(query, key, value, options)

    def attend_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        return attend_exactly(query, key, value, options)

    def to_dict(self) -> dict[str, Any]:
        return {}
