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
    T5ForConditionalGeneration,
    UMT5ForConditionalGeneration,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

import hf_effattn
from hf_effattn.patching.exact.architectures import deberta
from hf_effattn.patching.exact.architectures.deberta import (
    DebertaV2ByRows,
    DebertaV2EncoderByRows,
    attend_disentangled,
)
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
    output = encoder_of(model)(**inputs, output_attentions=True)
    assert len(output.attentions) == LAYERS
    return [*output.attentions, output.last_hidden_state[inputs["attention_mask"].bool()]]


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
        low_precision=1.1,
        all_padded=True,
        compiled={"mpnet": "inductor", "t5": "aot_eager", "deberta-v2": "aot_eager"}.get(kind, ""),
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
def test_rows_of_a_mask_may_differ() -> None:
    """A mask of four dimensions, by which no token sees a later one, is run by transformers' code."""
    model, inputs = make_model("t5"), inputs_of(padded=False)
    length = inputs["input_ids"].shape[1]
    mask = torch.zeros(1, 1, length, length).masked_fill(~torch.ones(length, length).tril().bool(), -1e9)
    called = encoder_of(model)
    exact = called(inputs["input_ids"], attention_mask=mask.expand(3, -1, -1, -1))[0]
    hf_effattn.patch_attention(model, METHOD)
    actual = called(inputs["input_ids"], attention_mask=mask.expand(3, -1, -1, -1))[0]
    torch.testing.assert_close(actual, exact, rtol=0, atol=5e-5)
    assert not torch.allclose(actual[:, 0], called(inputs["input_ids"])[0][:, 0], atol=1e-2)


def one_layer(kind: str) -> Any:
    few = {"num_layers": 1} if "t5" in kind else {"num_hidden_layers": 1}
    return hf_effattn.patch_attention(encoder_of(make_model(kind, **few)), METHOD)


@pytest.mark.slow
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


VARIANTS: dict[str, dict[str, Any]] = {
    "v3, as published": {},
    "v2, vectors of its own": {"share_att_key": False},
    "v2, no buckets": {"position_buckets": -1},
    "v2, as many positions as it has": {"max_relative_positions": -1},
    "v2, queries alone": {"pos_att_type": "c2p", "share_att_key": False},
    "v2, keys alone": {"pos_att_type": "p2c"},
    "v2, neither": {"pos_att_type": []},
    "v2, fewer distances than buckets": {"max_relative_positions": 6},
    "v2, no more distances than buckets": {"max_relative_positions": 160, "position_buckets": 160},
    "v2, an odd number of buckets": {"max_relative_positions": 24, "position_buckets": 15},
    "v2, no distances": {"relative_attention": False},
    "v2, positions beside them": {"position_biased_input": True},
}
KINDS += [
    Kind(
        name,
        partial(make_model, "deberta-v2", **options),
        inputs_of,
        encoded,
        OURS["deberta-v2"],
        near=Near(atol=5e-5),
        cases=each(padded=(False,)) | each(padded=(True,), length=(150, 9)),
        constants=((deberta, "ROWS", 40),),  # keys lie far before them, and far after
    )
    for name, options in VARIANTS.items()
]


def disentangled_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distance_key: torch.Tensor | None,
    distance_query: torch.Tensor | None,
    index: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """He et al. 2021, equation 4: the sum of three products is the score of a query and a key."""
    places = torch.arange(query.shape[2])
    of_pair = index[places[:, None] - places + len(places) - 1]
    scores = query @ key.transpose(2, 3)
    if distance_key is not None:
        scores = scores + torch.einsum("bhid,hijd->bhij", query, distance_key[:, of_pair])
    if distance_query is not None:
        scores = scores + torch.einsum("bhjd,hijd->bhij", key, distance_query[:, of_pair])
    scores = scale * scores
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(dim=-1) @ value


@each_size_and_precision
@pytest.mark.parametrize("vectors", ["both", "of keys", "of queries", "none"])
def test_disentangled_attention_against_the_definition(
    length: int, masked: bool, vectors: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deberta, "ROWS", 17)
    span, heads = 6, 3
    index = (torch.arange(1 - length, length) + span).clamp(0, 2 * span - 1)
    of_key, of_query = vectors in ("both", "of keys"), vectors in ("both", "of queries")

    def way(attend: Any, **how: Any) -> Any:
        def attend_with(query: Any, key: Any, value: Any, *distances: Any) -> torch.Tensor:
            given = iter(distances)
            vectors = (next(given) if used else None for used in (of_key, of_query))
            return attend(query, key, value, *vectors, index, key_mask(length, masked), scale=0.3, **how)

        return attend_with

    sizes = [(2, heads, length, 8)] * 3 + [(heads, 2 * span, 8)] * (of_key + of_query)
    attend, everywhere = (way(attend_disentangled, reach=reach, dropout=0.0) for reach in (span, None))
    check_against(way(disentangled_by_definition), attend, sizes, dtype, monkeypatch, also=(everywhere,))


@pytest.mark.slow
def test_rows_of_disentangled_attention_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    index = (torch.arange(-18, 19) + 5).clamp(0, 9)
    attend = partial(attend_disentangled, index=index, mask=None, scale=0.5, reach=5)
    check_recomputed_dropout(attend, [(1, 1, 19, 2)] * 3 + [(1, 10, 2)] * 2, 1, monkeypatch)


@pytest.mark.parametrize(("buckets", "largest"), [(16, 40), (256, 512), (8, 9), (2, 30), (16, 6), (-1, 40), (32, 16)])
def test_distances_are_transformers(buckets: int, largest: int) -> None:
    """One row of them stands for the matrix, and beyond the reach there is one vector on each side."""
    model = make_model("deberta-v2", position_buckets=buckets, max_relative_positions=largest)
    hf_effattn.patch_attention(model, METHOD)
    reach = model.encoder.layer[0].attention.self._reach()
    assert reach is not None or not 4 <= buckets < 2 * largest - 2
    span = buckets if buckets > 0 else largest
    for length in (1, 7, 40, 300):
        states = torch.zeros(1, length, 32)
        matrix = build_relative_position(states, states, bucket_size=buckets, max_position=largest)
        row = model.encoder.get_rel_pos(states)
        assert row.shape == (2 * length - 1,)
        assert torch.equal(deberta._matrix(row, length), matrix)
        if reach is not None:
            distances, index = torch.arange(1 - length, length), (row + span).clamp(0, 2 * span - 1)
            assert (index[distances >= reach] == 2 * span - 1).all()
            assert (index[distances <= -reach] == 0).all()


@torch.no_grad()
def test_queries_of_their_own() -> None:
    """Those of the enhanced mask decoder."""
    model, draw = make_model("deberta-v2", conv_kernel_size=0), torch.Generator().manual_seed(2)
    states, seen = torch.randn(2, 30, 32, generator=draw), torch.ones(2, 30)
    seen[1, 20:] = 0
    queries = torch.randn(2, 30, 32, generator=draw)
    layer, vectors = model.encoder.layer[0].attention.self, model.encoder.get_rel_embedding()

    def attend() -> torch.Tensor:
        made, mask = model.encoder.get_rel_pos(states, queries), model.encoder.get_attention_mask(seen)
        return layer(states, mask, query_states=queries, relative_pos=made, rel_embeddings=vectors)[0]

    exact = attend()
    hf_effattn.patch_attention(model, METHOD)
    torch.testing.assert_close(attend()[0], exact[0], rtol=0, atol=5e-5)
    torch.testing.assert_close(attend()[1, :20], exact[1, :20], rtol=0, atol=5e-5)


@torch.no_grad()
def test_matrices_of_a_mask_or_of_distances_are_run_by_transformers_code() -> None:
    """A mask of three dimensions, by which no token sees a later one, and distances that are no row."""
    model, inputs = make_model("deberta-v2", conv_kernel_size=0), inputs_of(padded=False)
    states = model.embeddings(inputs["input_ids"])
    earlier = torch.ones(150, 150).tril()[None]
    matrix = torch.randint(-8, 8, (1, 150, 150), generator=torch.Generator().manual_seed(2))
    given: list[tuple[Any, ...]] = [(earlier,), (torch.ones(3, 150), True, False, None, matrix)]
    exact = [model.encoder(states, *args)[0] for args in given]
    hf_effattn.patch_attention(model, METHOD)
    assert all(torch.equal(model.encoder(states, *args)[0], other) for args, other in zip(given, exact, strict=True))
    assert not torch.allclose(exact[0][:, 0], model.encoder(states, torch.ones(3, 150))[0][:, 0], atol=1e-2)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SPEECH = {"conv_dim": (16,), "conv_stride": (2,), "conv_kernel": (3,), "squeeze_factor": 1}


@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        # At the 512 tokens that it takes there was too little to gain.
        ("deberta", {"vocab_size": 60}, r'DebertaModel: its model type "deberta" takes 512 tokens, .* 1\.0 to 1\.2'),
        ("sew-d", SPEECH, "SEWDModel"),  # which has classes of the same names
    ],
)
def test_what_is_alike_and_not_served_is_refused(model_type: str, sizes: dict[str, Any], message: str) -> None:
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **SMALL, **sizes))
    with pytest.raises(ValueError, match=message):
        hf_effattn.patch_attention(model, METHOD)
