"""`config.effattn` through save, load and transformers' own switch; edited by hand it is refused in words."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import (
    MODEL_TYPES,
    PARTS,
    SMALL_SETTINGS,
    batch_for,
    encoded,
    mostly_slow,
    tiny_model,
)
from transformers import AutoConfig, AutoModel, BertModel

import hf_effattn
from hf_effattn.hub.card import patch_of

FORCED = {"clusters": 6, "min_length": 0}


pytestmark = pytest.mark.usefixtures("without_gradient")


@pytest.mark.slow_except("bert", "bart", "modernbert", "whisper", "embedding_gemma2_text")
@pytest.mark.parametrize("model_type", mostly_slow(MODEL_TYPES))
def test_saved_and_loaded(model_type: str, tmp_path: Path, attended: list[str]) -> None:
    method = "bi-clustered"
    model = tiny_model(model_type)
    batch = batch_for(model, padding="right")
    exact = encoded(model, batch)
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method])
    expected = encoded(model, batch)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["effattn"] == model.config.effattn
    assert "attn_implementation" not in str(saved)

    model_class: Any = type(model) if model_type in PARTS else AutoModel
    loaded = hf_effattn.from_pretrained(model_class, tmp_path).eval()
    assert torch.equal(encoded(loaded, batch), expected)
    assert loaded.config.effattn == model.config.effattn
    attended.clear()
    plain = model_class.from_pretrained(tmp_path).eval()
    assert torch.equal(encoded(plain, batch), exact)
    assert attended == []


def test_explicit_keywords_win(tmp_path: Path) -> None:
    hf_effattn.patch_attention(tiny_model("bert"), "i-clustered", topk=8, layers=[1], **FORCED).save_pretrained(
        tmp_path
    )
    model = hf_effattn.from_pretrained(BertModel, tmp_path, topk=5, layers=[0, 2], dtype=torch.float64)
    assert model.config.effattn["topk"] == 5
    assert model.config.effattn["clusters"] == 6
    assert model.config.effattn["layers"] == [0, 2]
    assert model.dtype == torch.float64
    for keyword in ("method", "attn_implementation"):
        model = hf_effattn.from_pretrained(BertModel, tmp_path, clusters=9, **{keyword: "clustered"})
        assert model.config.effattn["method"] == "clustered"
        assert model.config.effattn["clusters"] == 9
        assert model.config.effattn["layers"] == [1]
        assert model.config._attn_implementation == "clustered"


@pytest.mark.parametrize(
    ("implementation", "keywords"),
    [
        ("eager", {}),
        ("sdpa", {}),
        ("sdpa", {"method": "i-clustered"}),
        ("clustered", {"method": "i-clustered"}),
        ({"": "clustered"}, {}),
    ],
)
def test_a_contradicting_attn_implementation_is_an_error(tmp_path: Path, implementation: Any, keywords: dict) -> None:
    """Dropped silently it would give an approximate model to who asks for an exact one."""
    hf_effattn.patch_attention(tiny_model("bert"), "i-clustered", **FORCED).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"contradicts .* load with BertModel.from_pretrained"):
        hf_effattn.from_pretrained(BertModel, tmp_path, attn_implementation=implementation, **keywords)


def test_arguments_of_loading_are_handed_on_and_none_is_added(tmp_path: Path) -> None:
    hf_effattn.patch_attention(tiny_model("bert"), "clustered").save_pretrained(tmp_path)
    seen: list[dict[str, Any]] = []

    class Recorder:
        @staticmethod
        def from_pretrained(name: Any, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return BertModel.from_pretrained(name, **kwargs)

    hf_effattn.from_pretrained(Recorder, tmp_path, clusters=7)
    model, info = hf_effattn.from_pretrained(Recorder, tmp_path, output_loading_info=True)
    assert seen == [{}, {"output_loading_info": True}]  # no trust_remote_code
    assert model.config._attn_implementation == "clustered"
    assert not info["missing_keys"]


def test_a_checkpoint_without_settings(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"saved without hf_effattn settings .*method=\"i-clustered\".*AutoModel.from_pre"
    ):
        hf_effattn.from_pretrained(AutoModel, tmp_path)
    model = hf_effattn.from_pretrained(AutoModel, tmp_path, method="clustered", clusters=3)
    assert model.config.effattn["clusters"] == 3
    with pytest.raises(ValueError, match="'clustered' has no setting 'topk'"):
        hf_effattn.from_pretrained(AutoModel, "a-folder-that-is-not-there", method="clustered", topk=3)
    with pytest.raises(TypeError, match="must be a class with from_pretrained"):
        hf_effattn.from_pretrained(tmp_path, AutoModel)


@pytest.mark.slow_except("bert", "bart", "modernbert", "whisper", "embedding_gemma2_text", "wav2vec2")
@pytest.mark.parametrize("model_type", mostly_slow(MODEL_TYPES))
def test_transformers_own_switch(model_type: str, attended: list[str]) -> None:
    """`attn_implementation=` and `set_attn_implementation` give what `patch_attention` gives."""
    settings = {"clusters": 6, "topk": 8, "min_length": 0}
    model = hf_effattn.patch_attention(tiny_model(model_type), "i-clustered", **settings)
    batch = batch_for(model, padding="right")
    expected = encoded(model, batch)
    built = tiny_model(model_type, effattn=settings, attn_implementation="i-clustered")
    assert torch.equal(encoded(built, batch), expected)
    switched = tiny_model(model_type, effattn=settings)
    exact = encoded(switched, batch)
    switched.set_attn_implementation("i-clustered")
    assert torch.equal(encoded(switched, batch), expected)
    switched.set_attn_implementation("sdpa")
    assert torch.equal(encoded(switched, batch), exact)
    switched.set_attn_implementation("i-clustered")
    hf_effattn.unpatch_attention(switched)
    assert torch.equal(encoded(switched, batch), exact)
    assert not hasattr(switched.config, "effattn")


def test_layers_under_transformers_own_switch(attended: list[str]) -> None:
    stored = {"layers": [-1], **FORCED}
    model = tiny_model("bert", effattn=stored, attn_implementation="clustered")
    encoded(model, batch_for(model))
    assert attended == ["clustered"]
    model = tiny_model("distilbert", effattn=stored, attn_implementation="clustered")
    with pytest.raises(ValueError, match="DistilBertSelfAttention does not know its own index; use patch_attention"):
        encoded(model, batch_for(model))


def test_switching_to_another_method_needs_its_settings() -> None:
    model = hf_effattn.patch_attention(tiny_model("bert"), "i-clustered", **FORCED)
    model.set_attn_implementation("clustered")
    with pytest.raises(
        ValueError, match=r'those of "i-clustered"; change the method with patch_attention.model, "clu'
    ):
        encoded(model, batch_for(model))
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_settings_without_a_method(tmp_path: Path) -> None:
    tiny_model("bert", effattn={"clusters": 4}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no method"):
        hf_effattn.from_pretrained(AutoModel, tmp_path)
    model = hf_effattn.from_pretrained(AutoModel, tmp_path, method="clustered")
    assert model.config.effattn["clusters"] == 4


def test_unknown_fields_warn_by_name(tmp_path: Path) -> None:
    stored = {"version": 3, "method": "clustered", "clusters": 4, "sharpness": 3, "aim": "x"}
    tiny_model("bert", effattn=stored).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="does not know and ignores: aim, sharpness"):
        model = hf_effattn.from_pretrained(AutoModel, tmp_path)
    assert model.config.effattn["clusters"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=0)


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


@pytest.mark.parametrize(("edit", "message"), [case for case in EDITS if case[0] not in OF_THE_MODEL])
def test_a_card_says_what_is_wrong(edit: Any, message: str, saved: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(edited(saved, edit, tmp_path))
    with pytest.raises((TypeError, ValueError), match=message):
        patch_of(config)


@pytest.mark.parametrize("edit", [{"iterations": 1000}, {"clusters": 2**31 - 1}, {"layers": None}, {"layers": [-1]}])
def test_what_is_allowed_runs(edit: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    model = hf_effattn.from_pretrained(AutoModel, edited(saved, edit, tmp_path))
    assert encoded(model, batch_for(model)).isfinite().all()
