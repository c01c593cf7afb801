"""The report on a conversion: it measures it, says that it needs fine-tuning, and leaves the model as it was."""

import pytest
import torch
from support.cst_conversions import convert, first_output, small_model, tokens
from support.tiny_models import tiny_model

import hf_effattn
from hf_effattn.patching.methods.cst.positions import NAME
from hf_effattn.reporting.pattern import find_pattern

METHODS = [
    {"method": "clustered", "clusters": 6},
    {"method": "cst", "slice_length": 4},
    {"method": "cst", "slice_length": 4, "composition": "local-global"},
]
LABELS = [
    "clustered clusters=6",
    "cst slice_length=4 extension_ratio=1",
    "cst slice_length=4 extension_ratio=1 composition=local-global attend_ends=False",
]


def quick_report(model, inputs, methods=METHODS):
    return hf_effattn.report(model, inputs, methods, repeats=1, memory=False, progress=False)


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
def test_it_measures_a_conversion_and_says_what_it_needs(model_type):
    model = small_model(model_type)
    report = quick_report(model, {"input_ids": tokens()})
    assert list(report.methods) == LABELS
    errors = [report.of(label)[0].change.hidden_error for label in LABELS]
    assert 0 < errors[1] < errors[2]
    assert all(len(report.of(label)[0].attention_error) == 3 for label in LABELS)
    text = report.summary()
    assert f"{', '.join(LABELS[1:])}: a conversion of the model, which needs fine-tuning on your task" in text
    assert "fine-tuning" not in quick_report(model, {"input_ids": tokens()}, METHODS[:1]).summary()
    assert not hasattr(model.base_model, NAME)
    assert not hasattr(model.config, "effattn")


def test_a_converted_model_is_measured_with_its_tables_and_keeps_them():
    """Also for a second input, after other methods were patched in between."""
    model = convert(small_model("bert"))
    tables = getattr(model, NAME)
    inputs = [{"input_ids": tokens()}, {"input_ids": tokens(seed=2)}]
    with torch.no_grad():
        before = first_output(model, tokens())
        report = quick_report(model, inputs)
        assert getattr(model, NAME) is tables
        assert torch.equal(first_output(model, tokens()), before)
        for index, batch in enumerate(inputs):
            (measured,) = report.of(LABELS[1], index)
            converted = first_output(model, batch["input_ids"])
            model.set_attn_implementation("sdpa")
            exact = first_output(model, batch["input_ids"])
            model.set_attn_implementation("cst")
            error = ((converted - exact).norm() / exact.norm()).item()
            assert measured.change.hidden_error == pytest.approx(error, rel=1e-4)
        alone = quick_report(model, inputs[1:], METHODS[1])
    errors, expected = (run.of(LABELS[1])[-1].attention_error for run in (report, alone))
    for layer, heads in expected.items():
        assert errors[layer] == pytest.approx(heads)


def test_a_model_that_cannot_be_converted_raises_before_anything_runs(monkeypatch):
    model = tiny_model("modernbert")
    monkeypatch.setattr(type(model), "forward", None)
    with pytest.raises(ValueError, match="does not know where ModernBertModel"):
        quick_report(model, {"input_ids": tokens()})


def test_the_attention_pattern_of_a_conversion():
    model = small_model("bert")
    words = [str(i) for i in range(27)]
    pattern = find_pattern(
        model, {"input_ids": tokens(batch=1)}, methods=METHODS[1], rows=[0, 9], layer=1, head=1, tokens=words
    )
    torch.testing.assert_close(pattern.weights[LABELS[1]].sum(dim=1), torch.ones(2))
