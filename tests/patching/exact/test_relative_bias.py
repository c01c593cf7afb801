"""T5's kind, MPNet and DeBERTa: the same values and gradients without matrices of their biases and distances."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    DebertaModel,
    DebertaV2Model,
    MPNetModel,
    MT5ForConditionalGeneration,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5ForConditionalGeneration,
)

import hf_effattn
from hf_effattn.patching.exact import query_chunks
from hf_effattn.patching.exact.architectures import deberta, t5_and_mpnet
from hf_effattn.patching.exact.architectures.deberta import DebertaByRows, DebertaV2ByRows
from hf_effattn.patching.exact.architectures.t5_and_mpnet import (
    MPNetByDistance,
    MPNetEncoderByDistance,
    MT5ByDistance,
    T5ByDistance,
    UMT5ByDistance,
    attend_by_distance,
    floor,
)
from hf_effattn.patching.model_types.stacks import find_stacks

METHOD = "exact"
MODELS: dict[str, Any] = {
    "t5": T5ForConditionalGeneration,
    "mt5": MT5ForConditionalGeneration,
    "umt5": UMT5ForConditionalGeneration,
    "mpnet": MPNetModel,
    "deberta": DebertaModel,
    "deberta-v2": DebertaV2Model,
}
PATCHED: dict[str, type] = {
    "t5": T5ByDistance,
    "mt5": MT5ByDistance,
    "umt5": UMT5ByDistance,
    "mpnet": MPNetByDistance,
    "deberta": DebertaByRows,
    "deberta-v2": DebertaV2ByRows,
}
LAYERS, HEADS, TOKENS = 3, 4, 60
each_kind = pytest.mark.parametrize("kind", MODELS)
each_with_a_view = pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "mpnet"])
each_writer = pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])


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
    if kind in ("deberta", "deberta-v2"):
        sizes |= {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
        sizes |= {"max_relative_positions": 40}
    if kind == "deberta-v2":
        sizes |= {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}
    config = AutoConfig.for_model(kind, vocab_size=TOKENS, **sizes | options)
    model = (model_class or MODELS[kind])(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model.eval()


def last_dropout(model: Any, p: float) -> None:
    """Dropout on the attention weights of the last layer."""
    last = find_stacks(model)[0].modules[-1]
    if isinstance(last.dropout, torch.nn.Dropout):
        last.dropout.p = p
    else:
        last.dropout = p


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


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    last = encoded(model, inputs)[-1]
    (last * torch.linspace(-1, 1, last.shape[1])).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Also where all there is are the roundings of others, as in the gradient of a bias of the keys."""
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        bound = 1e-5 * gradient.abs().max().item() + 1e-7 * largest
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=bound, msg=lambda said, at=name: f"{at}: {said}"
        )


def classes_of(model: Any) -> set[type]:
    (stack,) = find_stacks(model)
    return {type(module) for module in stack.modules}


@pytest.fixture
def biases(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What SDPA was called with to be added to the scores."""
    seen: list[torch.Tensor] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: torch.Tensor, attn_mask: torch.Tensor, **how: Any) -> torch.Tensor:
        seen.append(attn_mask.detach())
        return attend(*args, attn_mask=attn_mask, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return seen


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, mask: Any, scale: float
) -> torch.Tensor:
    """Raffel et al. 2020, section 2.1: a learned number for each head and distance is added to the score."""
    places = torch.arange(query.shape[2])
    distances = places - places[:, None]
    scores = scale * query @ key.transpose(2, 3) + bias[:, distances + len(places) - 1]
    return (scores if mask is None else scores + mask).softmax(dim=-1) @ value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 37, 64])
def test_against_the_definition(
    length: int, masked: bool, learns: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_chunks, "KEPT", 2 * 3 * 40 * 40)  # those of 64 tokens are computed again
    monkeypatch.setitem(query_chunks.SCORES, "cpu", 2 * 3 * 64 * 20)  # several pieces, the last one shorter
    draw = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(2, 3, length, 8, dtype=torch.float64, generator=draw).to(dtype).requires_grad_() for _ in range(3)
    )
    bias = torch.randn(3, 2 * length - 1, dtype=torch.float64, generator=draw).to(dtype).requires_grad_(learns)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 1, length, dtype=dtype)
        mask[1, ..., length // 2 + 1 :] = floor(dtype)
    leaves = [query, key, value, *([bias] if learns else [])]
    weights = torch.randn(2, 3, length, 8, dtype=torch.float64, generator=draw)

    found = attend_by_distance(query, key, value, bias, mask, scale=0.5, dropout=0.0)
    assert found.dtype == dtype
    of_found = torch.autograd.grad((found * weights).sum(), leaves)
    wide = [one.detach().double().requires_grad_() for one in (query, key, value, bias)]
    seen = None if mask is None else torch.where(mask == 0, 0.0, -torch.inf).double()
    expected = by_definition(*wide, seen, scale=0.5)
    of_expected = torch.autograd.grad((expected * weights).sum(), wide[: len(leaves)])
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for one, other in zip([found, *of_found], [expected, *of_expected], strict=True):
        assert (one - other).norm() <= bound * max(1.0, other.norm().item())


def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(query_chunks.SCORES, "cpu", 2 * 13 * 5)
    monkeypatch.setattr(query_chunks, "KEPT", 0)
    draw = torch.Generator().manual_seed(3)
    shapes = [(1, 2, 13, 3)] * 3 + [(2, 25)]
    leaves = [torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attend_by_distance(*tensors, None, scale=0.5, dropout=0.4)

    assert torch.autograd.gradcheck(attend, leaves)
    assert not torch.equal(attend(*leaves), attend_by_distance(*leaves, None, scale=0.5, dropout=0.0))


@each_kind
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [150, 7])
def test_values_and_gradients(kind: str, padded: bool, length: int, biases: list[torch.Tensor]) -> None:
    model, inputs = make_model(kind), inputs_of(padded=padded, length=length)
    with torch.no_grad():
        exact = encoded(model, inputs)
    expected = gradients(model, inputs)
    assert any("relative_attention_bias" in name or "rel_embeddings" in name for name in expected)
    hf_effattn.patch_attention(model, METHOD)
    assert classes_of(model) == {PATCHED[kind]}
    biases.clear()
    with torch.no_grad():
        found = encoded(model, inputs)
    if "deberta" in kind:
        assert [bias.shape for bias in biases] == [
            (3, HEADS, len(rows), length) for rows in torch.arange(length).split(deberta.ROWS)
        ] * LAYERS
    else:
        assert [bias.shape for bias in biases] == [(1, HEADS, length, length)] * LAYERS
        for bias in biases:  # a view of one row of distances
            assert bias.untyped_storage().nbytes() == 4 * HEADS * (2 * length - 1)
    for layer, (one, other) in enumerate(zip(found, exact, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5, msg=lambda said, at=layer: f"layer {at}: {said}")
    assert_near(gradients(model, inputs), expected)


@each_with_a_view
def test_gradients_where_the_biases_do_not_learn(kind: str, biases: list[torch.Tensor]) -> None:
    model, inputs = make_model(kind), inputs_of()
    for name, weight in model.named_parameters():
        weight.requires_grad_("relative_attention_bias" not in name)
    expected = gradients(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    biases.clear()
    assert_near(gradients(model, inputs), expected)
    assert all(bias.untyped_storage().nbytes() == 4 * HEADS * 299 for bias in biases)


@each_kind
@torch.no_grad()
def test_unpatched_it_is_what_it_was(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of()
    exact, implementation = encoded(model, inputs), model.config._attn_implementation
    before = classes_of(model)
    hf_effattn.patch_attention(model, METHOD)
    copied = copy.deepcopy(model)
    patched = encoded(model, inputs)
    hf_effattn.unpatch_attention(model)
    assert classes_of(model) == before
    ours = {t5_and_mpnet.__name__, deberta.__name__}
    assert not any(type(module).__module__ in ours for module in model.modules())
    assert {part.config._attn_implementation for part in (model, encoder_of(model))} == {implementation}
    assert not hasattr(model.config, "effattn")
    for one, other in zip(encoded(model, inputs), exact, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(encoded(copied, inputs), patched, strict=True):
        assert torch.equal(one, other)


@each_writer
@torch.no_grad()
def test_writes_the_same(kind: str) -> None:
    """Also where the decoder's text is as long as the encoder's."""
    model, inputs = make_model(kind), inputs_of()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "num_beams": 2}
    written = model.generate(**inputs, **options)
    beside = inputs | {"decoder_input_ids": inputs["input_ids"]}
    exact = model(**beside).logits
    hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(model.generate(**inputs, **options), written)
    torch.testing.assert_close(model(**beside).logits, exact, rtol=0, atol=2e-4)


@each_writer
@torch.no_grad()
def test_the_switch_of_transformers_changes_nothing(kind: str) -> None:
    """It is heard where transformers calls a function, which then runs exactly, with the biases that it is given."""
    model, inputs = make_model(kind), inputs_of()
    beside = inputs | {"decoder_input_ids": inputs["input_ids"]}
    exact = model(**beside).logits
    model.set_attn_implementation(METHOD)
    torch.testing.assert_close(model(**beside).logits, exact, rtol=0, atol=2e-4)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(model(**beside).logits, exact)


@each_kind
@torch.no_grad()
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(kind), METHOD), inputs_of()
    expected = encoded(model, inputs)[-1]
    model.save_pretrained(tmp_path)
    auto: Any = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModel
    loaded = hf_effattn.from_pretrained(auto, tmp_path).eval()
    assert classes_of(loaded) == {PATCHED[kind]}
    assert torch.equal(encoded(loaded, inputs)[-1], expected)
    assert not classes_of(auto.from_pretrained(tmp_path)) & set(PATCHED.values())


@torch.no_grad()
def test_an_encoder_alone() -> None:
    model, inputs = make_model("t5", T5EncoderModel), inputs_of()
    for encoder in (model, make_model("t5").get_encoder()):
        exact = encoded(encoder, inputs)[-1]
        hf_effattn.patch_attention(encoder, METHOD)
        assert classes_of(encoder) == {T5ByDistance}
        torch.testing.assert_close(encoded(encoder, inputs)[-1], exact, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["t5", "mt5", "mpnet", "deberta", "deberta-v2"])
@torch.no_grad()
def test_weights_are_transformers(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of()
    model.set_attn_implementation("eager")
    exact = encoder_of(model)(**inputs, output_attentions=True)
    hf_effattn.patch_attention(model, METHOD)
    asked = encoder_of(model)(**inputs, output_attentions=True)
    assert len(asked.attentions) == LAYERS
    seen = inputs["attention_mask"].bool()
    for one, other in zip(asked.attentions, exact.attentions, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5)
    torch.testing.assert_close(asked.last_hidden_state[seen], exact.last_hidden_state[seen], rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["t5", "mt5"])
@torch.no_grad()
def test_rows_of_a_mask_may_differ(kind: str) -> None:
    """A mask of four dimensions, by which no token sees a later one, is run by transformers' code."""
    model, inputs = make_model(kind), inputs_of(padded=False)
    length = inputs["input_ids"].shape[1]
    mask = torch.zeros(1, 1, length, length).masked_fill(~torch.ones(length, length).tril().bool(), -1e9)
    called = encoder_of(model)
    exact = called(inputs["input_ids"], attention_mask=mask.expand(3, -1, -1, -1))[0]
    hf_effattn.patch_attention(model, METHOD)
    found = called(inputs["input_ids"], attention_mask=mask.expand(3, -1, -1, -1))[0]
    torch.testing.assert_close(found, exact, rtol=0, atol=5e-5)
    assert not torch.allclose(found[:, 0], called(inputs["input_ids"])[0][:, 0], atol=1e-2)


@each_kind
def test_trains_with_gradient_checkpointing_and_dropout(kind: str) -> None:
    model, inputs = hf_effattn.patch_attention(make_model(kind), METHOD).train(), inputs_of()
    expected = gradients(model, inputs)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
        assert_near(gradients(model, inputs), expected)
    last_dropout(model, 0.5)
    with torch.no_grad():
        drawn = [encoded(model, inputs)[-1] for _ in range(2)]
        assert not torch.equal(*drawn)
        model.eval()
        assert torch.equal(*(encoded(model, inputs)[-1] for _ in range(2)))


@each_kind
@torch.no_grad()
def test_bfloat16_is_as_near_as_transformers(kind: str) -> None:
    inputs = inputs_of()
    exact = encoded(make_model(kind), inputs)[-1]
    model = make_model(kind).bfloat16()
    by_transformers = encoded(model, inputs)[-1]
    patched = encoded(hf_effattn.patch_attention(model, METHOD), inputs)[-1]
    error, usual = ((one.float() - exact).norm() for one in (patched, by_transformers))
    assert error <= 1.1 * usual


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_text_of_padding_alone_is_finite(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, whose numbers are smaller than those that the mask was made of."""
    model, inputs = hf_effattn.patch_attention(make_model(kind), METHOD), inputs_of()
    inputs["attention_mask"][1] = 0
    with torch.autocast("cpu", dtype=dtype):
        by_view = encoder_of(model)(**inputs)[0]
        monkeypatch.setattr(t5_and_mpnet, "_by_view", partial(t5_and_mpnet._by_rows, dropout=0.0))
        in_rows = encoder_of(model)(**inputs)[0]
    assert by_view.isfinite().all()
    assert in_rows.isfinite().all()


@pytest.mark.parametrize("kind", ["t5", "mpnet", "deberta", "deberta-v2"])
@torch.no_grad()
def test_traced_by_transformers_code(kind: str) -> None:
    model, inputs = make_model(kind), inputs_of()
    called = hf_effattn.patch_attention(encoder_of(model), METHOD)
    expected = called(**inputs)[0]
    traced = torch.jit.trace(called, tuple(inputs.values()), strict=False, check_trace=False)
    found = traced(*inputs.values())
    last = found["last_hidden_state"] if isinstance(found, dict) else found[0]
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(last[seen], expected[seen], rtol=0, atol=5e-5)


@pytest.mark.slow_except("mpnet")
@pytest.mark.parametrize("kind", ["t5", "umt5", "mpnet", "deberta-v2"])
@torch.no_grad()
def test_a_graph_takes_every_length(kind: str) -> None:
    """As the exact model's does; no view of one row of distances can be made of a length that a graph leaves open."""
    few = {"num_layers": 1} if "t5" in kind else {"num_hidden_layers": 1}
    called = hf_effattn.patch_attention(encoder_of(make_model(kind, **few)), METHOD)
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
    few = {"num_layers": 1} if "t5" in kind else {"num_hidden_layers": 1}
    called = hf_effattn.patch_attention(encoder_of(make_model(kind, **few)), METHOD)
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


@pytest.mark.slow
@each_kind
def test_compiled(kind: str) -> None:
    # The compiler takes half a minute for each layer of DeBERTa's.
    few: dict[str, int] = {"num_hidden_layers": 1} if "deberta" in kind else {}
    model, inputs = hf_effattn.patch_attention(make_model(kind, **few), METHOD), inputs_of()
    expected, of_weights = encoded(model, inputs), gradients(model, inputs)
    torch.compiler.reset()
    model.compile()
    with torch.no_grad():
        found = encoded(model, inputs)
    torch.testing.assert_close(found[-1], expected[-1].detach(), rtol=0, atol=5e-5)
    assert_near(gradients(model, inputs), of_weights)


@torch.no_grad()
def test_mpnet_of_more_positions() -> None:
    model, inputs = make_model("mpnet"), inputs_of(length=400)
    hf_effattn.extend_positions(model, 400)
    exact = encoded(model, inputs)[-1]
    hf_effattn.patch_attention(model, METHOD)
    assert any(type(module) is MPNetEncoderByDistance for module in model.modules())
    torch.testing.assert_close(encoded(model, inputs)[-1], exact, rtol=0, atol=5e-5)


def test_what_is_said_of_it() -> None:
    model = make_model("t5")
    with pytest.warns(
        UserWarning, match="approximate nothing: all layers of T5ForConditionalGeneration add biases of"
    ):
        hf_effattn.patch_attention(model, "bi-clustered")
    assert classes_of(model) == {T5ByDistance}
    with pytest.raises(ValueError, match="all its layers add biases of distances and stay exact"):
        hf_effattn.patch_attention(model, "bi-clustered", layers=[0])
    with pytest.raises(ValueError, match="no attention to measure: all its layers add biases of distances"):
        hf_effattn.calibrate(model, inputs_of(), max_error=0.1)
