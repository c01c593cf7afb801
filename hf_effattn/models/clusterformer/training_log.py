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
        self.sums: dict[str, torch.Tensor] = {}
        self.steps = 0
        model.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the numbers of one forward pass, on their device: reading them here would make the GPU wait."""
        if not module.training or not isinstance(output, ClusteringOutput):
            return
        self.steps += 1
        for name in CLUSTERING_FIELDS:
            number = getattr(output, name)
            if number is not None:
                self.sums[name] = self.sums.get(name, 0.0) + number.detach()

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
        numbers = {name: float(total) / self.steps for name, total in self.sums.items()}
        logs.update(numbers)
        # Trainer keeps its own copy of the log before it calls anyone.
        state.log_history[-1].update(numbers)
        self.sums, self.steps = {}, 0


def log_clustering(trainer: "Trainer") -> None:
    """Let a `Trainer` log the losses and statistics of the clustering beside its loss.

    Every integration that the trainer reports to gets them. `L1` and `L2` that fall without end, a largest cluster
    near 1 or a cosine of words near 1 show a collapse that the task's loss shows late.

    Warns where nothing would train the clustering: with `label_smoothing_factor` or `compute_loss_func` transformers'
    `Trainer` takes the loss from the logits alone.

    Args:
        trainer (`transformers.Trainer`): of a ClusterFormer model, before `train()`.
    """
    from transformers import Trainer

    outside = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    trained = any("centroid" in name and p.requires_grad for name, p in trainer.model.named_parameters())
    if outside and trained and type(trainer).compute_loss is Trainer.compute_loss:
        warnings.warn(
            "label_smoothing_factor and compute_loss_func make Trainer compute the loss from the logits alone: the "
            "losses of the clustering, L1 and L2, are logged but not trained. Leave them out, or add the two in a "
            "Trainer whose compute_loss calls total_loss",
            stacklevel=2,
        )
    # First in the list: those that write the log elsewhere come after.
    trainer.callback_handler.callbacks.insert(0, ClusteringLog(trainer.model))
