"""Parakeet and Wav2Vec2: the same values and gradients without matrices of their distances, or masks of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCTC,
    ParakeetEncoder,
    ParakeetForCTC,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForCTC,
    Wav2Vec2BertModel,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerModel,
)
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention

import hf_effattn
from hf_effattn.patching.exact.architectures import parakeet
from hf_effattn.patching.exact.architectures.parakeet import (
    ParakeetByRows,
    ParakeetConvolution,
    attend_by_distance_vectors,
)
from hf_effattn.patching.exact.architectures.wav2vec2 import Wav2Vec2BertByRows, Wav2Vec2ConformerByRows
from hf_effattn.patching.model_types.stacks import find_stacks

from .contract import (
    METHOD,
    Kind,
    Near,
    check_against,
    check_recomputed_dropout,
    each,
    each_size_and_precision,
    key_mask,
    logits_of_seen,
    shapes,
    with_large_weights,
)

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
    return with_large_weights(model, 0.2, bias_=0.5, relative_k=0.5)


def inputs_of(*, padded: bool = True) -> dict[str, torch.Tensor]:
    """Three recordings; padded, the second and the third end early."""
    features = torch.randn(3, 2 * FRAMES, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 2 * FRAMES, dtype=torch.long)
    if padded:
        mask[1, 200:] = 0
        mask[2, 37:] = 0
    return {"input_features": features, "attention_mask": mask}


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers give for the frames that are seen, and a recognizer."""
    encoder = model if isinstance(model, ParakeetEncoder) else model.encoder
    output = encoder(**inputs, output_hidden_states=True)
    mask = inputs.get("attention_mask")
    seen = torch.ones(output.last_hidden_state.shape[:2]) if mask is None else output.attention_mask
    states = [*output.hidden_states, output.last_hidden_state]
    if encoder is not model:
        states.append(model(**inputs).logits)
    return tuple(state[seen.bool()] for state in states)


def check_rows(calls: list[torch.Tensor], _: Any) -> None:
    """The products with distances are made for some queries at a time."""
    assert shapes(calls) == [(3, HEADS, rows, FRAMES) for rows in (40, 40, 40, 30)] * LAYERS


def weigh(model: Any) -> list[torch.Tensor]:
    output = model(**inputs_of(padded=False), output_attentions=True)  # transformers 5.7 gives NaN beside padding
    assert len(output.attentions) == LAYERS
    return [*output.attentions, output.last_hidden_state]


OURS = frozenset({ParakeetByRows, ParakeetConvolution})
KINDS = [
    Kind(
        "parakeet",
        make_model,
        inputs_of,
        encoded,
        OURS,
        constants=((parakeet, "ROWS", 40),),
        ran=check_rows,
        learns=("layers.0.self_attn.bias_v",),
        whole=encoded,
        unpatched=True,
        auto=AutoModel,
        weigh=weigh,
        eager=True,
        retrained=Near(atol=1e-3),
        drops=True,
        redrawn={"dropout_positions": 0.3},
        low_precision=1.1,
        all_padded=True,
        traced=lambda output, _: output.attention_mask.bool(),
        compiled="aot_eager",
        compiled_as={"num_hidden_layers": 1},
        says="add biases of distances",
    ),
    Kind(
        "parakeet's recognizer",
        partial(make_model, ParakeetForCTC),
        inputs_of,
        encoded,
        OURS,
        unpatched=True,
        auto=AutoModelForCTC,
        write=lambda model, inputs: model.generate(**inputs),
    ),
]


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


@each_size_and_precision
@pytest.mark.parametrize("texts", [1, 2])
def test_against_the_definition(
    length: int, masked: bool, texts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parakeet, "ROWS", 17)
    given: dict[str, Any] = {"mask": key_mask(length, masked), "scale": 0.3}
    attend = partial(attend_by_distance_vectors, **given, dropout=0.0)
    sizes = [(2, 3, length, 8)] * 4 + [(texts, 3, 2 * length - 1, 8)]
    check_against(partial(by_definition, **given), attend, sizes, dtype, monkeypatch)


@pytest.mark.slow
def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = partial(attend_by_distance_vectors, mask=None, scale=0.5)
    check_recomputed_dropout(attend, [(1, 1, 19, 2)] * 4 + [(1, 1, 37, 2)], 1, monkeypatch)


@torch.no_grad()
def test_a_recording_needs_no_mask() -> None:
    """Transformers gives every layer one of pairs; without it none is made, and nothing is added to the products."""
    model, inputs = make_model(), inputs_of(padded=False)
    exact = model(**inputs)
    hf_effattn.patch_attention(model, METHOD)
    masked, alone = model(**inputs), model(inputs["input_features"])
    assert torch.equal(masked.attention_mask, exact.attention_mask)
    assert alone.attention_mask is None
    for output in (masked, alone):
        torch.testing.assert_close(output.last_hidden_state, exact.last_hidden_state, rtol=0, atol=2e-5)


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
    (stack,) = find_stacks(model)
    assert {type(module) for module in stack.modules} == {ParakeetEncoderAttention}
    KINDS[0].check_classes(hf_effattn.patch_attention(model, METHOD))


WAV2VEC2: dict[str, Any] = {
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
BERT = WAV2VEC2 | {"feature_projection_input_dim": 16, "conformer_conv_dropout": 0.0}
CONVOLUTIONS = {"conv_dim": [8, 8], "conv_kernel": [5, 3], "conv_stride": [4, 2], "num_feat_extract_layers": 2}
CONFORMER = WAV2VEC2 | CONVOLUTIONS | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
DISTANCES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
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


def make_wav2vec2(kind: str = "key", model_class: Any = None, **options: Any) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    default, config, sizes = (DISTANCES | PLAIN)[kind]
    model = (model_class or default)(config(**sizes | options))
    return with_large_weights(model, 0.2, pos_bias=0.5, distance=0.5)


def recordings(kind: str = "key", *, padded: bool = True) -> dict[str, torch.Tensor]:
    """Three recordings; padded, the second and the third end early."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones(3, FRAMES if "conformer" not in kind else 8 * FRAMES + 10, dtype=torch.long)
    if padded:
        mask[1, 2 * mask.shape[1] // 3 :] = 0
        mask[2, mask.shape[1] // 8 :] = 0
    if "conformer" in kind:
        return {"input_values": torch.randn(mask.shape, generator=draw) * mask, "attention_mask": mask}
    return {"input_features": torch.randn(3, FRAMES, 16, generator=draw), "attention_mask": mask}


def encoded_by_wav2vec2(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers give for the frames that are seen."""
    mask, output = inputs["attention_mask"], model(**inputs, output_hidden_states=True)
    if "input_values" in inputs:
        mask = model._get_feature_vector_attention_mask(output.last_hidden_state.shape[1], mask)
    return tuple(state[mask.bool()] for state in (*output.hidden_states, output.last_hidden_state))


def weigh_as(kind: str) -> Callable[[Any], list[torch.Tensor]]:
    """Its weights, those of rows of padding aside."""

    def weigh(model: Any) -> list[torch.Tensor]:
        layers = model(**recordings(kind), output_attentions=True).attentions
        assert len(layers) == LAYERS
        return [part for weights in layers for part in (weights[0], weights[1, :, :90])]

    return weigh


def wav2vec2(kind: str, **promises: Any) -> Kind:
    return Kind(
        f"wav2vec2, {kind}",
        partial(make_wav2vec2, kind),
        partial(recordings, kind),
        encoded_by_wav2vec2,
        frozenset({Wav2Vec2ConformerByRows if kind == "conformer" else Wav2Vec2BertByRows}),
        slopes=Near(of_each=1e-5, of_all=1e-6),
        constants=((parakeet, "ROWS", 40),),
        ran=check_rows,
        learns=("encoder.layers.0.self_attn." + ("distance_embedding.weight" if "key" in kind else "pos_bias_v"),),
        whole=encoded_by_wav2vec2,
        auto=AutoModel,
        weigh=weigh_as(kind),
        eager=True,
        low_precision=1.2,
        compiled_as={"num_hidden_layers": 1},
        reports=(3, FRAMES, None),
        **promises,
    )


KINDS += [
    wav2vec2(
        "key",
        unpatched=True,
        retrained=Near(atol=1e-3),
        drops=True,
        all_padded=True,
        compiled="aot_eager",
        says="add biases of distances",
    ),
    wav2vec2("far key"),
    wav2vec2("bert"),
    wav2vec2("conformer", compiled="aot_eager"),
    Kind(
        "wav2vec2's recognizer",
        partial(make_wav2vec2, model_class=Wav2Vec2BertForCTC),
        recordings,
        logits_of_seen,
        frozenset({Wav2Vec2BertByRows}),
        slopes=Near(of_each=1e-5, of_all=1e-6),
        cases=each(padded=(True,)),
        auto=AutoModelForCTC,
        write=lambda model, inputs: logits_of_seen(model, inputs)[0].argmax(dim=-1),
    ),
]


@torch.no_grad()
def test_an_adapter_behind_it() -> None:
    """Its layers attend, too, over fewer frames, and know no positions."""
    model, inputs = (
        make_wav2vec2(add_adapter=True, num_adapter_layers=2, use_intermediate_ffn_before_adapter=True),
        recordings(),
    )
    exact = model(**inputs).last_hidden_state
    assert exact.shape[1] < FRAMES
    hf_effattn.patch_attention(model, METHOD)
    actual = model(**inputs).last_hidden_state
    torch.testing.assert_close(actual[0], exact[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(actual[1, : exact.shape[1] // 2], exact[1, : exact.shape[1] // 2], rtol=0, atol=2e-5)


@pytest.mark.slow_except("*-key", "torch.float64-*")
@pytest.mark.parametrize("kind", ["key", *PLAIN])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@torch.no_grad()
def test_masks_have_the_precision_of_the_model(kind: str, dtype: torch.dtype) -> None:
    """Also where transformers' code runs, its own function called, and in the weights that it gives."""
    model = make_wav2vec2(kind).to(dtype)
    inputs = {name: part.to(dtype) if part.is_floating_point() else part for name, part in recordings(kind).items()}
    exact = encoded_by_wav2vec2(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    bound = 1e-12 if dtype == torch.float64 else 0.1
    Near(atol=bound).check(encoded_by_wav2vec2(model, inputs), exact)
    model.set_attn_implementation("eager")
    Near(atol=2 * bound).check(encoded_by_wav2vec2(model, inputs), exact)
    assert {part.dtype for part in model(**inputs, output_attentions=True).attentions} == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["key", "rotary bert"])
@torch.no_grad()
def test_flex_attention_goes_on_with_masks_of_its_own(kind: str) -> None:
    model, inputs = make_wav2vec2(kind), recordings(kind)
    if not model._supports_flex_attn:
        pytest.skip("not in this version of transformers")
    exact = encoded_by_wav2vec2(model, inputs)
    model.set_attn_implementation("flex_attention")
    if kind == "key":
        (measured,) = hf_effattn.report(model, inputs, repeats=0, progress=False).inputs
        assert (measured.length, measured.valid_tokens) == (FRAMES, int(inputs["attention_mask"].sum()))
    hf_effattn.patch_attention(model, METHOD)
    model.set_attn_implementation("flex_attention")
    Near(atol=2e-5).check(encoded_by_wav2vec2(model, inputs), exact)


@pytest.mark.parametrize("kind", PLAIN)
def test_without_distances_nothing_is_said_to_be_gained(kind: str) -> None:
    model = make_wav2vec2(kind)
    if not model._supports_sdpa:
        pytest.skip("transformers runs it eagerly in this version")
    for method in (METHOD, "i-clustered"):
        with pytest.warns(UserWarning, match="will do nothing: no layer of Wav2Vec2"):
            hf_effattn.patch_attention(model, method)
    with pytest.raises(ValueError, match="all its layers compute their attention themselves and stay exact"):
        hf_effattn.patch_attention(model, "i-clustered", layers=[0])
    hf_effattn.unpatch_attention(model)
    with pytest.raises(ValueError, match="no attention to measure: all its layers compute their attention themselves"):
        hf_effattn.report(model, recordings(kind), repeats=0, progress=False)
