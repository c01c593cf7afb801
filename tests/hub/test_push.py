"""Pushing a model with its card, by the function and by the command, to the Hub on localhost."""

import importlib
import json
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.hub_server import HubServer
from support.hub_state import USER
from support.round_trips import KINDS, changed
from transformers import AutoConfig, PhobertTokenizer

from hf_effattn.hub import model_card, push_folder
from hf_effattn.hub.push import PUSHED


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("pushing") / "hub") as server:
        yield server


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model as a training leaves it: with a checkpoint, a pickle and a log beside it."""
    folder = tmp_path_factory.mktemp("saved")
    kind = KINDS["bert-cst"]
    changed(kind.build(), kind).save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"a pickle")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "config.json").write_text("{}")
    (folder / "all_results.json").write_text(json.dumps({"eval_accuracy": 0.5}))
    model_card(AutoConfig.from_pretrained(folder), name="mine").save(folder / "README.md")
    return folder


@pytest.mark.slow
def test_the_function_pushes_model_and_card_and_keeps_a_card_that_is_there(hub: HubServer) -> None:
    code = """
        import hf_effattn
        from huggingface_hub import HfApi, ModelCard
        from support.round_trips import KINDS, changed
        kind = KINDS["bert-i-clustered"]
        model = changed(kind.build(), kind)
        print(hf_effattn.push_to_hub(model, "patched", commit_message="first").commit_message)
        HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo="README.md", repo_id="tester/patched")
        hf_effattn.push_to_hub(model.bfloat16(), "patched", max_shard_size="8KB")
        print(ModelCard.load("tester/patched").text.strip())
        assert "model.safetensors" not in HfApi().list_repo_files("tester/patched")
        card = hf_effattn.model_card(model, repo_id="tester/patched", license="mit")
        hf_effattn.push_to_hub(model, "patched", card=card, private=True)
        print(ModelCard.load("tester/patched").data.license)
        hf_effattn.push_to_hub(changed(KINDS["cst-causal"].build(), KINDS["cst-causal"]), "scratch", private=True)
    """
    said = hub.run("-c", textwrap.dedent(code), home=hub.folder.parent / "home", token=hub.token).splitlines()
    assert said == ["first", "mine", "mit"]
    text = hub.content(f"{USER}/scratch", "README.md").decode()
    assert f'AutoModelForCausalLM.from_pretrained("{USER}/scratch")' in text
    assert "import hf_effattn  # tells transformers what this model is" in text
    files = hub.files(f"{USER}/patched")
    # One file, then shards, then one file again: nothing of the shards is left.
    assert [path for path in sorted(files) if "safetensors" in path] == ["model.safetensors"]
    assert not any(path.endswith(".bin") for path in files)


@pytest.mark.slow
def test_the_command_pushes_what_a_model_needs_and_nothing_else(hub: HubServer, saved: Path) -> None:
    arguments = ("-m", "hf_effattn", "push", str(saved), "converted", "--private")
    said = hub.run(*arguments, home=hub.folder.parent / "home", token=hub.token)
    assert said.strip() == f"pushed: {hub.endpoint}/{USER}/converted"
    assert sorted(hub.files(f"{USER}/converted")) == [
        ".gitattributes",
        "README.md",
        "all_results.json",
        "config.json",
        "model.safetensors",
    ]
    text = hub.content(f"{USER}/converted", "README.md").decode()
    assert f'hf_effattn.from_pretrained(AutoModelForSequenceClassification, "{USER}/converted")' in text


@pytest.mark.slow
def test_a_new_branch_is_made_and_every_vocabulary_goes_along(hub: HubServer, saved: Path, tmp_path: Path) -> None:
    """A missing branch was an error after the repository had been made; PhoBERT came back without its merges."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    (tmp_path / "vocab.txt").write_text("a</w> 5\nb</w> 4\nab</w> 3\n")
    (tmp_path / "bpe.codes").write_text("a b</w> 3\n")
    PhobertTokenizer(str(tmp_path / "vocab.txt"), str(tmp_path / "bpe.codes")).save_pretrained(tmp_path)
    arguments = ("-m", "hf_effattn", "push", str(tmp_path), "vietnamese", "--revision", "v2")
    for _ in range(2):  # the second time it is there
        hub.run(*arguments, home=hub.folder.parent / "home", token=hub.token)
    assert list(hub.files(f"{USER}/vietnamese")) == [".gitattributes"]
    there = hub.files(f"{USER}/vietnamese", "v2")
    assert {"README.md", "config.json", "model.safetensors", "vocab.txt", "bpe.codes"} <= set(there)


@pytest.mark.parametrize("model", ["roberta", "phobert", "bertweet", "xlm_roberta", "prophetnet", "albert"])
def test_the_vocabularies_of_a_tokenizer_are_among_what_is_pushed(model: str) -> None:
    module = importlib.import_module(f"transformers.models.{model}.tokenization_{model}")
    names = [*module.VOCAB_FILES_NAMES.values(), "source.spm"]  # Marian's, whose module needs sentencepiece
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in PUSHED)] == []


@pytest.mark.slow
def test_who_has_no_token_is_told_where_to_get_one(hub: HubServer, saved: Path) -> None:
    said = hub.run("-m", "hf_effattn", "push", str(saved), "other", home=hub.folder.parent / "nobody", fails=True)
    assert "Error: " in said
    assert "hf auth login" in said
    assert "Traceback" not in said
    assert f"{USER}/other" not in hub.repositories


@pytest.mark.slow
def test_a_hub_that_is_not_there_is_told_in_a_line(saved: Path, tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as gone:
        pass
    said = gone.run("-m", "hf_effattn", "push", str(saved), "other", home=tmp_path, token=gone.token, fails=True)
    assert f"Error: {gone.endpoint} cannot be reached" in said
    assert "Traceback" not in said


def test_a_folder_without_a_model_is_refused_before_anything_is_asked_of_the_hub(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        push_folder(tmp_path, "any")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"but adapter_config\.json.*merge_and_unload"):
        push_folder(tmp_path, "any")
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ValueError, match="no weights as safetensors"):
        push_folder(tmp_path, "any")
