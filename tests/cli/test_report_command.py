"""`effattn report` and `effattn methods`: what they print and write, and how they fail."""

import json
import sys

import pytest
import torch
from support.tiny_models import tiny_model
from transformers import AutoConfig, AutoModel, AutoTokenizer, LongformerConfig, LongformerModel, ViTConfig, ViTModel
from typer.testing import CliRunner

import hf_effattn
from hf_effattn import list_methods
from hf_effattn.cli import app
from hf_effattn.cli.app import _own_and_default_methods
from hf_effattn.cli.arguments import method_of
from hf_effattn.measuring.candidates import DEFAULT_METHODS, make_candidates
from hf_effattn.reporting import Report, report
from hf_effattn.samples.texts import Passages, bundled_books

runner = CliRunner()
SMALL = ["--lengths", "24,48", "--repeats", "0", "--method", "i-clustered clusters=5 topk=4"]


def test_a_method_is_read_with_values_of_their_kinds():
    assert method_of('i-clustered clusters=5 distance=vectors check_finite=true') == {
        "method": "i-clustered",
        "clusters": 5,
        "distance": "vectors",
        "check_finite": True,
    }  # fmt: skip


def test_report_is_that_of_the_library_in_words_as_json_and_as_a_page(real_model_folder, tmp_path):
    page = tmp_path / "new" / "page.html"
    words = runner.invoke(app, ["report", *SMALL, "--output", str(tmp_path / "out"), "--html", str(page)])
    assert words.exit_code == 0, words.output
    lines = [line for line in words.stderr.splitlines() if not line.startswith("written: ")]
    assert len(lines) == 16  # for both lengths six layers, and the output with exact attention and with the method
    assert lines[0] == "1/16 attention of layer 0, 24 tokens"
    assert lines[-1] == "16/16 output with i-clustered clusters=5 topk=4, 48 tokens"
    assert "1 text of 24 tokens" in words.stdout
    assert "i-clustered clusters=5 topk=4" in words.stdout
    assert f"written: {page}" in words.stderr
    text = page.read_text(encoding="utf-8")
    assert text.endswith("</html>")
    assert "BertModel (6 attention layers" in text
    assert "Where the model looks" in text
    kept = Report.load(tmp_path / "out")
    printed = runner.invoke(app, ["report", *SMALL, "--json"])
    reported = Report.from_dict(json.loads(printed.stdout))
    assert [measured.attention_error for measured in reported.measurements] == [
        measured.attention_error for measured in kept.measurements
    ]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".png"}


def test_report_of_a_model_that_transformers_has_no_sdpa_for(real_model_folder, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    config = LongformerConfig(vocab_size=len(tokenizer), attention_window=16, max_position_embeddings=66, **sizes)
    LongformerModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = runner.invoke(app, ["report", str(tmp_path), "--lengths", "48", "--repeats", "0"])
    assert result.exit_code == 0, result.output
    assert "LongformerModel (all layers run exactly, " in result.stdout
    assert "exact: nothing is approximated" in result.stdout


@pytest.mark.slow_except("bart")
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_report_of_a_model_with_a_decoder_is_of_its_encoder(model_type, real_model_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 16, "d_kv": 16}
    if model_type == "bart":
        sizes = {"vocab_size": len(tokenizer), "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
        sizes |= {"encoder_ffn_dim": 16, "decoder_layers": 1, "decoder_ffn_dim": 16, "decoder_attention_heads": 2}
    AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    method = "exact" if model_type == "t5" else "i-clustered clusters=5 topk=4"
    arguments = ["report", str(tmp_path), "--lengths", "48", "--repeats", "0", "--method", method]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert {"t5": "T5Stack", "bart": "BartEncoder"}[model_type] in result.stdout
    assert "1 text of 48 tokens" in result.stdout


def test_a_model_of_images_is_refused_also_beside_a_tokenizer(real_model_folder, tmp_path):
    ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(real_model_folder).save_pretrained(tmp_path)
    result = runner.invoke(app, ["report", str(tmp_path), *SMALL])
    assert result.exit_code == 1
    assert "reads pixel_values, and this works on text: call hf_effattn.report(model, inputs)" in result.stderr


def test_report_goes_beyond_the_positions_of_the_model_and_says_so(real_model_folder):
    arguments = ["report", "--lengths", "530", "--repeats", "0", "--method", "clustered clusters=5"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "knows 512 positions" in result.stderr
    assert "1 text of 530 tokens" in result.stdout


def test_a_page_that_could_not_be_written_is_told_before_anything_is_measured(monkeypatch, tmp_path):
    def fail(*args, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("hf_effattn.samples.model.load_model", fail)
    (tmp_path / "file").touch()
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "page.html", "file")):
        result = runner.invoke(app, ["report", *SMALL, "--html", str(path)])
        assert result.exit_code == 1
        assert message in result.output
        assert "Traceback" not in result.output
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = runner.invoke(app, ["report", *SMALL, "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert "hf_effattn[plots]" in result.output


@pytest.mark.parametrize("command", ["report", "tune"])
def test_a_text_that_is_not_there_is_told_before_a_model_is_loaded(command, monkeypatch, tmp_path):
    def fail(*args, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("hf_effattn.samples.model.load_model", fail)
    output = tmp_path / "output"
    result = runner.invoke(app, [command, "--text", "no-such-file.txt", "--output", str(output)])
    assert result.exit_code == 1
    assert "there is no file no-such-file.txt" in result.output
    assert not output.exists()


def test_a_model_of_a_type_without_a_tokenizer_is_told_what_to_do(tmp_path):
    """transformers' own words alone ask for sentencepiece, which would not help."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    result = runner.invoke(app, ["report", str(tmp_path), *SMALL])
    assert result.exit_code == 1
    assert f"{tmp_path} has no tokenizer that loads" in result.stderr
    assert "hf_effattn.report(model, inputs)" in result.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:report was interrupted")
def test_an_interruption_keeps_the_page_of_what_was_measured(real_model_folder, monkeypatch, tmp_path):
    def stop(done, total, what):
        if "48 tokens" in what:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        "hf_effattn.reporting.report", lambda *args, **options: report(*args, **options | {"progress": stop})
    )
    page = tmp_path / "page.html"
    result = runner.invoke(app, ["report", *SMALL, "--html", str(page)])
    assert result.exit_code == 130
    text = page.read_text(encoding="utf-8")
    assert "The measurement was stopped before its end" in text
    assert "1 text of 24 tokens" in text


@pytest.mark.slow
def test_a_patched_model_is_measured_as_it_was_saved(real_model_folder, tmp_path):
    """All layers were measured of a model patched in one; settings that are also a default's were refused as twice."""
    model = AutoModel.from_pretrained(real_model_folder)
    settings = {"clusters": 25, "topk": 32, "min_length": 0}
    hf_effattn.patch_attention(model, "i-clustered", layers=[0], **settings).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(real_model_folder).save_pretrained(tmp_path)
    shown = runner.invoke(app, ["report", str(tmp_path), "--lengths", "48", "--repeats", "0", "--json"])
    assert shown.exit_code == 0, shown.output
    reported = Report.from_dict(json.loads(shown.stdout))
    first, everywhere = (reported.of(f"i-clustered clusters=25 topk=32{layers}")[0] for layers in (" layers=[0]", ""))
    ids = Passages(AutoTokenizer.from_pretrained(tmp_path), bundled_books()).longest(48)
    with torch.no_grad():
        patched = model.eval()(ids).last_hidden_state
        exact = hf_effattn.unpatch_attention(model)(ids).last_hidden_state
    assert first.change.hidden_error == pytest.approx(float((patched - exact).norm() / exact.norm()), rel=1e-4)
    assert first.change.hidden_error < everywhere.change.hidden_error

    hf_effattn.patch_attention(model, "i-clustered", **settings)
    labels = [make_candidates(method)[0].label for method in _own_and_default_methods(model)]
    assert labels[0] == "i-clustered clusters=25 topk=32"
    assert len(set(labels)) == len(labels) == len(DEFAULT_METHODS)


def test_of_a_patched_model_with_windows_these_alone_are_measured_too():
    model = hf_effattn.patch_attention(tiny_model("modernbert"), "bi-clustered", clusters=6, min_length=0)
    methods = _own_and_default_methods(model)
    assert methods[0]["clusters"] == 6
    assert methods[-1] == {"method": "exact"}
    hf_effattn.patch_attention(model, "exact")
    assert [method["method"] for method in _own_and_default_methods(model)].count("exact") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--method", "j-clustered"], 1, "did you mean"),
        (["--method", "i-clustered clusters"], 2, "name=value"),
        (["--method", "i-clustered cluster=5"], 1, "cluster"),
        (["--lengths", "many"], 2, "numbers of tokens"),
        (["--text", "no-such-file.txt"], 1, "there is no file"),
        (["./no-such-folder"], 1, "Error"),
        (["--max-error", "0.1", *SMALL], 1, "Error"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_without_a_traceback(arguments, status, message):
    result = runner.invoke(app, ["report", *arguments])
    assert result.exit_code == status
    assert message in result.output
    assert "Traceback" not in result.output


def test_methods_are_those_of_the_library():
    methods = json.loads(runner.invoke(app, ["methods", "--json"]).stdout)
    decoders = [f"{name} in decoders" for name in ("clustered", "i-clustered", "bi-clustered", "per-head")]
    assert tuple(methods) == (*list_methods(), *decoders)
    assert methods["bi-clustered in decoders"]["exact_keys"] == 384
    assert methods["i-clustered"]["topk"] == 32
    shown = runner.invoke(app, ["methods"]).stdout
    assert all(name in shown for name in (*list_methods(), "slice_length", "key_clusters"))
    lines = [line.split()[0] for line in shown.splitlines() if line.startswith(" ") and line.strip()]
    assert all(lines.count(name) == 1 for name in ("seed", "segment_length", "slice_length"))
    assert all(lines.count(name) == 2 for name in ("key_clusters", "topk", "min_length"))  # two defaults
