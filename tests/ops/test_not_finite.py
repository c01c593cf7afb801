"""Tokens that are not finite: what they must not reach."""

import pytest
import torch
from support.causal_cases import METHODS, Case, attend, make_inputs

from hf_effattn.ops import neural_clustering

TOKEN = 17  # in the middle of a segment
SPECIAL = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.slow_except("*-batched-*")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", ["reference", "batched"])
@pytest.mark.parametrize("masks", ["none", "left"])
def test_a_token_that_is_not_finite_changes_no_earlier_output(method, backend, masks):
    """0 times a value that was NaN made the outputs of its segment NaN, those before it too."""
    case = Case("not finite", H=4, key_heads=2, masks=masks)
    *inputs, mask = make_inputs(case)
    before = attend(method, case, *inputs, mask, backend=backend)
    for number, special in ((0, SPECIAL[0]), (1, SPECIAL[1]), (2, SPECIAL[0]), (2, SPECIAL[2])):
        changed = [rows.clone() for rows in inputs]
        changed[number][:, 1, TOKEN, 0] = special
        output = attend(method, case, *changed, mask, backend=backend)
        assert torch.equal(output[:, :, :TOKEN], before[:, :, :TOKEN])


@pytest.mark.slow_except("nan-batched-*i-clustered|inf-batched-bi-clustered|nan-reference-clustered")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", ["reference", "batched"])
@pytest.mark.parametrize("special", SPECIAL)
def test_a_value_that_is_not_finite_reaches_all_later_outputs(method, backend, special):
    case = Case("not finite", H=4, key_heads=2, masks="right")
    query, key, value, mask = make_inputs(case)
    plain = attend(method, case, query, key, value, mask, backend=backend)
    value = value.clone().masked_fill(~mask[:, None, :, None], special)  # what is masked does not count
    assert torch.equal(attend(method, case, query, key, value, mask, backend=backend), plain)
    value[0, 1, TOKEN, 2] = special
    output = attend(method, case, query, key, value, mask, backend=backend)
    reached = output[0, 2:, TOKEN:, 2][:, mask[0, TOKEN:]]
    assert torch.equal(reached, torch.full_like(reached, special)) or (special != special and reached.isnan().all())
    output[0, 2:, TOKEN:, 2] = plain[0, 2:, TOKEN:, 2]
    torch.testing.assert_close(output, plain)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_earlier_outputs_stay_finite(method):
    case = Case("not finite", masks="none")
    *inputs, mask = make_inputs(case)
    grads = []
    for special in (0.0, float("nan")):
        rows = [tensor.clone() for tensor in inputs]
        rows[2][:, :, TOKEN] = special
        rows = [tensor.requires_grad_() for tensor in rows]
        output = attend(method, case, *rows, mask, backend="batched")
        grads.append(torch.autograd.grad(output[:, :, :TOKEN].square().sum(), rows))
    for plain, special in zip(*grads, strict=True):
        assert torch.equal(special, plain)


@pytest.mark.parametrize("backend", ["reference", "batched"])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("argument", [0, 1], ids=["words", "centroids"])
def test_an_item_that_is_not_finite_changes_no_clusters_of_another(backend, similarity, dtype, argument):
    generator = torch.Generator().manual_seed(0)
    for N, d, k in ((1, 1, 1), (7, 3, 2), (33, 17, 5)):
        inputs = [torch.randn(3, rows, d, generator=generator).to(dtype) for rows in (N, k)]
        options = {"similarity": similarity, "backend": backend}
        before = neural_clustering(*inputs, **options)
        inputs[argument] = inputs[argument].clone()
        inputs[argument][1, -1] = float("nan")
        for plain, changed in zip(before, neural_clustering(*inputs, **options), strict=True):
            assert torch.equal(changed[::2], plain[::2])
