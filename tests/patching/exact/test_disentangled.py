"""DeBERTa's disentangled attention in rows: the definition, and the configs that test_relative_bias.py has not."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

import hf_effattn
from hf_effattn.patching.exact.architectures import deberta
from hf_effattn.patching.exact.architectures.deberta import attend_disentangled

from .contract import (
    METHOD,
    Kind,
    Near,
    check_against,
    check_recomputed_dropout,
    each,
    each_size_and_precision,
    key_mask,
)
from .test_relative_bias import OURS, encoded, inputs_of, make_model

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
KINDS = [
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


@each_size_and_precision
@pytest.mark.parametrize("vectors", ["both", "of keys", "of queries", "none"])
def test_against_the_definition(
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
    check_against(way(by_definition), attend, sizes, dtype, monkeypatch, also=(everywhere,))


def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
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
    exact = [model.encoder(states, *one)[0] for one in given]
    hf_effattn.patch_attention(model, METHOD)
    assert all(torch.equal(model.encoder(states, *one)[0], other) for one, other in zip(given, exact, strict=True))
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
