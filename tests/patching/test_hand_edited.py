"""`config.effattn` edited by hand: what cannot be is refused in words, before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import batch_for, encoded, tiny_model
from transformers import AutoConfig, AutoModel

import hf_effattn
from hf_effattn.hub.card import patch_of
from hf_effattn.patching.stored import read_stored

# Edits, and how their messages begin.
EDITS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"method": ["clustered"]}, r"method must be the name of one, .*; got \['clustered'\]"),
    ({"method": {"name": "clustered"}}, "method must be the name of one, .*; got {'name': 'clustered'}"),
    ({"layers": 3}, "layers must be a list of ints or None for all, got 3; give a list of layer indices"),
    ({"layers": 1.5}, "layers must be a list of ints or None for all, got 1.5"),
    ({"layers": True}, "layers must be a list of ints or None for all, got True"),
    ({"layers": [[0]]}, r"layers must hold ints, got \[0\]"),
    ({"layers": [10**30]}, "layers has 10{30}, but the model has 3 layers"),
    ({"iterations": 2**63}, "iterations must be at most 1000, got 9223372036854775808: the rounds of Lloyd's"),
    ({"iterations": 10**6}, "iterations must be at most 1000, got 1000000"),
    ({"fit_queries": 10**30}, "fit_queries must be at most 2147483647, got 10{30}: the queries per head"),
    ({"bits": 2**31}, "bits must be at most 4096, got 2147483648"),
    ({"topk": 2**31}, "topk must be at most 2147483647, got 2147483648"),
    ({"min_length": 10**19}, "min_length must be at most 2147483647, got 10{19}"),
    ({"seed": 10**30}, "seed must be at most"),
    ({"clusters": [3]}, r"clusters must be an int, got \[3\]"),
    ({"clustering": ["lsh"]}, r"clustering must be one of .*, got \['lsh'\]"),
)
each_edit = pytest.mark.parametrize(("edit", "message"), EDITS, ids=[json.dumps(edit)[:40] for edit, _ in EDITS])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched model, saved."""
    folder = tmp_path_factory.mktemp("patched")
    model = tiny_model("bert")
    hf_effattn.patch_attention(model, "i-clustered", clusters=3, topk=2, min_length=0).save_pretrained(folder)
    return folder


def edited(saved: Path, edit: dict[str, Any], folder: Path) -> Path:
    for file in saved.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((saved / "config.json").read_text())
    config["effattn"] |= edit
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@each_edit
def test_our_loading_says_what_is_wrong(edit: dict[str, Any], message: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hf_effattn.from_pretrained(AutoModel, edited(saved, edit, tmp_path))


@each_edit
def test_the_first_forward_says_what_is_wrong(edit: dict[str, Any], message: str, saved: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(edited(saved, edit, tmp_path), attn_implementation="i-clustered")
    with pytest.raises((TypeError, ValueError), match=message):
        encoded(model, batch_for(model))


@each_edit
def test_a_card_says_what_is_wrong(edit: dict[str, Any], message: str, saved: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(edited(saved, edit, tmp_path))
    if edit == {"layers": [10**30]}:
        assert read_stored(config.effattn)[1] == [10**30]  # how many there are the model alone knows
        return
    with pytest.raises((TypeError, ValueError), match=message):
        patch_of(config)


@pytest.mark.parametrize("edit", [{"iterations": 1000}, {"clusters": 2**31 - 1}, {"layers": None}, {"layers": [-1]}])
def test_what_is_allowed_runs(edit: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    model = hf_effattn.from_pretrained(AutoModel, edited(saved, edit, tmp_path))
    assert encoded(model, batch_for(model)).isfinite().all()
