"""LongT5, Pegasus-X, Longformer and LED, whose encoders compute their attention themselves: the same, in blocks."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny_decoders import COMMON
from support.tiny_models import TWO
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LongT5EncoderModel,
)

import hf_effattn
from hf_effattn.patching.exact import call
from hf_effattn.patching.exact.architectures import longformer
from hf_effattn.patching.exact.architectures.longformer import LEDEncoderInBlocks, LongformerInBlocks
from hf_effattn.patching.exact.architectures.longt5 import LongT5LocalInBlocks, LongT5TransientGlobalInBlocks
from hf_effattn.patching.exact.architectures.pegasus_x import PegasusXInBlocks

from .contract import EQUAL, METHOD, Kind, Near, each, record, shapes, with_large_weights, write_by_beams

IN_BLOCKS = {
    "local": LongT5LocalInBlocks,
    "transient-global": LongT5TransientGlobalInBlocks,
    "pegasus-x": PegasusXInBlocks,
}
LAYERS = 3


FOUR_HEADS = TWO | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
# Its second layer shifts the blocks by half of one.
PEGASUS_X = FOUR_HEADS | {"decoder_layers": 1, "block_size": 16, "num_global_tokens": 6}
LONGT5: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_decoder_layers": 1,
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 48,
    "local_radius": 15,
    "global_block_size": 8,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def make_model(kind: str, model_class: Any = AutoModelForSeq2SeqLM) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    if kind == "pegasus-x":
        config = AutoConfig.for_model("pegasus_x", **PEGASUS_X)
    else:
        config = AutoConfig.for_model("longt5", vocab_size=60, encoder_attention_type=kind, **LONGT5)
    of_config = getattr(model_class, "from_config", model_class)
    return with_large_weights(of_config(config), 0.25)


def check_blocks(kind: str, calls: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    """The masks and biases that SDPA is called with."""
    texts, length = inputs["input_ids"].shape
    blocks = -(-length // 16)
    expected: list[tuple[int, ...]] = []
    if kind == "pegasus-x":  # also for its global tokens
        for more in [0, 1, 0]:
            expected += [(texts, 1, 1, 6 + 16 * (blocks + more)), (texts * (blocks + more), 1, 1, 6 + 16)]
    else:  # LongT5's first layer makes the biases and runs transformers' code
        keys = 48 + (length // 8 if kind == "transient-global" else 0)
        expected = [(texts * blocks, 4, 16, keys)] * (LAYERS - 1)
    assert shapes(calls) == expected


def inputs_of(*, padded: bool = True, length: int = 150) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (3, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 100:] = 0
        mask[2, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers of the encoder give, and the last one for the tokens that are seen."""
    states = list(model.get_encoder()(**inputs, output_hidden_states=True).hidden_states)
    if isinstance(states[-1], tuple):  # Pegasus-X tells its global tokens beside its last states, and pads the others
        states[-1:] = states[-1]
        states = [state[:, : inputs["input_ids"].shape[1]] for state in states]
    return (*states, states[LAYERS][inputs["attention_mask"].bool()])


def weigh(model: Any) -> list[torch.Tensor]:
    """Those of global tokens beside the others."""
    weights = model.get_encoder()(**inputs_of(), output_attentions=True).attentions
    assert len(weights) == LAYERS
    return [part for layer in weights for part in (layer.values() if isinstance(layer, dict) else [layer])]


TRAINED: dict[str, Any] = {"retrained": Near(rtol=1e-4, atol=1e-5), "drops": True, "low_precision": 1.1}
KINDS = [
    Kind(
        kind,
        partial(make_model, kind),
        inputs_of,
        encoded,
        frozenset({IN_BLOCKS[kind]}),
        near=Near(atol=5e-5),
        slopes=Near(rtol=1e-4, atol=5e-4),
        cases=each(padded=(False, True), length=(150, 160)) | each(padded=(False,), length=(7,)),
        ran=partial(check_blocks, kind),
        unpatched=True,
        auto=AutoModelForSeq2SeqLM,
        weigh=weigh,
        weights_near=EQUAL,
        write=write_by_beams,
        alone=True,
        **({} if kind == "local" else TRAINED),
    )
    for kind in IN_BLOCKS
]


@pytest.mark.parametrize("kind", KINDS[: len(IN_BLOCKS)], ids=lambda kind: kind.name)
def test_an_encoder_alone(kind: Kind) -> None:
    part = kind.make().get_encoder() if kind.name == "pegasus-x" else kind.make(LongT5EncoderModel)
    kind.check_classes(hf_effattn.patch_attention(part, METHOD))


@pytest.mark.parametrize("kind", ["local", "pegasus-x"])
@torch.no_grad()
def test_the_switch_of_transformers_reaches_its_decoder_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which stays exact by it, with its biases, and goes back by unpatching."""
    model, inputs, attended = make_model(kind), inputs_of(), record(monkeypatch)
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :40]
    exact = model(**inputs).logits
    model.set_attn_implementation(METHOD)
    torch.testing.assert_close(model(**inputs).logits, exact, rtol=0, atol=5e-5)
    if hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):  # LongT5's in 5.7 had none
        assert [mask.shape[-2] for mask in attended] == [40, 40]  # of its layer, to itself and to the encoder
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**inputs).logits, exact)


WITH_WINDOWS = {"longformer": LongformerInBlocks, "led": LEDEncoderInBlocks}
WINDOWS = [16, 32, 16]
LENGTH = 180  # padded to 192, a multiple of the widest window


LONGFORMER = COMMON | {
    "max_position_embeddings": LENGTH + 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LED = FOUR_HEADS | {
    "decoder_layers": 1,
    "max_encoder_position_embeddings": LENGTH + 40,
    "max_decoder_position_embeddings": 40,
}


def make_longformer(model_type: str, auto_class: Any = AutoModel, **changes: Any) -> Any:
    """A small random model, without dropout, whose layers have windows of two widths."""
    torch.manual_seed(0)
    sizes = (LED if model_type == "led" else LONGFORMER) | {"attention_window": WINDOWS}
    model = auto_class.from_config(AutoConfig.for_model(model_type, **sizes | changes)).eval()
    for name, weight in model.named_parameters():  # which begin with 0
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.25)
    return model


def with_global_tokens(
    model_type: str, *, padded: bool = True, global_tokens: str = "some"
) -> dict[str, torch.Tensor]:
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


def weigh_longformer(model_type: str, model: Any) -> list[torch.Tensor]:
    output = model(**with_global_tokens(model_type), output_attentions=True)
    names = "attentions", "global_attentions", "encoder_attentions", "encoder_global_attentions"
    return [output[0], *(weights for name in names for weights in getattr(output, name, None) or ())]


def check_windows(calls: list[torch.Tensor], _: Any) -> None:
    assert shapes(calls) == [(3, 1, 4, 64, 64 + window) for window in WINDOWS]


def longformer_kind(model_type: str, **promises: Any) -> Kind:
    return Kind(
        model_type,
        partial(make_longformer, model_type),
        partial(with_global_tokens, model_type),
        hidden_states,  # of padding too, which is 0 in the attention's output
        frozenset({WITH_WINDOWS[model_type]}),
        slopes=Near(rtol=1e-4, atol=2e-4),
        cases=each(global_tokens=("none", "some", "many"), padded=(False, True)),
        watched=((call, "attend_in_blocks"), (longformer, "attend_in_blocks")),
        ran=check_windows,
        unpatched=True,
        auto=AutoModel,
        weigh=partial(weigh_longformer, model_type),
        weights_near=EQUAL,
        alone=True,
        **promises,
    )


KINDS += [
    longformer_kind(
        "longformer",
        retrained=EQUAL,
        low_precision=1.1,
        compiled="eager",
        compiled_as={"num_hidden_layers": 1, "attention_window": [16]},
        says="see a sliding window",
    ),
    longformer_kind("led"),
    Kind(
        "longformer's classifier",
        partial(make_longformer, "longformer", AutoModelForSequenceClassification),
        partial(with_global_tokens, "longformer"),
        lambda model, inputs: (model(**inputs).logits,),
        frozenset({LongformerInBlocks}),
        cases={},
        auto=AutoModelForSequenceClassification,
    ),
    Kind(
        "led's writer",
        partial(make_longformer, "led", AutoModelForSeq2SeqLM),
        partial(with_global_tokens, "led"),
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
    model, inputs = make_longformer("longformer"), with_global_tokens("longformer")
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


@pytest.mark.slow_except("some")
@pytest.mark.parametrize("global_tokens", ["some", "many"])
def test_dropout(global_tokens: str) -> None:
    """Weights are dropped with the layer's probability and the others grow by as much: on average nothing changes."""
    model = make_longformer("longformer", attention_probs_dropout_prob=0.3)
    layer = hf_effattn.patch_attention(model, METHOD).encoder.layer[0].attention.self
    inputs = with_global_tokens("longformer", global_tokens=global_tokens)
    chosen = inputs["global_attention_mask"][:1, :64].bool()
    states = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(2)).expand(800, -1, -1)
    masked = torch.zeros(800, 64, dtype=torch.bool)
    arguments = {"is_index_masked": masked, "is_index_global_attn": chosen.expand(800, -1), "is_global_attn": True}
    with torch.no_grad():
        (exact,) = layer.eval()(states, **arguments)
        (dropped,) = layer.train()(states, **arguments)
    spread = dropped.std(dim=0)
    assert spread.min() > 0
    off = (dropped.mean(dim=0) - exact[0]) / (spread / 800**0.5)
    assert off.square().mean() < 1.3
    # transformers' own spread, of other numbers drawn alike
    exactly = hf_effattn.unpatch_attention(model).encoder.layer[0].attention.self.train()
    mask = torch.where(chosen, 10_000.0, 0.0).expand(800, -1)
    with torch.no_grad():
        expected = exactly(states, attention_mask=mask, **arguments)[0].std(dim=0)
    torch.testing.assert_close(spread, expected, rtol=0.2, atol=1e-3)


@torch.no_grad()
def test_positions_are_extended() -> None:
    model, inputs = make_longformer("longformer"), with_global_tokens("longformer")
    exact = model(**inputs)[0]
    hf_effattn.extend_positions(hf_effattn.patch_attention(model, METHOD), 500)
    torch.testing.assert_close(model(**inputs)[0], exact, rtol=0, atol=2e-5)
    assert model(torch.full((1, 500), 7)).last_hidden_state.shape == (1, 500, 32)
    with pytest.raises(ValueError, match="its encoder and its decoder have a table of positions each"):
        hf_effattn.extend_positions(make_longformer("led"), 500)
