"""A text of padding alone: 0 by every method, as in torch's SDPA, and no gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import attention_cases

from hf_effattn.patching.methods import Method, make_method

DENSE = attention_cases.Case("text of padding", N=23, M=23, masks="row")
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
