"""First-order bi-clustered attention on a pretrained BERT's own queries, keys and values, in float64.

The spread of real scores is what random inputs do not have: in the first layer a head's scores differ by 20, and a few
keys hold a query's whole weight.
"""

import pytest
import torch
import torch.nn.functional as F
from support.closeness import assert_close_to_reference

from hf_effattn.measuring.recording import Measured, recording
from hf_effattn.ops import bi_clustered_attention, cluster_queries, query_residuals
from hf_effattn.ops.bi_clustered_attention import batched
from hf_effattn.ops.bi_clustered_attention.reference import LARGEST_VARIANCE_CORRECTION
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Passages, bundled_books

LENGTH, CLUSTERS, TOPK, KEY_CLUSTERS = 97, 9, 7, 8
COUNTS = {"clusters": CLUSTERS, "topk": TOPK, "key_clusters": KEY_CLUSTERS}


@pytest.fixture(scope="module")
def layers(real_model_folder):
    """Scaled query, key, value `(1, 12, 97, 32)` of every layer, and how the method groups them."""
    model, tokenizer, _ = load_model(str(real_model_folder))
    tokens, _, _ = Passages(tokenizer, bundled_books()).pairs(LENGTH, per_book=1)
    seen = []

    def keep(attention):
        seen.append([tensor.double() for tensor in (attention.query, attention.key, attention.value)])
        return attention.exact()

    with torch.no_grad(), recording(Measured.of(model), keep):
        model(input_ids=tokens[:1])
    inputs = []
    for query, key, value in seen:
        query = query * query.shape[-1] ** -0.5
        labels = cluster_queries(query, CLUSTERS, key=key)
        residuals, _ = query_residuals(query, labels, CLUSTERS)
        inputs.append((query, key, value, labels, cluster_queries(key, KEY_CLUSTERS, key=residuals)))
    assert len(inputs) == 6
    return inputs


def by_the_definition(query, key, value, labels, key_labels):
    """One head `(N, D)`, query by query and key by key: steps 2 to 5 of the definition, sums written out."""
    N, M = len(query), len(key)
    mean = {j: query[labels == j].mean(dim=0) for j in labels.unique().tolist()}
    eta = torch.stack([query[i] - mean[int(labels[i])] for i in range(N)])
    sigma = sum(torch.outer(row, row) for row in eta.detach()) / N
    groups = [torch.nonzero(key_labels == c).flatten().tolist() for c in key_labels.unique().tolist()]
    covariance, distance = [], torch.zeros(M, dtype=key.dtype)
    for group in groups:
        key_mean, value_mean = key[group].mean(dim=0), value[group].mean(dim=0)
        covariance.append(sum(torch.outer(key[t] - key_mean, value[t] - value_mean) for t in group) / len(group))
        for t in group:
            away = (key[t] - key_mean).detach()
            distance[t] = away @ sigma @ away
    tables = {}
    for j, centroid in mean.items():
        rank = (key @ centroid).detach() + distance.clamp(min=1e-30).log()
        top = set(rank.topk(TOPK).indices.tolist())
        at_key, weight = (key @ centroid).exp(), (key @ centroid + (distance / 2).clamp(max=0.5)).exp()
        rows = []
        for c, group in enumerate(groups):
            rest = [t for t in group if t not in top]
            if rest:
                mass = weight[rest].sum()
                tilted = [sum(weight[t] * rows[t] for t in rest) / mass for rows in (key, value)]
                rows.append((mass, *tilted, covariance[c]))
        at_top = sum(at_key[t] for t in top)
        on_clusters = sum(row[0] for row in rows)
        matrix = sum(row[0] * row[3] for row in rows) / (at_top + on_clusters)
        tables[j] = (sorted(top), rows, matrix, on_clusters / (at_top + on_clusters))
    output = []
    for i in range(N):
        top, rows, matrix, at_centroid = tables[int(labels[i])]
        exact = [(query[i] @ key[t]).exp() for t in top]
        tangents = [row[0] * (eta[i] @ row[1]).exp() for row in rows]
        total = sum(exact) + sum(tangents)
        out = sum(e * value[t] for e, t in zip(exact, top, strict=True))
        out = out + sum(e * row[2] for e, row in zip(tangents, rows, strict=True))
        ratio = sum(tangents) / total / at_centroid
        output.append(out / total + ratio * (eta[i] @ matrix))
    return torch.stack(output)


def attend(query, key, value, labels, key_labels, **options):
    return bi_clustered_attention(query, key, value, labels, key_labels, scale=1.0, **COUNTS, **options)


@pytest.mark.slow_except("0-0", "3-5")
@pytest.mark.parametrize("head", [0, 5])
@pytest.mark.parametrize("layer", range(6))
def test_values_and_gradients_are_those_of_the_definition(layers, layer, head):
    query, key, value, labels, key_labels = (tensor[:, head : head + 1] for tensor in layers[layer])
    noise = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(0))
    results = {}
    for form in ("definition", "reference", "batched"):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        if form == "definition":
            output = by_the_definition(*(leaf[0, 0] for leaf in leaves), labels[0, 0], key_labels[0, 0])[None, None]
        else:
            output = attend(*leaves, labels, key_labels, backend=form)
        results[form] = (output.detach(), *torch.autograd.grad((output * noise).sum(), leaves))
    for form in ("reference", "batched"):
        for name, actual, expected in zip("oqkv", results[form], results["definition"], strict=True):
            assert_close_to_reference(f"{name} of {form}", actual, expected, rtol=1e-11)


@pytest.mark.parametrize("layer", range(6))
def test_a_cluster_for_every_query_is_exact(layers, layer):
    query, key, value, _, key_labels = layers[layer]
    own = torch.arange(LENGTH).expand(1, 12, -1)
    counts = {"clusters": LENGTH, "topk": 1, "key_clusters": KEY_CLUSTERS}
    output = bi_clustered_attention(query, key, value, own, key_labels, scale=1.0, **counts)
    expected = F.scaled_dot_product_attention(query, key, value, scale=1.0)
    assert_close_to_reference("output", output, expected, rtol=1e-12)


def test_the_summaries_matter(layers):
    """The settings leave something to expand: the forms above do not agree by being exact."""
    for query, key, value, labels, key_labels in layers:
        expected = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        error = (attend(query, key, value, labels, key_labels) - expected).norm() / expected.norm()
        assert 0.01 < error < 0.9


def test_without_the_lift_there_is_more_error(layers, monkeypatch):
    """In the median head: at its centroid a cluster of keys has less mass than in the mean over the queries."""
    medians = []
    for largest in (LARGEST_VARIANCE_CORRECTION, 0.0):
        monkeypatch.setattr(batched, "LARGEST_VARIANCE_CORRECTION", largest)
        errors = []
        for query, key, value, labels, key_labels in layers:
            expected = F.scaled_dot_product_attention(query, key, value, scale=1.0)
            difference = attend(query, key, value, labels, key_labels) - expected
            errors.append(difference.norm(dim=(2, 3)) / expected.norm(dim=(2, 3)))
        medians.append(torch.cat(errors).median())
    assert medians[0] < 0.95 * medians[1]
