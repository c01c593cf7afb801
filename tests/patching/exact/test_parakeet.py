"""Parakeet's encoder: the same values and gradients without matrices of its distances, and without masks of them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCTC, ParakeetEncoder, ParakeetForCTC
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention, ParakeetEncoderConvolutionModule

import hf_effattn
from hf_effattn.patching.exact import query_chunks
from hf_effattn.patching.exact.architectures import parakeet
from hf_effattn.patching.exact.architectures.parakeet import (
    ParakeetByRows,
    ParakeetConvolution,
    attend_by_distance_vectors,
)
from hf_effattn.patching.model_types.stacks import find_stacks

METHOD = "exact"
LAYERS, HEADS, FRAMES = 3, 4, 150
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
    "subsampling_factor": 2,
} | dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0)


def make_model(model_class: Any = ParakeetEncoder, **options: Any) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    if model_class is ParakeetEncoder:
        model = model_class(AutoConfig.for_model("parakeet_encoder", **SIZES | options))
    else:
        model = model_class(AutoConfig.for_model("parakeet_ctc", vocab_size=20, encoder_config=SIZES | options))
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.5 if "bias_" in name or "relative_k" in name else 0.2)
    return model.eval()


def inputs_of(*, padded: bool = True) -> dict[str, torch.Tensor]:
    """Three recordings; padded, the second and the third end early."""
    features = torch.randn(3, 2 * FRAMES, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 2 * FRAMES, dtype=torch.long)
    if padded:
        mask[1, 200:] = 0
        mask[2, 37:] = 0
    return {"input_features": features, "attention_mask": mask}


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers give for the frames that are seen."""
    encoder = model if isinstance(model, ParakeetEncoder) else model.encoder
    found = encoder(**inputs, output_hidden_states=True)
    mask = inputs.get("attention_mask")
    seen = torch.ones(found.last_hidden_state.shape[:2]) if mask is None else found.attention_mask
    return tuple(state[seen.bool()] for state in (*found.hidden_states, found.last_hidden_state))


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    last = encoded(model, inputs)[-1]
    (last * torch.linspace(-1, 1, last.shape[1], dtype=last.dtype)).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_all_near(found: Any, expected: Any, atol: float = 2e-5) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda said, at=place: f"{at}: {said}")


def classes_of(model: Any) -> set[type]:
    (stack,) = find_stacks(model)
    return {type(module) for module in stack.modules}


def by_definition(
    query: torch.Tensor,
    distance_query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distance_key: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Dai et al. 2019, section 3.3: each query by the key, and by the vector of the distance, with a bias each."""
    places = torch.arange(key.shape[2])
    of_pairs = distance_key[:, :, len(places) - 1 - places[:, None] + places]  # (1 or B, H, N, N, D)
    scores = query @ key.transpose(2, 3) + (distance_query[:, :, :, None] * of_pairs).sum(dim=4)
    scores = scale * scores
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(dim=-1) @ value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 37, 64])
def test_against_the_definition(
    length: int, masked: bool, texts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_chunks, "KEPT", 2 * 3 * 40 * 40)  # those of 64 frames are computed again
    monkeypatch.setitem(query_chunks.SCORES, "cpu", 2 * 3 * 64 * 20)  # several pieces, the last one shorter
    monkeypatch.setattr(parakeet, "ROWS", 17)
    draw = torch.Generator().manual_seed(length)
    shapes = [(2, 3, length, 8)] * 4 + [(texts, 3, 2 * length - 1, 8)]
    leaves = [torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype).requires_grad_() for shape in shapes]
    mask = None
    if masked:
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
        mask[1, ..., length // 2 + 1 :] = False
    weights = torch.randn(2, 3, length, 8, dtype=torch.float64, generator=draw)

    found = attend_by_distance_vectors(*leaves, mask, scale=0.3, dropout=0.0)
    assert found.dtype == dtype
    of_found = torch.autograd.grad((found * weights).sum(), leaves)
    with torch.no_grad():
        learning_nothing = attend_by_distance_vectors(*leaves, mask, scale=0.3, dropout=0.0)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    expected = by_definition(*wide, mask, scale=0.3)
    of_expected = torch.autograd.grad((expected * weights).sum(), wide)
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    pairs = zip([found, learning_nothing, *of_found], [expected, expected, *of_expected], strict=True)
    for one, other in pairs:
        assert (one - other).norm() <= bound * max(1.0, other.norm().item())


def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(query_chunks.SCORES, "cpu", 1)
    monkeypatch.setattr(query_chunks, "KEPT", 0)
    draw = torch.Generator().manual_seed(3)
    shapes = [(1, 1, 19, 2)] * 4 + [(1, 1, 37, 2)]
    leaves = [torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes]

    def attend(*tensors: torch.Tensor, dropout: float = 0.4) -> torch.Tensor:
        torch.manual_seed(5)
        return attend_by_distance_vectors(*tensors, None, scale=0.5, dropout=dropout)

    assert torch.autograd.gradcheck(attend, leaves)
    assert not torch.equal(attend(*leaves), attend(*leaves, dropout=0.0))


@pytest.mark.parametrize("padded", [False, True])
def test_values_and_gradients(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parakeet, "ROWS", 40)
    model, inputs = make_model(), inputs_of(padded=padded)
    with torch.no_grad():
        exact = encoded(model, inputs)
    expected = gradients(model, inputs)
    assert {"layers.0.self_attn.bias_v", "layers.0.self_attn.relative_k_proj.weight"} <= expected.keys()
    hf_effattn.patch_attention(model, METHOD)
    assert classes_of(model) == {ParakeetByRows}
    assert {type(layer.conv) for layer in model.layers} == {ParakeetConvolution}
    with torch.no_grad():
        assert_all_near(encoded(model, inputs), exact)
    found, largest = gradients(model, inputs), max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        bound = 1e-5 * gradient.abs().max().item() + 1e-7 * largest
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=bound, msg=lambda said, at=name: f"{at}: {said}"
        )


@torch.no_grad()
def test_rows_of_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parakeet, "ROWS", 40)
    added: list[torch.Size] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: torch.Tensor, attn_mask: torch.Tensor, **how: Any) -> torch.Tensor:
        added.append(attn_mask.shape)
        return attend(*args, attn_mask=attn_mask, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    hf_effattn.patch_attention(make_model(), METHOD)(**inputs_of())
    assert added == [(3, HEADS, rows, FRAMES) for rows in (40, 40, 40, 30)] * LAYERS


@torch.no_grad()
def test_a_recording_needs_no_mask() -> None:
    """Transformers gives every layer one of pairs; without it none is made, and nothing is added to the products."""
    model, inputs = make_model(), inputs_of(padded=False)
    exact = model(**inputs)
    hf_effattn.patch_attention(model, METHOD)
    found, alone = model(**inputs), model(inputs["input_features"])
    assert torch.equal(found.attention_mask, exact.attention_mask)
    assert alone.attention_mask is None
    for one in (found, alone):
        torch.testing.assert_close(one.last_hidden_state, exact.last_hidden_state, rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_recognizer_hears_the_same() -> None:
    model, inputs = make_model(ParakeetForCTC), inputs_of()
    exact, heard = model(**inputs).logits, model.generate(**inputs)
    hf_effattn.patch_attention(model, METHOD)
    assert classes_of(model) == {ParakeetByRows}
    seen = model.encoder(**inputs).attention_mask.bool()
    torch.testing.assert_close(model(**inputs).logits[seen], exact[seen], rtol=0, atol=2e-5)
    assert torch.equal(model.generate(**inputs), heard)


@torch.no_grad()
def test_unpatched_it_is_what_it_was() -> None:
    model, inputs = make_model(ParakeetForCTC), inputs_of()
    exact = encoded(model, inputs)
    implementations = [part.config._attn_implementation for part in (model, model.encoder)]
    hf_effattn.patch_attention(model, METHOD)
    copied, patched = copy.deepcopy(model), encoded(model, inputs)
    hf_effattn.unpatch_attention(model)
    assert classes_of(model) == {ParakeetEncoderAttention}
    assert {type(layer.conv) for layer in model.encoder.layers} == {ParakeetEncoderConvolutionModule}
    assert [part.config._attn_implementation for part in (model, model.encoder)] == implementations
    assert not hasattr(model.config, "effattn")
    for one, other in zip([*encoded(model, inputs), *encoded(copied, inputs)], [*exact, *patched], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("model_class", "auto"), [(ParakeetEncoder, AutoModel), (ParakeetForCTC, AutoModelForCTC)])
@torch.no_grad()
def test_saved_and_loaded(model_class: Any, auto: Any, tmp_path: Path) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(model_class), METHOD), inputs_of()
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(auto, tmp_path).eval()
    assert classes_of(loaded) == {ParakeetByRows}
    assert all(map(torch.equal, encoded(loaded, inputs), encoded(model, inputs)))
    assert classes_of(auto.from_pretrained(tmp_path)) == {ParakeetEncoderAttention}


@torch.no_grad()
def test_weights_are_transformers() -> None:
    model, inputs = make_model(), inputs_of(padded=False)  # transformers 5.7 gives NaN beside padding
    model.set_attn_implementation("eager")
    exact = model(**inputs, output_attentions=True)
    hf_effattn.patch_attention(model, METHOD)
    found = model(**inputs, output_attentions=True)
    assert len(found.attentions) == LAYERS
    assert_all_near([*found.attentions, found.last_hidden_state], [*exact.attentions, exact.last_hidden_state])


@torch.no_grad()
def test_the_switch_of_transformers_changes_nothing() -> None:
    """It is heard where transformers calls a function, which then runs exactly, with the matrix that it is given."""
    model, inputs = make_model(), inputs_of()
    exact = encoded(model, inputs)
    model.set_attn_implementation(METHOD)
    assert_all_near(encoded(model, inputs), exact)


def test_trains_with_gradient_checkpointing_and_dropout() -> None:
    model, inputs = hf_effattn.patch_attention(make_model(), METHOD).train(), inputs_of()
    expected = gradients(model, inputs)
    model.gradient_checkpointing_enable()
    found = gradients(model, inputs)
    assert_all_near([found[name] for name in expected], expected.values(), atol=1e-3)
    model.layers[-1].self_attn.attention_dropout = 0.5
    with torch.no_grad():
        assert not torch.equal(*(encoded(model, inputs)[-1] for _ in range(2)))
        model.eval()
        assert torch.equal(*(encoded(model, inputs)[-1] for _ in range(2)))


def test_dropout_of_positions_is_each_recordings_own() -> None:
    """Drawn as in transformers: the same numbers give the same values."""
    model, inputs = make_model(dropout_positions=0.3).train(), inputs_of()

    def drawn() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(7)
        return encoded(model, inputs)

    with torch.no_grad():
        exact = drawn()
        hf_effattn.patch_attention(model, METHOD)
        assert_all_near(drawn(), exact)


@torch.no_grad()
def test_bfloat16_is_as_near_as_transformers() -> None:
    inputs = inputs_of()
    exact = encoded(make_model(), inputs)[-1]
    model = make_model().bfloat16()
    inputs["input_features"] = inputs["input_features"].bfloat16()
    by_transformers = encoded(model, inputs)[-1]
    patched = encoded(hf_effattn.patch_attention(model, METHOD), inputs)[-1]
    error, usual = ((one.float() - exact).norm() for one in (patched, by_transformers))
    assert error <= 1.1 * usual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_recording_of_padding_alone_is_finite(dtype: torch.dtype) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(), METHOD), inputs_of()
    inputs["attention_mask"][1] = 0
    with torch.autocast("cpu", dtype=dtype):
        assert model(**inputs).last_hidden_state.isfinite().all()


@torch.no_grad()
def test_traced_by_transformers_code() -> None:
    model, inputs = hf_effattn.patch_attention(make_model(), METHOD), inputs_of()
    expected = model(**inputs)
    traced = torch.jit.trace(model, tuple(inputs.values()), strict=False, check_trace=False)(*inputs.values())
    seen = expected.attention_mask.bool()
    last = traced["last_hidden_state"]
    torch.testing.assert_close(last[seen], expected.last_hidden_state[seen], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_compiled() -> None:
    model, inputs = hf_effattn.patch_attention(make_model(num_hidden_layers=1), METHOD), inputs_of()
    expected, of_weights = encoded(model, inputs)[-1].detach(), gradients(model, inputs)
    torch.compiler.reset()
    model.compile(backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(encoded(model, inputs)[-1], expected, rtol=0, atol=2e-5)
    found = gradients(model, inputs)
    assert_all_near([found[name] for name in of_weights], of_weights.values(), atol=1e-3)


def test_other_methods_say_what_it_is() -> None:
    model = make_model()
    with pytest.warns(UserWarning, match="approximate nothing: all layers of ParakeetEncoder add biases of distances"):
        hf_effattn.patch_attention(model, "i-clustered")


# Their decoders stay as they are.
AROUND = {
    "parakeet_tdt": "AutoModelForTDT",
    "parakeet_rnnt": "AutoModelForRNNT",
    "canary": "AutoModelForSpeechSeq2Seq",
    "cohere_asr": "AutoModelForSpeechSeq2Seq",
}


KNOWN = [kind for kind, auto in AROUND.items() if kind in CONFIG_MAPPING and hasattr(transformers, auto)]


@pytest.mark.parametrize("kind", KNOWN)
def test_inside_of_other_models(kind: str) -> None:
    config = AutoConfig.for_model(kind, encoder_config={"model_type": "parakeet_encoder"} | SIZES)
    with torch.device("meta"):
        model = getattr(transformers, AROUND[kind]).from_config(config)
    assert classes_of(model) == {ParakeetEncoderAttention}
    assert classes_of(hf_effattn.patch_attention(model, METHOD)) == {ParakeetByRows}
