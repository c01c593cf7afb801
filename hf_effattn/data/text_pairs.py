"""Pairs and triplets of texts for an embedder: from the Hub, or from tables."""

from dataclasses import dataclass, field

from datasets import Dataset, DatasetDict, Value

from .checks import check_one_source
from .hub_data import load_from_hub
from .labelled_texts import TableArguments, load_table

GIVEN_BY = {
    "train": "--train_files or a --dataset_name that has them",
    "validation": "--validation_files or a --dataset_name that has them",
}
ANCHOR, POSITIVE, NEGATIVE = "anchor", "positive", "negative"
TEXT = (Value("string"), Value("large_string"))


@dataclass
class DataArguments(TableArguments):
    """Which texts."""

    columns: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Columns of the anchor, the positive and any negatives. Default: anchor positive, and negative"
            " where there is one."
        },
    )

    @property
    def most(self) -> dict[str, int | None]:
        """How many rows of each split are taken at most."""
        return {"train": self.max_train_samples, "validation": self.max_eval_samples}


def load_pairs(arguments: DataArguments) -> DatasetDict:
    """The splits `train` and `validation`, those that there are: the anchor, the positive and any negatives.

    Raises:
        ValueError: no texts are named, or in more than one way; or as `texts_of`.
    """
    check_one_source(arguments, ("dataset_name", "dataset_config_name"), ("train_files", "validation_files"))
    files = {"train": arguments.train_files, "validation": arguments.validation_files}
    if arguments.dataset_name is not None:
        data = load_from_hub(arguments.dataset_name, arguments.dataset_config_name, instead="--train_files")
    elif any(files.values()):
        data = DatasetDict({split: load_table(paths) for split, paths in files.items() if paths})
    else:
        raise ValueError("no texts: name a data set with --dataset_name, or files with --train_files")
    return DatasetDict({split: texts_of(data[split], split, arguments.columns) for split in files if split in data})


def texts_of(rows: Dataset, split: str, columns: list[str]) -> Dataset:
    """The columns of texts alone, in their order, by which sentence-transformers knows them.

    Args:
        rows (`Dataset`): with these columns among others.
        split (`str`): what messages call it.
        columns (`list[str]`): of the anchor, the positive and any negatives; none for the default names.

    Raises:
        ValueError: a column is missing or holds something else than a text in each row.
    """
    there = rows.column_names
    named = columns or [ANCHOR, POSITIVE, *([NEGATIVE] if NEGATIVE in there else [])]
    missing = [name for name in named if name not in there]
    if missing or len(named) < 2:
        wrong = f"no column {', '.join(missing)}" if missing else f"one column alone, {', '.join(named)}"
        raise ValueError(
            f"the texts of {split!r} have {wrong}: name those of the anchor, the positive and any negatives with"
            f" --columns, there are {', '.join(there)}"
        )
    for name in named:
        if rows.features[name] not in TEXT:
            raise ValueError(f"the column {name!r} of {split!r} has no text a row, but {rows.features[name]}")
        texts = rows[name][:]
        if None in texts:
            raise ValueError(f"row {texts.index(None) + 1} of {split!r} has no text in the column {name!r}")
    return rows.select_columns(named)
