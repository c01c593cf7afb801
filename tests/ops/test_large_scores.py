"""Large queries and keys: scores that overflow their dtype, and an offset that all queries share.

A scale that is no power of two must not round what all queries share in bfloat16. Of a query the rounding is seen by
all keys alike, so the scores err by what the offset is larger than the rest.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import Case
from support.closeness import assert_close_to_reference
from support.op_cases import CLUSTERED, SLICES, to_dtype, with_gradients
from support.slice_cases import Case as SlicesCase

from hf_effattn.measuring.errors import relative_error
from hf_effattn.ops import slice_attention
from hf_effattn.ops.shared.precision import split_scale

CASE = Case("large", N=19, M=23, D=8, Dv=8, clusters=3, topk=3)
SIZES = {"H": 4, "key_heads": 2, "N": 96, "D": 32, "Dv": 32}
SHARED = {
    CLUSTERED[1]: Case("offset", M=96, topk=96, **SIZES),
    CLUSTERED[2]: Case("offset", M=96, topk=96, **SIZES),
    SLICES: SlicesCase("offset", L=96, **SIZES),
}
QUERY_KEY_VALUE = ("query", "key", "value")


def large(op, dtype, magnitude=1e4):
    inputs = op.make(CASE)
    return to_dtype(inputs | {name: inputs[name] * magnitude for name in ("query", "key")}, dtype)


@pytest.mark.parametrize("op", CLUSTERED[:2], ids=str)
def test_scores_beyond_float16_leave_outputs_and_gradients_finite(op):
    inputs = large(op, torch.float16)
    assert F.scaled_dot_product_attention(*(inputs[name] for name in QUERY_KEY_VALUE)).isfinite().all()
    tensors = with_gradients(op, CASE, inputs)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    exact = with_gradients(op, CASE, to_dtype(inputs, torch.float64), backend="reference")["output"]
    assert_close_to_reference("output", tensors["output"], exact, rtol=1e-6)


@pytest.mark.parametrize("backend", ["batched", "triton"])
def test_top_keys_are_chosen_by_score_where_weights_underflow(backend):
    """Of weights that are all 0 but one, the largest were any keys: the forms chose others."""
    op = CLUSTERED[1]
    inputs = large(op, torch.float32, magnitude=1e2)
    expected = with_gradients(op, CASE, to_dtype(inputs, torch.float64), backend="reference")["output"]
    output = with_gradients(op, CASE, inputs, backend=backend)["output"]
    assert_close_to_reference("output", output, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_weights_of_slices_sum_to_one_at_any_magnitude(dtype):
    key = large(CLUSTERED[0], dtype)["key"]
    query, key, value = (rows.detach().requires_grad_() for rows in (key, key.flip(2), torch.ones_like(key)))
    output = slice_attention(query, key, value, slice_length=4, extension_ratio=2)[0]
    torch.testing.assert_close(output, torch.ones_like(output), rtol=1e-6, atol=0)
    of_query, of_key, of_value = torch.autograd.grad(output.double().sum(), (query, key, value))
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


@pytest.mark.parametrize("op", SHARED, ids=str)
def test_an_offset_of_all_queries_is_not_rounded(op):
    """With all keys exact, every op is exact attention; it was as far off as of queries that are rounded once more."""
    case = SHARED[op]
    inputs = op.make(case)
    direction = F.normalize(torch.randn(case.D, generator=torch.Generator().manual_seed(1)).double(), dim=0)
    inputs["query"] = inputs["query"] + 10 * case.D**0.5 * direction
    inputs["key"] = inputs["key"] - 0.98 * (inputs["key"] @ direction)[..., None] * direction  # hardly sees it
    inputs = to_dtype(inputs, torch.bfloat16)

    def of_output_alone(case, inputs, **options):
        return {"output": op.call(case, inputs, **options)["output"]}

    def exact(case, inputs):
        return {"output": F.scaled_dot_product_attention(*(inputs[name] for name in QUERY_KEY_VALUE), enable_gqa=True)}

    expected = with_gradients(op, case, to_dtype(inputs, torch.float64), run=exact)
    rounded = of_output_alone(case, inputs | {"query": inputs["query"] * case.D**-0.5}, scale=1.0)["output"]
    limit = 0.9 * relative_error(expected["output"], rounded)
    for name, actual in with_gradients(op, case, inputs, run=of_output_alone).items():
        assert relative_error(expected[name], actual) < limit


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
