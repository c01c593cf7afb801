"""The callback that puts what the clustering does into the log of transformers' `Trainer`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from .outputs import CLUSTERING_FIELDS, ClusteringOutput

if TYPE_CHECKING:
    from transformers import TrainingArguments


class ClusteringLog(TrainerCallback):
    """Collects what a model's outputs report while it trains, and adds the means since the last log to the next."""

    def __init__(self, model: nn.Module) -> None:
        # By name and device: nn.DataParallel calls the hook in a thread per device, and none waits for another.
        self.sums: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.steps: dict[tuple[str, torch.device], int] = {}
        model.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the numbers of one forward pass, on their device: reading them here would make the GPU wait."""
        if not module.training or not isinstance(output, ClusteringOutput):
            return
        for name in CLUSTERING_FIELDS:
            number = getattr(output, name)
            if number is not None:
                place = name, number.device
                self.sums[place] = self.sums.get(place, 0.0) + number.detach()
                self.steps[place] = self.steps.get(place, 0) + 1

    def on_log(
        self,
        args: "TrainingArguments",
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the means to a log of training steps."""
        if logs is None or "loss" not in logs or not self.steps:
            return
        numbers = {}
        for name in dict.fromkeys(name for name, _ in self.sums):
            places = [place for place in self.sums if place[0] == name]
            total = sum(float(self.sums[place]) for place in places)
            numbers[name] = total / sum(self.steps[place] for place in places)
        logs.update(numbers)
        # Trainer keeps its own copy of the log before it calls anyone.
        state.log_history[-1].update(numbers)
        self.sums, self.steps = {}, {}
