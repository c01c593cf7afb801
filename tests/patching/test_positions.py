"""Learned positions for longer inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import MODEL_TYPES, TEXT, batch_for, mostly_slow, tiny_config, tiny_model
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, HeliumConfig, HeliumModel

import hf_effattn
from hf_effattn.patching.model_types.stacks import longest_input
from hf_effattn.patching.model_types.table import MODEL_TYPES as TABLE

LEARNED = tuple(name for name in MODEL_TYPES if TABLE[name].learned is not None)
OFFSET = tuple(name for name in LEARNED if TABLE[name].learned.reserved_by_padding)


pytestmark = pytest.mark.usefixtures("without_gradient")


def test_longest_input() -> None:
    for model_type in LEARNED:
        model = tiny_model(model_type)
        assert longest_input(model) == longest_input(model.config) == (62 if model_type in OFFSET else 64)
    assert longest_input(hf_effattn.extend_positions(model, 100)) == longest_input(model.config) == 100
    assert longest_input(tiny_model("modernbert")) is None
    assert longest_input(tiny_config("vit")) is None


def table(model: Any) -> nn.Embedding:
    return model.base_model.embeddings.position_embeddings


@torch.enable_grad()
def test_a_model_converted_and_extended_in_inference_mode_can_be_trained() -> None:
    model = tiny_model("bert")
    with torch.inference_mode():
        hf_effattn.patch_attention(model, "cst", slice_length=8)
        hf_effattn.extend_positions(model, 100)
    model(**batch_for(model, length=90).inputs).last_hidden_state.square().mean().backward()
    assert table(model).weight.grad is not None
    assert all(weight.grad is not None and weight.grad.any() for weight in model.hf_effattn_cst.parameters())


@pytest.mark.slow_except("*-AutoModel", "bert-*")
@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForMaskedLM], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("model_type", mostly_slow(LEARNED))
def test_longer_inputs(model_type: str, auto_class: Any, tmp_path: Path) -> None:
    if model_type == "bert-generation":
        auto_class = AutoModel  # it has no masked language model
    model = tiny_model(model_type, auto_class)
    reserved = model.config.pad_token_id + 1 if model_type in OFFSET else 0
    assert reserved == (2 if model_type in OFFSET else 0)
    old = table(model).weight.clone()
    present = len(old) - reserved
    short, long = batch_for(model, padding="right"), batch_for(model, length=150, padding="right")
    before = model(**short.inputs)[0]
    with pytest.raises((IndexError, RuntimeError)):
        model(**long.inputs)

    assert hf_effattn.extend_positions(model, 150) is model
    weight = table(model).weight
    assert weight.shape == (reserved + 150, old.shape[1])
    assert table(model).num_embeddings == reserved + 150
    assert torch.equal(weight[: len(old)], old)
    assert torch.equal(weight[reserved + present : reserved + 2 * present], old[reserved:])
    assert torch.equal(weight[reserved + 2 * present :], old[reserved:][: 150 - 2 * present])
    assert model.config.max_position_embeddings == reserved + 150
    assert torch.equal(model(**short.inputs)[0], before)
    after = model(**long.inputs)[0]
    assert after.isfinite().all()

    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == reserved + 150
    loaded = auto_class.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**long.inputs)[0], after)
    fresh = {name: buffer.shape for name, buffer in loaded.named_buffers()}
    assert {name: buffer.shape for name, buffer in model.named_buffers()} == fresh
    assert model.state_dict().keys() == loaded.state_dict().keys()
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))


def test_what_the_table_is_stays() -> None:
    model = tiny_model("roberta").to(torch.bfloat16)
    embedding = table(model)
    embedding.weight.requires_grad_(False)
    hf_effattn.extend_positions(model, 100)
    assert table(model) is embedding
    assert embedding.weight.dtype == torch.bfloat16
    assert isinstance(embedding.weight, nn.Parameter)
    assert not embedding.weight.requires_grad
    assert embedding.padding_idx == 1
    assert hf_effattn.extend_positions(tiny_model("bert"), 100).embeddings.position_embeddings.weight.requires_grad


def test_the_present_length_changes_nothing_and_twice_is_as_good_as_once() -> None:
    model = tiny_model("bert")
    weight = table(model).weight
    hf_effattn.extend_positions(model, 64)
    assert table(model).weight is weight
    assert model.config.max_position_embeddings == 64
    once = hf_effattn.extend_positions(tiny_model("bert"), 256)
    twice = hf_effattn.extend_positions(hf_effattn.extend_positions(model, 128), 256)
    assert torch.equal(table(once).weight, table(twice).weight)


def test_sinusoidal_positions_of_distilbert_continue() -> None:
    model = tiny_model("distilbert", sinusoidal_pos_embds=True)
    longer = tiny_model("distilbert", sinusoidal_pos_embds=True, max_position_embeddings=150)
    old = table(model).weight.clone()
    hf_effattn.extend_positions(model, 150)
    assert torch.equal(table(model).weight[:64], old)
    torch.testing.assert_close(table(model).weight, table(longer).weight)
    assert table(model).weight.requires_grad == table(longer).weight.requires_grad

    trained = tiny_model("distilbert", sinusoidal_pos_embds=True)
    table(trained).weight.data.add_(1.0)
    old = table(trained).weight.clone()
    hf_effattn.extend_positions(trained, 128)
    assert torch.equal(table(trained).weight, torch.cat([old, old]))


def test_models_without_positions_to_extend() -> None:
    for model_type, message in (
        ("modernbert", 'ModernBertModel .model type "modernbert". has no learned positions to extend: .* rotary'),
        ("vit", "grid of image patches; pass interpolate_pos_encoding=True"),
        ("wav2vec2", "come from a convolution"),
        ("whisper", "exactly 30 seconds"),
    ):
        model = tiny_model(model_type)
        config = model.config.to_dict()
        with pytest.raises(ValueError, match=message + ".*extend_positions serves bert, roberta, .*albert"):
            hf_effattn.extend_positions(model, 4096)
        assert model.config.to_dict() == config


def test_mistakes() -> None:
    model = tiny_model("roberta")
    with pytest.raises(
        ValueError, match="takes 62 tokens already, so max_length must be at least 62, got 40; to shorten"
    ):
        hf_effattn.extend_positions(model, 40)
    for wrong in ("long", 100.0, True, None):
        with pytest.raises(TypeError, match="max_length must be an int"):
            hf_effattn.extend_positions(model, wrong)  # type: ignore[arg-type]
    for around in (nn.Sequential(model), torch.compile(model)):
        with pytest.raises(TypeError, match=r"must be a transformers model .*, got \w+; .* pass the model inside"):
            hf_effattn.extend_positions(around, 100)
    helium = HeliumModel(HeliumConfig(**TEXT, num_key_value_heads=2, head_dim=16, pad_token_id=1))
    with pytest.raises(ValueError, match="does not know where its positions are"):
        hf_effattn.extend_positions(helium, 4096)
    assert table(model).num_embeddings == 64

    class QuantisedEmbedding(nn.Embedding):
        pass

    quantised = tiny_model("bert")
    quantised.embeddings.position_embeddings = QuantisedEmbedding(64, 32)
    with pytest.raises(
        ValueError, match=r"a QuantisedEmbedding of dtype .* not a plain nn.Embedding .quantised, sharded"
    ):
        hf_effattn.extend_positions(quantised, 100)
    assert quantised.config.max_position_embeddings == 64
