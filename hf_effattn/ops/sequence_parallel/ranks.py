"""What the ranks of a process group say to each other: sums that gradients flow through, maxima, lists."""

import math
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The ranks that a sequence is spread over; every one of them makes the same calls in the same order.

    Args:
        group (`torch.distributed.ProcessGroup`, *optional*): default: all processes.

    Raises:
        ValueError: there is no process group, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "there is no process group: call torch.distributed.init_process_group in every process, started by "
                "torchrun, or hf_effattn.ops.bi_clustered_attention in a single one"
            )
        self.group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in group: call from the processes that new_group was given only")

    def sum(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The sums over the ranks of tensors of one dtype, in one message; gradients are summed likewise."""
        message = torch.cat([tensor.flatten() for tensor in tensors])
        total = _Sum.apply(message, self.group)
        sizes = [math.prod(tensor.shape) for tensor in tensors]
        return [part.view_as(tensor) for part, tensor in zip(total.split(sizes), tensors, strict=True)]

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks, number by number; no gradient flows through it."""
        found = tensor.detach().contiguous().clone()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor of the same shape `(...)`: `(ranks, ...)`; no gradient flows through it."""
        tensor = tensor.detach().contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(found, tensor, group=self.group)
        return torch.stack(found)

    def agree(self, settings: dict[str, Any], refused: Exception | None) -> None:
        """Raise on every rank where one of them refuses its arguments or has other settings.

        Args:
            settings: by name, the same names on every rank that refuses nothing.
            refused: what is wrong on this rank, or None.

        Raises:
            Exception: `refused`.
            ValueError: another rank refuses, or a setting differs.
        """
        everyone: list[Any] = [None] * self.count
        dist.all_gather_object(everyone, (None if refused is None else str(refused), settings), group=self.group)
        if refused is not None:
            raise refused
        for rank, (problem, _) in enumerate(everyone):
            if problem is not None:
                raise ValueError(f"rank {rank} of the group refuses its arguments: {problem}")
        for rank, (_, others) in enumerate(everyone):
            for name, value in everyone[0][1].items():
                if others[name] != value:
                    raise ValueError(
                        f"{name} must be the same on every rank of the group, got {value} on rank 0 and "
                        f"{others[name]} on rank {rank}"
                    )


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Every rank's loss depends on it, so its gradient is the sum over the ranks, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(grads[0], ctx.group), None
