"""The processes of a launch that share a run: which one this is, and in which order it does the pieces of the work.

Ranks exchange nothing but files. Each does its own share first and then what the others have not finished yet, from
the end of theirs: a rank that is slow or was killed holds up none, and a piece that two of them do has the same bits.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rank:
    """One process of a launch.

    Args:
        number (`int`): from 0, its `RANK`. Rank 0 decides what is measured, tells the progress of all, and writes the
            result.
        ranks (`int`): how many there are, the `WORLD_SIZE`.
        local (`int`): its number on this machine, the `LOCAL_RANK`.
    """

    number: int = 0
    ranks: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> "Rank":
        """As `torchrun` and `accelerate launch` set it; one process where they do not.

        Raises:
            ValueError: variables that are no numbers, or a rank beyond the last.
        """
        names = {"number": "RANK", "ranks": "WORLD_SIZE", "local": "LOCAL_RANK"}
        set_to = {field: os.environ[name] for field, name in names.items() if os.environ.get(name)}
        shown = ", ".join(f"{names[field]}={value}" for field, value in set_to.items())
        try:
            rank = cls(**{field: int(value) for field, value in set_to.items()})
        except ValueError:
            raise ValueError(f"the launcher's variables must be whole numbers, got {shown}") from None
        if not (0 <= rank.number < rank.ranks and rank.local >= 0):
            raise ValueError(f"RANK must be from 0 to WORLD_SIZE - 1, got {shown}")
        return rank

    @property
    def leads(self) -> bool:
        """Whether it is rank 0."""
        return self.number == 0

    def device(self, named: str | None) -> str | None:
        """The device of this rank: of several GPUs in a machine each process has one.

        Args:
            named (`str`, *optional*): by the user, such as `"cuda:1"`, which then stays. Default: a GPU where there is
                one.
        """
        if self.ranks > 1 and named in (None, "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local % torch.cuda.device_count()}"
        return named

    def shares(self, costs: Sequence[float]) -> tuple[list[int], list[int]]:
        """The pieces of work in the order in which this rank does them.

        Args:
            costs (`Sequence[float]`): of each piece, in any unit: only their order counts.

        Returns:
            `(list[int], list[int])`: the indices of its own share, the most expensive first, and those of the others'
            shares, each from its end. The shares of all ranks are a partition of all pieces.
        """
        dearest_first = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
        shares: list[list[int]] = [[] for _ in range(self.ranks)]
        for start in range(0, len(costs), self.ranks):
            dealt = dearest_first[start : start + self.ranks]
            # There and back, so that no rank gets the dearer one each time.
            takers = shares if start // self.ranks % 2 == 0 else shares[::-1]
            for share, index in zip(takers, dealt, strict=False):
                share.append(index)
        behind = [shares[(self.number + step) % self.ranks] for step in range(1, self.ranks)]
        return shares[self.number], [index for share in behind for index in reversed(share)]
