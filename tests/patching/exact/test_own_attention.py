"""LongT5 and Pegasus-X, whose encoders compute their attention themselves: the same values and gradients, by SDPA."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    LongT5Config,
    LongT5EncoderModel,
    LongT5ForConditionalGeneration,
    PegasusXConfig,
    PegasusXForConditionalGeneration,
)

import hf_effattn
from hf_effattn.patching.exact.architectures.longt5 import LongT5LocalInBlocks, LongT5TransientGlobalInBlocks
from hf_effattn.patching.exact.architectures.pegasus_x import PegasusXInBlocks

from .contract import EQUAL, METHOD, Kind, Near, each, record, shapes, with_large_weights, write_by_beams

IN_BLOCKS = {
    "local": LongT5LocalInBlocks,
    "transient-global": LongT5TransientGlobalInBlocks,
    "pegasus-x": PegasusXInBlocks,
}
LAYERS = 3


def make_model(kind: str, model_class: Any = LongT5ForConditionalGeneration) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    model = make_pegasus_x() if kind == "pegasus-x" else make_longt5(kind, model_class)
    return with_large_weights(model, 0.25)


def make_pegasus_x() -> PegasusXForConditionalGeneration:
    """Its second layer shifts the blocks by half of one."""
    config = PegasusXConfig(
        encoder_layers=LAYERS,
        decoder_layers=1,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=60,
        block_size=16,
        num_global_tokens=6,
        dropout=0.0,
    )
    return PegasusXForConditionalGeneration(config)


def make_longt5(kind: str, model_class: Any) -> Any:
    config = LongT5Config(
        encoder_attention_type=kind,
        num_layers=LAYERS,
        num_decoder_layers=1,
        d_model=32,
        d_kv=8,
        num_heads=4,
        d_ff=48,
        vocab_size=60,
        local_radius=15,
        global_block_size=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return model_class(config)


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
        states = [one[:, : inputs["input_ids"].shape[1]] for one in states]
    return (*states, states[LAYERS][inputs["attention_mask"].bool()])


def weigh(model: Any) -> list[torch.Tensor]:
    """Those of global tokens beside the others."""
    found = model.get_encoder()(**inputs_of(), output_attentions=True).attentions
    assert len(found) == LAYERS
    return [part for one in found for part in (one.values() if isinstance(one, dict) else [one])]


TRAINED: dict[str, Any] = {"retrained": Near(rtol=1e-4, atol=1e-5), "drops": True, "bfloat16": 1.1}
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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
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
