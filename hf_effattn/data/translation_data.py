"""Texts and their translations, from the Hub or from parallel files."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from datasets import Dataset, DatasetDict

from .checks import check_one_source
from .hub_data import load_from_hub

FILES = "Text files, a text a line (gzip too)."

GIVEN_BY = {
    split: f"--{split}_source and --{split}_target, or a --dataset_name that has them"
    for split in ("train", "validation", "test")
}


@dataclass
class DataArguments:
    """Which texts, how much of them, and how they are translated."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    source_lang: str | None = field(default=None, metadata={"help": "Language of the texts, by its name there."})
    target_lang: str | None = field(default=None, metadata={"help": "Language of the translations."})
    train_source: list[str] = field(default_factory=list, metadata={"help": FILES})
    train_target: list[str] = field(default_factory=list, metadata={"help": "Their translations, line by line."})
    validation_source: list[str] = field(default_factory=list, metadata={"help": "The same, to evaluate on."})
    validation_target: list[str] = field(default_factory=list, metadata={"help": "Their translations."})
    test_source: list[str] = field(default_factory=list, metadata={"help": "The same, to translate at the end."})
    test_target: list[str] = field(default_factory=list, metadata={"help": "Their translations."})
    source_prefix: str = field(default="", metadata={"help": "Put before every text to translate, as T5 wants it."})
    max_source_length: int = field(default=128, metadata={"help": "Tokens of a text; longer ones are cut."})
    max_target_length: int = field(
        default=128, metadata={"help": "Tokens of a translation, those that are learnt and those that are written."}
    )
    num_beams: int = field(default=4, metadata={"help": "Beams of the search for a translation; 1: greedy."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many pairs, drawn by lot."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn by lot."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Test on so many, drawn by lot."})
    sample_seed: int = field(default=0, metadata={"help": "Decides which pairs those are."})


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file; nothing but a line feed ends one, so that no other character shifts the pairs."""
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.rstrip("\r\n")


def read_pairs(source: list[str], target: list[str]) -> Dataset:
    """The pairs of parallel files: columns `source` and `target`.

    Raises:
        ValueError: there are more files of the one than of the other, or two that belong together differ in length.
    """
    pairs: dict[str, list[str]] = {"source": [], "target": []}
    for paths in zip_longest(source, target):
        if None in paths:
            raise ValueError(f"files belong together two by two, got {len(source)} sources and {len(target)} targets")
        lines = [list(read_lines(path)) for path in paths]
        if len(lines[0]) != len(lines[1]):
            raise ValueError(f"{paths[0]} has {len(lines[0])} lines, but {paths[1]} has {len(lines[1])}")
        pairs["source"] += lines[0]
        pairs["target"] += lines[1]
    return Dataset.from_dict(pairs)


def load_pairs(arguments: DataArguments) -> DatasetDict:
    """The splits `train`, `validation` and `test`, those that there are: columns `source` and `target`.

    Raises:
        ValueError: no data is named, or both a data set of the Hub and files, or such a data set without its
            languages; or as `read_pairs`.
    """
    files = {
        "train": (arguments.train_source, arguments.train_target),
        "validation": (arguments.validation_source, arguments.validation_target),
        "test": (arguments.test_source, arguments.test_target),
    }
    sides = [f"{split}_{side}" for split in files for side in ("source", "target")]
    check_one_source(arguments, ("dataset_name", "dataset_config_name"), sides)
    if arguments.dataset_name is not None:
        languages = {"source": arguments.source_lang, "target": arguments.target_lang}
        if None in languages.values():
            raise ValueError("a data set of the Hub needs --source_lang and --target_lang")
        data = load_from_hub(
            arguments.dataset_name,
            arguments.dataset_config_name,
            instead="--train_source and --train_target",
        )

        def pair(row: dict[str, Any]) -> dict[str, str]:
            texts = row.get("translation", row)  # some data sets have a column for each language
            return {side: texts[language] for side, language in languages.items()}

        parts = {
            split: data[split].map(pair, remove_columns=data[split].column_names) for split in files if split in data
        }
        return DatasetDict(parts)
    named = {split: paths for split, paths in files.items() if any(paths)}
    if not named:
        raise ValueError("no texts: name a data set with --dataset_name, or files with --train_source, --train_target")
    return DatasetDict({split: read_pairs(*paths) for split, paths in named.items()})
