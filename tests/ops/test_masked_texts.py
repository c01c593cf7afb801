"""A text of padding alone, or one whose keys are all masked: 0 in every form, as in torch's SDPA, and no gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import attention_cases, causal_cases, slice_cases

from hf_effattn.patching.methods import Method, make_method

BACKENDS = ("reference", "batched", "triton")
DENSE = attention_cases.Case("text of padding", N=23, M=23, masks="row")
CAUSAL = causal_cases.Case("text of padding", masks="row", N=19)
SLICES = slice_cases.Case("text of padding", masks="row", N=19)
LOCAL: dict[bool, dict[str, Any]] = {False: {}, True: {"segment_length": 4, "window": 4}}
RUNGS: dict[bool, list[dict[str, Any]]] = {
    False: [{"method": "bi-clustered", "clusters": 3, "topk": 2, "key_clusters": 4}],
    True: [{"method": "bi-clustered", "exact_keys": 12, "key_clusters": 2, **LOCAL[True]}],
}
COUNTS: dict[bool, dict[str, Any]] = {False: {"topk": 2}, True: {"exact_keys": 12}}
METHODS = [
    (causal, method)
    for causal, (candidate,) in RUNGS.items()
    for method in (
        make_method("clustered", causal=causal, clusters=3, **LOCAL[causal], min_length=0),
        make_method("i-clustered", causal=causal, clusters=3, **COUNTS[causal], **LOCAL[causal], min_length=0),
        make_method(**candidate, causal=causal, min_length=0),
        make_method(**candidate, causal=causal, min_length=0, tolerance=0.5),
        make_method("per-head", causal=causal, candidates=[candidate], heads=[[0, 1]], min_length=0),
        make_method("cst", slice_length=4),
        make_method("exact"),
    )
]


def assert_last_is_zero(
    attend: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    inputs = [rows.clone().requires_grad_() for rows in (query, key, value)]
    output = attend(*inputs)
    assert torch.equal(output[-1], torch.zeros_like(output[-1]))
    assert output[0].abs().sum() > 0
    for gradient in torch.autograd.grad(output.square().sum() + output.sum(), inputs):
        assert torch.equal(gradient[-1], torch.zeros_like(gradient[-1]))
        assert gradient.isfinite().all()


@pytest.mark.slow_except("*-reference-*", "*-batched-*")
@pytest.mark.parametrize("keys_alone", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["clustered_attention", "improved_clustered_attention", "bi_clustered_attention"])
def test_of_clusters(op: str, backend: str, keys_alone: bool) -> None:
    x = attention_cases.make_inputs(DENSE, torch.float32)
    options = {"backend": backend} | ({"query_mask": None} if keys_alone else {})

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        given = attention_cases.Inputs(query, key, value, x.labels, x.key_labels, x.key_mask, x.query_mask)
        return attention_cases.attend(op, DENSE, given, **options)

    assert_last_is_zero(attend, x.query, x.key, x.value)


@pytest.mark.slow_except("*-reference", "*-batched")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", causal_cases.METHODS)
def test_of_clusters_that_hide_the_future(method: str, backend: str) -> None:
    *inputs, mask = causal_cases.make_inputs(CAUSAL, torch.float32)
    assert_last_is_zero(lambda *rows: causal_cases.attend(method, CAUSAL, *rows, mask, backend=backend), *inputs)


@pytest.mark.slow_except("reference", "batched")
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_slices(backend: str) -> None:
    made = slice_cases.make_inputs(SLICES, torch.float32)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return slice_cases.attend(SLICES, made | {"query": query, "key": key, "value": value}, backend=backend)[0]

    assert_last_is_zero(attend, made["query"], made["key"], made["value"])


@pytest.mark.parametrize(("causal", "method"), METHODS, ids=str)
def test_of_every_method(causal: bool, method: Method) -> None:
    x = attention_cases.make_inputs(DENSE, torch.float32)
    assert_last_is_zero(
        lambda *rows: method.run(*rows, key_mask=x.key_mask, causal=causal, training=True), x.query, x.key, x.value
    )


def test_of_torch() -> None:
    """What the exact model gives, and what ONNX's attention does not: there it is the mean of the masked values."""
    x = attention_cases.make_inputs(DENSE, torch.float32)
    mask = x.key_mask[:, None, None].expand(-1, 1, DENSE.N, -1)
    assert_last_is_zero(lambda *rows: F.scaled_dot_product_attention(*rows, attn_mask=mask), x.query, x.key, x.value)
