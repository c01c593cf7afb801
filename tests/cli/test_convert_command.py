"""`effattn convert`: what it writes is the patched model, and it says how it is loaded."""

import shutil

import pytest
import torch
from support.tiny_models import TEXT
from tokenizers import Tokenizer
from transformers import AutoConfig, BertForSequenceClassification, ViTImageProcessor, ViTModel
from typer.testing import CliRunner

import hf_effattn
from hf_effattn.cli import app

runner = CliRunner()
WORDS = torch.arange(1, 41)[None]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = BertForSequenceClassification(AutoConfig.for_model("bert", **TEXT))
    model.save_pretrained(tmp_path / "exact")
    return tmp_path


@pytest.mark.parametrize(
    "method", ["bi-clustered clusters=6 topk=8 key_clusters=7 min_length=0", "cst slice_length=4"]
)
def test_a_converted_model_is_that_of_the_library(method, folder):
    result = runner.invoke(app, ["convert", str(folder / "exact"), str(folder / "new"), "--method", method])
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines() if line.startswith("    ")]
    names = {"hf_effattn": hf_effattn}
    exec("\n".join(lines), names)  # as printed
    converted = names["model"].eval()
    name, *settings = method.split()
    exact = BertForSequenceClassification.from_pretrained(folder / "exact").eval()
    before = exact(WORDS).logits
    values = {key: int(value) for key, value in (setting.split("=") for setting in settings)}
    hf_effattn.patch_attention(exact, name, **values)
    torch.testing.assert_close(converted(WORDS).logits, exact.eval()(WORDS).logits)
    assert not torch.allclose(converted(WORDS).logits, before, rtol=1e-3)
    assert "has no tokenizer" in result.stderr
    assert not (folder / "new" / "tokenizer.json").exists()


def test_a_longer_model_in_half_the_bytes(folder, real_model_folder):
    arguments = ["--max-length", "600", "--dtype", "bfloat16", "--auto-class", "AutoModel"]
    result = runner.invoke(app, ["convert", str(real_model_folder), str(folder / "long"), *arguments])
    assert result.exit_code == 0, result.output
    config = AutoConfig.from_pretrained(folder / "long")
    assert config.max_position_embeddings == 600
    assert config.effattn["method"] == "bi-clustered"
    # Its own file cuts at 128, for all that read it without transformers.
    assert len(Tokenizer.from_file(str(folder / "long" / "tokenizer.json")).encode("word " * 700).ids) == 600
    size = (folder / "long" / "model.safetensors").stat().st_size
    assert size < 0.6 * (real_model_folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./no-such-folder", "new"], "there is no folder ./no-such-folder"),
        (["no/such/folder", "new"], "there is no folder no/such/folder"),
        (["empty", "new"], "empty has no config.json"),
        (["exact/config.json", "new"], "exact/config.json is a file"),
        (["exact", "exact"], "holds a model already"),
        (["exact", "new", "--method", "i-clustered cluster=5"], "cluster"),
        (["exact", "exact/config.json"], "is a file"),
        (["scratch", "new"], "is a cst model from scratch"),
        (["exact", "new", "--auto-class", "AutoModelForChess"], "has no class 'AutoModelForChess'"),
        (["converted", "new", "--method", "cst slice_length=4"], 'is converted to "cst" already'),
        (["converted", "new"], 'is converted to "cst" already'),
        (["damaged", "new"], "the weights cannot be read"),
    ],
)
def test_mistakes_write_nothing(arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    AutoConfig.for_model("cst").save_pretrained(folder / "scratch")
    converted = BertForSequenceClassification.from_pretrained(folder / "exact")
    hf_effattn.patch_attention(converted, "cst", slice_length=4).save_pretrained(folder / "converted")
    (folder / "empty").mkdir()
    shutil.copytree(folder / "exact", folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"xx")
    result = runner.invoke(app, ["convert", *arguments])
    assert result.exit_code == 1
    assert message in result.output
    assert not (folder / "new").exists()


def test_a_model_of_images_keeps_its_processor(folder):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    ViTModel(AutoConfig.for_model("vit", image_size=32, patch_size=4, **sizes)).save_pretrained(folder / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vit")
    result = runner.invoke(app, ["convert", str(folder / "vit"), str(folder / "new"), "--method", "clustered"])
    assert result.exit_code == 0, result.output
    assert (folder / "new" / "preprocessor_config.json").exists()


def test_what_would_never_run_is_told(folder):
    result = runner.invoke(app, ["convert", str(folder / "exact"), str(folder / "new"), "--method", "i-clustered"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "Warning: The patch will do nothing" in said
    assert "min_length=0" in said
    method = "cst slice_length=4"
    result = runner.invoke(app, ["convert", str(folder / "exact"), str(folder / "cst"), "--method", method])
    assert "Warning" not in result.stderr
    assert "fine-tune it" in result.stdout
