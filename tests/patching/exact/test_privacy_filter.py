"""The privacy filter of OpenAI: windows to both sides and sinks in all layers, which transformers runs eagerly."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForTokenClassification

import hf_effattn
from hf_effattn.patching.exact import call

from .contract import METHOD, Kind, Near, each, logits_of_seen, shapes

MODEL_TYPE = "openai_privacy_filter"
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


def inputs_of(padding: str | None = "right", length: int = 300) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(1))}
    if padding is not None:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 90 :] = 0
        inputs["attention_mask"] = mask if padding == "right" else mask.flip(1)
    return inputs


def weigh(model: Any) -> list[torch.Tensor]:
    """Those of short texts, too; of rows of tokens that are no padding."""
    found = []
    for inputs in (inputs_of("right", 120), inputs_of("right")):
        output, real = model(**inputs, output_attentions=True), inputs["attention_mask"].bool()
        found += [output.logits[real], *(weights.transpose(1, 2)[real] for weights in output.attentions)]
    return found


def check_blocks(calls: list[torch.Tensor], _: Any) -> None:
    assert shapes(calls) == [BLOCKS] * 2


KINDS = [
    Kind(
        "privacy filter",
        make_model,
        inputs_of,
        logits_of_seen,
        slopes=Near(atol=1e-5, of_each=1e-5),
        cases=each(padding=(None, "left", "right")),
        watched=((call, "attend_in_blocks"),),
        ran=check_blocks,
        learns=("sinks",),
        unpatched=True,
        auto=AutoModelForTokenClassification,
        load={"experts_implementation": "eager"},
        weigh=weigh,
        weights_near=Near(atol=1e-5),
        retrained=Near(rtol=1e-4, atol=1e-4),
        whole=logits_of_seen,
        heard=True,
        says="see a sliding window only",
        reports=(2, 300, None),
        alone=True,
    )
]
if MODEL_TYPE not in CONFIG_MAPPING:
    KINDS = []


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
def test_autocast_runs_it_in_blocks(in_blocks: list[torch.Size]) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(), METHOD).train(), inputs_of()
    (expected,) = logits_of_seen(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = logits_of_seen(model, inputs)
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert len(in_blocks) == 4
