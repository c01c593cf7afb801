"""`config.effattn` and its way through save, load, copy and transformers' own switch."""

import copy
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
    tiny_config,
    tiny_model,
)
from transformers import AutoModel, AutoModelForSequenceClassification, BertLMHeadModel, BertModel, EncoderDecoderModel

import hf_effattn

FORCED = {"clusters": 6, "min_length": 0}


pytestmark = pytest.mark.usefixtures("without_gradient")


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


def test_composite_model(tmp_path: Path) -> None:
    decoder = BertLMHeadModel(tiny_config("bert", is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=tiny_model("bert"), decoder=decoder).eval()
    tokens = batch_for(model.encoder).inputs["input_ids"]
    hf_effattn.patch_attention(model, "clustered", layers=[1], **FORCED)
    expected = model(input_ids=tokens, decoder_input_ids=tokens).logits
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(EncoderDecoderModel, tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=tokens, decoder_input_ids=tokens).logits, expected)
    assert loaded.decoder.config._attn_implementation == "sdpa"


def test_deepcopy_is_independent() -> None:
    model = tiny_model("distilbert")
    batch = batch_for(model, padding="right")
    exact = encoded(model, batch)
    hf_effattn.patch_attention(model, "i-clustered", topk=8, layers=[0, 2], **FORCED)
    expected = encoded(model, batch)
    copied = copy.deepcopy(model)
    assert torch.equal(encoded(copied, batch), expected)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(encoded(model, batch), exact)
    assert torch.equal(encoded(copied, batch), expected)
    hf_effattn.unpatch_attention(copied)
    assert torch.equal(encoded(copied, batch), exact)


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


def test_from_pretrained_with_attn_implementation(tmp_path: Path, attended: list[str]) -> None:
    tiny_model("bert", AutoModelForSequenceClassification).save_pretrained(tmp_path)
    load = AutoModelForSequenceClassification.from_pretrained
    config = tiny_config("bert", effattn={"clusters": 5, "topk": 8, "min_length": 0})
    model = load(tmp_path, attn_implementation="i-clustered", config=config)
    batch = batch_for(model)
    model(**batch.inputs)
    assert attended == ["i-clustered"] * 3
    model = load(tmp_path, attn_implementation="i-clustered")
    model(**batch.inputs)  # the defaults: too short to gain
    assert len(attended) == 3


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
