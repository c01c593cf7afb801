"""The benchmark of slice attention at small sizes."""

import json

import benchmark_cst
import pytest
import torch
from typer import Typer
from typer.testing import CliRunner


def test_layers_are_measured_and_kept(tmp_path):
    output = tmp_path / "results" / "cst.json"
    options = {"width": 32, "heads": 2, "slice_length": 8, "repeats": 1, "cosines": False, "output": output}
    benchmark_cst.main("64,96", **options)
    first = json.loads(output.read_text())
    assert [(row["length"], row["part"], row["attention"]) for row in first["layers"]] == [
        (length, part, name) for length in (64, 96) for part in ("layer", "attention") for name in ("slices", "SDPA")
    ]
    for row in first["layers"]:
        assert row["forward_ms"] > 0
        assert row["forward_backward_peak_bytes"] > row["forward_peak_bytes"] > 0
        assert row["attention"] == "slices" or row["forward_backward_speedup"] == 1
    benchmark_cst.main("64,96,104", **options)
    second = json.loads(output.read_text())["layers"]
    assert second[:8] == first["layers"]
    assert {row["length"] for row in second[8:]} == {104}


def test_the_layer_with_sdpa_is_the_same_layer():
    """One slice over the whole input and no global part: both give the same, with the same weights."""
    layer = benchmark_cst.CSTLayer(benchmark_cst.CSTConfig(hidden_size=32, num_attention_heads=2, slice_length=16))
    attention = layer.attention.double().eval()
    exact = benchmark_cst.ExactAttention(attention)
    hidden = torch.randn(1, 16, 32, dtype=torch.float64)
    local = attention._local(0, hidden, None, None)[0]
    torch.testing.assert_close(exact(hidden)[0], attention.output(local))


def test_conversions_are_measured(real_model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_cst, "COSINE_LENGTHS", (48,))
    monkeypatch.setattr(benchmark_cst, "SLICES", ((8, 1), (8, 3)))
    output = tmp_path / "cst.json"
    benchmark_cst.main("", texts_per_book=1, output=output)
    rows = json.loads(output.read_text())["conversions"]
    means = {(row["conversion"], row["extension_ratio"]): row["cosine_mean"] for row in rows}
    assert len(means) == 8
    assert means["merged", 3] > means["merged", 1] > means["merged, no sinks", 1] > means["the paper's sum", 1]


def test_help_says_what_it_does():
    app = Typer()
    app.command()(benchmark_cst.main)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "--output" in result.output


@pytest.mark.parametrize("lengths", ["", "64"])
def test_another_setting_is_measured_anew(lengths, tmp_path):
    output = tmp_path / "cst.json"
    options = {"width": 16, "heads": 2, "repeats": 1, "cosines": False, "output": output}
    benchmark_cst.main("32", slice_length=8, **options)
    benchmark_cst.main(lengths, slice_length=4, **options)
    assert json.loads(output.read_text())["settings"]["slice_length"] == (4 if lengths else 8)
