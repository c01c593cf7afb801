"""What holds for the architectures of ours, ClusterFormer and Composite Slice Transformer, whatever they are given."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support import clusterformer_cases, cst_models
from support.model_cases import Run, TextCase, check_influence, drawn_text, multiplied, text_of
from support.properties import property_test, same
from transformers import PreTrainedModel

from hf_effattn.models import ClusterFormerModel, CSTModel

# Causal ones know each word's cluster from the words before it; centroids have seen later words.
STRICT = ("neural", "dot", "post_norm", "wide_window", "lsh", "full")
CAUSAL_CST = (
    "paper", "half_extension", "three_levels", "max_pooling", "parallel", "global_local", "one_slice", "full",
)  # fmt: skip
BUILT: dict[str, list[tuple[str, bool]]] = {
    "clusterformer": [*product(clusterformer_cases.VARIANTS, [False]), *product(STRICT, [True])],
    "cst": [*product(cst_models.VARIANTS, [False]), *product(CAUSAL_CST, [True])],
}


@dataclass(frozen=True, kw_only=True)
class Case(TextCase):
    """A model of ours on a text."""

    kind: str
    variant: str
    causal: bool


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    variant, causal = draw(st.sampled_from(BUILT[kind]))
    return Case(kind=kind, variant=variant, causal=causal, **drawn_text(draw))


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
    ids, mask = text_of(case, 50)

    def run(ids: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return output.masked_fill(mask[..., None] == 0, 0.0)

    queries = [rows for name, rows in model.named_parameters() if ".query." in name]
    with multiplied(queries, 10.0**case.exponent):
        check_output(case, run, ids, mask)


def check_output(case: Case, run: Run, ids: torch.Tensor, mask: torch.Tensor) -> None:
    output = run(ids)
    assert output.shape[:2] == ids.shape
    assert output.dtype == case.dtype
    # Scores of float16 end at 65,504.
    if case.dtype != torch.float16 or case.exponent < 1:
        assert output.isfinite().all()
    check_influence(case, run, ids, mask, output)
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
    property_test(kind, check, cases(kind), share=20)
