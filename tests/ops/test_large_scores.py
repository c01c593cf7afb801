"""Queries, keys and values so large that scores overflow their dtype: results stay finite where exact ones do."""

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import Case, attend, make_inputs
from support.closeness import assert_close_to_reference

from hf_effattn.ops import slice_attention

CASE = Case("large", N=19, M=23, D=8, Dv=8, clusters=3, topk=3)


def large(dtype, magnitude=1e4):
    inputs = make_inputs(CASE)
    inputs.query, inputs.key = inputs.query * magnitude, inputs.key * magnitude
    return inputs.to(dtype)


def with_gradients(run, *tensors):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = run(*leaves)
    return output.detach(), *torch.autograd.grad(output.double().sum(), leaves)


@pytest.mark.parametrize("op", ["clustered_attention", "improved_clustered_attention"])
def test_scores_beyond_float16_leave_outputs_and_gradients_finite(op):
    inputs = large(torch.float16)

    def run(query, key, value):
        inputs.query, inputs.key, inputs.value = query, key, value
        return attend(op, CASE, inputs)

    tensors = inputs.query, inputs.key, inputs.value
    assert F.scaled_dot_product_attention(*tensors).isfinite().all()
    output, *gradients = with_gradients(run, *tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)
    exact = attend(op, CASE, inputs.to(torch.float64), backend="reference")
    assert_close_to_reference(op, output.double(), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_weights_of_slices_sum_to_one_at_any_magnitude(dtype):
    inputs = large(dtype)
    tensors = inputs.key, inputs.key.flip(2), torch.ones_like(inputs.value)

    def run(query, key, value):
        return slice_attention(query, key, value, slice_length=4, extension_ratio=2)[0]

    output, of_query, of_key, of_value = with_gradients(run, *tensors)
    torch.testing.assert_close(output, torch.ones_like(output), rtol=1e-6, atol=0)
    assert all(gradient.isfinite().all() for gradient in (of_query, of_key))
    assert of_value.double().sum().item() == pytest.approx(output.numel(), rel=1e-6)


def test_equal_large_scores_share_their_weight_in_slices():
    """Of scores of 1e8 a log-sum-exp in float32 is as coarse as 8: each of two equal keys got weight 1."""
    query = torch.full((1, 1, 4, 1), 1e4)
    key = torch.tensor([1e4, 1e4, 0.0, 0.0]).view(1, 1, 4, 1)
    value = torch.tensor([1.0, 3.0, 0.0, 0.0]).view(1, 1, 4, 1).requires_grad_()
    output, _, lse = slice_attention(query, key, value, slice_length=4, return_lse=True)
    torch.testing.assert_close(output, torch.full_like(output, 2.0))
    assert torch.equal(lse, torch.full_like(lse, 1e8))
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(gradient.flatten(), torch.tensor([2.0, 2.0, 0.0, 0.0]))


@pytest.mark.parametrize("backend", ["batched", "triton"])
def test_top_keys_are_chosen_by_score_where_weights_underflow(backend):
    """Of weights that are all 0 but one, the largest were any keys: the forms chose others."""
    inputs = large(torch.float64, magnitude=1e2).to(torch.float32)
    expected = attend("improved_clustered_attention", CASE, inputs.to(torch.float64), backend="reference")
    output = attend("improved_clustered_attention", CASE, inputs, backend=backend)
    assert_close_to_reference("output", output, expected)
