r"""Train or evaluate a classifier of texts or of pairs of texts, with transformers' `Trainer`.

Data comes from the Hub by name, from local JSON-lines, CSV or TSV files, or from files that hold one class each, a
text a line. The model is a checkpoint, plain or with its attention replaced, or one from scratch.

    python scripts/run_classification.py --dataset_name stanfordnlp/imdb --model_name_or_path roberta-base \
        --method i-clustered --method_settings clusters=25,topk=32,min_length=0 --output_dir runs/imdb \
        --do_train --do_eval
    python scripts/run_classification.py --train_files train.jsonl.gz --test_files test.jsonl.gz \
        --model_type cst --config_overrides slice_length=16,max_position_embeddings=4096 --tokenizer_name bytes \
        --output_dir runs/bytes --do_train --do_predict --bf16
    python scripts/run_classification.py --class_files rt-polarity.neg rt-polarity.pos --model_type clusterformer \
        --config_overrides clusters=8,max_position_embeddings=64 --output_dir runs/mr --do_train --do_eval

`--resume_from_checkpoint last` goes on from the newest checkpoint of the output folder. The metrics are printed and
kept in `all_results.json` there.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from class_order import class_order, in_order
from command_line import parser_of
from datasets import ClassLabel, Dataset, DatasetDict, concatenate_datasets, load_dataset
from sampling import RepeatableTrainer
from training import (
    accuracy,
    drawn_samples,
    label_settings,
    length_settings,
    load_tokenizer,
    make_model,
    run_classifier,
    tokenize_texts,
)
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    set_seed,
)


@dataclass
class DataArguments:
    """Which texts and labels."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "JSON-lines, CSV or TSV files (gzip too)."})
    validation_files: list[str] = field(default_factory=list, metadata={"help": "The same, to evaluate on."})
    test_files: list[str] = field(default_factory=list, metadata={"help": "The same, to predict at the end."})
    class_files: list[str] = field(default_factory=list, metadata={"help": "Text files, one for each class."})
    encoding: str = field(default="utf-8", metadata={"help": "Of class files."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of the second text of a pair."})
    label_column: str = field(default="label", metadata={"help": "Column of the class, its name or number."})
    validation_share: float = field(
        default=0.1, metadata={"help": "Share of the training texts to evaluate on, where no others are given."}
    )
    split_seed: int = field(default=0, metadata={"help": "Decides which texts those are."})
    max_length: int = field(default=512, metadata={"help": "Tokens of an example; longer texts are cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many, drawn by lot."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Test on so many, drawn by lot."})


def load_classes(files: list[str], encoding: str) -> Dataset:
    """Texts whose class is the file they stand in; empty lines are left out."""
    parts = []
    for label, path in enumerate(files):
        lines = load_dataset("text", data_files=path, split="train", encoding=encoding, encoding_errors="replace")
        lines = lines.filter(lambda row: bool(row["text"].strip()))
        parts.append(lines.add_column("label", [label] * len(lines)))
    return concatenate_datasets(parts)


def load_texts(arguments: DataArguments) -> DatasetDict:
    """The splits with their columns of text and a column `label` of class numbers."""
    files = {
        "train": arguments.train_files,
        "validation": arguments.validation_files,
        "test": arguments.test_files,
    }
    files = {split: paths for split, paths in files.items() if paths}
    if arguments.dataset_name is not None:
        data = load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    elif arguments.class_files:
        data = DatasetDict({"train": load_classes(arguments.class_files, arguments.encoding)})
    elif files:
        first_file = Path(next(iter(files.values()))[0]).name
        if ".tsv" in first_file:  # of GLUE, in which a quotation mark is a character like others
            data = load_dataset("csv", data_files=files, sep="\t", quoting=csv.QUOTE_NONE)
        else:
            data = load_dataset("csv" if ".csv" in first_file else "json", data_files=files)
    else:
        raise ValueError("no texts: name a data set with --dataset_name, or files with --train_files or --class_files")
    if arguments.label_column != "label":
        data = data.rename_column(arguments.label_column, "label")
    first = data[next(iter(data))]
    if not isinstance(first.features["label"], ClassLabel):
        names = sorted({str(label) for label in first["label"]})
        data = data.map(lambda row: {"label": str(row["label"])})
        data = data.cast_column("label", ClassLabel(names=names))
    if "train" in data and "validation" not in data and arguments.validation_share > 0:
        parts = data["train"].train_test_split(
            test_size=arguments.validation_share, seed=arguments.split_seed, stratify_by_column="label"
        )
        data["train"], data["validation"] = parts["train"], parts["test"]
    return data


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and predict as the arguments say; returns the metrics."""
    parser = parser_of(__doc__, DataArguments)
    model_arguments, data_arguments, training = parser.parse_args_into_dataclasses(command_line)
    set_seed(training.seed)
    data = load_texts(data_arguments)
    classes = data[next(iter(data))].features["label"].names
    outputs = class_order(classes, model_arguments, training, fewer=not training.do_train)
    data = in_order(data, outputs)
    columns = list(filter(None, [data_arguments.text_column, data_arguments.text_pair_column]))

    def texts() -> Iterator[str]:
        for column in columns:
            yield from (row[column] for row in data["train"])

    tokenizer = load_tokenizer(model_arguments, training, texts(), pairs=len(columns) == 2)
    most = {"train": data_arguments.max_train_samples, "test": data_arguments.max_predict_samples}
    data = drawn_samples(data, most, data_arguments.split_seed)
    examples = data.map(
        partial(tokenize_texts, tokenizer=tokenizer, columns=columns, max_length=data_arguments.max_length),
        batched=True,
        remove_columns=[name for name in data[next(iter(data))].column_names if name != "label"],
    )
    defaults = label_settings(outputs) | length_settings(model_arguments, tokenizer, data_arguments.max_length)
    model = make_model(model_arguments, AutoModelForSequenceClassification, tokenizer, defaults)
    trainer = RepeatableTrainer(
        model=model,
        args=training,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy(),
    )
    return run_classifier(trainer, training, examples.get("test"), model_arguments.save_dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
