"""DeBERTa's disentangled attention in rows: the definition, and the configs that test_relative_bias.py has not."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DebertaConfig,
    DebertaModel,
    DebertaV2Config,
    SEWDConfig,
    SEWDModel,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

import hf_effattn
from hf_effattn.patching.exact import query_chunks
from hf_effattn.patching.exact.architectures import deberta
from hf_effattn.patching.exact.architectures.deberta import DebertaV2ByRows, attend_disentangled

from .test_relative_bias import METHOD, assert_near, classes_of, encoded, gradients, inputs_of, make_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3, as published": ("deberta-v2", {}),
    "v2, vectors of its own": ("deberta-v2", {"share_att_key": False}),
    "v2, no buckets": ("deberta-v2", {"position_buckets": -1}),
    "v2, as many positions as it has": ("deberta-v2", {"max_relative_positions": -1}),
    "v2, queries alone": ("deberta-v2", {"pos_att_type": "c2p", "share_att_key": False}),
    "v2, keys alone": ("deberta-v2", {"pos_att_type": "p2c"}),
    "v2, neither": ("deberta-v2", {"pos_att_type": []}),
    "v2, fewer distances than buckets": ("deberta-v2", {"max_relative_positions": 6}),
    "v2, no more distances than buckets": (
        "deberta-v2",
        {"max_relative_positions": 160, "position_buckets": 160},
    ),
    "v2, an odd number of buckets": ("deberta-v2", {"max_relative_positions": 24, "position_buckets": 15}),
    "v2, no distances": ("deberta-v2", {"relative_attention": False}),
    "v2, positions beside them": ("deberta-v2", {"position_biased_input": True}),
}


def by_definition(
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vectors", ["both", "of keys", "of queries", "none"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 37, 64])
def test_against_the_definition(
    length: int, masked: bool, vectors: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_chunks, "KEPT", 2 * 3 * 40 * 40)  # those of 64 tokens are computed again
    monkeypatch.setitem(query_chunks.SCORES, "cpu", 2 * 3 * 64 * 20)  # several pieces, the last one shorter
    monkeypatch.setattr(deberta, "ROWS", 17)
    span, heads = 6, 3
    draw = torch.Generator().manual_seed(length)
    shapes = [(2, heads, length, 8)] * 3 + [(heads, 2 * span, 8)] * 2
    leaves = [torch.randn(s, dtype=torch.float64, generator=draw).to(dtype).requires_grad_() for s in shapes]
    given = [True] * 3 + [vectors in ("both", "of keys"), vectors in ("both", "of queries")]
    index = (torch.arange(1 - length, length) + span).clamp(0, 2 * span - 1)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[1, ..., length // 2 + 1 :] = False
    seen = mask if masked else None
    weights = torch.randn(shapes[0], dtype=torch.float64, generator=draw)

    def gradients_of(output: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        wanted = [one for one, used in zip(inputs, given, strict=True) if used]
        return torch.autograd.grad((output * weights).sum(), wanted)

    def chosen(inputs: list[torch.Tensor]) -> Any:
        return [one if used else None for one, used in zip(inputs, given, strict=True)]

    how: dict[str, Any] = {"scale": 0.3, "reach": span, "dropout": 0.0}
    found = attend_disentangled(*chosen(leaves), index, seen, **how)
    assert found.dtype == dtype
    wide = [one.detach().double().requires_grad_() for one in leaves]
    expected = by_definition(*chosen(wide), index, seen, scale=0.3)
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    of_found, of_expected = gradients_of(found, leaves), gradients_of(expected, wide)
    with torch.no_grad():
        unlearned = attend_disentangled(*chosen(leaves), index, seen, **how)
        everywhere = attend_disentangled(*chosen(leaves), index, seen, **how | {"reach": None})
    pairs = [(found, expected), (unlearned, expected), (everywhere, expected)]
    for one, other in [*pairs, *zip(of_found, of_expected, strict=True)]:
        assert (one - other).norm() <= bound * max(1.0, other.norm().item())


def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(query_chunks.SCORES, "cpu", 1)
    monkeypatch.setattr(query_chunks, "KEPT", 0)
    draw = torch.Generator().manual_seed(3)
    shapes = [(1, 1, 19, 2)] * 3 + [(1, 10, 2)] * 2
    leaves = [torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes]
    index = (torch.arange(-18, 19) + 5).clamp(0, 9)

    def attend(*tensors: torch.Tensor, dropout: float = 0.4) -> torch.Tensor:
        torch.manual_seed(5)
        return attend_disentangled(*tensors, index, None, scale=0.5, reach=5, dropout=dropout)

    assert torch.autograd.gradcheck(attend, leaves)
    assert not torch.equal(attend(*leaves), attend(*leaves, dropout=0.0))


@pytest.mark.parametrize("length", [1, 7, 40, 300])
@pytest.mark.parametrize(("buckets", "largest"), [(16, 40), (256, 512), (8, 9), (2, 30), (16, 6), (-1, 40), (32, 16)])
def test_distances_are_transformers(buckets: int, largest: int, length: int) -> None:
    """One row of them stands for the matrix, and beyond the reach there is one vector on each side."""
    model = make_model("deberta-v2", position_buckets=buckets, max_relative_positions=largest)
    states = torch.zeros(1, length, 32)
    matrix = build_relative_position(states, states, bucket_size=buckets, max_position=largest)
    hf_effattn.patch_attention(model, METHOD)
    row = model.encoder.get_rel_pos(states)
    assert row.shape == (2 * length - 1,)
    assert torch.equal(deberta._matrix(row, length), matrix)
    reach = model.encoder.layer[0].attention.self._reach()
    if reach is None:
        assert not 4 <= buckets < 2 * largest - 2
        return
    span = buckets if buckets > 0 else largest
    distances, index = torch.arange(1 - length, length), (row + span).clamp(0, 2 * span - 1)
    assert (index[distances >= reach] == 2 * span - 1).all()
    assert (index[distances <= -reach] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("padded", "length"), [(False, 150), (True, 150), (True, 9)])
def test_values_and_gradients(variant: str, padded: bool, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deberta, "ROWS", 40)  # keys lie far before them, and far after
    kind, options = VARIANTS[variant]
    model, inputs = make_model(kind, **options), inputs_of(padded=padded, length=length)
    with torch.no_grad():
        exact = encoded(model, inputs)
    expected = gradients(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    assert classes_of(model) == {DebertaV2ByRows}
    with torch.no_grad():
        found = encoded(model, inputs)
    for layer, (one, other) in enumerate(zip(found, exact, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5, msg=lambda said, at=layer: f"layer {at}: {said}")
    assert_near(gradients(model, inputs), expected)


def test_dropout_on_the_vectors_is_transformers() -> None:
    """Drawn as there, so that the same numbers are drawn after it."""
    model, inputs = make_model("deberta-v2", hidden_dropout_prob=0.3).train(), inputs_of()
    torch.manual_seed(1)
    exact = encoded(model, inputs)[-1]
    hf_effattn.patch_attention(model, METHOD)
    torch.manual_seed(1)
    torch.testing.assert_close(encoded(model, inputs)[-1], exact, rtol=0, atol=5e-5)


@torch.no_grad()
def test_rows_of_a_mask_may_differ() -> None:
    """A mask of three dimensions, by which no token sees a later one, is run by transformers' code."""
    model, inputs = make_model("deberta-v2", conv_kernel_size=0), inputs_of(padded=False)
    states = model.embeddings(inputs["input_ids"])
    earlier = torch.ones(150, 150).tril()[None]
    exact = model.encoder(states, earlier)[0]
    hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(model.encoder(states, earlier)[0], exact)
    assert not torch.allclose(exact[:, 0], model.encoder(states, torch.ones(3, 150))[0][:, 0], atol=1e-2)


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
def test_a_matrix_of_distances_may_be_given() -> None:
    model = make_model("deberta-v2")
    states, seen = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(2)), torch.ones(2, 30)
    matrix = torch.randint(-8, 8, (1, 30, 30), generator=torch.Generator().manual_seed(2))
    exact = model.encoder(states, seen, relative_pos=matrix)[0]
    hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(model.encoder(states, seen, relative_pos=matrix)[0], exact)


@torch.no_grad()
def test_a_classifier() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
    model = AutoModelForSequenceClassification.from_config(DebertaV2Config(vocab_size=60, **sizes, **own)).eval()
    inputs = {name: given[:2] for name, given in inputs_of(length=700).items()}  # the third begins with padding
    exact = model(**inputs).logits
    hf_effattn.patch_attention(model, "bi-clustered")
    assert classes_of(model) == {DebertaV2ByRows}
    torch.testing.assert_close(model(**inputs).logits, exact, rtol=0, atol=1e-5)


def test_the_first_deberta_is_refused_with_the_reason() -> None:
    """At the 512 tokens that it takes there was too little to gain."""
    model = DebertaModel(DebertaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=60))
    with pytest.raises(
        ValueError, match=r"DebertaModel: its model type \"deberta\" takes 512 tokens, .* 1\.0 to 1\.2 times as fast"
    ):
        hf_effattn.patch_attention(model, METHOD)


def test_speech_with_classes_of_the_same_name_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = SEWDModel(SEWDConfig(**sizes, conv_dim=(16,), conv_stride=(2,), conv_kernel=(3,), squeeze_factor=1))
    with pytest.raises(ValueError, match="SEWDModel"):
        hf_effattn.patch_attention(model, METHOD)
