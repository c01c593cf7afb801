r"""Fine-tune or evaluate a model on a task of GLUE, with transformers' `Trainer`.

Data comes from the Hub, or from the benchmark's own files with `--data_dir`. The model is a checkpoint, plain or with
its attention replaced, or one from scratch.

    python scripts/train/glue.py --task_name cola --model_name_or_path roberta-base --output_dir runs/cola \
        --do_train --do_eval --learning_rate 2e-5
    python scripts/train/glue.py --task_name mrpc --data_dir glue --model_name_or_path runs/mrpc --do_eval \
        --output_dir runs/check --method "i-clustered clusters=25 topk=32 min_length=0"

`--resume_from_checkpoint last` goes on from the newest checkpoint of the output folder. The metrics, with the Hub's
names, are printed and kept in `all_results.json` there; `--do_predict` writes the labels of the test set as the
benchmark's server takes them. A fine-tuned checkpoint keeps the order of its classes.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
)

from hf_effattn.data.glue_tasks import TASKS, GlueTask, load_glue
from hf_effattn.training import (
    RepeatableTrainer,
    check_splits,
    class_order,
    drawn_samples,
    first_logits,
    in_order,
    keep_metrics,
    label_settings,
    load_metric,
    load_tokenizer,
    make_model,
    numbers_of,
    parsed_arguments,
    tokenize_texts,
    train,
    training_split,
    write_predictions,
)

# What the benchmark's server expects behind the name of a task.
OF_TEST_SET = {"test": "", "test_matched": "-m", "test_mismatched": "-mm"}


@dataclass
class DataArguments:
    """Which task."""

    task_name: str = field(metadata={"help": "Task of GLUE.", "choices": list(TASKS)})
    data_dir: str | None = field(default=None, metadata={"help": "Folder of the benchmark's files; default: the Hub."})
    max_length: int = field(default=128, metadata={"help": "Tokens of an example; longer texts are cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many, drawn by lot."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn by lot."})


def prepare(data: DatasetDict, task: GlueTask, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """The examples as tokens, with their labels."""
    columns = data[next(iter(data))].column_names
    return data.map(
        partial(tokenize_texts, tokenizer=tokenizer, columns=task.texts, max_length=max_length),
        batched=True,
        remove_columns=[name for name in columns if name != "label"],
    )


def predicted(prediction: EvalPrediction, numbers: np.ndarray) -> np.ndarray:
    """The likeliest classes by their numbers in the benchmark, which `numbers` has of the outputs; else the scores."""
    first = first_logits(prediction)
    return numbers[np.argmax(first, axis=1)] if len(numbers) else first[:, 0]


def metrics_of(task_name: str, numbers: np.ndarray) -> Callable[[EvalPrediction], dict[str, float]]:
    """What GLUE reports of a task, as `Trainer` calls it."""
    metric = load_metric("glue", task_name)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        # F1 is of the benchmark's class 1.
        wanted = numbers[prediction.label_ids] if len(numbers) else prediction.label_ids
        return metric.compute(predictions=predicted(prediction, numbers), references=wanted)

    return compute


def as_the_server_takes_them(values: np.ndarray, task: GlueTask) -> list[Any]:
    """Words where the task's labels are words, numbers otherwise."""
    words = any("entailment" in name for name in task.labels) and task.folder != "WNLI"
    return [task.labels[value] if words else value for value in values]


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and predict as the arguments say; returns the metrics."""
    model_arguments, data_arguments, training = parsed_arguments(__doc__, command_line, DataArguments)
    name = data_arguments.task_name
    data = load_glue(name, Path(data_arguments.data_dir) if data_arguments.data_dir else None)
    task = TASKS[name]
    files = {"train": "train", **task.validation, **task.test}
    given_by = {split: f"{file}.tsv in the folder {task.folder} of --data_dir" for split, file in files.items()}
    check_splits(data, training, given_by, data=f"the data of {name}", validation=task.validation, test=task.test)
    outputs = class_order(task.labels, model_arguments, training) if task.labels else []
    data = in_order(data, outputs) if outputs else data
    numbers = np.asarray(numbers_of(outputs, task.labels))

    def texts() -> Iterator[str]:
        for column in task.texts:
            yield from training_split(data)[column]

    tokenizer = load_tokenizer(model_arguments, training, texts(), pairs=len(task.texts) == 2)
    most = {"train": data_arguments.max_train_samples}
    most |= dict.fromkeys(task.validation, data_arguments.max_eval_samples)
    examples = prepare(drawn_samples(data, most, training.data_seed or 0), task, tokenizer, data_arguments.max_length)
    labels = label_settings(outputs) if outputs else {"num_labels": 1, "problem_type": "regression"}
    model = make_model(model_arguments, AutoModelForSequenceClassification, tokenizer, labels)
    trainer = RepeatableTrainer(
        model=model,
        args=training,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get(next(iter(task.validation))),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics_of(name, numbers),
    )
    metrics = {"parameters": float(model.num_parameters())}
    if training.do_train:
        metrics |= train(trainer, training, model_arguments.save_dtype)
    if training.do_eval:
        for split in task.validation:
            prefix = split.replace("validation", "eval")
            metrics |= trainer.evaluate(examples[split], metric_key_prefix=prefix)
    if training.do_predict:
        for split in task.test:
            values = predicted(trainer.predict(examples[split].remove_columns("label")), numbers)
            if trainer.is_world_process_zero():
                path = Path(training.output_dir) / f"{task.folder}{OF_TEST_SET[split]}.tsv"
                write_predictions(path, enumerate(as_the_server_takes_them(values, task)))
    keep_metrics(trainer, metrics)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
