"""LongT5 and Pegasus-X, whose encoders compute their attention themselves: the same values and gradients, by SDPA."""

import copy
import sys
from pathlib import Path
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
from hf_effattn.patching.model_types.stacks import find_stacks

METHOD = "exact"
IN_BLOCKS = {
    "local": LongT5LocalInBlocks,
    "transient-global": LongT5TransientGlobalInBlocks,
    "pegasus-x": PegasusXInBlocks,
}
LAYERS = 3
# LongT5's first layer makes the biases and runs transformers' code; Pegasus-X calls SDPA for its global tokens, too.
CALLS = {"local": LAYERS - 1, "transient-global": LAYERS - 1, "pegasus-x": 2 * LAYERS}
each_kind = pytest.mark.parametrize("kind", IN_BLOCKS)


def make_model(kind: str, model_class: Any = LongT5ForConditionalGeneration) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    model = make_pegasus_x() if kind == "pegasus-x" else make_longt5(kind, model_class)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model.eval()


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


def expected_shapes(kind: str, texts: int, length: int) -> list[tuple[int, ...]]:
    """The masks and biases that SDPA is called with."""
    blocks = -(-length // 16)
    if kind == "pegasus-x":
        shapes: list[tuple[int, ...]] = []
        for more in [0, 1, 0]:
            shapes += [(texts, 1, 1, 6 + 16 * (blocks + more)), (texts * (blocks + more), 1, 1, 6 + 16)]
        return shapes
    keys = 48 + (length // 8 if kind == "transient-global" else 0)
    return [(texts * blocks, 4, 16, keys)] * (LAYERS - 1)


def inputs_of(*, padded: bool = True, length: int = 150) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (3, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 100:] = 0
        mask[2, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers of the encoder give."""
    states = list(model.get_encoder()(**inputs, output_hidden_states=True).hidden_states)
    if isinstance(states[-1], tuple):  # Pegasus-X tells its global tokens beside its last states, and pads the others
        states[-1:] = states[-1]
        states = [one[:, : inputs["input_ids"].shape[1]] for one in states]
    return tuple(states)


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    last = model.get_encoder()(**inputs).last_hidden_state * inputs["attention_mask"][..., None]
    (last * torch.linspace(-1, 1, last.shape[2])).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def classes_of(model: Any) -> set[type]:
    (stack,) = find_stacks(model)
    return {type(module) for module in stack.modules}


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the biases that SDPA was called with."""
    shapes: list[torch.Size] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: torch.Tensor, attn_mask: torch.Tensor, **how: Any) -> torch.Tensor:
        shapes.append(attn_mask.shape)
        return attend(*args, attn_mask=attn_mask, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return shapes


@each_kind
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [150, 160, 7])
def test_values_and_gradients(kind: str, padded: bool, length: int, attended: list[torch.Size]) -> None:
    model = make_model(kind)
    inputs = inputs_of(padded=padded and length > 100, length=length)
    with torch.no_grad():
        exact = encoded(model, inputs)
    expected = gradients(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    assert classes_of(model) == {IN_BLOCKS[kind]}
    assert attended == []
    with torch.no_grad():
        found = encoded(model, inputs)
    assert [tuple(one) for one in attended] == expected_shapes(kind, 3, length)
    for layer, (one, other) in enumerate(zip(found, exact, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5, msg=lambda said, at=layer: f"layer {at}: {said}")
    of_patched = gradients(model, inputs)
    assert of_patched.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            of_patched[name], gradient, rtol=1e-4, atol=5e-4, msg=lambda said, at=name: f"{at}: {said}"
        )


@each_kind
@torch.no_grad()
def test_writes_the_same_and_is_unpatched(kind: str, attended: list[torch.Size]) -> None:
    model, inputs = make_model(kind), inputs_of()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "num_beams": 2}
    exact, written = encoded(model, inputs), model.generate(**inputs, **options)
    before = classes_of(model)
    hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(model.generate(**inputs, **options), written)
    assert len(attended) == CALLS[kind]
    copied = copy.deepcopy(model)
    hf_effattn.unpatch_attention(model)
    assert classes_of(model) == before
    assert not hasattr(model.config, "effattn")
    assert torch.equal(encoded(model, inputs)[-1], exact[-1])
    assert classes_of(copied) == {IN_BLOCKS[kind]}


@each_kind
@torch.no_grad()
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """The settings are in the model's own config, of which its encoder has a copy."""
    model, inputs = hf_effattn.patch_attention(make_model(kind), METHOD), inputs_of()
    expected = encoded(model, inputs)[-1]
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModelForSeq2SeqLM, tmp_path).eval()
    assert classes_of(loaded) == {IN_BLOCKS[kind]}
    assert torch.equal(encoded(loaded, inputs)[-1], expected)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert not classes_of(plain) & set(IN_BLOCKS.values())
    part = make_model(kind).get_encoder() if kind == "pegasus-x" else make_model(kind, LongT5EncoderModel)
    encoder = hf_effattn.patch_attention(part, METHOD)
    assert classes_of(encoder) == {IN_BLOCKS[kind]}


@each_kind
@torch.no_grad()
def test_weights_come_from_transformers(kind: str, attended: list[torch.Size]) -> None:
    model, inputs = make_model(kind), inputs_of()
    exact = model.get_encoder()(**inputs, output_attentions=True)
    hf_effattn.patch_attention(model, METHOD)
    asked = model.get_encoder()(**inputs, output_attentions=True)
    assert attended == []
    assert len(asked.attentions) == LAYERS
    for one, other in zip(asked.attentions, exact.attentions, strict=True):
        for name in one if isinstance(one, dict) else [...]:
            assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("kind", ["local", "pegasus-x"])
@torch.no_grad()
def test_the_switch_of_transformers_reaches_its_decoder_alone(kind: str, attended: list[torch.Size]) -> None:
    """Which stays exact by it, with its biases, and goes back by unpatching."""
    model, inputs = make_model(kind), inputs_of()
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :40]
    exact = model(**inputs).logits
    model.set_attn_implementation(METHOD)
    torch.testing.assert_close(model(**inputs).logits, exact, rtol=0, atol=5e-5)
    if hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):  # LongT5's in 5.7 had none
        assert [shape[-2] for shape in attended] == [40, 40]  # of its layer, to itself and to the encoder
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**inputs).logits, exact)


@pytest.mark.parametrize("kind", ["transient-global", "pegasus-x"])
def test_trains_with_gradient_checkpointing_and_dropout(kind: str, attended: list[torch.Size]) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(kind), METHOD).train(), inputs_of()
    expected = gradients(model, inputs)
    model.gradient_checkpointing_enable()
    attended.clear()
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    assert len(attended) == 2 * CALLS[kind]
    last = find_stacks(model)[0].modules[-1]
    last.dropout = 0.5
    with torch.no_grad():
        drawn = [encoded(model, inputs)[-1] for _ in range(2)]
        assert not torch.equal(*drawn)
        model.eval()
        assert torch.equal(*(encoded(model, inputs)[-1] for _ in range(2)))


@pytest.mark.parametrize("kind", ["transient-global", "pegasus-x"])
@torch.no_grad()
def test_bfloat16_is_as_near_as_transformers(kind: str) -> None:
    inputs = inputs_of()
    exact = encoded(make_model(kind), inputs)[LAYERS]
    model = make_model(kind).bfloat16()
    by_transformers = encoded(model, inputs)[LAYERS]
    patched = encoded(hf_effattn.patch_attention(model, METHOD), inputs)[LAYERS]
    real = inputs["attention_mask"].bool()
    error, usual = ((one[real].float() - exact[real]).norm() for one in (patched, by_transformers))
    assert error <= 1.1 * usual
