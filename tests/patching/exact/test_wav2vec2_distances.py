"""Wav2Vec2-BERT and Wav2Vec2-Conformer: the same values and gradients without a matrix for the distances."""

from collections.abc import Callable
from functools import partial
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

import hf_effattn
from hf_effattn.patching.exact.architectures import parakeet
from hf_effattn.patching.exact.architectures.wav2vec2 import Wav2Vec2BertByRows, Wav2Vec2ConformerByRows

from .contract import METHOD, Kind, Near, each, logits_of_seen, with_large_weights
from .test_parakeet import check_rows

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


def make_model(kind: str = "key", model_class: Any = None, **options: Any) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    default, config, sizes = (DISTANCES | PLAIN)[kind]
    model = (model_class or default)(config(**sizes | options))
    return with_large_weights(model, 0.2, pos_bias=0.5, distance=0.5)


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
    mask, found = inputs["attention_mask"], model(**inputs, output_hidden_states=True)
    if "input_values" in inputs:
        mask = model._get_feature_vector_attention_mask(found.last_hidden_state.shape[1], mask)
    return tuple(state[mask.bool()] for state in (*found.hidden_states, found.last_hidden_state))


def weigh_as(kind: str) -> Callable[[Any], list[torch.Tensor]]:
    """Its weights, those of rows of padding aside."""

    def weigh(model: Any) -> list[torch.Tensor]:
        found = model(**inputs_of(kind), output_attentions=True).attentions
        assert len(found) == LAYERS
        return [part for weights in found for part in (weights[0], weights[1, :, :90])]

    return weigh


def kind_of(kind: str, **promises: Any) -> Kind:
    return Kind(
        f"wav2vec2, {kind}",
        partial(make_model, kind),
        partial(inputs_of, kind),
        encoded,
        frozenset({Wav2Vec2ConformerByRows if kind == "conformer" else Wav2Vec2BertByRows}),
        slopes=Near(of_each=1e-5, of_all=1e-6),
        constants=((parakeet, "ROWS", 40),),
        ran=check_rows,
        learns=("encoder.layers.0.self_attn." + ("distance_embedding.weight" if "key" in kind else "pos_bias_v"),),
        whole=encoded,
        auto=AutoModel,
        weigh=weigh_as(kind),
        eager=True,
        bfloat16=1.2,
        compiled_as={"num_hidden_layers": 1},
        reports=(3, FRAMES, None),
        **promises,
    )


KINDS = [
    kind_of(
        "key",
        unpatched=True,
        retrained=Near(atol=1e-3),
        drops=True,
        all_padded=True,
        compiled="aot_eager",
        says="add biases of distances",
    ),
    kind_of("far key"),
    kind_of("bert"),
    kind_of("conformer", compiled="aot_eager"),
    Kind(
        "wav2vec2's recognizer",
        partial(make_model, model_class=Wav2Vec2BertForCTC),
        inputs_of,
        logits_of_seen,
        frozenset({Wav2Vec2BertByRows}),
        slopes=Near(of_each=1e-5, of_all=1e-6),
        cases=each(padded=(True,)),
        auto=AutoModelForCTC,
        write=lambda model, inputs: logits_of_seen(model, inputs)[0].argmax(dim=-1),
    ),
]


@pytest.mark.parametrize("kind", PLAIN)
@torch.no_grad()
def test_where_positions_are_no_distances_transformers_code_runs(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of(kind)
    exact = encoded(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    Near(atol=2e-5).check(encoded(model, inputs), exact)


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
    Near(atol=bound).check(encoded(model, inputs), exact)
    model.set_attn_implementation("eager")
    Near(atol=2 * bound).check(encoded(model, inputs), exact)
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
    Near(atol=2e-5).check(encoded(model, inputs), exact)


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
