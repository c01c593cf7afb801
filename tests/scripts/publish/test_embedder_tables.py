"""The tables of the embedder for long texts, made of results that stand here."""

import pytest
from support.stored_results import cells

from scripts.publish import embedder_tables
from scripts.publish.cst_tables import NOT_RUN

CUT, CHUNKS = "cut at 512", "mean of chunks of 512"


def judged(model, vector, score, seconds):
    row = {"phase": "retrieval", "model": model, "vector": vector, "ndcg_at_10": score, "seconds": seconds}
    return row | {"queries": 475, "meetings": 70}


def gain(model, vector, value):
    return {"phase": "gains", "model": model, "vector": vector, "gain": value, "standard_error": 0.0123}


def test_gains_stand_beside_the_vectors_that_they_are_over(keep):
    keep("long_embedder", [])
    assert embedder_tables.judged() == NOT_RUN
    scores = {CUT: 0.25, CHUNKS: 0.375, "exact": 0.35}
    keep("retrieval", [{"method": name, "ndcg_at_10": score} for name, score in scores.items()])
    rows = [judged("after", name, score + 0.125, 2000) for name, score in scores.items()]
    rows += [judged("before", "patched", 0.36, 7), judged("after", "patched", 0.5, 8)]
    rows += [gain("before", CHUNKS, 0.125), gain("after", CHUNKS, -0.01), gain("before", "patched", 0.14)]
    keep("long_embedder", rows)
    table = embedder_tables.judged()
    assert cells(table, CHUNKS) == ["37.5", "50.0", "+12.5 ± 1.2", "-1.0 ± 1.2", "2,000"]
    assert cells(table, "whole text, patched") == ["36.0", "50.0", "+14.0 ± 1.2", "", "8"]
    assert cells(table, "whole text, exact") == ["35.0", "47.5", "", "", "2,000"]
    assert "475 queries over 70 meetings" in table


def test_steps_are_told_apart_by_the_length_of_their_texts(keep):
    keep("long_embedder", [], max_length=8192)
    assert embedder_tables.steps() == NOT_RUN
    rows = [
        {
            "phase": "steps",
            "attention": name,
            "by_length": {
                length: {"steps": 30, "seconds": seconds, "speedup": speedup}
                for length, speedup in (("8192", of_long), ("512", 1.0))
            },
        }
        for name, seconds, of_long in (("exact", 10.0, 1.0), ("patched", 4.0, 2.5))
    ]
    keep("long_embedder", rows, max_length=8192)
    table = embedder_tables.steps()
    assert table.startswith("| texts of | 512 tokens | 8,192 tokens |")
    assert cells(table, "exact") == ["10.0 s", "10.0 s"]
    assert cells(table, "times faster") == ["1.0×", "2.5×"]


def test_errors_are_those_after_the_training(keep):
    assert embedder_tables.trained_errors() == {}
    row = {"phase": "errors", "method": "m", "name": "clusters=1", "length": 8}
    keep("long_embedder", [row | {"model": "before", "error": 0.5}, row | {"model": "after", "error": 0.25}])
    assert embedder_tables.trained_errors() == {("m", "clusters=1", 8): pytest.approx(0.25)}
