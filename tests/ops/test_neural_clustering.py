"""Neural clustering: against loops, float64, masks, gradients, compiled code."""

from math import exp, log, sqrt

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.closeness import assert_close_to_reference
from support.clustering_cases import make_inputs, with_gradients

from hf_effattn.ops import neural_clustering

BACKENDS = ("reference", "batched")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_similarity = pytest.mark.parametrize("similarity", ["dot", "cosine"])


def cluster_with_loops(words, centroids, counts, similarity, sharpness):
    """Eq. 2 to 4 of one row in plain Python."""
    k, d = len(centroids), len(centroids[0])

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def likeness(a, b):
        return sharpness * dot(a, b) / (1.0 if similarity == "dot" else sqrt(dot(a, a) * dot(b, b)))

    seen = [j for j in range(len(words)) if counts[j]]
    phi = [{j: likeness(centroids[i], words[j]) for j in seen} for i in range(k)]
    total = [sum(exp(value) for value in row.values()) for row in phi]
    updated = [[sum(exp(phi[i][j]) / total[i] * words[j][a] for j in seen) for a in range(d)] for i in range(k)]
    labels = [0] * len(words)
    for j in seen:
        logs = [phi[i][j] - log(total[i]) for i in range(k)]
        labels[j] = logs.index(max(logs))
    return updated, labels


@each_backend
@each_similarity
@pytest.mark.parametrize("sizes", [(3, 2, 2), (7, 3, 4), (2, 5, 3), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("masks", ["none", "right"])
def test_equals_the_definition_written_as_loops(backend, similarity, sizes, masks):
    N, k, d = sizes
    words, centroids, mask = make_inputs(N=N, k=k, d=d, masks=masks)
    options = {"similarity": similarity, "sharpness": 3.0, "mask": mask, "backend": backend}
    updated, labels = neural_clustering(words, centroids, **options)
    counts = torch.ones(2, N) if mask is None else mask
    for b in range(2):
        expected, expected_labels = cluster_with_loops(
            words[b].tolist(), centroids[b].tolist(), counts[b].tolist(), similarity, 3.0
        )
        torch.testing.assert_close(updated[b], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=4e-15)
        assert labels[b].tolist() == expected_labels


@each_similarity
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes", "row"])
@pytest.mark.parametrize("sizes", [(2, 23, 5, 12), (1, 1, 3, 4), (3, 50, 1, 7), (2, 4, 9, 3)], ids=str)
def test_fast_form_equals_reference(similarity, masks, sizes):
    words, centroids, mask = make_inputs(*sizes, masks=masks)
    options = {"similarity": similarity, "sharpness": 4.0, "mask": mask}
    expected, expected_labels = with_gradients(words, centroids, backend="reference", **options)
    actual, labels = with_gradients(words, centroids, backend="batched", **options)
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)
    assert torch.equal(labels, expected_labels)


@each_similarity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_against_float64(similarity, dtype):
    words, centroids, mask = make_inputs(N=60, masks="holes", dtype=dtype)
    options = {"similarity": similarity, "sharpness": 1.5, "mask": mask}
    expected, _ = with_gradients(words.double(), centroids.double(), backend="reference", **options)
    baseline, _ = with_gradients(words, centroids, backend="reference", **options)
    actual, _ = with_gradients(words, centroids, backend="batched", **options)
    for name in expected:
        assert actual[name].dtype == dtype
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)


@each_similarity
def test_float16_scores_beyond_its_range(similarity):
    """Products of words with centroids, 66,000 to 200,000, were made in float16."""
    words, centroids, _ = make_inputs(N=9, k=3, d=16, dtype=torch.float16)
    words, centroids = (6400 * words, centroids) if similarity == "cosine" else (100 * words, 100 * centroids)
    sharpness = 15.0 if similarity == "cosine" else 1.0
    results, _ = with_gradients(words, centroids, similarity=similarity, sharpness=sharpness, backend="batched")
    assert all(tensor.isfinite().all() for tensor in results.values())


@each_backend
@each_similarity
@pytest.mark.parametrize("masks", ["none", "holes"])
def test_gradcheck(backend, similarity, masks):
    words, centroids, mask = make_inputs(N=6, k=3, d=3, masks=masks)
    leaves = words.requires_grad_(), centroids.requires_grad_()
    options = {"similarity": similarity, "sharpness": 2.0, "mask": mask, "backend": backend}
    assert torch.autograd.gradcheck(lambda w, c: neural_clustering(w, c, **options)[0], leaves)


@each_backend
@each_similarity
@pytest.mark.parametrize("garbage", [1e4, float("inf"), float("nan")])
def test_masked_words_change_nothing(backend, similarity, garbage):
    """Neither their values nor their presence: a padded row equals the row alone."""
    words, centroids, mask = make_inputs(masks="right")
    options = {"similarity": similarity, "backend": backend}
    clean, labels = with_gradients(words, centroids, mask=mask, **options)
    dirty_words = words.clone()
    dirty_words[-1, ~mask[-1]] = garbage
    dirty, dirty_labels = with_gradients(dirty_words, centroids, mask=mask, **options)
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=0, atol=0)
    assert torch.equal(labels, dirty_labels)
    assert (labels[-1, ~mask[-1]] == 0).all()
    assert (dirty["words"][-1, ~mask[-1]] == 0).all()
    alone, alone_labels = neural_clustering(words[-1:, mask[-1]], centroids[-1:], **options)
    torch.testing.assert_close(clean["updated"][-1:], alone, rtol=1e-13, atol=1e-14)
    assert torch.equal(labels[-1:, mask[-1]], alone_labels)


@each_backend
@each_similarity
def test_a_row_without_words_gives_zero_and_no_gradient(backend, similarity):
    words, centroids, mask = make_inputs(masks="row")
    results, _ = with_gradients(words, centroids, mask=mask, similarity=similarity, backend=backend)
    assert all((tensor[-1] == 0).all() for tensor in results.values())
    assert all((tensor[0] != 0).any() for tensor in results.values())


@each_backend
def test_a_word_of_length_zero_has_similarity_zero_and_no_gradient_of_it(backend):
    words, centroids, _ = make_inputs()
    words[0, 3] = 0.0
    results, _ = with_gradients(words, centroids, similarity="cosine", backend=backend)

    leaves = words.requires_grad_(), centroids.requires_grad_()
    lengths = words.detach().norm(dim=-1, keepdim=True)
    directions = words / words.norm(dim=-1, keepdim=True).where(lengths > 0, torch.inf)
    unit = centroids / centroids.norm(dim=-1, keepdim=True)
    expected = (unit @ directions.transpose(1, 2)).softmax(dim=-1) @ words
    torch.testing.assert_close(results["updated"], expected.detach(), rtol=0, atol=1e-15)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, gradient in zip(("words", "centroids"), torch.autograd.grad(expected, leaves, weights), strict=True):
        torch.testing.assert_close(results[name], gradient, rtol=0, atol=1e-15)
    assert results["words"][0, 3].abs().max() > 0  # its weight in the mean stays


@each_backend
def test_memberships_that_underflow_still_have_a_largest(backend):
    """The label is the argmax of U in logs: exp(-1000) is 0 for both centroids, one is larger all the same."""
    words = torch.tensor([[[1000.0, 0.0], [0.0, 0.0], [-1.0, 0.1]]], dtype=torch.float64)
    centroids = torch.tensor([[[1.0, 0.0], [0.9, 0.2]]], dtype=torch.float64)
    _, labels = neural_clustering(words, centroids, backend=backend)
    assert labels.tolist() == [[0, 1, 1]]


@each_similarity
def test_compiles_as_one_graph(similarity):
    words, centroids, mask = make_inputs(masks="holes")
    expected, labels = with_gradients(words, centroids, mask=mask, similarity=similarity)
    compiled = torch.compile(neural_clustering, fullgraph=True, backend="aot_eager")
    leaves = words.requires_grad_(), centroids.requires_grad_()
    updated, compiled_labels = compiled(*leaves, mask=mask, similarity=similarity)
    assert torch.equal(compiled_labels, labels)
    weights = torch.randn(updated.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(updated, leaves, weights)
    for name, tensor in zip(("updated", "words", "centroids"), (updated, *gradients), strict=True):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-14, atol=1e-14)


def test_registered_with_torch_library():
    words, centroids, mask = make_inputs(N=7, masks="holes")
    arguments = words.requires_grad_(), centroids.requires_grad_(), True, mask
    torch.library.opcheck(torch.ops.hf_effattn.neural_clustering.default, arguments)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 12), st.integers(1, 9)),
    masks=st.sampled_from(["none", "right", "left", "holes", "row"]),
    similarity=st.sampled_from(["dot", "cosine"]),
    seed=st.integers(0, 2**16),
)
def test_any_sizes(sizes, masks, similarity, seed):
    assume(similarity == "dot" or sizes[3] > 1)  # in one dimension cosines are 1 or -1: which of many is largest?
    words, centroids, mask = make_inputs(*sizes, masks=masks, seed=seed)
    options = {"mask": mask, "similarity": similarity}
    expected, expected_labels = with_gradients(words, centroids, backend="reference", **options)
    actual, labels = with_gradients(words, centroids, backend="batched", **options)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-13)
    assert torch.equal(labels, expected_labels)


def test_mistakes_are_named():
    words, centroids, mask = make_inputs(masks="right")
    with pytest.raises(ValueError, match="centroids must have 3 dimensions"):
        neural_clustering(words, centroids[0])
    with pytest.raises(ValueError, match="must agree with words"):
        neural_clustering(words, centroids[..., :-1])
    with pytest.raises(ValueError, match="similarity must be one of 'dot', 'cosine', got 'l2'"):
        neural_clustering(words, centroids, similarity="l2")
    for sharpness in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="sharpness must be above 0 and finite"):
            neural_clustering(words, centroids, sharpness=sharpness)
    with pytest.raises(TypeError, match="mask must be boolean"):
        neural_clustering(words, centroids, mask=mask.long())
    with pytest.raises(ValueError, match="share dtype and device"):
        neural_clustering(words, centroids.float())
    with pytest.raises(ValueError, match="at least one centroid"):
        neural_clustering(words, centroids[:, :0])
    with pytest.raises(TypeError, match="floating-point"):
        neural_clustering(words.long(), centroids)
