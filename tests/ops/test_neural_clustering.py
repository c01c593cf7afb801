"""Neural clustering: against loops, float64, masks, gradients, compiled code."""

from math import exp, log, sqrt

import pytest
import torch
from support.clustering_cases import Case, cluster, make_inputs
from support.op_cases import NEURAL_CLUSTERING, with_gradients

from hf_effattn.ops import neural_clustering

BACKENDS = ("reference", "batched")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


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
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("sizes", [(3, 2, 2), (7, 3, 4), (2, 5, 3), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("masks", ["none", "right"])
def test_equals_the_definition_written_as_loops(backend, similarity, sizes, masks):
    N, k, d = sizes
    case = Case("loops", 2, N, k, d, masks, similarity, sharpness=3.0)
    words, centroids, mask = make_inputs(case)
    updated, labels = cluster(case, words, centroids, mask, backend=backend)
    counts = torch.ones(2, N) if mask is None else mask
    for b in range(2):
        expected, expected_labels = cluster_with_loops(
            words[b].tolist(), centroids[b].tolist(), counts[b].tolist(), similarity, 3.0
        )
        torch.testing.assert_close(updated[b], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=4e-15)
        assert labels[b].tolist() == expected_labels


@each_backend
def test_a_word_of_length_zero_has_similarity_zero_and_no_gradient_of_it(backend):
    case = Case("zero", similarity="cosine", sharpness=1.0)
    inputs = NEURAL_CLUSTERING.make(case)
    words, centroids, _ = inputs.values()
    words[0, 3] = 0.0
    results = with_gradients(NEURAL_CLUSTERING, case, inputs, backend=backend)

    leaves = words.requires_grad_(), centroids.requires_grad_()
    lengths = words.detach().norm(dim=-1, keepdim=True)
    directions = words / words.norm(dim=-1, keepdim=True).where(lengths > 0, torch.inf)
    unit = centroids / centroids.norm(dim=-1, keepdim=True)
    expected = (unit @ directions.transpose(1, 2)).softmax(dim=-1) @ words
    torch.testing.assert_close(results["updated"], expected.detach(), rtol=0, atol=1e-15)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, gradient in zip(("words", "centroids"), torch.autograd.grad(expected, leaves, weights), strict=True):
        torch.testing.assert_close(results[f"gradient of {name}"], gradient, rtol=0, atol=1e-15)
    assert results["gradient of words"][0, 3].abs().max() > 0  # its weight in the mean stays


@each_backend
def test_memberships_that_underflow_still_have_a_largest(backend):
    """The label is the argmax of U in logs: exp(-1000) is 0 for both centroids, one is larger all the same."""
    words = torch.tensor([[[1000.0, 0.0], [0.0, 0.0], [-1.0, 0.1]]], dtype=torch.float64)
    centroids = torch.tensor([[[1.0, 0.0], [0.9, 0.2]]], dtype=torch.float64)
    _, labels = neural_clustering(words, centroids, backend=backend)
    assert labels.tolist() == [[0, 1, 1]]


def test_mistakes_are_named():
    words, centroids, mask = make_inputs(Case("mistakes", masks="right"))
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
