"""What holds for every clustering, whatever it is given."""

from dataclasses import replace

import torch
from support.properties import property_test, same
from support.property_cases import Case, Inputs, cases, make_inputs

from hf_effattn import ops


def cluster(case: Case, inputs: Inputs, backend: str | None = None) -> torch.Tensor:
    in_metric = case.method != "clustered"
    return ops.cluster_queries(
        inputs.query,
        case.clusters,
        method="lsh" if case.method == "bi-clustered" else "kmeans",
        key=inputs.key if in_metric else None,
        key_mask=inputs.key_mask if in_metric else None,
        iterations=case.topk - 1,
        bits=case.length,
        fit_queries=4 * case.key_clusters,
        query_mask=inputs.query_mask,
        seed=case.seed,
        backend=backend,
    )


def others_changed(case: Case, inputs: Inputs) -> Inputs:
    """With other numbers in all items of the batch but one, `seed % B`."""
    changed = inputs.map(torch.clone)
    others = torch.arange(case.B) != case.seed % case.B
    for rows in changed.tensors:
        rows[others] = rows[others] * -0.5 + 1
    return changed


def check_labels(case: Case) -> None:
    inputs = make_inputs(case)
    before = [rows.clone() for rows in inputs.tensors]
    labels = cluster(case, inputs)
    assert all(same(rows, copy) for rows, copy in zip(inputs.tensors, before, strict=True)), "an input was changed"
    assert labels.shape == inputs.query.shape[:3]
    assert labels.dtype == torch.int64
    assert ((labels >= 0) & (labels < case.clusters)).all()
    assert not labels.masked_fill(inputs.readers[:, None], 0).any(), "a masked query has a label"
    other = make_inputs(case, junk=3.0)
    assert torch.equal(cluster(case, other), labels), "masked rows have influence"
    item = case.seed % case.B
    assert torch.equal(cluster(case, others_changed(case, inputs))[item], labels[item]), "another item has influence"
    assert torch.equal(cluster(case, inputs.map(torch.clone)), labels), "the layout in memory has influence"
    if case.equal == "queries" and inputs.query_mask is None and case.clusters < case.N:
        assert torch.equal(labels, labels[..., :1].expand_as(labels)), "equal queries are in several clusters"


def check_kmeans(case: Case) -> None:
    """Every point has the nearest centroid, and centroids lie among the points."""
    inputs = make_inputs(case)
    points, mask = inputs.query[:, 0], inputs.query_mask
    labels, centroids = ops.kmeans(points, case.clusters, iterations=case.topk, mask=mask, seed=case.seed)
    assert ((labels >= 0) & (labels < case.clusters)).all()
    assert centroids.isfinite().all()
    counted = points.to(centroids.dtype).masked_fill(~inputs.readers[..., None], 0.0)
    assert (centroids.abs().amax(dim=1) <= counted.abs().amax(dim=1) * (1 + 1e-5)).all()
    distances = torch.cdist(counted.double(), centroids.double())
    chosen = distances.gather(2, labels[..., None])[..., 0]
    largest = counted.double().norm(dim=2).amax(dim=1, keepdim=True)
    nearest = distances.masked_fill(_unused(labels, case.clusters)[:, None], torch.inf).amin(dim=2)
    excess = (chosen - nearest).masked_fill(~inputs.readers, 0.0)
    assert (excess <= 1e-2 * largest).all(), "a point is far from its centroid"


def _unused(labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """Clusters without a point, `(P, C)`."""
    return ~(labels[..., None] == torch.arange(clusters)).any(dim=1)


def check_neural_clustering(case: Case) -> None:
    inputs = make_inputs(case)
    words, centroids, mask = inputs.query[:, 0], inputs.key[:, 0, : case.clusters], inputs.query_mask
    centroids = centroids.nan_to_num(0.0, 0.0, 0.0)
    options = {"mask": mask, "similarity": "cosine" if case.flag else "dot"}
    updated, labels = ops.neural_clustering(words, centroids, **options)
    assert updated.isfinite().all()
    assert ((labels >= 0) & (labels < centroids.shape[1])).all()
    assert not labels.masked_fill(inputs.readers, 0).any(), "a masked word has a label"
    counted = words.masked_fill(~inputs.readers[..., None], 0.0)
    bound = counted.abs().amax(dim=1, keepdim=True)
    assert (updated.abs() <= bound * (1 + 4 * torch.finfo(case.dtype).eps) + 1e-7).all(), "outside the words"
    if mask is not None:
        other = make_inputs(case, junk=3.0).query[:, 0]
        for changed, first in zip(ops.neural_clustering(other, centroids, **options), (updated, labels), strict=True):
            assert same(changed, first), "masked words have influence"
    item = case.seed % case.B
    # In one layout: a product of rows that lie otherwise in memory may be rounded otherwise.
    both = [given.query[:, 0] for given in (inputs.map(torch.clone), others_changed(case, inputs))]
    for result, first in zip(*(ops.neural_clustering(rows, centroids, **options) for rows in both), strict=True):
        assert same(result[item], first[item]), "another item has influence"
    size = 1.0 if case.flag else 1 + (bound.double() * centroids.double().abs().amax()).amax().item() * case.D
    tolerance = 16 * torch.finfo(case.dtype).eps * size
    if tolerance < 1e-2:
        expected, _ = ops.neural_clustering(words.double(), centroids.double(), **options, backend="reference")
        torch.testing.assert_close(
            updated.double(), expected, rtol=0, atol=tolerance * bound.double().amax().item() + 1e-7
        )


def check_predicted_error(case: Case) -> None:
    """Not negative, and of no masked row or neighbour; where keys of a cluster are equal nothing is lost."""
    inputs = make_inputs(case)

    def predict(given: Inputs) -> torch.Tensor:
        settings = {"key_heads": case.key_heads, "query_mask": given.query_mask, "rows": case.topk + 1}
        residuals, counts = ops.query_residuals(given.query, given.labels, case.clusters, **settings)
        options = {"group": case.group, "key_mask": given.key_mask, "scale": case.scale}
        return ops.predicted_error(residuals, counts, given.key, given.key_labels, case.key_clusters, **options)

    error = predict(inputs)
    assert error.shape == (case.B, case.key_heads)
    assert (error >= 0).all()
    assert same(predict(make_inputs(case, junk=3.0)), error), "masked rows have influence"
    item = case.seed % case.B
    assert same(predict(others_changed(case, inputs))[item], error[item]), "another item has influence"
    if case.clusters == 1 and case.N == 1:
        assert not error.any(), "a query that is its own centroid"


def check_order(case: Case) -> None:
    """A permutation: by cluster, in the words' order within one, masked words last."""
    inputs = make_inputs(case)
    labels, mask = inputs.labels[:, 0] * (-1) ** case.flag, inputs.query_mask
    order = ops.cluster_order(labels, mask=mask)
    assert order.dtype == torch.int64
    words = [
        sorted(range(case.N), key=lambda word: (not inputs.readers[b, word], row[word] * inputs.readers[b, word]))
        for b, row in enumerate(labels.tolist())
    ]
    assert order.tolist() == words
    changed = labels if mask is None else labels.masked_fill(~mask, 2**62)
    assert torch.equal(ops.cluster_order(changed, mask=mask), order), "masked words have influence"


def test_labels_of_queries():
    property_test("cluster_queries", check_labels, cases("cluster_queries"), share=30)


def test_kmeans():
    property_test("kmeans", check_kmeans, cases("kmeans"), share=20)


def test_neural_clustering():
    property_test(
        "neural_clustering", check_neural_clustering, cases("neural_clustering").map(_with_enough_keys), share=40
    )


def test_predicted_errors():
    property_test("predicted_error", check_predicted_error, cases("predicted_error"), share=25)


def test_orders():
    property_test("cluster_order", check_order, cases("cluster_order"), share=25)


def _with_enough_keys(case: Case) -> Case:
    """At least as many keys as centroids are asked for."""
    return replace(case, M=max(case.M, case.clusters))
