"""What holds for every patched model, whatever it is given."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support.cst_conversions import convert, small_model
from support.model_cases import Run, TextCase, check_influence, drawn_text, multiplied, text_of
from support.properties import property_test, same
from transformers import AutoConfig, AutoModel, PreTrainedModel

import hf_effattn

ENCODERS = ("bert", "distilbert")
DECODERS = ("gpt2", "llama")
METHODS = ("clustered", "i-clustered", "bi-clustered", "cst")
SERVED = [
    (kind, method) for kind in (*ENCODERS, *DECODERS) for method in METHODS if (kind, method) != ("llama", "cst")
]


@dataclass(frozen=True, kw_only=True)
class Case(TextCase):
    """A model patched by a method on a text."""

    kind: str
    method: str
    clusters: int
    topk: int
    key_clusters: int
    length: int


@st.composite
def cases(draw: st.DrawFn, kind: str, method: str) -> Case:
    return Case(
        kind=kind,
        method=method,
        **drawn_text(draw),
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


def queries_of(model: PreTrainedModel) -> list[torch.Tensor]:
    """The weights of the queries; GPT-2 has them beside others."""
    names = ("query.weight", "q_lin.weight", "q_proj.weight", "attn.c_attn.weight")
    weights = [weight.data for name, weight in model.named_parameters() if name.endswith(names)]
    return [weight[:, :32] if len(weight[0]) == 96 else weight for weight in weights]


def settings_of(case: Case) -> dict[str, Any]:
    if case.method == "cst":
        return {"slice_length": case.length}
    names = {"clustered": (), "i-clustered": ("topk",), "bi-clustered": ("topk", "key_clusters")}[case.method]
    chosen = {name: getattr(case, name) for name in ("clusters", *names)} | {"min_length": 0}
    if case.kind not in DECODERS:
        return chosen
    if "topk" in chosen:
        chosen["exact_keys"] = 6 * chosen.pop("topk")
    if case.method == "bi-clustered":
        del chosen["clusters"]
    return chosen | {"segment_length": case.length, "window": case.topk - 1}


@torch.no_grad()
def check(case: Case) -> None:
    model = model_of(case.kind, case.dtype)
    ids, mask = text_of(case, 60)

    def run(ids: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return output.masked_fill(mask[..., None] == 0, 0.0)

    with multiplied(queries_of(model), 10.0**case.exponent):
        before = run(ids)
        try:
            if case.method == "cst":
                convert(model, **settings_of(case))
                model.to(case.dtype)
            else:
                hf_effattn.patch_attention(model, case.method, **settings_of(case))
            output = run(ids)
            check_output(case, run, ids, mask, before, output)
        finally:
            hf_effattn.unpatch_attention(model)
        assert same(run(ids), before), "unpatching does not give the model back"


def check_output(
    case: Case, run: Run, ids: torch.Tensor, mask: torch.Tensor, before: torch.Tensor, output: torch.Tensor
) -> None:
    assert output.shape == before.shape
    assert output.dtype == before.dtype
    # The causal form over clusters multiplies in float16, which ends at 65,504.
    in_half = case.dtype == torch.float16 and case.kind in DECODERS and case.method != "cst"
    if before.isfinite().all() and not (in_half and case.exponent > 1):
        assert output.isfinite().all(), "not finite, where the exact model is"
    check_influence(case, run, ids, mask, output)
    if case.kind in DECODERS:
        other = ids.clone()
        other[:, -1] = 11
        assert same(run(other)[:, :-1], output[:, :-1]), "a token changes what comes before it"


@pytest.mark.slow_except("bert-*", "gpt2-bi-clustered", "gpt2-cst")
@pytest.mark.parametrize(("kind", "method"), SERVED)
def test_every_patched_model(kind, method):
    property_test(f"patched by {method}", check, cases(kind, method), share=12)
