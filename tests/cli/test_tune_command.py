"""`effattn tune`: it writes what `calibrate` finds, on the user's model and texts, and says how to use it."""

import json
from pathlib import Path

import torch
from support.embedding_cases import save_encoder, text
from transformers import AutoModel
from typer.testing import CliRunner

import hf_effattn
from hf_effattn.cli import app

runner = CliRunner()


def test_tuned_on_ones_own_text_beyond_the_models_positions(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "model", positions=64)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(text(400, seed=len(name)), encoding="utf-8")
    options = ["--text", str(tmp_path / "one.txt"), "--text", str(tmp_path / "two.txt"), "--min-length", "0"]
    output = tmp_path / "tuned"
    arguments = ["tune", str(folder), *options, "--lengths", "80,150", "--texts", "3", "--output", str(output)]
    result = runner.invoke(app, [*arguments, "--max-error", "0.2", "--training"])
    assert result.exit_code == 0, result.output
    assert "knows 64 positions" in result.stderr
    assert "12/12 layer 1, 150 tokens" in result.stderr
    assert {path.name for path in output.iterdir()} == {"effattn.json", "head_settings.png"}
    stored = json.loads((output / "effattn.json").read_text())
    about = stored["calibration"]
    assert (about["max_error"], about["training"], about["lengths"], about["texts"]) == (0.2, True, [80, 150], 6)
    assert f'settings="{output / "effattn.json"}", tolerance=0.2' in result.stdout
    model = hf_effattn.extend_positions(AutoModel.from_pretrained(folder), 150)
    hf_effattn.patch_attention(model, settings=output, tolerance=0.2)
    with torch.no_grad():
        model(torch.randint(4, 10, (1, 150)))
    heads = [index for row in stored["heads"] for index in row]
    assert any(index == len(stored["candidates"]) for index in heads) or hf_effattn.measured_error(model)


def test_mistakes_in_words(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "model")
    (tmp_path / "short.txt").write_text(text(60), encoding="utf-8")
    base = ["tune", str(folder), "--text", str(tmp_path / "short.txt"), "--output", str(tmp_path / "tuned")]
    for more, said in (
        (["--lengths", "40", "--max-error", "0.1", "--speed", "2"], "the one decides the other"),
        (["--lengths", "40"], "two texts or more"),
        (["--lengths", "90"], "the text is too short"),
        (["--lengths", "20", "--texts", "2"], "--min-length 0"),
    ):
        result = runner.invoke(app, [*base, *more])
        assert result.exit_code == 1
        assert said in result.stderr
        assert "layer 0" not in result.stderr  # before anything is measured
        assert not (tmp_path / "tuned").exists()


def test_a_conversion_is_not_tuned(tmp_path: Path) -> None:
    """Its weights were fine-tuned for slices, and it was measured against an exact attention that they never had."""
    folder = save_encoder(tmp_path / "model")
    model = hf_effattn.patch_attention(AutoModel.from_pretrained(folder), "cst", slice_length=4)
    model.save_pretrained(folder)
    result = runner.invoke(app, ["tune", str(folder), "--output", str(tmp_path / "tuned"), "--min-length", "0"])
    assert result.exit_code == 1
    assert 'is a conversion to "cst"' in result.stderr
    assert not (tmp_path / "tuned").exists()
