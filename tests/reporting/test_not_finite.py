"""Numbers that are not finite: within no budget, said in words, and valid JSON."""

import json
import math

import pytest
import torch
from support.tiny_models import batch_for, tiny_model

import hf_effattn
from hf_effattn import Report
from hf_effattn.reporting.table import report_table

LABEL = "clustered clusters=5"


@pytest.fixture(scope="module")
def broken():
    """A report of a model whose last layer adds NaN."""
    model = tiny_model("bert")
    with torch.no_grad():
        model.encoder.layer[-1].output.dense.bias[0] = float("nan")
    options = {"max_error": 0.05, "repeats": 1, "memory": False, "progress": False}
    return hf_effattn.report(model, batch_for(model).inputs, {"method": "clustered", "clusters": 5}, **options)


def test_it_is_within_no_budget(broken):
    """NaN is not above a budget, so it counted as within."""
    assert math.isnan(broken.of(LABEL)[0].change.hidden_error)
    assert broken.fastest_within(0.05) is None
    assert "none of these settings meets it" in broken.summary()


def test_words_and_tables_say_so(broken):
    said = broken.summary()
    assert "the last hidden state is not finite; the mean-pooled embedding is not finite" in said
    header, (_, row) = report_table(broken)
    cells = dict(zip(header, row, strict=True))
    assert cells["output error"] == cells["cosine"] == "not finite"
    for text in (said, str(row), broken._repr_html_()):
        assert "nan" not in text.lower().replace("finance", "")
    broken.of(LABEL)[0].attention_error[1][1] = math.inf
    assert "the attention output is not finite (layer 1, head 1); " in broken.summary()


def test_json_has_no_word_for_it(broken):
    """`json.dumps` writes NaN, which other readers refuse; what was not measured and what is not finite differ."""
    text = json.dumps(broken.to_dict(), allow_nan=False)
    again = Report.from_dict(json.loads(text))
    assert math.isnan(again.of(LABEL)[0].change.hidden_error)
    assert all(map(math.isnan, again.of(LABEL)[0].change.embedding_cosines))
    assert again.of("unpatched")[0].change.hidden_error is None
    assert again.summary() == broken.summary()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: [values], "no report of hf_effattn"),
        (lambda values: {**values, "format": "one"}, "no report of hf_effattn"),
        (lambda values: {name: value for name, value in values.items() if name != "inputs"}, "damaged .KeyError"),
        (lambda values: {**values, "layers": ["a"]}, "damaged"),
        (lambda values: {**values, "measurements": [{"input": 0}]}, "damaged"),
        (lambda values: {**values, "format": 99}, "reads 2: update"),
    ],
)
def test_what_is_no_report_is_told(change, message, broken):
    with pytest.raises(ValueError, match=message):
        Report.from_dict(change(broken.to_dict()))
