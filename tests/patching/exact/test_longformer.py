"""Longformer and LED, whose attention transformers computes itself: the same values and gradients, in blocks."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LEDConfig,
    LongformerConfig,
)

import hf_effattn
from hf_effattn.patching.exact import call
from hf_effattn.patching.exact.architectures import longformer
from hf_effattn.patching.exact.architectures.longformer import LEDEncoderInBlocks, LongformerInBlocks

from .contract import EQUAL, METHOD, Kind, Near, each, shapes, write_by_beams

IN_BLOCKS = {"longformer": LongformerInBlocks, "led": LEDEncoderInBlocks}
WINDOWS = [16, 32, 16]
LENGTH = 180  # padded to 192, a multiple of the widest window


def make_model(model_type: str, auto_class: Any = AutoModel, **changes: Any) -> Any:
    """A small random model, without dropout, whose layers have windows of two widths."""
    torch.manual_seed(0)
    config: Any
    if model_type == "longformer":
        config = LongformerConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=LENGTH + 40,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.25,
            pad_token_id=1,
            vocab_size=60,
            attention_window=WINDOWS,
        )
    else:
        config = LEDConfig(
            d_model=32,
            encoder_layers=3,
            encoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_layers=1,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_encoder_position_embeddings=LENGTH + 40,
            max_decoder_position_embeddings=40,
            dropout=0.0,
            init_std=0.25,
            vocab_size=60,
            attention_window=WINDOWS,
        )
    for name, value in changes.items():
        setattr(config, name, value)
    model = auto_class.from_config(config).eval()
    for name, weight in model.named_parameters():  # which begin with 0
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.25)
    return model


def inputs_of(model_type: str, *, padded: bool = True, global_tokens: str = "some") -> dict[str, torch.Tensor]:
    """Three texts; `global_tokens`: "none", "some", of which texts have 1, 4 and 0, or "many", more than head_dim."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (3, LENGTH), generator=generator)
    mask, chosen = torch.ones_like(ids), torch.zeros_like(ids)
    if padded:
        mask[1, 100:] = 0
        mask[2, 1:] = 0
    if global_tokens == "some":
        chosen[0, 0] = 1
        chosen[1, [0, 7, 40, 99]] = 1
    elif global_tokens == "many":
        chosen[0, 60:80] = 1
    inputs = {"input_ids": ids, "attention_mask": mask, "global_attention_mask": chosen}
    return inputs | ({"decoder_input_ids": ids[:, :10]} if model_type == "led" else {})


def hidden_states(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers of the encoder give, padded tokens among them."""
    output = model(**inputs, output_hidden_states=True)
    return tuple(getattr(output, "encoder_hidden_states", None) or output.hidden_states)


def weigh(model_type: str, model: Any) -> list[torch.Tensor]:
    output = model(**inputs_of(model_type), output_attentions=True)
    names = "attentions", "global_attentions", "encoder_attentions", "encoder_global_attentions"
    return [output[0], *(weights for name in names for weights in getattr(output, name, None) or ())]


def check_blocks(calls: list[torch.Tensor], _: Any) -> None:
    assert shapes(calls) == [(3, 1, 4, 64, 64 + window) for window in WINDOWS]


def kind_of(model_type: str, **promises: Any) -> Kind:
    return Kind(
        model_type,
        partial(make_model, model_type),
        partial(inputs_of, model_type),
        hidden_states,  # of padding too, which is 0 in the attention's output
        frozenset({IN_BLOCKS[model_type]}),
        slopes=Near(rtol=1e-4, atol=2e-4),
        cases=each(global_tokens=("none", "some", "many"), padded=(False, True)),
        watched=((call, "attend_in_blocks"), (longformer, "attend_in_blocks")),
        ran=check_blocks,
        unpatched=True,
        auto=AutoModel,
        weigh=partial(weigh, model_type),
        weights_near=EQUAL,
        alone=True,
        **promises,
    )


KINDS = [
    kind_of(
        "longformer",
        retrained=EQUAL,
        bfloat16=1.1,
        compiled="eager",
        says="see a sliding window",
    ),
    kind_of("led"),
    Kind(
        "longformer's classifier",
        partial(make_model, "longformer", AutoModelForSequenceClassification),
        partial(inputs_of, "longformer"),
        lambda model, inputs: (model(**inputs).logits,),
        frozenset({LongformerInBlocks}),
        cases={},
        auto=AutoModelForSequenceClassification,
    ),
    Kind(
        "led's writer",
        partial(make_model, "led", AutoModelForSeq2SeqLM),
        partial(inputs_of, "led"),
        hidden_states,
        frozenset({LEDEncoderInBlocks}),
        cases={},
        watched=((longformer, "attend_in_blocks"),),
        write=write_by_beams,
        alone=True,
    ),
]


@torch.no_grad()
def test_adapters_of_the_weights_for_global_tokens_are_called() -> None:
    """Few global tokens need no keys of all tokens, unless something beside the weights makes them."""
    model, inputs = make_model("longformer"), inputs_of("longformer")
    layer = model.encoder.layer[0].attention.self
    called: list[str] = []

    def doubled(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        called.append(type(module).__name__)
        return 2 * output

    hf_effattn.patch_attention(model, METHOD)
    model(**inputs)
    assert called == []
    handles = [layer.key_global.register_forward_hook(doubled), layer.value_global.register_forward_hook(doubled)]
    patched = model(**inputs)[0]
    assert called == ["Linear", "Linear"]
    exact = hf_effattn.unpatch_attention(model)(**inputs)[0]
    torch.testing.assert_close(patched, exact, rtol=0, atol=2e-5)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(model(**inputs)[0], exact, atol=1e-3)


@pytest.mark.parametrize("global_tokens", ["some", "many"])
def test_dropout(global_tokens: str) -> None:
    """Weights are dropped with the layer's probability and the others grow by as much: on average nothing changes."""
    model = make_model("longformer", attention_probs_dropout_prob=0.3)
    layer = hf_effattn.patch_attention(model, METHOD).encoder.layer[0].attention.self
    inputs = inputs_of("longformer", global_tokens=global_tokens)
    chosen = inputs["global_attention_mask"][:1, :64].bool()
    states = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(2)).expand(800, -1, -1)
    masked = torch.zeros(800, 64, dtype=torch.bool)
    asked = {"is_index_masked": masked, "is_index_global_attn": chosen.expand(800, -1), "is_global_attn": True}
    with torch.no_grad():
        (exact,) = layer.eval()(states, **asked)
        (dropped,) = layer.train()(states, **asked)
    spread = dropped.std(dim=0)
    assert spread.min() > 0
    off = (dropped.mean(dim=0) - exact[0]) / (spread / 800**0.5)
    assert off.square().mean() < 1.3
    # transformers' own spread, of other numbers drawn alike
    exactly = hf_effattn.unpatch_attention(model).encoder.layer[0].attention.self.train()
    mask = torch.where(chosen, 10_000.0, 0.0).expand(800, -1)
    with torch.no_grad():
        expected = exactly(states, attention_mask=mask, **asked)[0].std(dim=0)
    torch.testing.assert_close(spread, expected, rtol=0.2, atol=1e-3)


@torch.no_grad()
def test_positions_are_extended() -> None:
    model, inputs = make_model("longformer"), inputs_of("longformer")
    exact = model(**inputs)[0]
    hf_effattn.extend_positions(hf_effattn.patch_attention(model, METHOD), 500)
    torch.testing.assert_close(model(**inputs)[0], exact, rtol=0, atol=2e-5)
    assert model(torch.full((1, 500), 7)).last_hidden_state.shape == (1, 500, 32)
    with pytest.raises(ValueError, match="its encoder and its decoder have a table of positions each"):
        hf_effattn.extend_positions(make_model("led"), 500)
