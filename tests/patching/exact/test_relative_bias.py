"""T5's kind, MPNet and DeBERTa: the same values and gradients without matrices of their biases and distances."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    DebertaV2Model,
    MPNetModel,
    MT5ForConditionalGeneration,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5ForConditionalGeneration,
)

import hf_effattn
from hf_effattn.patching.exact.architectures import deberta
from hf_effattn.patching.exact.architectures.deberta import DebertaV2ByRows, DebertaV2EncoderByRows
from hf_effattn.patching.exact.architectures.t5_and_mpnet import (
    MPNetByDistance,
    MPNetEncoderByDistance,
    MT5ByDistance,
    T5ByDistance,
    UMT5ByDistance,
    attend_by_distance,
    floor,
)

from .contract import (
    METHOD,
    Kind,
    Near,
    check_against,
    check_recomputed_dropout,
    each,
    each_size_and_precision,
    key_mask,
    record,
    shapes,
    with_large_weights,
    write_by_beams,
)

MODELS: dict[str, Any] = {
    "t5": T5ForConditionalGeneration,
    "mt5": MT5ForConditionalGeneration,
    "umt5": UMT5ForConditionalGeneration,
    "mpnet": MPNetModel,
    "deberta-v2": DebertaV2Model,
}
OURS: dict[str, frozenset[type]] = {
    "t5": frozenset({T5ByDistance}),
    "mt5": frozenset({MT5ByDistance}),
    "umt5": frozenset({UMT5ByDistance}),
    "mpnet": frozenset({MPNetByDistance, MPNetEncoderByDistance}),
    "deberta-v2": frozenset({DebertaV2ByRows, DebertaV2EncoderByRows}),
}
LAYERS, HEADS, TOKENS = 3, 4, 60


def make_model(kind: str, model_class: Any = None, **options: Any) -> Any:
    """A small random model in eval mode whose weights and biases are large enough to matter."""
    torch.manual_seed(0)
    sizes: dict[str, Any]
    if kind in ("t5", "mt5", "umt5"):
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": HEADS, "dropout_rate": 0.0}
        sizes |= {"num_decoder_layers": 2, "decoder_start_token_id": 0, "relative_attention_max_distance": 40}
        sizes |= {"relative_attention_num_buckets": 12}
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        sizes |= {"max_position_embeddings": 162, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "deberta-v2":
        sizes |= {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
        sizes |= {"max_relative_positions": 40}
        sizes |= {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}
    config = AutoConfig.for_model(kind, vocab_size=TOKENS, **sizes | options)
    return with_large_weights((model_class or MODELS[kind])(config), 0.25)


def encoder_of(model: Any) -> Any:
    return model.get_encoder() if model.config.is_encoder_decoder else model


def inputs_of(*, padded: bool = True, length: int = 150) -> dict[str, torch.Tensor]:
    """Three texts; padded, the second ends early, the third begins late and has a hole."""
    ids = torch.randint(5, TOKENS, (3, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 2 * length // 3 :] = 0
        mask[2, : length // 2] = 0
        mask[2, length - 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What all layers of the encoder give for the tokens that are seen."""
    states = encoder_of(model)(**inputs, output_hidden_states=True).hidden_states
    return tuple(state[inputs["attention_mask"].bool()] for state in states)


def decoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Also where the decoder's text is as long as the encoder's."""
    return (model(**inputs, decoder_input_ids=inputs["input_ids"]).logits,)


def weigh(model: Any) -> list[torch.Tensor]:
    inputs = inputs_of()
    found = encoder_of(model)(**inputs, output_attentions=True)
    assert len(found.attentions) == LAYERS
    return [*found.attentions, found.last_hidden_state[inputs["attention_mask"].bool()]]


def check_views(calls: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    """Biases are views of one row of distances."""
    length = inputs["input_ids"].shape[1]
    assert shapes(calls) == [(1, HEADS, length, length)] * LAYERS
    assert all(bias.untyped_storage().nbytes() == 4 * HEADS * (2 * length - 1) for bias in calls)


def check_rows(calls: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    """Products with distances are made for some queries at a time."""
    length = inputs["input_ids"].shape[1]
    rows = torch.arange(length).split(deberta.ROWS)
    assert shapes(calls) == [(3, HEADS, len(some), length) for some in rows] * LAYERS


def kind_of(kind: str, **promises: Any) -> Kind:
    return Kind(
        kind,
        partial(make_model, kind),
        inputs_of,
        encoded,
        OURS[kind],
        near=Near(atol=5e-5),
        cases=each(padded=(False, True), length=(150, 7)),
        learns=("relative_attention_bias", "rel_embeddings"),
        part=encoder_of,
        unpatched=True,
        weights_near=Near(atol=5e-5),
        eager=True,
        retrained=Near(of_each=1e-5, of_all=1e-7),
        drops=True,
        bfloat16=1.1,
        all_padded=True,
        compiled="inductor",
        **{"auto": AutoModel, "ran": check_views, "weigh": weigh} | promises,
    )


SEEN: dict[str, Any] = {"traced": lambda _, inputs: inputs["attention_mask"].bool()}
WRITES: dict[str, Any] = {
    "auto": AutoModelForSeq2SeqLM,
    "whole": decoded,
    "whole_near": Near(atol=2e-4),
    "write": write_by_beams,
    "compiled_as": {"num_layers": 1},
}
KINDS = [
    kind_of("t5", says="add biases of distances", **WRITES, **SEEN),
    kind_of("mt5", **WRITES),
    kind_of("umt5", **WRITES, weigh=None),
    kind_of("mpnet", **SEEN),
    kind_of(
        "deberta-v2",
        **SEEN,
        ran=check_rows,
        compiled_as={"num_hidden_layers": 1},  # half a minute for each layer
        redrawn={"hidden_dropout_prob": 0.3},
    ),
]


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, mask: Any, scale: float
) -> torch.Tensor:
    """Raffel et al. 2020, section 2.1: a learned number for each head and distance is added to the score."""
    places = torch.arange(query.shape[2])
    distances = places - places[:, None]
    scores = scale * query @ key.transpose(2, 3) + bias[:, distances + len(places) - 1]
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(dim=-1) @ value


@each_size_and_precision
@pytest.mark.parametrize("learns", [False, True])
def test_against_the_definition(
    length: int, masked: bool, learns: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = key_mask(length, masked)
    hidden = None if seen is None else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, floor(dtype))
    attend = partial(attend_by_distance, mask=hidden, scale=0.5, dropout=0.0)
    definition = partial(by_definition, mask=seen, scale=0.5)
    sizes = [(2, 3, length, 8)] * 3 + [(3, 2 * length - 1)]
    check_against(definition, attend, sizes, dtype, monkeypatch, constants=0 if learns else 1)


def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = partial(attend_by_distance, mask=None, scale=0.5)
    check_recomputed_dropout(attend, [(1, 2, 13, 3)] * 3 + [(2, 25)], 2 * 13 * 5, monkeypatch)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in ("t5", "mpnet")], ids=lambda kind: kind.name)
def test_gradients_where_the_biases_do_not_learn(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, biases = kind.make(), inputs_of(), record(monkeypatch)
    for name, weight in model.named_parameters():
        weight.requires_grad_("relative_attention_bias" not in name)
    expected = kind.gradients(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    biases.clear()
    kind.slopes.check(kind.gradients(model, inputs), expected)
    assert all(bias.untyped_storage().nbytes() == 4 * HEADS * 299 for bias in biases)


@torch.no_grad()
def test_an_encoder_alone() -> None:
    model, inputs = make_model("t5", T5EncoderModel), inputs_of()
    for encoder in (model, make_model("t5").get_encoder()):
        exact = encoded(encoder, inputs)[-1]
        hf_effattn.patch_attention(encoder, METHOD)
        KINDS[0].check_classes(encoder)
        torch.testing.assert_close(encoded(encoder, inputs)[-1], exact, rtol=0, atol=5e-5)


@torch.no_grad()
def test_rows_of_a_mask_may_differ() -> None:
    """A mask of four dimensions, by which no token sees a later one, is run by transformers' code."""
    model, inputs = make_model("t5"), inputs_of(padded=False)
    length = inputs["input_ids"].shape[1]
    mask = torch.zeros(1, 1, length, length).masked_fill(~torch.ones(length, length).tril().bool(), -1e9)
    called = encoder_of(model)
    exact = called(inputs["input_ids"], attention_mask=mask.expand(3, -1, -1, -1))[0]
    hf_effattn.patch_attention(model, METHOD)
    found = called(inputs["input_ids"], attention_mask=mask.expand(3, -1, -1, -1))[0]
    torch.testing.assert_close(found, exact, rtol=0, atol=5e-5)
    assert not torch.allclose(found[:, 0], called(inputs["input_ids"])[0][:, 0], atol=1e-2)


def one_layer(kind: str) -> Any:
    few = {"num_layers": 1} if "t5" in kind else {"num_hidden_layers": 1}
    return hf_effattn.patch_attention(encoder_of(make_model(kind, **few)), METHOD)


@pytest.mark.slow_except("mpnet")
@pytest.mark.parametrize("kind", ["t5", "umt5", "mpnet", "deberta-v2"])
@torch.no_grad()
def test_a_graph_takes_every_length(kind: str) -> None:
    """As the exact model's does; no view of one row of distances can be made of a length that a graph leaves open."""
    called = one_layer(kind)
    inputs, size = inputs_of(length=60), torch.export.Dim.DYNAMIC
    graph = torch.export.export(called, (), inputs, dynamic_shapes={name: {1: size} for name in inputs}).module()
    for length in (20, 90, 150):
        others = inputs_of(length=length)
        seen = others["attention_mask"].bool()
        torch.testing.assert_close(graph(**others)[0][seen], called(**others)[0][seen], rtol=0, atol=5e-5)


@pytest.mark.compatibility("torch", "`torch.compile` over many lengths: as many graphs as unpatched", "runs")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "mpnet", "deberta-v2"])
@torch.no_grad()
def test_lengths_make_no_graphs_of_their_own(kind: str) -> None:
    called = one_layer(kind)
    torch.compiler.reset()
    made: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph

    compiled = torch.compile(called, backend=keep, fullgraph=True)
    for length in (150, 140, 155, 131, 160):  # more than 128 rows, which were parts of their own
        inputs = inputs_of(length=length)
        seen = inputs["attention_mask"].bool()
        torch.testing.assert_close(compiled(**inputs)[0][seen], called(**inputs)[0][seen], rtol=0, atol=5e-5)
    assert len(made) == 2


@torch.no_grad()
def test_mpnet_of_more_positions() -> None:
    model, inputs = make_model("mpnet"), inputs_of(length=400)
    hf_effattn.extend_positions(model, 400)
    exact = encoded(model, inputs)[-1]
    hf_effattn.patch_attention(model, METHOD)
    assert any(type(module) is MPNetEncoderByDistance for module in model.modules())
    torch.testing.assert_close(encoded(model, inputs)[-1], exact, rtol=0, atol=5e-5)
