"""What holds for every attention op, whatever it is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.properties import property_test, same
from support.property_cases import (
    CHOOSES,
    OPS,
    Case,
    Inputs,
    attend,
    cases,
    exact_attention,
    largest_score,
    make_inputs,
)

from hf_effattn.ops.causal_clustered_attention import reference as causal_reference
from hf_effattn.ops.causal_clustered_attention.reference import exact_keys


def may_overflow(case: Case, inputs: Inputs) -> bool:
    """Whether float16 may be too small: the first order of bi-clustered attention has no bound that values give."""
    unbounded = case.op in ("bi_clustered_attention", "causal_clustered_attention")
    return unbounded and case.dtype == torch.float16 and largest_score(case, inputs) > 100


def check(case: Case) -> None:
    inputs = make_inputs(case)
    before = [rows.clone() for rows in inputs.tensors]
    output = attend(case, inputs)
    assert output.shape == (*inputs.query.shape[:3], inputs.value.shape[3])
    assert output.dtype == case.dtype
    for rows, copy in zip(inputs.tensors, before, strict=True):
        assert same(rows, copy), "an input was changed in place"
    check_weights(case, inputs, output)
    check_influence(case, inputs, output)
    if case.seed % 3 == 0:
        check_against_reference(case, inputs, output)


def check_weights(case: Case, inputs: Inputs, output: torch.Tensor) -> None:
    """Rows of weights sum to 1, constants come back, masked keys and queries have nothing."""
    if may_overflow(case, inputs) or not exact_attention(case, inputs).isfinite().all():
        return
    assert output.isfinite().all(), "not finite, where exact attention is"
    reads = (inputs.readers & inputs.tokens.any(dim=1, keepdim=True))[:, None, :, None]
    assert not output.masked_fill(reads, 0.0).any(), "a masked query has an output"
    M = inputs.key.shape[2]
    constant, weights = output[..., case.Dv :].double().split([1, M], dim=3)
    assert not weights.masked_fill(inputs.tokens[:, None, None], 0.0).any(), "a masked key has a weight"
    eps = torch.finfo(case.dtype).eps
    # The causal form adds what remains of a value to the mean of its cluster: rounding leaves a 0 below 0.
    least = -4 * eps if case.op == "causal_clustered_attention" else 0.0
    assert case.op == "bi_clustered_attention" or (weights >= least).all(), "a weight below 0"
    # Each of M weights is rounded on its own; a dipole's parts, which cancel, are as large as what is lost of a score.
    lost = eps * largest_score(case, inputs) if case.op == "bi_clustered_attention" else 0.0
    tolerance = 4 * eps * M * max([1.0, lost, *weights.abs().flatten().tolist()])
    target = reads.double().expand_as(constant)
    torch.testing.assert_close(weights.sum(dim=3, keepdim=True), target, rtol=0, atol=tolerance)
    torch.testing.assert_close(constant, target, rtol=0, atol=tolerance)


def check_influence(case: Case, inputs: Inputs, output: torch.Tensor) -> None:
    """What is masked, what stands in other items of the batch, and later tokens of a causal form change no bit."""
    if inputs.key_mask is not None:
        other = make_inputs(case, junk=3.0 if case.junk != 3.0 else -1.0)
        assert same(attend(case, other), output), "masked rows have influence"
    if case.B > 1:
        item = case.seed % case.B
        changed = inputs.map(torch.clone)
        others = torch.arange(case.B) != item
        for rows in changed.tensors:
            rows[others] = rows[others] * -0.5 + 1
        assert same(attend(case, changed)[item], output[item]), "another item has influence"
    if case.is_causal and case.N:
        first = case.seed % case.N
        later = inputs.map(torch.clone)
        for rows in later.tensors:
            rows[:, :, first:] = rows[:, :, first:] * -0.5 + 1
        assert same(attend(case, later)[:, :, :first], output[:, :, :first]), "a later token has influence"


@contextmanager
def ranks_moved_by(part: float) -> Iterator[None]:
    """Ranks of the causal reference's exact keys that differ by such a part.

    Two clusters may give all of their weight to one key each: both rank 1 to rounding, however the keys are moved.
    """

    def moved(clusters: Any, key: torch.Tensor, distances: torch.Tensor, topk: int) -> torch.Tensor:
        noise = torch.randn(distances.shape, generator=torch.Generator().manual_seed(0), dtype=distances.dtype)
        return exact_keys(clusters, key, distances * (1 + part * noise), topk)

    with patch.object(causal_reference, "exact_keys", moved):
        yield


def check_against_reference(case: Case, inputs: Inputs, output: torch.Tensor) -> None:
    """As near to the definition in float64 as the dtype allows."""
    if not (inputs.value.numel() and output.numel()):
        return
    eps = torch.finfo(case.dtype).eps
    size = 1 + largest_score(case, inputs)
    chooses = case.op in CHOOSES
    if chooses:
        if case.dtype.itemsize == 2 or case.equal == "keys":
            return  # any of the equal keys may be chosen
        size, eps = size * size, 1000 * eps
    if eps * size > 1e-2 or not output.isfinite().all():
        return  # rounding alone decides
    doubled = inputs.map(torch.Tensor.double)
    expected = attend(case, doubled, backend="reference")
    counted = inputs.value.double().masked_fill(~inputs.tokens[:, None, :, None], 0.0)
    atol = 16 * eps * size * counted.abs().amax().item()
    if chooses:
        generator = torch.Generator().manual_seed(0)
        moved = doubled.map(torch.clone)
        moved.key = moved.key * (1 + eps * torch.randn(moved.key.shape, generator=generator))
        # Of the causal form, keys of equal rank change places with one of the signs.
        for sign in (1, -1) if case.op == "causal_clustered_attention" else (0,):
            with ranks_moved_by(sign * eps):
                if not (attend(case, moved, backend="reference") - expected).abs().max().item() <= atol:
                    return  # keys of nearly equal rank
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol + 1e-7)


@pytest.mark.parametrize("op", OPS)
def test_every_attention_op(op):
    property_test(op, check, cases(op), share=40)


def check_gradients(case: Case) -> None:
    """Those of the definition in float64, and 0 in masked rows whatever stands there."""
    exponents = {name: getattr(case, name) / 8 for name in ("query_exponent", "key_exponent", "value_exponent")}
    case = replace(case, dtype=torch.float64, scale=None, **exponents)
    if case.op in CHOOSES and case.equal != "none":
        return  # any of equal keys may be chosen, and for equal queries any key
    results = []
    for backend in ("reference", "batched"):
        inputs = make_inputs(case).map(lambda rows: rows.detach().requires_grad_())
        output = attend(case, inputs, backend)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss = (output * weights).sum()
        if not loss.requires_grad:
            return  # no query sees a key
        results.append((output.detach(), *torch.autograd.grad(loss, inputs.tensors, materialize_grads=True)))
        for gradient, mask in zip(results[-1][1:], (inputs.readers, inputs.tokens, inputs.tokens), strict=True):
            assert not gradient.masked_fill(mask[:, None, :, None], 0.0).any(), "a masked row has a gradient"
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_every_attention_op(op):
    property_test(f"gradients of {op}", check_gradients, cases(op), share=20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_what_scores_share_is_not_rounded_with_them(op, dtype):
    """Of scores around 256 bfloat16 keeps whole numbers and float16 quarters; exact attention sums in float32."""
    shape: dict[str, Any] = {"B": 1, "key_heads": 2, "group": 1, "N": 96, "M": 96, "D": 16, "Dv": 16}
    plain: dict[str, Any] = {"layout": "contiguous", "masks": "none", "junk": 0.0, "equal": "none", "exact": False}
    sizes: dict[str, Any] = {"clusters": 8, "topk": 96, "key_clusters": 4, "length": 16, "method": "clustered"}
    exponents = dict.fromkeys(("query_exponent", "key_exponent", "value_exponent"), 0.0)
    case = Case(op, seed=0, dtype=dtype, scale=None, flag=True, **shape, **plain, **sizes, **exponents)
    inputs = make_inputs(replace(case, dtype=torch.float64)).map(lambda rows: (rows + 8).to(dtype))
    inputs.value -= 8
    expected = attend(case, inputs.map(torch.Tensor.double))
    output = attend(case, inputs).double()
    assert (output - expected).norm() < 4 * torch.finfo(dtype).eps * expected.norm()
