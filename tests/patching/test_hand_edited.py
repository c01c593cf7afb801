"""`config.effattn` edited by hand: what cannot be is refused in words, before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import batch_for, encoded, tiny_model
from transformers import AutoConfig, AutoModel

import hf_effattn
from hf_effattn.hub.card import patch_of

# Edits, and how their messages begin.
EDITS: tuple[tuple[Any, str], ...] = (
    ({"version": 4}, "newer hf_effattn .format 4, this one reads 3.*update"),
    ({"version": 2}, "older hf_effattn .format 2, this one reads 3.*patch the exact model again"),
    ({"version": "1"}, "'version'. must be an int"),
    ({"causal": "prefill"}, "causal says whether .* got 'prefill'"),
    ({"causal": True}, "those of a decoder, and this is an encoder"),
    ({"method": "cluster"}, 'unknown attention method .*did you mean "clustered"'),
    ({"clusters": 0}, "clusters must be at least 1"),
    ({"layers": [7]}, "layers has 7, but the model has 3 layers"),
    ("clustered", "config.effattn must be a dict"),
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


def edited(saved: Path, edit: Any, folder: Path) -> Path:
    for file in saved.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((saved / "config.json").read_text())
    config["effattn"] = config["effattn"] | edit if isinstance(edit, dict) else edit
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@each_edit
def test_loading_and_the_first_forward_say_what_is_wrong(edit: Any, message: str, saved: Path, tmp_path: Path) -> None:
    folder = edited(saved, edit, tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        hf_effattn.from_pretrained(AutoModel, folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="i-clustered")
    with pytest.raises((TypeError, ValueError), match=message):
        encoded(model, batch_for(model))


# How many layers there are, and whether it is a decoder, the model alone knows.
OF_THE_MODEL = ({"layers": [10**30]}, {"layers": [7]}, {"causal": True})


@pytest.mark.parametrize(("edit", "message"), [one for one in EDITS if one[0] not in OF_THE_MODEL])
def test_a_card_says_what_is_wrong(edit: Any, message: str, saved: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(edited(saved, edit, tmp_path))
    with pytest.raises((TypeError, ValueError), match=message):
        patch_of(config)


@pytest.mark.parametrize("edit", [{"iterations": 1000}, {"clusters": 2**31 - 1}, {"layers": None}, {"layers": [-1]}])
def test_what_is_allowed_runs(edit: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    model = hf_effattn.from_pretrained(AutoModel, edited(saved, edit, tmp_path))
    assert encoded(model, batch_for(model)).isfinite().all()
