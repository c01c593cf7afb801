"""Texts and their classes of a classifier: from the Hub, from tables, or from a file for each class."""

import codecs
import csv
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset

from .checks import check_one_source
from .hub_data import load_from_hub

GIVEN_BY = {
    "train": "--train_files, --class_files or a --dataset_name that has them",
    "validation": "--validation_files, or hold out a --validation_share",
    "test": "--test_files or a --dataset_name that has them",
}
# Of a run without training: what it would hold out may be what the checkpoint was trained on.
GIVEN_WITHOUT_TRAINING = GIVEN_BY | {
    "validation": "--validation_files or a --dataset_name that has them; a --validation_share is held out only where"
    " the same run trains on the rest, with --do_train and --do_eval"
}
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


@dataclass
class TableArguments:
    """Tables of texts on the Hub or in files, and how many of their rows."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "JSON-lines, CSV or TSV files (gzip too)."})
    validation_files: list[str] = field(default_factory=list, metadata={"help": "The same, to evaluate on."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many, drawn by lot."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn by lot."})


@dataclass
class DataArguments(TableArguments):
    """Which texts and labels."""

    test_files: list[str] = field(
        default_factory=list, metadata={"help": "The same, to predict at the end; they need no labels."}
    )
    class_files: list[str] = field(default_factory=list, metadata={"help": "Text files, one for each class."})
    encoding: list[str] = field(
        default_factory=lambda: ["utf-8"], metadata={"help": "Of the class files: one of all, or one of each."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of the second text of a pair."})
    label_column: str = field(default="label", metadata={"help": "Column of the class, its name or number."})
    validation_share: float = field(
        default=0.1,
        metadata={"help": "Share of the training texts that --do_train --do_eval hold out where there are no others."},
    )
    split_seed: int = field(default=0, metadata={"help": "Decides which texts those are."})
    max_length: int = field(default=512, metadata={"help": "Tokens of an example; longer texts are cut."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Test on so many, drawn by lot."})


def lines_of(path: str, encoding: str) -> list[str]:
    """The lines of a file (gzip too) that are not empty.

    Raises:
        ValueError: no such encoding, or bytes that are nothing in it; the message names the file and the line.
    """
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise ValueError(f"unknown encoding {encoding!r}; Python's are allowed, such as utf-8 or latin-1") from None
    # load_dataset forgets the encoding of a file that is compressed.
    try:
        with fsspec.open(path, "rt", encoding=encoding, compression="infer") as file:
            return [line.rstrip("\n") for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: line {undecodable_line(path, encoding)} is not text in {encoding}: pass --encoding, one name for"
            " all class files or one for each, such as latin-1"
        ) from error


def undecodable_line(path: str, encoding: str) -> int:
    """The number of the first line, from 1, whose bytes are nothing in the encoding."""

    def is_text(line: bytes) -> bool:
        try:
            line.decode(encoding)
        except UnicodeDecodeError:
            return False
        return True

    with fsspec.open(path, "rb", compression="infer") as file:
        return next(number for number, line in enumerate(file, start=1) if not is_text(line))


def load_classes(files: Sequence[str], encodings: Sequence[str]) -> Dataset:
    """Texts whose class is the file they stand in, by its place among the files; empty lines are left out.

    A letter that is read wrongly, or as a mark of what could not be read, would give its file away.

    Args:
        files (`Sequence[str]`): a text a line (gzip too).
        encodings (`Sequence[str]`): one of all files, or one of each.

    Raises:
        ValueError: another number of encodings, an unknown one, or a file that is not in its encoding.
    """
    if len(encodings) not in (1, len(files)):
        raise ValueError(
            f"--encoding has {len(encodings)} names for {len(files)} class files: give one, or one of each"
        )
    file_encodings = encodings if len(encodings) > 1 else [*encodings] * len(files)
    columns: dict[str, list[Any]] = {"text": [], "label": []}
    for label, (path, encoding) in enumerate(zip(files, file_encodings, strict=True)):
        lines = lines_of(path, encoding)
        columns["text"] += lines
        columns["label"] += [label] * len(lines)
    return Dataset.from_dict(columns)


def load_table(files: list[str]) -> Dataset:
    """The rows of JSON-lines, CSV or TSV files, whose kind the first one's name tells."""
    if ".tsv" in Path(files[0]).name:  # of GLUE, in which a quotation mark is a character like others
        return load_dataset("csv", data_files=files, split="train", sep="\t", quoting=csv.QUOTE_NONE)
    return load_dataset("csv" if ".csv" in Path(files[0]).name else "json", data_files=files, split="train")


def class_names(labels: set[str]) -> list[str]:
    """The classes in the order of their numbers, or of the alphabet where some are words."""
    if all(NUMBER.fullmatch(label) for label in labels):
        return sorted(labels, key=lambda label: (float(label), label))
    return sorted(labels)


def is_unlabelled(rows: Dataset) -> bool:
    """Whether no row has a label, as in tests that keep them secret."""
    if "label" not in rows.column_names:
        return True
    nothing = {None, -1} if isinstance(rows.features["label"], ClassLabel) else {None}
    return set(rows.unique("label")) <= nothing


def without_labels(rows: Dataset) -> Dataset:
    """The rows without a column `label`, if there is one."""
    return rows.remove_columns([name for name in rows.column_names if name == "label"])


def with_known_classes(rows: Dataset, split: str) -> Dataset:
    """Rows with a `ClassLabel` without those of no class, -1 or null, which a warning counts.

    A test keeps its rows, by whose numbers it is predicted, and loses its labels instead.
    """
    known = [number for number, label in enumerate(rows["label"]) if label is not None and label >= 0]
    missing = len(rows) - len(known)
    if not missing:
        return rows
    counted = f"{missing} of {len(rows)} texts of {split!r} have no class (a label of -1 or null)"
    if split == "test":
        warnings.warn(f"{counted}: all are predicted, and no accuracy is measured", stacklevel=2)
        return without_labels(rows)
    warnings.warn(f"{counted}: they are left out", stacklevel=2)
    return rows.select(known)


def with_class_numbers(data: DatasetDict, label_column: str) -> DatasetDict:
    """The splits with a column `label` of class numbers; splits that are not labelled have none.

    Data with a `ClassLabel`, as those of the Hub, may have texts on whose class nobody agreed (-1, in SNLI): see
    `with_known_classes`. In files, a text without a label is an error.

    Raises:
        ValueError: texts to train or evaluate on without labels, some of a split of files without, or with other
            classes than those to train on.
    """
    numbered = {}
    for split, rows in data.items():
        columns = rows.column_names
        if label_column != "label":
            rows = without_labels(rows)  # others than those that are asked for
            if label_column in columns:
                rows = rows.rename_column(label_column, "label")
        if is_unlabelled(rows):
            if split in ("train", "validation"):
                raise ValueError(
                    f"the texts of {split!r} have no labels in a column {label_column!r}; name it with --label_column,"
                    f" there are {', '.join(columns)}"
                )
            rows = without_labels(rows)
        elif isinstance(rows.features["label"], ClassLabel):
            rows = with_known_classes(rows, split)
        numbered[split] = rows
    labelled = {split: rows for split, rows in numbered.items() if "label" in rows.column_names}
    if any(isinstance(rows.features["label"], ClassLabel) for rows in labelled.values()):
        return DatasetDict(numbered)
    seen = {split: rows.unique("label") for split, rows in labelled.items()}
    for split, labels in seen.items():
        if None in labels:
            raise ValueError(f"some texts of {split!r} have no label in the column {label_column!r}")
    names = {split: {str(label) for label in labels} for split, labels in seen.items()}
    known = names.get("train", set().union(*names.values()))
    kind = ClassLabel(names=class_names(known))
    for split, rows in labelled.items():
        if not names[split] <= known:
            raise ValueError(
                f"{split!r} has classes that 'train' lacks: {', '.join(class_names(names[split] - known))}"
            )
        # A label that is a number is another class's number where the numbers are not 0, 1, 2, …
        features = rows.features.copy()
        features["label"] = kind
        numbered[split] = rows.map(lambda row: {"label": kind.str2int(str(row["label"]))}, features=features)
    return DatasetDict(numbered)


def load_texts(arguments: DataArguments, hold_out: bool = True) -> DatasetDict:
    """The splits with their columns of text and, where they are labelled, a column `label` of class numbers.

    Args:
        arguments (`DataArguments`): which texts.
        hold_out (`bool`): take `validation_share` off the training texts, where no others are there to evaluate on.

    Raises:
        ValueError: no texts are named, or in more than one way; or as `load_classes` and `with_class_numbers`.
    """
    check_one_source(
        arguments,
        ("dataset_name", "dataset_config_name"),
        ("class_files",),
        ("train_files", "validation_files", "test_files"),
    )
    files = {
        "train": arguments.train_files,
        "validation": arguments.validation_files,
        "test": arguments.test_files,
    }
    if arguments.dataset_name is not None:
        data = load_from_hub(
            arguments.dataset_name, arguments.dataset_config_name, instead="--train_files or --class_files"
        )
    elif arguments.class_files:
        data = DatasetDict({"train": load_classes(arguments.class_files, arguments.encoding)})
    elif any(files.values()):
        data = DatasetDict({split: load_table(paths) for split, paths in files.items() if paths})
    else:
        raise ValueError("no texts: name a data set with --dataset_name, or files with --train_files or --class_files")
    named = DatasetDict({split: data[split] for split in files if split in data})
    data = with_class_numbers(named, arguments.label_column)
    if hold_out and "train" in data and "validation" not in data and arguments.validation_share > 0:
        parts = data["train"].train_test_split(
            test_size=arguments.validation_share, seed=arguments.split_seed, stratify_by_column="label"
        )
        data["train"], data["validation"] = parts["train"], parts["test"]
    return data
