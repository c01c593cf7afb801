"""What the clustering does during training, in the log of transformers' `Trainer`."""

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer


def log_clustering(trainer: "Trainer") -> None:
    """Let a `Trainer` log the losses and statistics of the clustering beside its loss.

    Every integration that the trainer reports to gets them. `L1` and `L2` that fall without end, a largest cluster
    near 1 or a cosine of words near 1 show a collapse that the task's loss shows late.

    Warns where `L1` and `L2` have weights and would not be trained: with `label_smoothing_factor` or
    `compute_loss_func` transformers' `Trainer` takes the loss from the logits alone.

    Args:
        trainer (`transformers.Trainer`): of a ClusterFormer model, before `train()`.
    """
    from transformers import Trainer  # imports datasets and PEFT, which most users of a model don't need

    from .training_callback import ClusteringLog

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
