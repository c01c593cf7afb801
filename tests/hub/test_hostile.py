"""What checkpoints, cards and documents of strangers hold stays data: nothing runs, or lands outside its folder."""

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from support.embedding_cases import save_encoder
from support.tiny_models import tiny_model
from transformers import AutoModel
from typer.testing import CliRunner

import hf_effattn
from hf_effattn.cli import app
from hf_effattn.hub.module_folders import module_folders
from hf_effattn.hub.push import push_folder

PACKAGE = Path(hf_effattn.__file__).parent
HOSTILE = 'a: b\n---\nlicense: other\n<script>alert("x")</script> {{ 7 * 7 }} `x` ../../x'
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def calls(tree):
    """Names of what a module calls, and its keywords that are set to True."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield (
                ast.unparse(node.func),
                {kw.arg for kw in node.keywords if isinstance(kw.value, ast.Constant) and kw.value.value is True},
            )


def test_no_line_of_the_package_runs_text_or_reads_a_pickle():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, switched_on in calls(tree):
            assert name not in RUNS_TEXT, (path, name)
            assert name not in ("torch.load", "yaml.load", "os.system", "pickle.load", "pickle.loads"), (path, name)
            assert not switched_on & {"trust_remote_code", "shell"}, (path, name)
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not imported & {"pickle", "dill", "joblib", "marshal", "shelve"}, path


class Payload:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_pickle_in_place_of_the_weights_does_not_run(tmp_path):
    folder, mark = tmp_path / "model", tmp_path / "it ran"
    hf_effattn.patch_attention(tiny_model("bert"), "clustered", clusters=3, min_length=0).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Payload(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        hf_effattn.from_pretrained(AutoModel, folder)
    assert not mark.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert mark.exists()  # it would have


def test_a_card_keeps_hostile_names_apart_from_its_metadata():
    model = hf_effattn.patch_attention(tiny_model("bert"), "clustered", clusters=3, min_length=0)
    card = hf_effattn.model_card(
        model, name=HOSTILE, repo_id="me/x", base_model=HOSTILE, license="mit", language="en", datasets=[HOSTILE]
    )
    data = ModelCard(str(card)).data
    assert (data.license, data.base_model, data.datasets) == ("mit", HOSTILE, [HOSTILE])
    assert "49" not in card.text


def test_names_of_documents_name_no_files(tmp_path):
    documents = tmp_path / "in" / "rows.jsonl"
    documents.parent.mkdir()
    ids = ["../../evil", "/evil", "a/../../evil", HOSTILE]
    documents.write_text("\n".join(json.dumps({"id": name, "text": "ba be"}) for name in ids))
    encoder = save_encoder(tmp_path / "encoder")
    before = {path for path in tmp_path.rglob("*") if encoder not in path.parents}
    output = tmp_path / "out"
    result = CliRunner().invoke(app, ["embed", str(encoder), str(documents), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["id"] for line in (output / "ids.jsonl").read_text().splitlines()] == ids
    new = {path for path in tmp_path.rglob("*") if encoder not in path.parents} - before
    assert {path.relative_to(output).as_posix() for path in new if path.is_file()} == {
        "vectors.npy", "ids.jsonl", "skipped.jsonl", "embed.json", ".lock"
    }  # fmt: skip


@pytest.mark.parametrize("path", ["../other", "/etc", "1_Pooling/../../other"])
def test_modules_outside_a_folder_are_refused(path, tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps([{"path": path, "type": "x"}]))
    with pytest.raises(ValueError, match="names a module outside its folder"):
        module_folders(tmp_path)
    if path != "/etc":
        with pytest.raises(ValueError, match="names a module outside its folder"):
            push_folder(tmp_path, "me/x")


@pytest.mark.parametrize("method", ["os.system", "../clustered", "__import__('os').getcwd()", "me/kernel:f", HOSTILE])
def test_a_stored_method_is_a_name_and_nothing_else(method, tmp_path):
    hf_effattn.patch_attention(tiny_model("bert"), "clustered", clusters=3, min_length=0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["effattn"]["method"] = method
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="unknown attention method"):
        hf_effattn.from_pretrained(AutoModel, tmp_path)
