"""The kernels of neural clustering, under Triton's interpreter or on a GPU, against the reference."""

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.clustering_cases import make_inputs, with_gradients

from hf_effattn import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_similarity = pytest.mark.parametrize("similarity", ["dot", "cosine"])


def run(words, centroids, mask, **options):
    mask = None if mask is None else mask.to(DEVICE)
    results, labels = with_gradients(words.to(DEVICE), centroids.to(DEVICE), mask=mask, backend="triton", **options)
    return {name: tensor.cpu() for name, tensor in results.items()}, labels.cpu()


@pytest.mark.slow_except("2x23x5x12-*", "1x90x40x70-holes-*")
@each_similarity
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes", "row"])
@pytest.mark.parametrize(
    "sizes", [(2, 23, 5, 12), (1, 3, 7, 4), (1, 90, 40, 70)], ids=lambda sizes: "x".join(map(str, sizes))
)
def test_kernels_equal_reference(similarity, masks, sizes):
    """More words, centroids and columns than a tile, and fewer; within three times what plain PyTorch has."""
    words, centroids, mask = make_inputs(*sizes, masks=masks, dtype=torch.float32)
    options = {"similarity": similarity, "sharpness": 3.0 if similarity == "cosine" else 0.5}
    expected, labels = with_gradients(words.double(), centroids.double(), mask=mask, backend="reference", **options)
    baseline, _ = with_gradients(words, centroids, mask=mask, backend="reference", **options)
    actual, actual_labels = run(words, centroids, mask, **options)
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6, factor=3.0)
    assert torch.equal(actual_labels, labels)


@each_similarity
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(similarity, dtype):
    words, centroids, mask = make_inputs(1, 90, 20, 70, masks="right", dtype=dtype)
    options = {"similarity": similarity, "sharpness": 2.0 if similarity == "cosine" else 0.2}
    expected, labels = with_gradients(words.double(), centroids.double(), mask=mask, backend="reference", **options)
    baseline, _ = with_gradients(words, centroids, mask=mask, backend="reference", **options)
    actual, actual_labels = run(words, centroids, mask, **options)
    assert (actual_labels == labels).float().mean() > 0.95
    for name in expected:
        assert actual[name].dtype == dtype
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)


@each_similarity
def test_masked_garbage_changes_nothing_and_strides_do_not_matter(similarity):
    words, centroids, mask = make_inputs(masks="right", dtype=torch.float32)
    clean, labels = run(words, centroids, mask, similarity=similarity)
    words[-1, ~mask[-1]] = float("nan")
    words = words.transpose(1, 2).contiguous().transpose(1, 2)
    dirty, dirty_labels = run(words, centroids, mask, similarity=similarity)
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=0, atol=0)
    assert torch.equal(labels, dirty_labels)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_the_words_are_merged(monkeypatch, parts):
    from hf_effattn.ops.neural_clustering import triton as form

    monkeypatch.setattr(form, "split_count", lambda *sizes: parts)
    words, centroids, _ = make_inputs(1, 150, 5, 12, dtype=torch.float32)
    expected, labels = with_gradients(words.double(), centroids.double(), backend="reference")
    actual, actual_labels = run(words, centroids, None)
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=2e-6)
    assert torch.equal(actual_labels, labels)


@pytest.mark.slow_except("70-2-cosine", "70-2-dot")
@each_similarity
@pytest.mark.parametrize(("kib", "parts"), [(0, 1), (70, 1), (70, 2)])
def test_scores_of_a_few_words_at_a_time(monkeypatch, kib, parts, similarity):
    """Of one tile of words, and of several: parts go on where they stopped, scores for labels are made anew."""
    from hf_effattn.ops.neural_clustering import triton as form

    monkeypatch.setattr(form, "split_count", lambda *sizes: parts)
    monkeypatch.setattr(form, "SCORE_BYTES", kib * 1024)
    words, centroids, mask = make_inputs(2, 150, 40, 12, masks="left", dtype=torch.float32)
    mask[0, :64] = False  # the first step of a row has no word
    options = {"similarity": similarity, "sharpness": 3.0 if similarity == "cosine" else 0.5}
    expected, labels = with_gradients(words.double(), centroids.double(), mask=mask, backend="reference", **options)
    actual, actual_labels = run(words, centroids, mask, **options)
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=2e-6)
    assert torch.equal(actual_labels, labels)


@pytest.mark.slow_except("batched")
@pytest.mark.parametrize("backend", ["batched", "triton"])
def test_half_precision_keeps_the_gradients_of_many_words(backend):
    """A membership of 1/N times a gradient is 0 in float16, the sum over N of them is not."""
    words, centroids, _ = make_inputs(1, 4096, 2, 16, dtype=torch.float16)
    words, gradient = 20 * words, torch.full((1, 2, 16), 2.0**-14, dtype=torch.float16)
    gradient[..., ::2] *= -1
    assert ((gradient.amax() / 4096).half() == 0).all()

    def gradients(dtype, backend):
        leaves = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in (words, centroids)]
        updated, _ = ops.neural_clustering(*leaves, similarity="cosine", backend=backend)
        return torch.autograd.grad(updated, leaves, gradient.to(updated))[1].cpu()

    actual, expected = gradients(torch.float16, backend), gradients(torch.float64, "reference")
    assert_close_to_reference("centroids", actual, expected, rtol=torch.finfo(torch.float16).eps)


@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_autocast_changes_nothing(monkeypatch, parts, dtype):
    """The parts were once merged in the precision of autocast."""
    from hf_effattn.ops.neural_clustering import triton as form

    monkeypatch.setattr(form, "split_count", lambda *sizes: parts)
    words, centroids, mask = make_inputs(1, 150, 5, 12, masks="right", dtype=dtype)
    expected, labels = run(words, centroids, mask, similarity="cosine")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual, actual_labels = run(words, centroids, mask, similarity="cosine")
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
    assert torch.equal(actual_labels, labels)


def test_registered_with_torch_library():
    from hf_effattn.ops.neural_clustering import triton as _  # noqa: F401

    words, centroids, mask = make_inputs(1, 7, 3, 4, masks="holes", dtype=torch.float32)
    arguments = [words.to(DEVICE).requires_grad_(), centroids.to(DEVICE).requires_grad_(), True, mask.to(DEVICE)]
    torch.library.opcheck(torch.ops.hf_effattn.neural_clustering_triton.default, arguments)
