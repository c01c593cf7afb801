"""What holds for every patched model, whatever it is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support.cst_conversions import convert, small_model
from support.properties import property_test, same
from transformers import AutoConfig, AutoModel, PreTrainedModel

import hf_effattn

LENGTH = 23  # at most
ENCODERS = ("bert", "distilbert")
DECODERS = ("gpt2", "llama")
METHODS = ("clustered", "i-clustered", "bi-clustered", "cst")
SERVED = [
    (kind, method) for kind in (*ENCODERS, *DECODERS) for method in METHODS if (kind, method) != ("llama", "cst")
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One forward pass; `exponent`: the power of ten that the queries' weights are multiplied by."""

    kind: str
    method: str
    seed: int
    B: int
    N: int
    dtype: torch.dtype
    padding: str
    exponent: float
    all_equal: bool
    clusters: int
    topk: int
    key_clusters: int
    length: int


@st.composite
def cases(draw: st.DrawFn, kind: str, method: str) -> Case:
    return Case(
        kind,
        method,
        seed=draw(st.integers(0, 2**20)),
        B=draw(st.sampled_from((1, 2, 3))),
        N=draw(st.integers(1, LENGTH)),
        dtype=draw(st.sampled_from(DTYPES)),
        padding=draw(st.sampled_from(("none", "left", "right"))),
        exponent=draw(st.floats(-4, 4, width=16)),
        all_equal=draw(st.sampled_from((False, False, True))),
        clusters=draw(st.integers(1, 6)),
        topk=draw(st.integers(1, 9)),
        key_clusters=draw(st.integers(1, 6)),
        length=draw(st.integers(1, 7)),
    )


@lru_cache
def model_of(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """A tiny model with random weights."""
    if kind != "llama":
        return small_model(kind, AutoModel, **{"n_layer" if kind == "gpt2" else LAYERS[kind]: 2}).to(dtype)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.25}
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model("llama", **sizes, **heads)).eval().to(dtype)


LAYERS = {"bert": "num_hidden_layers", "distilbert": "n_layers"}


@contextmanager
def larger_queries(model: PreTrainedModel, factor: float) -> Iterator[None]:
    """The weights of the queries multiplied; GPT-2 has them beside others."""
    names = ("query.weight", "q_lin.weight", "q_proj.weight", "attn.c_attn.weight")
    weights = [weight.data for name, weight in model.named_parameters() if name.endswith(names)]
    queries = [weight[:, :32] if len(weight[0]) == 96 else weight for weight in weights]
    kept = [rows.clone() for rows in queries]
    for rows in queries:
        rows.mul_(factor)
    try:
        yield
    finally:
        for rows, copy in zip(queries, kept, strict=True):
            rows.copy_(copy)


def settings_of(case: Case) -> dict[str, Any]:
    if case.method == "cst":
        return {"slice_length": case.length}
    names = {"clustered": (), "i-clustered": ("topk",), "bi-clustered": ("topk", "key_clusters")}[case.method]
    chosen = {name: getattr(case, name) for name in ("clusters", *names)} | {"min_length": 0}
    return chosen | ({"segment_length": case.length, "window": case.topk - 1} if case.kind in DECODERS else {})


@torch.no_grad()
def check(case: Case) -> None:
    model = model_of(case.kind, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(5, 60, (case.B, 1 if case.all_equal else case.N), generator=generator).repeat(
        1, case.N if case.all_equal else 1
    )
    mask = torch.ones_like(ids)
    if case.padding != "none":
        padded = int(torch.randint(case.N, (1,), generator=generator))
        mask[-1, :padded] = 0
        mask = mask if case.padding == "left" else mask.flip(1)
    counts = mask.bool()

    def run(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask).last_hidden_state.masked_fill(~counts[..., None], 0.0)

    with larger_queries(model, 10.0**case.exponent):
        before = run(ids)
        try:
            if case.method == "cst":
                convert(model, **settings_of(case))
                model.to(case.dtype)
            else:
                hf_effattn.patch_attention(model, case.method, **settings_of(case))
            output = run(ids)
            check_output(case, run, ids, counts, before, output)
        finally:
            hf_effattn.unpatch_attention(model)
        assert same(run(ids), before), "unpatching does not give the model back"


def check_output(case, run, ids, counts, before, output) -> None:
    assert output.shape == before.shape
    assert output.dtype == before.dtype
    # The causal form over clusters multiplies in float16, which ends at 65,504.
    in_half = case.dtype == torch.float16 and case.kind in DECODERS and case.method != "cst"
    if before.isfinite().all() and not (in_half and case.exponent > 1):
        assert output.isfinite().all(), "not finite, where the exact model is"
    other = ids.masked_fill(~counts, 7)
    assert same(run(other), output), "padding has influence"
    if case.B > 1:
        item = case.seed % case.B
        other = ids.clone()
        other[torch.arange(case.B) != item] = 9
        assert same(run(other)[item], output[item]), "another text has influence"
    if case.kind in DECODERS:
        other = ids.clone()
        other[:, -1] = 11
        assert same(run(other)[:, :-1], output[:, :-1]), "a token changes what comes before it"


@pytest.mark.slow_except("bert-*", "gpt2-*")
@pytest.mark.parametrize(("kind", "method"), SERVED)
def test_every_patched_model(kind, method):
    property_test(f"patched by {method}", check, cases(kind, method), share=25)
