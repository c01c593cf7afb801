"""The pictures: what they show, against the numbers; how they look is for the eye."""

import pytest
import torch
from support.tiny_models import batch_for, tiny_model

import hf_effattn
from hf_effattn.reporting import plot_attention
from hf_effattn.reporting.pattern import find_pattern, head_scores

METHODS = [
    {"method": "clustered", "clusters": 5},
    {"method": "i-clustered", "clusters": 5, "topk": 4},
    {"method": "bi-clustered", "clusters": 5, "topk": 4, "key_clusters": 6},
]
CLUSTERED, IMPROVED = "clustered clusters=5", "i-clustered clusters=5 topk=4"
BI_CLUSTERED = "bi-clustered clusters=5 topk=4 key_clusters=6"


@pytest.fixture
def model():
    return tiny_model("bert")


@pytest.fixture
def text(model):
    batch = batch_for(model).inputs
    return {"input_ids": batch["input_ids"][:1]}


def words(text):
    return [f"word{token}" for token in text["input_ids"][0].tolist()]


def test_a_heat_map_has_a_panel_per_method_with_the_mean_errors(model, tmp_path):
    inputs = [batch_for(model, length=length, seed=length).inputs for length in (20, 20, 30)]
    report = hf_effattn.report(model, inputs, METHODS, repeats=0, memory=False, progress=False)
    figure = report.plot(length=20)
    panels = [panel for panel in figure.axes if panel.images]
    assert [panel.get_title().split(":")[0] for panel in panels] == [CLUSTERED, IMPROVED, BI_CLUSTERED]
    assert panels[0].images[0].get_clim() == panels[1].images[0].get_clim()
    shown = torch.as_tensor(panels[0].images[0].get_array().data)
    expected = torch.tensor(
        [list(m.attention_error.values()) for m in report.of(CLUSTERED) if report.inputs[m.input].length == 20]
    ).mean(0)
    torch.testing.assert_close(shown.float(), expected)
    assert "20 tokens" in figure.get_suptitle()
    files = report.save(tmp_path)
    assert [file.name for file in files] == ["report.json", "attention_error_20.png", "attention_error_30.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[1:])
    with pytest.raises(ValueError, match="no errors of the attention output at 99 tokens"):
        report.plot(length=99)
    with pytest.raises(KeyError, match="not in this report"):
        report.plot(methods=["cst"])


def test_a_pattern_shows_the_weights_of_the_model_and_of_the_methods(model, text):
    pattern = find_pattern(model, text, methods=METHODS, rows=[3, 4, 9], layer=1, head=1, tokens=words(text))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(**text, output_attentions=True).attentions[1][0, 1]
    torch.testing.assert_close(pattern.weights["unpatched"], exact[[3, 4, 9]])
    for label in (CLUSTERED, IMPROVED, BI_CLUSTERED):
        torch.testing.assert_close(pattern.weights[label].sum(dim=1), torch.ones(3))
    # One layer patched: its queries and keys are the exact model's, as in the picture.
    model.set_attn_implementation("sdpa")
    hf_effattn.patch_attention(model, "clustered", layers=[1], clusters=5, min_length=0)
    with torch.no_grad():
        implied = model(**text, output_attentions=True).attentions[1][0, 1]
    torch.testing.assert_close(pattern.weights[CLUSTERED], implied[[3, 4, 9]])


def test_a_picture_labels_rows_and_their_most_attended_tokens(model, text):
    labels = words(text)
    report = hf_effattn.report(model, text, METHODS, repeats=0, memory=False, progress=False)
    figure = report.plot_attention(model, text, rows=[3, 4, 9], layer=2, head=0, tokens=labels)
    pattern = find_pattern(model, text, methods=METHODS, rows=[3, 4, 9], layer=2, head=0, tokens=labels)
    panels = [panel for panel in figure.axes if panel.images]
    shown = ["unpatched", IMPROVED, BI_CLUSTERED, CLUSTERED]
    assert [panel.get_title(loc="left").split(":")[0] for panel in panels] == shown
    for panel, label in zip(panels, shown, strict=True):
        assert [tick.get_text() for tick in panel.get_yticklabels()] == [labels[row] for row in (3, 4, 9)]
        (right,) = [axis for axis in panel.child_axes if axis.get_yticklabels()]
        tops = [labels[place] for place in pattern.most_attended(label)]
        assert [tick.get_text() for tick in right.get_yticklabels()] == tops
        assert panel.images[0].norm is panels[0].images[0].norm
    assert "layer 2, head 0" in figure.get_suptitle()


def test_the_chosen_head_is_the_one_that_matches_content():
    rows, length = [1, 2, 3, 4, 5], 30
    always_one, diagonal, content = torch.full((3, 5, length), 1 / length)
    always_one[:, 20] = 1
    for line, row in enumerate(rows):
        diagonal[line, row + 15] = 1
        content[line, (7 * row) % 20 + 9] = 0.5
    scores = head_scores(torch.stack([always_one, diagonal, content]), rows, torch.ones(length, dtype=torch.bool))
    assert scores.argmax() == 2
    assert scores[:2].max() < 0.3


MISTAKES = {
    "rows outside": ({"rows": [40]}, "tokens 0 to 39"),
    "no rows": ({"rows": []}, "rows is empty"),
    "layer": ({"layer": 3}, "layer 3 is not among"),
    "head": ({"head": 2}, "head 2 does not exist"),
    "too few labels": ({"tokens": ["one"]}, "1 labels"),
    "no labels": ({"tokens": None}, "no tokens to label"),
    "unknown method": ({"methods": "clusterd"}, "did you mean"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_and_change_nothing(mistake, model, text):
    options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        plot_attention(model, text, **{"tokens": words(text)} | options)
    assert model.config._attn_implementation == "sdpa"


def test_a_batch_is_refused(model):
    with pytest.raises(ValueError, match="draws one text, got a batch of 2"):
        plot_attention(model, batch_for(model).inputs)
