"""The data sets of text classification as `scripts/train/classification.py` takes them, each a file of JSON lines."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_effattn.data.labelled_texts import load_classes

from ..shared.data import dataset_path

Example = dict[str, str]


@dataclass(frozen=True)
class DataSet:
    """A data set and what suits it.

    Attributes:
        train: yields the examples; where there is no `test`, a part of them is held out.
        test: yields those of the test.
        max_length: tokens of an example.
        clusters: near the square root of it, as in the paper.
        epochs: times that a model sees the training examples.
        pairs: whether an example is a pair of texts.
        metric: `"accuracy"`, or `"map"` where the answers to a question are ranked.
        settings: of the model, where the paper has others.
    """

    train: Callable[[], Iterator[Example]]
    test: Callable[[], Iterator[Example]] | None
    max_length: int
    clusters: int
    epochs: int
    pairs: bool = False
    metric: str = "accuracy"
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> dict[str, Path]:
        """Write the splits into `folder`; their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = {}
        for split, examples in (("train", self.train), ("test", self.test)):
            if examples is not None:
                paths[split] = folder / f"{split}.jsonl"
                with paths[split].open("w", encoding="utf-8") as file:
                    file.writelines(json.dumps(example) + "\n" for example in examples())
        return paths


def class_files(*files: tuple[str, str]) -> Callable[[], Iterator[Example]]:
    """Examples of files with a text a line, whose class is the file; each with its encoding."""

    def examples() -> Iterator[Example]:
        paths = [str(dataset_path(f"sentcls/{name}.gz")) for name, _ in files]
        for row in load_classes(paths, [encoding for _, encoding in files]):
            yield {"text": row["text"].strip(), "label": files[row["label"]][0]}

    return examples


def newsgroups(split: str) -> Callable[[], Iterator[Example]]:
    """Whole messages with their headers, which do not name the group."""

    def examples() -> Iterator[Example]:
        with gzip.open(dataset_path(f"20newsgroups/{split}.jsonl.gz"), "rt", encoding="utf-8") as file:
            for line in file:
                message = json.loads(line)
                yield {"text": message["text"], "label": message["label"]}

    return examples


def sentence_pairs(name: str) -> Callable[[], Iterator[Example]]:
    """Pairs of sentences and the class of the pair, in columns divided by tabs."""

    def examples() -> Iterator[Example]:
        with gzip.open(dataset_path(f"matching/{name}.gz"), "rt", encoding="utf-8") as file:
            for line in file:
                first, second, label = line.rstrip("\n").split("\t")
                yield {"text": first, "second_text": second, "label": label}

    return examples


# The paper's size for pairs of texts.
OF_PAIRS = {"num_hidden_layers": 1, "num_attention_heads": 6}
# Epochs: about 900 updates for the sentences, as many times more as the texts of the others are longer or harder.
# Files of one data set differ in their encodings: read as one of the two, foreign letters would give the class away.
DATA_SETS = {
    "CR": DataSet(class_files(("custrev.neg", "utf-8"), ("custrev.pos", "utf-8")), None, 128, 8, 8),
    "MR": DataSet(class_files(("rt-polarity.neg", "latin-1"), ("rt-polarity.pos", "latin-1")), None, 128, 8, 3),
    "SUBJ": DataSet(class_files(("subj.objective", "utf-8"), ("subj.subjective", "latin-1")), None, 128, 8, 3),
    "MPQA": DataSet(class_files(("mpqa.neg", "utf-8"), ("mpqa.pos", "utf-8")), None, 64, 8, 3),
    "20 Newsgroups": DataSet(newsgroups("train"), newsgroups("test"), 512, 20, 3),
    "SICK": DataSet(
        sentence_pairs("sick/train.txt"), sentence_pairs("sick/test.txt"), 128, 3, 6, pairs=True, settings=OF_PAIRS
    ),
    "WikiQA": DataSet(
        *(sentence_pairs("wikiqa/train.txt"), sentence_pairs("wikiqa/test.txt"), 128, 3, 3),
        pairs=True,
        metric="map",
        settings=OF_PAIRS,
    ),
}
