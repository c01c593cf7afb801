"""What only the kernels of neural clustering can get wrong: on a GPU, else under Triton's interpreter."""

from importlib import import_module

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.clustering_cases import Case
from support.op_cases import DEVICE, NEURAL_CLUSTERING, check_kernels, with_gradients

from hf_effattn import ops


@pytest.fixture
def form():
    return import_module("hf_effattn.ops.neural_clustering.triton")


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_the_words_are_merged(monkeypatch, parts, form):
    monkeypatch.setattr(form, "split_count", lambda *sizes: parts)
    case = Case("parts", B=1, N=150, sharpness=1.0)
    check_kernels(NEURAL_CLUSTERING, case, NEURAL_CLUSTERING.make(case, torch.float32))


@pytest.mark.slow_except("70-2-cosine")
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize(("kib", "parts"), [(0, 1), (70, 1), (70, 2)])
def test_scores_of_a_few_words_at_a_time(monkeypatch, kib, parts, similarity, form):
    """Of one tile of words, and of several: parts go on where they stopped, scores for labels are made anew."""
    monkeypatch.setattr(form, "split_count", lambda *sizes: parts)
    monkeypatch.setattr(form, "SCORE_BYTES", kib * 1024)
    sharpness = 3.0 if similarity == "cosine" else 0.5
    case = Case("few", N=150, k=40, masks="left", similarity=similarity, sharpness=sharpness)
    inputs = NEURAL_CLUSTERING.make(case, torch.float32)
    inputs["mask"][0, :64] = False  # the first step of a row has no word
    check_kernels(NEURAL_CLUSTERING, case, inputs)


@pytest.mark.slow_except("batched")
@pytest.mark.parametrize("backend", ["batched", "triton"])
def test_half_precision_keeps_the_gradients_of_many_words(backend):
    """A membership of 1/N times a gradient is 0 in float16, the sum over N of them is not."""
    words, centroids, _ = NEURAL_CLUSTERING.make(Case("many", B=1, N=4096, k=2, d=16), torch.float16).values()
    words, gradient = 20 * words, torch.full((1, 2, 16), 2.0**-14, dtype=torch.float16)
    gradient[..., ::2] *= -1
    assert ((gradient.amax() / 4096).half() == 0).all()

    def gradients(dtype, backend):
        leaves = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in (words, centroids)]
        updated, _ = ops.neural_clustering(*leaves, similarity="cosine", backend=backend)
        return torch.autograd.grad(updated, leaves, gradient.to(updated))[1].cpu()

    actual, expected = gradients(torch.float16, backend), gradients(torch.float64, "reference")
    assert_close_to_reference("centroids", actual, expected, rtol=torch.finfo(torch.float16).eps)


@pytest.mark.slow_except("a_gpu")
@pytest.mark.usefixtures("autocast_rules")
def test_autocast_does_not_change_how_parts_are_merged(monkeypatch, form):
    monkeypatch.setattr(form, "split_count", lambda *sizes: 3)
    case = Case("parts", B=1, N=150, masks="right", similarity="cosine", sharpness=1.0)
    inputs = NEURAL_CLUSTERING.make(case, torch.bfloat16)
    expected = with_gradients(NEURAL_CLUSTERING, case, inputs, backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual = with_gradients(NEURAL_CLUSTERING, case, inputs, backend="triton")
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
