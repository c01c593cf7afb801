"""The Trainer of the scripts: an order that a resumed run finds again, an end where the loss is no number."""

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler, LengthGroupedSampler

IGNORED = -100  # a label that transformers' losses leave out


class EpochOfSampler(TrainerCallback):
    """Tells the samplers which epoch begins.

    Trainer tells the loader that skips what a resumed epoch has had already; with several processes that one passes it
    on to accelerate's random sampler alone, and any other would draw the order of the first epoch. A sampler of
    batches lies inside those that share its batches out and skip them.
    """

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **inputs: Any
    ) -> None:
        """`state.epoch` is whole where an epoch begins, and has a fraction where one is resumed."""
        holder, epoch = inputs["train_dataloader"], int(state.epoch or 0)
        while holder is not None:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)
            holder = getattr(holder, "batch_sampler", None)


class RepeatableTrainer(Trainer):
    """`Trainer` whose order of the examples depends on the seed and the epoch alone.

    With `train_sampling_strategy="group_by_length"` Trainer draws the order from the global generator, whose state at
    the start of a resumed epoch is another one, and has the evaluation in an order of lengths too. Here both training
    orders are seeded with `data_seed`, or `seed`, and the epoch; on several processes group_by_length sorts what all
    of them take in a step. Evaluations and predictions are in the order of the data. An evaluation leaves the global
    generator as it was: a run that is stopped between a checkpoint and the evaluation of its epoch goes on without it.

    A loss that is not finite ends the training (FloatingPointError), where Trainer goes on with weights that are not
    numbers and saves them; not with float16, whose scaling of the loss leaves such steps out.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.add_callback(EpochOfSampler)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **settings: Any) -> torch.Tensor:
        """Trainer's own, of which a loss is no number only where the training is over, or where no label counts."""
        loss = super().training_step(model, inputs, *args, **settings)
        if not self.args.fp16 and not torch.isfinite(loss) and not _none_counts(inputs.get("labels")):
            raise FloatingPointError(
                f"the loss of step {self.state.global_step + 1} is {loss.item()}: lower --learning_rate, or train in "
                "float32. What was saved before stays; with --resume_from_checkpoint last a run goes on from there"
            )
        return loss

    def evaluate(self, *args: Any, **settings: Any) -> dict[str, float]:
        """Trainer's own, whose loader draws a number from the global generator."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **settings)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        # As one process: accelerate shares out the batches.
        return DistributedLengthGroupedSampler(
            sampler.batch_size * self.args.world_size,
            num_replicas=1,
            rank=0,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            lengths=list(sampler.lengths),
        )

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler:
        return SequentialSampler(eval_dataset)


def _none_counts(labels: torch.Tensor | None) -> bool:
    """Whether a mean over the labels is 0 / 0: such a batch changes no weight."""
    return labels is not None and bool((labels == IGNORED).all())
