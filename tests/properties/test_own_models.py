"""What holds for the architectures of ours, ClusterFormer and Composite Slice Transformer, whatever they are given."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support import clusterformer_cases, cst_models
from support.properties import property_test, same
from transformers import PreTrainedModel

from hf_effattn.models import ClusterFormerModel, CSTModel

LENGTH = 23  # at most
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Causal ones know each word's cluster from the words before it; centroids have seen later words.
STRICT = ("neural", "dot", "post_norm", "wide_window", "lsh", "full")
CAUSAL_CST = (
    "paper",
    "half_extension",
    "three_levels",
    "max_pooling",
    "parallel",
    "global_local",
    "one_slice",
    "full",
)
BUILT: dict[str, list[tuple[str, bool]]] = {
    "clusterformer": [*product(clusterformer_cases.VARIANTS, [False]), *product(STRICT, [True])],
    "cst": [*product(cst_models.VARIANTS, [False]), *product(CAUSAL_CST, [True])],
}


@dataclass(frozen=True)
class Case:
    """One forward pass; `exponent`: the power of ten that the queries are multiplied by."""

    kind: str
    variant: str
    causal: bool
    seed: int
    B: int
    N: int
    dtype: torch.dtype
    padding: str
    exponent: float
    all_equal: bool


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    variant, causal = draw(st.sampled_from(BUILT[kind]))
    return Case(
        kind,
        variant,
        causal,
        seed=draw(st.integers(0, 2**20)),
        B=draw(st.sampled_from((1, 2, 3))),
        N=draw(st.integers(1, LENGTH)),
        dtype=draw(st.sampled_from(DTYPES)),
        padding=draw(st.sampled_from(("none", "left", "right"))),
        exponent=draw(st.floats(-4, 4, width=16)),
        all_equal=draw(st.sampled_from((False, False, True))),
    )


@lru_cache
def model_of(kind: str, variant: str, causal: bool, dtype: torch.dtype) -> PreTrainedModel:
    """A tiny model with random weights."""
    changes: dict[str, Any] = {"is_decoder": causal}
    if kind == "cst":
        return cst_models.tiny_model(CSTModel, variant, **changes).to(dtype)
    changes |= clusterformer_cases.VARIANTS[variant]
    return clusterformer_cases.tiny_model(ClusterFormerModel, dtype=dtype, **changes)


@torch.no_grad()
def check(case: Case) -> None:
    model = model_of(case.kind, case.variant, case.causal, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.B, 1 if case.all_equal else case.N
    ids = torch.randint(5, 50, shape, generator=generator).repeat(1, case.N if case.all_equal else 1)
    mask = torch.ones_like(ids)
    if case.padding != "none":
        mask[-1, : int(torch.randint(case.N, (1,), generator=generator))] = 0
        mask = mask if case.padding == "left" else mask.flip(1)
    counts = mask.bool()
    queries = [rows for name, rows in model.named_parameters() if ".query." in name]
    kept = [rows.clone() for rows in queries]

    def run(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask).last_hidden_state.masked_fill(~counts[..., None], 0.0)

    for rows in queries:
        rows.mul_(10.0**case.exponent)
    try:
        check_output(case, run, ids, counts)
    finally:
        for rows, copy in zip(queries, kept, strict=True):
            rows.copy_(copy)


def check_output(case, run, ids, counts) -> None:
    output = run(ids)
    assert output.shape[:2] == ids.shape
    assert output.dtype == case.dtype
    # Scores of float16 end at 65,504.
    if case.dtype != torch.float16 or case.exponent < 1:
        assert output.isfinite().all()
    assert same(run(ids.masked_fill(~counts, 7)), output), "padding has influence"
    if case.B > 1:
        item = case.seed % case.B
        other = ids.clone()
        other[torch.arange(case.B) != item] = 9
        assert same(run(other)[item], output[item]), "another text has influence"
    if case.causal:
        first = case.seed % case.N
        other = ids.clone()
        other[:, first:] = 11
        before, after = output[:, :first], run(other)[:, :first]
        if case.kind == "cst":
            assert same(after, before), "a token changes what comes before it"
        elif case.dtype == torch.float64:
            # To rounding: a later word's cluster changes the order of sums.
            torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", BUILT)
def test_every_own_model(kind):
    property_test(kind, check, cases(kind), share=60)
