r"""Train and evaluate a model on a task of the Long Range Arena, with transformers' `Trainer`.

    python -m scripts.lra.train --task listops --model_type cst --config_overrides slice_length=16 \
        --output_dir runs/listops --do_train --do_eval --do_predict
    python -m scripts.lra.train --task listops --model_type cst \
        --config_overrides composition=full,position_embedding=absolute --output_dir runs/full --do_train --do_predict
    python -m scripts.lra.train --task pathfinder --num_proc 2 --verify_data --output_dir runs/pathfinder
    python -m scripts.lra.train --task retrieval --data_path lra_release/tsv_data --model_type clusterformer \
        --config_overrides clusters=64 --output_dir runs/retrieval --do_train --do_eval --bf16

ListOps and Pathfinder are generated on the first call, Text and Image come from the Hub or from files. Sizes, length,
batch, learning rate and steps default to those of the CST paper (Lee 2023, Table 6) for the task, and are overridden
by naming them. A model from scratch has the paper's width and depth where its configuration has these names. CST
reads the two texts of Retrieval apart and classifies both means; any other model reads them as one.

The validation set of Text is its test set, as the benchmark publishes it, so `--do_eval` measures on the test set and
`--load_best_model_at_end` is refused, unless `--data_settings validation_share=0.1` holds out texts to train on.
"""

import argparse
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    TrainingArguments,
    set_seed,
)

from hf_effattn import CSTForPairClassification
from hf_effattn.training import (
    ModelArguments,
    RepeatableTrainer,
    accuracy,
    check_model,
    check_work,
    differs,
    drawn_samples,
    label_settings,
    make_model,
    parse_settings,
    parser_of,
    run_classifier,
    works,
)

from . import TASKS, LRACollator, load_lra, lra_settings, lra_tokenizer, verify_lra

# Lee 2023, Table 6 and section A.6.1.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


@dataclass(frozen=True)
class TaskDefaults:
    """A row of the paper's Table 6.

    Attributes:
        max_length: tokens of an input.
        batch_size: examples of a step.
        learning_rate: its peak.
        warmup_steps: steps of its rise.
        max_steps: steps until it has fallen to zero.
    """

    max_length: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    max_steps: int

    def of_trainer(self) -> dict[str, Any]:
        """The same by the names of `TrainingArguments`."""
        return {
            "per_device_train_batch_size": self.batch_size,
            "per_device_eval_batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "max_steps": self.max_steps,
            "lr_scheduler_type": "linear",
            "weight_decay": 0.0,
        }


DEFAULTS = {
    "listops": TaskDefaults(2000, 32, 1e-5, 1000, 20_000),
    "text": TaskDefaults(4096, 32, 2e-5, 8000, 20_000),
    "retrieval": TaskDefaults(4096, 32, 5e-5, 800, 30_000),
    "image": TaskDefaults(1024, 256, 2e-4, 175, 35_000),
    "pathfinder": TaskDefaults(1024, 256, 1e-4, 312, 62_000),
}


@dataclass
class DataArguments:
    """Which task, and where its data come from."""

    task: str = field(metadata={"help": "Task of the Long Range Arena.", "choices": list(TASKS)})
    data_path: str | None = field(
        default=None, metadata={"help": "Folder of the task's files (not of generated ones)."}
    )
    data_settings: str = field(
        default="", metadata={"help": "Settings of the data, such as train_size=1000, as JSON or name=value,..."}
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Where data are kept; default that of `datasets`."})
    num_proc: int = field(default=1, metadata={"help": "Processes that generate data."})
    max_length: int = field(default=4096, metadata={"help": "Tokens of an input, in a pair of each text."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn by lot."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Test on so many, drawn by lot."})
    verify_data: bool = field(
        default=False, metadata={"help": "Compare generated data with the checksums of the default settings."}
    )


class AutoModelForPairClassification:
    """Makes and loads the model of two towers by the names that transformers' Auto classes have."""

    from_config = staticmethod(CSTForPairClassification._from_config)
    from_pretrained = staticmethod(CSTForPairClassification.from_pretrained)


def parse(command_line: list[str] | None) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The arguments; what is not named has the paper's value for the task."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--task")
    task = first.parse_known_args(command_line)[0].task
    parser = parser_of(__doc__, DataArguments)
    if task in DEFAULTS:
        parser.set_defaults(**DEFAULTS[task].of_trainer(), max_length=DEFAULTS[task].max_length)
    model, data, training = parser.parse_args_into_dataclasses(command_line)
    # The batches are made of columns that no model has an argument for.
    training.remove_unused_columns = False
    return model, data, training


def model_type(arguments: ModelArguments) -> str | None:
    """Kind of the model that the arguments name."""
    if arguments.model_name_or_path is not None:
        path, revision = arguments.model_name_or_path, arguments.model_revision
        return AutoConfig.from_pretrained(path, revision=revision).model_type
    return arguments.model_type


def model_settings(arguments: ModelArguments, positions: int) -> dict[str, Any]:
    """The paper's sizes, for a model from scratch whose configuration has them by these names."""
    if arguments.model_name_or_path is not None or arguments.model_type is None:
        return {}
    config = AutoConfig.for_model(arguments.model_type)
    settings = SIZES | {"max_position_embeddings": positions}
    return {name: value for name, value in settings.items() if hasattr(config, name)}


def only_named(collator: LRACollator, names: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch without what a forward has no name for: FNet knows no mask."""
    return {name: tensor for name, tensor in collator(rows).items() if name in names}


def longest_texts(task: str, max_length: int) -> dict[str, int]:
    """The setting of the data that cuts their texts, where the task has one."""
    return {"max_length": max_length} if task in ("text", "retrieval") else {}


def validates_on_test(task: str, settings: Mapping[str, Any]) -> bool:
    """Whether the validation set of the data with these settings is their test set."""
    return getattr(lra_settings(task, dict(settings)), "validation_share", None) == 0


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and predict as the arguments say; returns the metrics."""
    model_arguments, data_arguments, training = parse(command_line)
    task, max_length = data_arguments.task, data_arguments.max_length
    if not data_arguments.verify_data:
        check_work(training, more=", --verify_data")
    if works(training):
        check_model(model_arguments)
    if model_arguments.tokenizer_name is not None or differs(model_arguments, "vocab_size"):
        raise ValueError("the tokens are those of the task: leave out --tokenizer_name and --vocab_size")
    settings = longest_texts(task, max_length) | parse_settings(data_arguments.data_settings)
    if training.load_best_model_at_end and validates_on_test(task, settings):
        raise ValueError(
            f"the validation set of {task} is its test set, as the benchmark publishes it, which must not choose a"
            " model: hold texts out with --data_settings validation_share=0.1, or leave out --load_best_model_at_end"
        )
    set_seed(training.seed)
    with training.main_process_first(desc="making the data"):
        data = load_lra(
            task,
            data_arguments.data_path,
            cache_dir=data_arguments.cache_dir,
            num_proc=data_arguments.num_proc,
            **settings,
        )
    if data_arguments.verify_data:
        verify_lra(task, data)
        print(f"{task}: every split has the checksum of the default settings")
    if not works(training):
        return {}
    most = {"validation": data_arguments.max_eval_samples, "test": data_arguments.max_predict_samples}
    data = drawn_samples(data, most, seed=0)
    tokenizer = lra_tokenizer(task)
    two_towers = task == "retrieval" and model_type(model_arguments) == "cst"
    auto_class = AutoModelForPairClassification if two_towers else AutoModelForSequenceClassification
    # Two texts in one input have `</s>` between them.
    positions = 2 * max_length + 1 if task == "retrieval" and not two_towers else max_length
    classes = data["train"].features["label"].names
    model = make_model(
        model_arguments, auto_class, tokenizer, model_settings(model_arguments, positions) | label_settings(classes)
    )
    collator = LRACollator(task, tokenizer, max_length, two_towers)
    trainer = RepeatableTrainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=partial(only_named, collator, inspect.signature(model.forward).parameters),
        compute_metrics=accuracy(),
    )
    return run_classifier(trainer, training, data["test"], model_arguments.save_dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
