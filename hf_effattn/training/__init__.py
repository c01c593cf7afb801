"""What a training script is made of; those in `scripts/train` are examples to copy.

A script parses `ModelArguments`, its own arguments and transformers' `TrainingArguments` and reports mistakes before
any work starts (`parsed_arguments`, `check_splits`), makes the tokenizer and the model
(`load_tokenizer`, `make_model`), and trains, resumes and keeps the metrics (`RepeatableTrainer`, `train`,
`keep_metrics`). Readers of data sets lie in `hf_effattn.data`. These names may change with the scripts: they are not
promised as stable. They need the extra `training`.
"""

from ..settings_parsing import parse_settings
from .arguments import (
    ModelArguments,
    check_model,
    check_splits,
    check_work,
    differs,
    parsed_arguments,
    parser_of,
    works,
)
from .classes import class_order, in_order, numbers_of
from .models import (
    check_positions,
    label_settings,
    length_settings,
    load_tokenizer,
    make_model,
    tokenize_texts,
    train_tokenizer,
)
from .run import (
    accuracy,
    checkpoint_to_resume,
    drawn_samples,
    first_logits,
    keep_metrics,
    load_metric,
    run_classifier,
    task_loss_alone,
    train,
    training_split,
    used_splits,
    write_predictions,
)
from .trainer import RepeatableTrainer

__all__ = [
    "ModelArguments", "RepeatableTrainer", "accuracy", "check_model", "check_positions", "check_splits", "check_work",
    "checkpoint_to_resume", "class_order", "differs", "drawn_samples", "first_logits", "in_order", "keep_metrics",
    "label_settings", "length_settings", "load_metric", "load_tokenizer", "make_model", "numbers_of",
    "parse_settings", "parsed_arguments", "parser_of", "run_classifier", "task_loss_alone", "tokenize_texts", "train",
    "train_tokenizer", "training_split", "used_splits", "works", "write_predictions",
]  # fmt: skip
