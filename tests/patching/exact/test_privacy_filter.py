"""The privacy filter of OpenAI: windows to both sides and sinks in all layers, which transformers runs eagerly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForTokenClassification

import hf_effattn

MODEL_TYPE, METHOD = "openai_privacy_filter", "exact"
pytestmark = pytest.mark.skipif(MODEL_TYPE not in CONFIG_MAPPING, reason="transformers is too old for it")
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 1,
    "eos_token_id": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
BLOCKS = (2, 1, 6, 64, 64 + 2 * 16)  # of two texts of 300 tokens, one of them behind a gap


def make_model(**changes: Any) -> Any:
    """A model whose sinks have from none to most of the weight."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(MODEL_TYPE, **SIZES | changes)
    model = AutoModelForTokenClassification.from_config(config, experts_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.linspace(-3, 5, 4)
    return model


def inputs_of(padding: str | None, length: int = 300) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(1))}
    if padding is not None:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 90 :] = 0
        inputs["attention_mask"] = mask if padding == "right" else mask.flip(1)
    return inputs


def logits_and_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(**inputs).logits[inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()]
    (logits * torch.linspace(-1, 1, logits.shape[1])).sum().backward()
    return {"logits": logits.detach()} | {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_values_and_gradients(padding: str | None, in_blocks: list[torch.Size]) -> None:
    model, inputs = make_model(), inputs_of(padding)
    exact = logits_and_gradients(model, inputs)
    assert sum(name.endswith("sinks") for name in exact) == 2
    hf_effattn.patch_attention(model, METHOD)
    found = logits_and_gradients(model, inputs)
    assert in_blocks == [BLOCKS] * 2
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        close = 2e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            found[name], expected, rtol=0, atol=close, msg=lambda said, at=name: f"{at}: {said}"
        )


@torch.no_grad()
def test_a_layer_sees_its_window_and_no_more(in_blocks: list[torch.Size]) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(num_hidden_layers=1), METHOD), inputs_of(None)
    before, changed = model(**inputs).logits, inputs["input_ids"].clone()
    changed[:, 150] = (changed[:, 150] + 7) % 55 + 5
    away = (model(input_ids=changed).logits - before).abs().amax(dim=(0, 2))
    assert away[134:167].min() > 0
    assert away[:134].max() == away[167:].max() == 0
    assert len(in_blocks) == 2


@torch.no_grad()
def test_short_texts_weights_and_the_way_back(in_blocks: list[torch.Size]) -> None:
    model, short, long = make_model(), inputs_of("right", 120), inputs_of("right")
    exact = [model(**one, output_attentions=True) for one in (short, long)]
    hf_effattn.patch_attention(model, METHOD)
    for inputs, expected in zip((short, long), exact, strict=True):
        found = model(**inputs, output_attentions=True)
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=0, atol=2e-5)
        for one, other in zip(found.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(one.transpose(1, 2)[real], other.transpose(1, 2)[real], rtol=0, atol=1e-5)
    assert in_blocks == []
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**long).logits, exact[1].logits)


def test_saved_loaded_and_switched_on_by_name(tmp_path: Path, in_blocks: list[torch.Size]) -> None:
    model, inputs = make_model(), inputs_of("right")
    hf_effattn.patch_attention(model, METHOD).save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModelForTokenClassification, tmp_path, experts_implementation="eager")
    exact = hf_effattn.unpatch_attention(model)
    named = make_model()
    named.set_attn_implementation(METHOD)
    with torch.no_grad():
        expected = exact(**inputs).logits
        for one in (loaded, named):
            real = inputs["attention_mask"].bool()
            torch.testing.assert_close(one(**inputs).logits[real], expected[real], rtol=0, atol=2e-5)
    assert len(in_blocks) == 4


def test_any_other_method_approximates_nothing_and_says_so(in_blocks: list[torch.Size]) -> None:
    model = make_model()
    with pytest.warns(UserWarning, match="will approximate nothing: all layers of .* see a sliding window only"):
        hf_effattn.patch_attention(model, "bi-clustered")
    model(**inputs_of(None))
    assert len(in_blocks) == 2


def test_checkpointing_and_autocast(in_blocks: list[torch.Size]) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(), METHOD).train(), inputs_of("right")
    expected = logits_and_gradients(model, inputs)
    model.gradient_checkpointing_enable()
    for name, one in logits_and_gradients(model, inputs).items():
        torch.testing.assert_close(one, expected[name], rtol=1e-4, atol=1e-4, msg=name)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits = model(**inputs).logits[inputs["attention_mask"].bool()]
    assert (logits - expected["logits"]).norm() < 0.05 * expected["logits"].norm()
    assert len(in_blocks) == 8


def test_a_report() -> None:
    found = hf_effattn.report(make_model(), inputs_of("right"), repeats=1, progress=False)
    assert list(found.methods) == [METHOD]
    assert found.measurements[1].change.hidden_error < 1e-5
    assert found.measurements[1].change.argmax_agreement == {"logits": 1.0}
