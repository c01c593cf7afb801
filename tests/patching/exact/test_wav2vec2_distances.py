"""Wav2Vec2-BERT and Wav2Vec2-Conformer: the same values and gradients without a matrix for the distances."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCTC,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForCTC,
    Wav2Vec2BertModel,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerModel,
)
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerSelfAttention

import hf_effattn
from hf_effattn.patching.exact.architectures import parakeet
from hf_effattn.patching.exact.architectures.wav2vec2 import Wav2Vec2BertByRows, Wav2Vec2ConformerByRows
from hf_effattn.patching.model_types.stacks import find_stacks

METHOD = "exact"
LAYERS, HEADS, FRAMES = 3, 4, 150
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "pad_token_id": 0,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
} | dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"),
    0.0,
)
BERT = SIZES | {"feature_projection_input_dim": 16, "conformer_conv_dropout": 0.0}
CONVOLUTIONS = {"conv_dim": [8, 8], "conv_kernel": [5, 3], "conv_stride": [4, 2], "num_feat_extract_layers": 2}
CONFORMER = SIZES | CONVOLUTIONS | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # Fewer vectors than distances, and more, those of some distances never used.
    "key": (Wav2Vec2BertModel, Wav2Vec2BertConfig, BERT | {"left_max_position_embeddings": 20}),
    "far key": (Wav2Vec2BertModel, Wav2Vec2BertConfig, BERT | {"left_max_position_embeddings": 200}),
    "bert": (Wav2Vec2BertModel, Wav2Vec2BertConfig, BERT | {"position_embeddings_type": "relative"}),
    "conformer": (Wav2Vec2ConformerModel, Wav2Vec2ConformerConfig, CONFORMER),
}
# No distances: transformers' code runs.
PLAIN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "rotary bert": (Wav2Vec2BertModel, Wav2Vec2BertConfig, BERT | {"position_embeddings_type": "rotary"}),
    "no positions": (Wav2Vec2BertModel, Wav2Vec2BertConfig, BERT | {"position_embeddings_type": None}),
    "rotary conformer": (
        Wav2Vec2ConformerModel,
        Wav2Vec2ConformerConfig,
        CONFORMER | {"position_embeddings_type": "rotary"},
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make_model(kind: str = "key", model_class: Any = None, **options: Any) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    default, config, sizes = (KINDS | PLAIN)[kind]
    model = (model_class or default)(config(**sizes | options))
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "parametrizations" not in name:
            torch.nn.init.normal_(weight, std=0.5 if "pos_bias" in name or "distance" in name else 0.2)
    return model.eval()


def inputs_of(kind: str = "key", *, padded: bool = True) -> dict[str, torch.Tensor]:
    """Three recordings; padded, the second and the third end early."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones(3, FRAMES if "conformer" not in kind else 8 * FRAMES + 10, dtype=torch.long)
    if padded:
        mask[1, 2 * mask.shape[1] // 3 :] = 0
        mask[2, mask.shape[1] // 8 :] = 0
    if "conformer" in kind:
        return {"input_values": torch.randn(mask.shape, generator=draw) * mask, "attention_mask": mask}
    return {"input_features": torch.randn(3, FRAMES, 16, generator=draw), "attention_mask": mask}


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers give for the frames that are seen."""
    found = model(**inputs, output_hidden_states=True)
    mask = inputs["attention_mask"]
    if "input_values" in inputs:
        mask = model._get_feature_vector_attention_mask(found.last_hidden_state.shape[1], mask)
    seen = mask.bool()
    return tuple(state[seen] for state in (*found.hidden_states, found.last_hidden_state))


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


@each_kind
@pytest.mark.parametrize("padded", [False, True])
def test_values_and_gradients(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parakeet, "ROWS", 40)
    model, inputs = make_model(kind), inputs_of(kind, padded=padded)
    with torch.no_grad():
        exact = encoded(model, inputs)
    expected = gradients(model, inputs)
    of_distances = "distance_embedding.weight" if "key" in kind else "pos_bias_v"
    assert f"encoder.layers.0.self_attn.{of_distances}" in expected
    hf_effattn.patch_attention(model, METHOD)
    assert classes_of(model) == {Wav2Vec2ConformerByRows if kind == "conformer" else Wav2Vec2BertByRows}
    with torch.no_grad():
        assert_all_near(encoded(model, inputs), exact)
    found, largest = gradients(model, inputs), max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        bound = 1e-5 * gradient.abs().max().item() + 1e-6 * largest
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=bound, msg=lambda said, at=name: f"{at}: {said}"
        )


@each_kind
@torch.no_grad()
def test_rows_of_some_queries_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the products with distances no more are made, in layers of all kinds."""
    monkeypatch.setattr(parakeet, "ROWS", 40)
    model, inputs = hf_effattn.patch_attention(make_model(kind), METHOD), inputs_of(kind)
    added: list[torch.Size] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: torch.Tensor, attn_mask: torch.Tensor, **how: Any) -> torch.Tensor:
        added.append(attn_mask.shape)
        return attend(*args, attn_mask=attn_mask, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model(**inputs)
    assert added == [(3, HEADS, rows, FRAMES) for rows in (40, 40, 40, 30)] * LAYERS


@pytest.mark.parametrize("kind", PLAIN)
@torch.no_grad()
def test_where_positions_are_no_distances_transformers_code_runs(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of(kind)
    exact = encoded(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    assert_all_near(encoded(model, inputs), exact)


@torch.no_grad()
def test_an_adapter_behind_it() -> None:
    """Its layers attend, too, over fewer frames, and know no positions."""
    model, inputs = (
        make_model(add_adapter=True, num_adapter_layers=2, use_intermediate_ffn_before_adapter=True),
        inputs_of(),
    )
    exact = model(**inputs).last_hidden_state
    assert exact.shape[1] < FRAMES
    hf_effattn.patch_attention(model, METHOD)
    found = model(**inputs).last_hidden_state
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1, : exact.shape[1] // 2], exact[1, : exact.shape[1] // 2], rtol=0, atol=2e-5)


@torch.no_grad()
def test_unpatched_it_is_what_it_was() -> None:
    model, inputs = make_model(), inputs_of()
    exact, implementation = encoded(model, inputs), model.config._attn_implementation
    hf_effattn.patch_attention(model, METHOD)
    copied, patched = copy.deepcopy(model), encoded(model, inputs)
    hf_effattn.unpatch_attention(model)
    assert classes_of(model) == {Wav2Vec2BertSelfAttention}
    assert model.config._attn_implementation == implementation
    assert not hasattr(model.config, "effattn")
    for one, other in zip([*encoded(model, inputs), *encoded(copied, inputs)], [*exact, *patched], strict=True):
        assert torch.equal(one, other)


@each_kind
@torch.no_grad()
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(kind), METHOD), inputs_of(kind)
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path).eval()
    assert classes_of(loaded) == classes_of(model)
    assert all(map(torch.equal, encoded(loaded, inputs), encoded(model, inputs)))
    exact = {Wav2Vec2ConformerSelfAttention if kind == "conformer" else Wav2Vec2BertSelfAttention}
    assert classes_of(AutoModel.from_pretrained(tmp_path)) == exact


@torch.no_grad()
def test_a_recognizer_hears_the_same(tmp_path: Path) -> None:
    model, inputs = make_model(model_class=Wav2Vec2BertForCTC), inputs_of()
    exact, seen = model(**inputs).logits, inputs["attention_mask"].bool()
    hf_effattn.patch_attention(model, METHOD).save_pretrained(tmp_path)
    for one in (model, hf_effattn.from_pretrained(AutoModelForCTC, tmp_path).eval()):
        logits = one(**inputs).logits[seen]
        torch.testing.assert_close(logits, exact[seen], rtol=0, atol=2e-5)
        assert torch.equal(logits.argmax(dim=-1), exact[seen].argmax(dim=-1))


@each_kind
@torch.no_grad()
def test_weights_are_transformers(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of(kind)
    model.set_attn_implementation("eager")
    exact = model(**inputs, output_attentions=True)
    hf_effattn.patch_attention(model, METHOD)
    found = model(**inputs, output_attentions=True)
    assert len(found.attentions) == LAYERS
    for one, other in zip(found.attentions, exact.attentions, strict=True):
        assert_all_near([one[0], one[1, :, :90]], [other[0], other[1, :, :90]])


@each_kind
@torch.no_grad()
def test_the_switch_of_transformers_changes_nothing(kind: str) -> None:
    """It is heard where transformers calls a function, which then runs exactly, with the matrix that it is given."""
    model, inputs = make_model(kind), inputs_of(kind)
    exact = encoded(model, inputs)
    model.set_attn_implementation(METHOD)
    assert_all_near(encoded(model, inputs), exact)


def test_trains_with_gradient_checkpointing_and_dropout() -> None:
    model, inputs = hf_effattn.patch_attention(make_model(), METHOD).train(), inputs_of()
    expected = gradients(model, inputs)
    model.gradient_checkpointing_enable()
    found = gradients(model, inputs)
    assert_all_near([found[name] for name in expected], expected.values(), atol=1e-3)
    model.encoder.layers[-1].self_attn.dropout.p = 0.5
    with torch.no_grad():
        assert not torch.equal(*(encoded(model, inputs)[-1] for _ in range(2)))
        model.eval()
        assert torch.equal(*(encoded(model, inputs)[-1] for _ in range(2)))


@each_kind
@torch.no_grad()
def test_bfloat16_is_as_near_as_transformers(kind: str) -> None:
    inputs = inputs_of(kind)
    exact = encoded(make_model(kind), inputs)[-1]
    model = make_model(kind).bfloat16()
    inputs = {name: one.bfloat16() if one.is_floating_point() else one for name, one in inputs.items()}
    by_transformers = encoded(model, inputs)[-1]
    patched = encoded(hf_effattn.patch_attention(model, METHOD), inputs)[-1]
    error, usual = ((one.float() - exact).norm() for one in (patched, by_transformers))
    assert error <= 1.2 * usual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_recording_of_padding_alone_is_finite(dtype: torch.dtype) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(), METHOD), inputs_of()
    inputs["attention_mask"][1] = 0
    with torch.autocast("cpu", dtype=dtype):
        assert model(**inputs).last_hidden_state.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["key", "conformer"])
def test_compiled(kind: str) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(kind, num_hidden_layers=1), METHOD), inputs_of(kind)
    with torch.no_grad():
        expected = encoded(model, inputs)[-1]
        torch.compiler.reset()
        model.encoder.compile(backend="aot_eager")
        torch.testing.assert_close(encoded(model, inputs)[-1], expected, rtol=0, atol=2e-5)


@each_kind
def test_a_report(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of(kind)
    for _ in range(2):  # also of a model that is patched
        found = hf_effattn.report(model, inputs, repeats=0, progress=False)
        (measured,) = found.inputs
        assert (measured.batch_size, measured.length) == (3, FRAMES)
        assert FRAMES < measured.valid_tokens < 2 * FRAMES
        assert 0 < found.measurements[1].change.hidden_error < 1e-5
        hf_effattn.patch_attention(model, METHOD)


def test_other_methods_say_what_it_is() -> None:
    with pytest.warns(
        UserWarning, match="approximate nothing: all layers of Wav2Vec2BertModel add biases of distances"
    ):
        hf_effattn.patch_attention(make_model(), "i-clustered")


@pytest.mark.parametrize("kind", ["key", *PLAIN])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@torch.no_grad()
def test_masks_have_the_precision_of_the_model(kind: str, dtype: torch.dtype) -> None:
    """Also where transformers' code runs, its own function called, and in the weights that it gives."""
    model = make_model(kind).to(dtype)
    inputs = {name: one.to(dtype) if one.is_floating_point() else one for name, one in inputs_of(kind).items()}
    exact = encoded(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    bound = 1e-12 if dtype == torch.float64 else 0.1
    assert_all_near(encoded(model, inputs), exact, atol=bound)
    model.set_attn_implementation("eager")
    assert_all_near(encoded(model, inputs), exact, atol=2 * bound)
    assert {one.dtype for one in model(**inputs, output_attentions=True).attentions} == {dtype}


@pytest.mark.parametrize("kind", ["key", "rotary bert"])
@torch.no_grad()
def test_flex_attention_goes_on_with_masks_of_its_own(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of(kind)
    if not model._supports_flex_attn:
        pytest.skip("not in this version of transformers")
    exact = encoded(model, inputs)
    model.set_attn_implementation("flex_attention")
    if kind == "key":
        (measured,) = hf_effattn.report(model, inputs, repeats=0, progress=False).inputs
        assert (measured.length, measured.valid_tokens) == (FRAMES, int(inputs["attention_mask"].sum()))
    hf_effattn.patch_attention(model, METHOD)
    model.set_attn_implementation("flex_attention")
    assert_all_near(encoded(model, inputs), exact)


@pytest.mark.parametrize("kind", PLAIN)
def test_without_distances_nothing_is_said_to_be_gained(kind: str) -> None:
    model = make_model(kind)
    if not model._supports_sdpa:
        pytest.skip("transformers runs it eagerly in this version")
    for method in (METHOD, "i-clustered"):
        with pytest.warns(UserWarning, match="will do nothing: no layer of Wav2Vec2"):
            hf_effattn.patch_attention(model, method)
    with pytest.raises(ValueError, match="all its layers compute their attention themselves and stay exact"):
        hf_effattn.patch_attention(model, "i-clustered", layers=[0])
    hf_effattn.unpatch_attention(model)
    with pytest.raises(ValueError, match="no attention to measure: all its layers compute their attention themselves"):
        hf_effattn.report(model, inputs_of(kind), repeats=0, progress=False)
