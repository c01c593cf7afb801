"""What the clustering does during training, in the log of transformers' `Trainer`."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from .outputs import CLUSTERING_FIELDS, ClusteringOutput

if TYPE_CHECKING:  # the trainer imports datasets and pandas, which most users of a model don't need
    from transformers import Trainer, TrainingArguments


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


def log_clustering(trainer: "Trainer") -> None:
    """Let a `Trainer` log the losses and statistics of the clustering beside its loss.

    Every integration that the trainer reports to gets them. `L1` and `L2` that fall without end, a largest cluster
    near 1 or a cosine of words near 1 show a collapse that the task's loss shows late.

    Warns where `L1` and `L2` have weights and would not be trained: with `label_smoothing_factor` or
    `compute_loss_func` transformers' `Trainer` takes the loss from the logits alone.

    Args:
        trainer (`transformers.Trainer`): of a ClusterFormer model, before `train()`.
    """
    from transformers import Trainer

    outside = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    config = trainer.model.config
    weighted = config.cluster_loss_weight > 0 or config.sorting_loss_weight > 0
    trained = any("centroid" in name and p.requires_grad for name, p in trainer.model.named_parameters())
    if outside and weighted and trained and type(trainer).compute_loss is Trainer.compute_loss:
        warnings.warn(
            "label_smoothing_factor and compute_loss_func make Trainer compute the loss from the logits alone: the "
            "losses of the clustering, L1 and L2, are logged but not trained. Leave them out, or add the two in a "
            "Trainer whose compute_loss calls total_loss",
            stacklevel=2,
        )
    # First in the list: those that write the log elsewhere come after.
    trainer.callback_handler.callbacks.insert(0, ClusteringLog(trainer.model))
