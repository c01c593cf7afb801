"""What all queries share, in bfloat16: a scale that is no power of two must not round it.

Of a query the rounding is seen by all keys alike, so the scores err by what the offset is larger than the rest.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import Case, attend, make_inputs

from hf_effattn.measuring.errors import relative_error
from hf_effattn.ops import slice_attention
from hf_effattn.ops.shared.precision import split_scale

CASE = Case("offset", H=4, key_heads=2, N=96, M=96, D=32, Dv=32, topk=96)
OPS = ("bi_clustered_attention", "improved_clustered_attention", "slice_attention")


def shared_offset(size=10.0):
    """Inputs whose queries share an offset `size` times as large as they are, and keys that hardly see it."""
    inputs = make_inputs(CASE)
    direction = F.normalize(torch.randn(CASE.D, generator=torch.Generator().manual_seed(1)).double(), dim=0)
    inputs.query = inputs.query + size * CASE.D**0.5 * direction
    inputs.key = inputs.key - 0.98 * (inputs.key @ direction)[..., None] * direction
    return inputs.to(torch.bfloat16)


def with_gradients(run, query, key, value):
    """The output, and the gradients of query, key and value."""
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = run(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    return output.detach(), *torch.autograd.grad(output, leaves, weights)


def exact(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@pytest.mark.parametrize("op", OPS)
def test_an_offset_of_all_queries_is_not_rounded(op):
    """With all keys exact, every op is exact attention; it was as far off as of queries that are rounded once more."""
    inputs = shared_offset()
    tensors = inputs.query, inputs.key, inputs.value
    rounded = inputs.query * CASE.D**-0.5

    def run(query, key, value, **options):
        if op == "slice_attention":
            return slice_attention(query, key, value, slice_length=CASE.N, **options)[0]
        inputs.query, inputs.key, inputs.value = query, key, value
        return attend(op, CASE, inputs, backend="batched", **options)

    expected = with_gradients(exact, *(tensor.double() for tensor in tensors))
    with torch.no_grad():
        limit = 0.9 * relative_error(expected[0], run(rounded, *tensors[1:], scale=1.0))
    output, *gradients = with_gradients(run, *(tensor.detach() for tensor in tensors))
    assert relative_error(expected[0], output) < limit
    for gradient, truth in zip(gradients, expected[1:], strict=True):
        assert relative_error(truth, gradient) < limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.125, 1.0, 32**-0.5, 3.7, -0.3, 0.0])
def test_factors_of_a_scale(scale, dtype):
    of_queries, rest = split_scale(scale, dtype)
    assert of_queries * rest == scale
    if dtype in (torch.bfloat16, torch.float16):
        assert math.frexp(of_queries)[0] == 0.5
        assert rest == 0 or 1 <= abs(rest) < 2
    else:
        assert rest == 1
