"""The tasks of GLUE: their columns, classes and metrics, from the Hub or from the benchmark's own TSV files."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from datasets import ClassLabel, Dataset, DatasetDict, Value

from .hub_data import load_from_hub

HUB_NAME = "nyu-mll/glue"
NOT_ENTAILMENT = "not_entailment"


@dataclass(frozen=True)
class GlueTask:
    """A task as the Hub has it, and how its own files differ from that.

    Attributes:
        folder: name of its folder in the benchmark's download.
        texts: columns of the text, or of the two.
        labels: the classes by their numbers; none where a score is predicted.
        columns: the files' names of the columns `texts` and `label`, where they are others.
        header: columns of the labelled files, where these begin without a line that names them.
        validation: the splits to evaluate on, with their files.
        test: the splits whose labels the benchmark keeps, with their files.
    """

    folder: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    columns: dict[str, str] = field(default_factory=dict)
    header: tuple[str, ...] | None = None
    validation: dict[str, str] = field(default_factory=lambda: {"validation": "dev"})
    test: dict[str, str] = field(default_factory=lambda: {"test": "test"})


TASKS = {
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        ("unacceptable", "acceptable"),
        header=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueTask("SST-2", ("sentence",), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC",
        ("sentence1", "sentence2"),
        ("not_equivalent", "equivalent"),
        {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
    ),
    "stsb": GlueTask("STS-B", ("sentence1", "sentence2"), (), {"label": "score"}),
    "qqp": GlueTask("QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), {"label": "is_duplicate"}),
    "mnli": GlueTask(
        "MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
        validation={"validation_matched": "dev_matched", "validation_mismatched": "dev_mismatched"},
        test={"test_matched": "test_matched", "test_mismatched": "test_mismatched"},
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), ("entailment", NOT_ENTAILMENT)),
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), ("entailment", NOT_ENTAILMENT)),
    "wnli": GlueTask("WNLI", ("sentence1", "sentence2"), (NOT_ENTAILMENT, "entailment")),
}


def read_split(path: Path, task: GlueTask) -> Dataset:
    """One file with the Hub's columns; without labels, as tests are, every label is -1."""
    # Test files name their columns even where the others don't.
    header = None if path.name.startswith("test") else task.header
    frame = pd.read_csv(
        path,
        sep="\t",
        quoting=csv.QUOTE_NONE,
        encoding="utf-8-sig",
        dtype=str,
        keep_default_na=False,  # "NA" and "null" are words here
        names=header,
    )
    names = {task.columns.get(column, column): column for column in (*task.texts, "label")}
    rows = frame[[name for name in names if name in frame]].rename(columns=names)
    kind = ClassLabel(names=list(task.labels)) if task.labels else Value("float32")
    if "label" not in rows:
        rows["label"] = -1 if task.labels else -1.0
    elif task.labels:
        numbers = {name: number for number, name in enumerate(task.labels)}
        numbers |= {str(number): number for number in range(len(task.labels))}
        rows["label"] = rows["label"].map(numbers)
    else:
        rows["label"] = pd.to_numeric(rows["label"], errors="coerce")
    broken = rows["label"].isna()
    if broken.any():
        row = broken.to_list().index(True) + 1
        raise ValueError(f"{path}: row {row} of {len(rows)}, not counting a header, has no label of the task")
    rows["label"] = rows["label"].astype("int64" if task.labels else "float32")
    return Dataset.from_pandas(rows, preserve_index=False).cast_column("label", kind)


def load_glue(name: str, folder: Path | None = None) -> DatasetDict:
    """A task's splits, with the columns and class numbers of the Hub.

    Args:
        name (`str`): a key of `TASKS`.
        folder (`Path`, *optional*): the benchmark's download, a folder of TSV files for each task (gzip too). Default:
            the Hub.

    Returns:
        `DatasetDict`: `train` and the task's validation and test splits, those of them that are there.

    Raises:
        ValueError: an unknown task.
        FileNotFoundError: the folder has no file of the task.
        ValueError: a row whose label is none of the task's; the message names the file and the row.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r} of GLUE; there are {', '.join(TASKS)}")
    if folder is None:
        return load_from_hub(HUB_NAME, name, instead="--data_dir")
    task = TASKS[name]
    splits = {"train": "train", **task.validation, **task.test}
    files = {
        split: path
        for split, file in splits.items()
        for path in sorted((folder / task.folder).glob(f"{file}.tsv*"))[:1]
    }
    if not files:
        raise FileNotFoundError(f"{folder / task.folder} has none of {', '.join(f'{x}.tsv' for x in splits.values())}")
    return DatasetDict({split: read_split(path, task) for split, path in files.items()})
