"""Llama's decoder that reads images: layers that attend to text are patched, those that attend to images stay."""

from typing import Any

import pytest
import torch
from support.tiny_decoders import GROUPED
from transformers import MllamaConfig, MllamaForConditionalGeneration

import hf_effattn
from hf_effattn.patching.model_types.stacks import find_stacks

SMALL: dict[str, Any] = {"segment_length": 4, "key_clusters": 3, "min_length": 0}
TEXT = GROUPED | {"num_hidden_layers": 4, "cross_attention_layers": [1], "vocab_size": 52}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
    "max_num_tiles": 1,
    "supported_aspect_ratios": [[1, 1]],
    "intermediate_layers_indices": [0],
    "vision_output_dim": 32,
}
LENGTH = 60


def make_model() -> Any:
    torch.manual_seed(0)
    config = MllamaConfig(text_config=TEXT, vision_config=VISION, image_token_index=50)
    model = MllamaForConditionalGeneration._from_config(config).eval()
    for name, gate in model.named_parameters():
        if "gate" in name and gate.numel() == 1:
            torch.nn.init.ones_(gate)  # images count
    return model


def image_and_text() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 45, (1, LENGTH), generator=generator)
    ids[0, 3] = 50
    seen = torch.zeros(1, LENGTH, 1, 1, dtype=torch.long)
    seen[:, 3:] = 1
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 1, 3, 8, 8, generator=generator),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": seen,
    }


def test_layers_keep_their_numbers() -> None:
    model = make_model()
    (stack,) = find_stacks(model)
    assert stack.layers == ((0,), (2,), (3,))
    assert stack.depth == 4
    with pytest.raises(ValueError, match=r"layer 1 of MllamaTextModel has no attention; .* are \[0, 2, 3\]"):
        hf_effattn.patch_attention(model, "bi-clustered", layers=[1])


@torch.no_grad()
def test_with_an_image(lengths: list[int]) -> None:
    model, inputs = make_model(), image_and_text()
    exact = model(**inputs).logits
    blind = model(**inputs | {"pixel_values": torch.zeros_like(inputs["pixel_values"])}).logits
    assert (exact - blind)[:, 3:].abs().max() > 1e-3
    hf_effattn.patch_attention(model, "bi-clustered", exact_keys=59, window=44, **SMALL)
    torch.testing.assert_close(model(**inputs).logits, exact, rtol=0, atol=1e-5)
    assert lengths == [LENGTH] * 3
    hf_effattn.unpatch_attention(model)
    assert torch.equal(model(**inputs).logits, exact)


@torch.no_grad()
def test_no_logit_sees_a_later_token(lengths: list[int]) -> None:
    model, inputs = make_model(), image_and_text()
    exact = model(**inputs).logits
    hf_effattn.patch_attention(model, "bi-clustered", exact_keys=6, window=4, **SMALL)
    before = model(**inputs).logits
    assert (before - exact).abs().max() > 0.1
    changed = inputs | {"input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 40] = 7
    after = model(**changed).logits
    assert torch.equal(after[:, :40], before[:, :40])
    assert not torch.equal(after[:, 40:], before[:, 40:])
    assert lengths == [LENGTH] * 6


@torch.no_grad()
def test_generation(lengths: list[int]) -> None:
    model, inputs = make_model(), image_and_text()
    hf_effattn.patch_attention(model, "bi-clustered", exact_keys=6, window=4, **SMALL)
    first = model(**inputs).logits[0, -1].argmax()
    written = model.generate(**inputs, do_sample=False, max_new_tokens=4, eos_token_id=10**6)
    assert written[0, LENGTH] == first
    assert lengths == [LENGTH] * 6
