"""Longformer and LED, whose attention transformers computes itself: the same values and gradients, in blocks."""

import copy
import io
from pathlib import Path
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
from hf_effattn.patching.exact.architectures.longformer import LEDEncoderInBlocks, LongformerInBlocks
from hf_effattn.patching.exact.windows import block_length
from hf_effattn.patching.model_types.stacks import find_stacks

METHOD = "exact"
IN_BLOCKS = {"longformer": LongformerInBlocks, "led": LEDEncoderInBlocks}
WINDOWS = [16, 32, 16]
LENGTH = 180  # padded to 192, a multiple of the widest window
each_type = pytest.mark.parametrize("model_type", IN_BLOCKS)


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


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    last = hidden_states(model, inputs)[-1]
    (last * torch.linspace(-1, 1, last.shape[2])).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def classes_of(model: Any) -> set[type]:
    return {type(module) for module in find_stacks(model)[0].modules}


@each_type
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("global_tokens", ["none", "some", "many"])
def test_values_and_gradients(model_type: str, padded: bool, global_tokens: str, in_blocks: list[torch.Size]) -> None:
    """Of each layer and parameter, the exact model's; of padding too, which is 0 in the attention's output."""
    model = make_model(model_type)
    inputs = inputs_of(model_type, padded=padded, global_tokens=global_tokens)
    exact, expected = hidden_states(model, inputs), gradients(model, inputs)
    assert in_blocks == []
    assert hf_effattn.patch_attention(model, METHOD) is model
    assert classes_of(model) == {IN_BLOCKS[model_type]}
    found = hidden_states(model, inputs)
    spans = [(3, 1, 4, 64, 64 + window) for window in WINDOWS]
    assert [tuple(one) for one in in_blocks] == spans
    assert len(found) == 4
    for layer, (one, other) in enumerate(zip(found, exact, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=lambda said, at=layer: f"layer {at}: {said}")
    of_patched = gradients(model, inputs)
    assert of_patched.keys() == expected.keys()  # DDP waits for each
    for name, gradient in expected.items():
        torch.testing.assert_close(
            of_patched[name], gradient, rtol=1e-4, atol=2e-4, msg=lambda said, at=name: f"{at}: {said}"
        )


@each_type
@torch.no_grad()
def test_weights_come_from_transformers(model_type: str, in_blocks: list[torch.Size]) -> None:
    model, inputs = make_model(model_type), inputs_of(model_type)
    exact = model(**inputs, output_attentions=True)
    hf_effattn.patch_attention(model, METHOD)
    asked = model(**inputs, output_attentions=True)
    assert in_blocks == []
    for name in ("attentions", "global_attentions", "encoder_attentions", "encoder_global_attentions"):
        for one, other in zip(getattr(asked, name, None) or (), getattr(exact, name, None) or (), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(asked[0], exact[0])


@each_type
@torch.no_grad()
def test_unpatched_copied_and_pickled(model_type: str) -> None:
    model, inputs = make_model(model_type), inputs_of(model_type)
    exact = model(**inputs)[0]
    before = classes_of(model)
    hf_effattn.patch_attention(model, METHOD)
    patched = model(**inputs)[0]
    assert not torch.equal(patched, exact)
    assert torch.equal(copy.deepcopy(model)(**inputs)[0], patched)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert classes_of(loaded) == {IN_BLOCKS[model_type]}
    assert torch.equal(loaded(**inputs)[0], patched)
    hf_effattn.unpatch_attention(model)
    assert classes_of(model) == before
    assert not hasattr(model.config, "effattn")
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**inputs)[0], exact)


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    model = make_model("longformer", AutoModelForSequenceClassification)
    inputs = inputs_of("longformer")
    exact = model(**inputs).logits
    expected = hf_effattn.patch_attention(model, METHOD)(**inputs).logits
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path).eval()
    assert classes_of(loaded) == {LongformerInBlocks}
    assert torch.equal(loaded(**inputs).logits, expected)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(plain(**inputs).logits, exact)


@torch.no_grad()
def test_led_writes_the_same(in_blocks: list[torch.Size]) -> None:
    model = make_model("led", AutoModelForSeq2SeqLM)
    inputs = {name: one for name, one in inputs_of("led").items() if name != "decoder_input_ids"}
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "num_beams": 2}
    written = model.generate(**inputs, **options)
    hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(model.generate(**inputs, **options), written)
    assert len(in_blocks) == len(WINDOWS)


def test_other_methods_run_it_too_and_say_so(in_blocks: list[torch.Size]) -> None:
    model = make_model("longformer")
    with pytest.warns(UserWarning, match="approximate nothing: all layers of LongformerModel see a sliding window"):
        hf_effattn.patch_attention(model, "bi-clustered", clusters=2, topk=2, key_clusters=2, min_length=0)
    model(**inputs_of("longformer"))
    assert len(in_blocks) == len(WINDOWS)
    with pytest.raises(ValueError, match="all its layers see a sliding window"):
        hf_effattn.calibrate(model, [inputs_of("longformer")] * 2)
    with pytest.raises(ValueError, match=r'"cst" does not know where LongformerModel'):
        hf_effattn.patch_attention(model, "cst")
    assert classes_of(model) == {LongformerInBlocks}


def test_a_patch_that_fails_leaves_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("longformer")
    before = classes_of(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("too late")

    monkeypatch.setattr("hf_effattn.patching.patch.write_stored", fail)
    with pytest.raises(RuntimeError, match="too late"):
        hf_effattn.patch_attention(model, METHOD)
    assert classes_of(model) == before


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


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float64, False), (torch.bfloat16, True)],
)
@torch.no_grad()
def test_other_precisions(dtype: torch.dtype, autocast: bool) -> None:
    inputs = inputs_of("longformer")
    exact = make_model("longformer").double()(**inputs)[0]
    model = make_model("longformer").to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        by_transformers = model(**inputs)[0]
        patched = hf_effattn.patch_attention(model, METHOD)(**inputs)[0]
    assert patched.dtype == by_transformers.dtype
    error, usual = ((one.double() - exact).norm() / exact.norm() for one in (patched, by_transformers))
    assert error <= 1.1 * usual + 1e-6  # transformers takes the softmax in float32, of float64 too


@torch.no_grad()
def test_compiled() -> None:
    model, inputs = make_model("longformer"), inputs_of("longformer")
    exact = model(**inputs)[0]
    hf_effattn.patch_attention(model, METHOD)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs)[0], exact, rtol=0, atol=2e-5)


def test_trains_with_gradient_checkpointing(in_blocks: list[torch.Size]) -> None:
    model, inputs = make_model("longformer").train(), inputs_of("longformer")
    expected = gradients(hf_effattn.patch_attention(model, METHOD), inputs)
    model.gradient_checkpointing_enable()
    in_blocks.clear()
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)
    assert len(in_blocks) == 2 * len(WINDOWS)


@torch.no_grad()
def test_positions_are_extended() -> None:
    model, inputs = make_model("longformer"), inputs_of("longformer")
    exact = model(**inputs)[0]
    hf_effattn.extend_positions(hf_effattn.patch_attention(model, METHOD), 500)
    torch.testing.assert_close(model(**inputs)[0], exact, rtol=0, atol=2e-5)
    assert model(torch.full((1, 500), 7)).last_hidden_state.shape == (1, 500, 32)
    with pytest.raises(ValueError, match="its encoder and its decoder have a table of positions each"):
        hf_effattn.extend_positions(make_model("led"), 500)


def test_published_windows_run_in_blocks_of_a_quarter() -> None:
    assert block_length(hf_effattn.patching.exact.windows.Window(256, 256)) == 128
