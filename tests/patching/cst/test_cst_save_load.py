"""A converted model through save and load: same process, a fresh one, shards, other heads, other classes."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cst_conversions import CONVERTED, LENGTH, SLICES, convert, first_output, small_model, tokens
from support.tiny_models import tiny_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertLMHeadModel,
    EncoderDecoderModel,
)

import hf_effattn
from hf_effattn.patching.methods.cst.checkpoint import HINT
from hf_effattn.patching.methods.cst.positions import NAME

pytestmark = pytest.mark.usefixtures("without_gradient")


def auto_class_of(model_type: str) -> Any:
    return AutoModelForCausalLM if model_type == "gpt2" else AutoModel


@pytest.fixture
def warnings_of_transformers() -> Any:
    """What transformers logs; its logger hands nothing on to pytest's."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


@pytest.mark.parametrize("model_type", CONVERTED)
def test_saved_and_loaded(model_type: str, tmp_path: Path, warnings_of_transformers: list[str]) -> None:
    composition = "local-global" if model_type == "roberta" else "merged"
    model = convert(small_model(model_type), composition=composition, extension_ratio=2)
    expected = first_output(model, tokens())
    model.save_pretrained(tmp_path)
    warnings_of_transformers.clear()
    loaded, info = hf_effattn.from_pretrained(auto_class_of(model_type), tmp_path, output_loading_info=True)
    assert torch.equal(first_output(loaded, tokens()), expected)
    assert loaded.config.effattn == model.config.effattn
    assert not info["missing_keys"]
    assert not any(NAME in key for key in info["unexpected_keys"])
    assert not any(NAME in text for text in warnings_of_transformers)
    assert all(table.requires_grad for table in getattr(loaded.base_model, NAME).parameters())


def test_without_the_package_the_loading_report_names_what_is_left_out(
    tmp_path: Path, warnings_of_transformers: list[str]
) -> None:
    """The pretrained weights load, with exact attention; the names of the tables say whose they are.

    Beside them this package says how to load them.
    """
    model = small_model("bert", AutoModelForSequenceClassification)
    exact = first_output(model, tokens())
    convert(model).save_pretrained(tmp_path)
    warnings_of_transformers.clear()
    plain, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(first_output(plain, tokens()), exact)
    assert info["unexpected_keys"] == {f"bert.{NAME}.token_positions", f"bert.{NAME}.slice_positions"}
    assert any(f"{NAME}.slice_positions" in text for text in warnings_of_transformers)
    assert any(f"- {NAME}:\t{HINT}" in text for text in warnings_of_transformers)
    plain.set_attn_implementation("cst")
    with pytest.raises(ValueError, match=r"load a converted one with hf_effattn\.from_pretrained"):
        first_output(plain, tokens())


def test_saved_with_a_head_and_loaded_without_and_the_other_way(
    tmp_path: Path, warnings_of_transformers: list[str]
) -> None:
    """What else transformers finds is still reported."""
    model = convert(small_model("bert", AutoModelForSequenceClassification))
    model.save_pretrained(tmp_path / "head")
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path / "head")
    assert torch.equal(first_output(loaded, tokens()), first_output(model.bert, tokens()))
    loaded.save_pretrained(tmp_path / "base")
    warnings_of_transformers.clear()
    again = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "base")
    assert torch.equal(first_output(again.bert, tokens()), first_output(model.bert, tokens()))
    assert any("classifier.weight" in text for text in warnings_of_transformers)
    assert not any(NAME in text for text in warnings_of_transformers)


def test_positions_extended_after_the_conversion(tmp_path: Path) -> None:
    model = convert(small_model("roberta"))
    hf_effattn.extend_positions(model, 150)
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path)
    assert torch.equal(first_output(loaded, tokens(150)), first_output(model, tokens(150)))


def test_a_checkpoint_in_shards_and_another_dtype(tmp_path: Path) -> None:
    model = convert(small_model("bert"))
    model.save_pretrained(tmp_path, max_shard_size="20KB", variant="fp16")
    files = list(tmp_path.glob("*.safetensors*"))
    assert len(files) > 2
    assert all("fp16" in path.name for path in files)
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path, variant="fp16", dtype=torch.float64)
    assert getattr(loaded, NAME).token_positions.dtype == torch.float64
    assert torch.equal(first_output(loaded, tokens()), first_output(model.double(), tokens()))


def test_an_encoder_inside_a_composite_model(tmp_path: Path) -> None:
    decoder = BertLMHeadModel(tiny_config("bert", is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=small_model("bert"), decoder=decoder).eval()
    convert(model.encoder)
    expected = model(input_ids=tokens(), decoder_input_ids=tokens()).logits
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(EncoderDecoderModel, tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=tokens(), decoder_input_ids=tokens()).logits, expected)
    assert torch.equal(getattr(loaded.encoder, NAME).token_positions, getattr(model.encoder, NAME).token_positions)
    assert loaded.decoder.config._attn_implementation == "sdpa"


def test_an_unconverted_checkpoint_is_converted_while_it_loads(tmp_path: Path) -> None:
    small_model("bert").save_pretrained(tmp_path)
    model = hf_effattn.from_pretrained(AutoModel, tmp_path, method="cst", **SLICES)
    assert not getattr(model, NAME).token_positions.any()
    assert first_output(model, tokens(LENGTH)).isfinite().all()


@pytest.mark.parametrize(("method", "settings"), [("cst", SLICES), ("clustered", {"min_length": 0, "clusters": 4})])
def test_patching_what_transformers_loaded_without_its_tables_warns(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    convert(small_model("bert")).save_pretrained(tmp_path)
    plain = AutoModel.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=rf"BertModel .* without the position tables .{NAME}.*Load it with hf_eff"):
        hf_effattn.patch_attention(plain, method, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_effattn.patch_attention(plain, method, **settings)  # told once
        hf_effattn.patch_attention(hf_effattn.unpatch_attention(plain), method, **settings)
        hf_effattn.from_pretrained(AutoModel, tmp_path)


def test_tables_of_other_sizes_or_none_are_an_error(tmp_path: Path) -> None:
    model = convert(small_model("bert"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"converted with other settings: its .* has shape \(4, 32\).*\(8, 32\)"):
        hf_effattn.from_pretrained(AutoModel, tmp_path, slice_length=8)
    sums = hf_effattn.from_pretrained(AutoModel, tmp_path, composition="local-global")
    assert torch.equal(getattr(sums, NAME).token_positions, getattr(model, NAME).token_positions)
    with pytest.warns(
        UserWarning, match=rf'converted to "cst"; patched with "clustered" instead, .* without the {NAME}'
    ):
        clustered = hf_effattn.from_pretrained(AutoModel, tmp_path, method="clustered", min_length=0)
    assert not hasattr(clustered, NAME)
    with pytest.raises(ValueError, match="leave out slice_length, extension_ratio and max_position_embeddings"):
        hf_effattn.from_pretrained(AutoModel, tmp_path, max_position_embeddings=128, ignore_mismatched_sizes=True)
    AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"its weights hold no {NAME}.token_positions: save the converted model"):
        hf_effattn.from_pretrained(AutoModel, tmp_path)


def test_weights_in_the_old_form_of_pytorch_are_an_error(tmp_path: Path) -> None:
    """transformers reads the model out of them, which then has no tables."""
    model = convert(small_model("bert"))
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=rf"has no safetensors, and no {NAME} is read from other files: load it where"
    ):
        hf_effattn.from_pretrained(AutoModel, tmp_path)
