"""Parakeet's encoder: the same values and gradients without matrices of its distances, and without masks of them."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCTC, ParakeetEncoder, ParakeetForCTC
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention

import hf_effattn
from hf_effattn.patching.exact.architectures import parakeet
from hf_effattn.patching.exact.architectures.parakeet import (
    ParakeetByRows,
    ParakeetConvolution,
    attend_by_distance_vectors,
)
from hf_effattn.patching.model_types.stacks import find_stacks

from .contract import (
    METHOD,
    Kind,
    Near,
    check_against,
    check_recomputed_dropout,
    each_size_and_precision,
    key_mask,
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
    found = encoder(**inputs, output_hidden_states=True)
    mask = inputs.get("attention_mask")
    seen = torch.ones(found.last_hidden_state.shape[:2]) if mask is None else found.attention_mask
    states = [*found.hidden_states, found.last_hidden_state]
    if encoder is not model:
        states.append(model(**inputs).logits)
    return tuple(state[seen.bool()] for state in states)


def check_rows(calls: list[torch.Tensor], _: Any) -> None:
    """The products with distances are made for some queries at a time."""
    assert shapes(calls) == [(3, HEADS, rows, FRAMES) for rows in (40, 40, 40, 30)] * LAYERS


def weigh(model: Any) -> list[torch.Tensor]:
    found = model(**inputs_of(padded=False), output_attentions=True)  # transformers 5.7 gives NaN beside padding
    assert len(found.attentions) == LAYERS
    return [*found.attentions, found.last_hidden_state]


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
        bfloat16=1.1,
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


def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = partial(attend_by_distance_vectors, mask=None, scale=0.5)
    check_recomputed_dropout(attend, [(1, 1, 19, 2)] * 4 + [(1, 1, 37, 2)], 1, monkeypatch)


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
