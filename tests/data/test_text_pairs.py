"""Pairs and triplets of texts: the columns in their order, and rows that are none."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.script_runs import write_gzip

from hf_effattn.data.text_pairs import DataArguments, load_pairs


def arguments(path: Path, *rows: dict[str, Any], **options: Any) -> DataArguments:
    """What names a compressed file of these rows."""
    write_gzip(path / "pairs.jsonl.gz", "".join(json.dumps(row) + "\n" for row in rows))
    return DataArguments(train_files=[str(path / "pairs.jsonl.gz")], **options)


def test_columns_come_in_the_order_of_their_parts(tmp_path: Path) -> None:
    """sentence-transformers goes by the order alone, and would train on whatever stands first."""
    row = {"id": 1, "negative": "n", "positive": "p", "anchor": "a"}
    assert load_pairs(arguments(tmp_path, row))["train"][:] == {"anchor": ["a"], "positive": ["p"], "negative": ["n"]}
    del row["negative"]
    assert list(load_pairs(arguments(tmp_path, row))["train"][0]) == ["anchor", "positive"]
    row = {"answer": "p", "question": "a", "hard": "n", "harder": "m"}
    named = ["question", "answer", "harder", "hard"]
    assert load_pairs(arguments(tmp_path, row, columns=named))["train"].column_names == named


PAIR = {"anchor": "a", "positive": "p"}
WRONG: dict[str, tuple[list[dict[str, Any]], list[str], str]] = {
    "no such column": ([PAIR], ["anchor", "text"], "'train' have no column text: .* there are anchor, positive"),
    "no default column": ([{"question": "a", "answer": "p"}], [], "no column anchor, positive: .* --columns"),
    "one column": ([PAIR], ["anchor"], "one column alone, anchor"),
    "numbers": ([PAIR | {"positive": 1}], [], "the column 'positive' of 'train' has no text a row"),
    "a list": ([PAIR | {"positive": ["p"]}], [], "the column 'positive' of 'train' has no text a row"),
    "nothing": ([PAIR, PAIR | {"positive": None}], [], "row 2 of 'train' has no text in the column 'positive'"),
    "a row without": ([PAIR | {"negative": "n"}, PAIR], [], "row 2 of 'train' has no text in the column 'negative'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_that_are_no_pairs_are_told(case: str, tmp_path: Path) -> None:
    rows, columns, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        load_pairs(arguments(tmp_path, *rows, columns=columns))


def test_the_source_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no texts: name a data set with --dataset_name"):
        load_pairs(DataArguments())
    with pytest.raises(ValueError, match="--dataset_name and --train_files name data in more than one way"):
        load_pairs(arguments(tmp_path, PAIR, dataset_name="some/name"))
    with pytest.raises(FileNotFoundError, match="'some/name' cannot be had from the Hub"):
        load_pairs(DataArguments(dataset_name="some/name"))
