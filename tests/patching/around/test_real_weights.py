"""A pretrained BERT on real text: what patching and converting promise, on the weights and the words they are for."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import attend_to_key_clusters_with_loops, residuals_with_loops
from support.closeness import assert_close_to_reference

import hf_effattn
from hf_effattn.measuring.recording import Measured, recording
from hf_effattn.ops import bi_clustered_attention, cluster_queries, query_residuals
from hf_effattn.ops.bi_clustered_attention import batched
from hf_effattn.ops.bi_clustered_attention.reference import LARGEST_VARIANCE_CORRECTION
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Passages, bundled_books

FEW = {"clusters": 25, "topk": 32}
MANY = {"clusters": 100, "topk": 64}
# Mean cosine of sentence embeddings with the exact model's, all layers patched: method, tokens, counts, at least.
PROMISED = [
    ("i-clustered", 128, FEW, 0.997),
    ("i-clustered", 256, FEW, 0.989),
    ("i-clustered", 256, MANY, 0.999),
    ("bi-clustered", 128, FEW | {"key_clusters": 50}, 0.999),
    ("bi-clustered", 256, FEW | {"key_clusters": 50}, 0.995),
    ("bi-clustered", 512, MANY | {"key_clusters": 200}, 0.999),
    # Before any fine-tuning.
    ("cst", 128, {"slice_length": 16}, 0.82),
    ("cst", 128, {"slice_length": 16, "extension_ratio": 3}, 0.91),
    ("cst", 128, {"slice_length": 64}, 0.94),
    ("cst", 128, {"slice_length": 64, "extension_ratio": 3}, 1 - 1e-5),
]


@pytest.fixture(scope="module")
def bert(real_model_folder):
    model, tokenizer, _ = load_model(str(real_model_folder))
    return model, Passages(tokenizer, bundled_books())


@pytest.fixture(scope="module")
def excerpts(bert):
    """Tokens of three excerpts of every book, of long ones one; their books; their exact embeddings; for a length."""
    model, passages = bert

    @cache
    def of_length(length):
        tokens, _, books = passages.pairs(length, per_book=3 if length < 512 else 1)
        return tokens, books, embed(model, tokens)

    return of_length


def embed(model, tokens, **inputs):
    with torch.no_grad():
        hidden = model(input_ids=tokens, **inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(tokens))[..., None]
    return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def cosine(model, tokens, exact, method, **settings):
    """Of the embeddings of a patched model with the exact ones, in the mean."""
    hf_effattn.patch_attention(model, method, min_length=0, **settings)
    patched = embed(model, tokens)
    hf_effattn.unpatch_attention(model)
    cosines = (patched * exact).sum(dim=-1)
    print(f"{len(tokens)} texts, {method} {settings}: mean cosine {cosines.mean():.5f}, lowest {cosines.min():.5f}")
    return cosines.mean()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "length", "counts", "promised"), PROMISED)
def test_embeddings_stay_close(bert, excerpts, method, length, counts, promised):
    tokens, books, exact = excerpts(length)
    assert len(books) >= (18 if length < 512 else 6)
    assert len(set(books)) >= 3
    assert cosine(bert[0], tokens, exact, method, **counts) >= promised
    assert torch.equal(embed(bert[0], tokens), exact)


@pytest.mark.slow
def test_what_is_closer_than_what(bert):
    model, passages = bert
    tokens, _, _ = passages.pairs(256, per_book=1)
    exact = embed(model, tokens)
    improved, clustered, bi_clustered, lsh, merged, without_ends, paper = (
        cosine(model, tokens, exact, method, **settings)
        for method, settings in (
            ("i-clustered", FEW),
            ("clustered", {"clusters": 25}),
            ("bi-clustered", FEW | {"key_clusters": 50}),
            ("i-clustered", FEW | {"clustering": "lsh", "iterations": 10}),
            ("cst", {"slice_length": 16}),
            ("cst", {"slice_length": 16, "attend_ends": False}),
            ("cst", {"slice_length": 16, "composition": "local-global"}),
        )
    )
    assert improved > lsh
    assert improved > clustered
    assert bi_clustered > improved
    assert merged > without_ends + 0.05
    assert without_ends > paper + 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), [("bi-clustered", FEW), ("cst", {"slice_length": 16})])
def test_padding_changes_nothing(bert, method, settings):
    model, passages = bert
    short = passages.pairs(128, per_book=1)[0][:4]
    padded, mask = F.pad(short, (0, 57)), F.pad(torch.ones_like(short), (0, 57))
    hf_effattn.patch_attention(model, method, min_length=0, **settings)
    torch.testing.assert_close(embed(model, padded, attention_mask=mask), embed(model, short), atol=1e-6, rtol=0)
    hf_effattn.unpatch_attention(model)


LENGTH, CLUSTERS, TOPK, KEY_CLUSTERS = 97, 9, 7, 8
COUNTS = {"clusters": CLUSTERS, "topk": TOPK, "key_clusters": KEY_CLUSTERS}


@pytest.fixture(scope="module")
def layers(bert):
    """Scaled query, key, value `(1, 12, 97, 32)` of every layer, in float64, and how the method groups them.

    The spread of real scores is what random inputs do not have: in the first layer a head's scores differ by 20, and a
    few keys hold a query's whole weight.
    """
    model, passages = bert
    tokens, _, _ = passages.pairs(LENGTH, per_book=1)
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
    """One head `(N, D)`, sums written out."""
    head = (query * query.shape[1] ** 0.5).tolist(), key.tolist(), value.tolist(), labels.tolist()
    seen = [True] * LENGTH
    residuals = residuals_with_loops([(head[0], head[3])], CLUSTERS, seen)
    counts = CLUSTERS, KEY_CLUSTERS, TOPK
    rows = attend_to_key_clusters_with_loops(*head, key_labels.tolist(), residuals, *counts, seen, seen)
    return torch.tensor(rows, dtype=torch.float64)


def attend(query, key, value, labels, key_labels, **options):
    return bi_clustered_attention(query, key, value, labels, key_labels, scale=1.0, **COUNTS, **options)


@pytest.mark.slow_except("0-0", "3-5")
@pytest.mark.parametrize("head", [0, 5])
@pytest.mark.parametrize("layer", range(6))
def test_values_are_those_of_the_definition_and_gradients_those_of_the_reference(layers, layer, head):
    query, key, value, labels, key_labels = (tensor[:, head : head + 1] for tensor in layers[layer])
    noise = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(0))
    results = []
    for form in ("reference", "batched"):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = attend(*leaves, labels, key_labels, backend=form)
        results.append((output.detach(), *torch.autograd.grad((output * noise).sum(), leaves)))
    expected = by_the_definition(*(tensor[0, 0] for tensor in (query, key, value, labels, key_labels)))
    assert_close_to_reference("reference", results[0][0][0, 0], expected, rtol=1e-11)
    for name, wanted, actual in zip("oqkv", *results, strict=True):
        assert_close_to_reference(name, actual, wanted, rtol=1e-11)


def test_a_cluster_for_every_query_is_exact(layers):
    labels = torch.arange(LENGTH).expand(1, 12, -1)
    counts = {"clusters": LENGTH, "topk": 1, "key_clusters": KEY_CLUSTERS}
    for query, key, value, _, key_labels in layers:
        output = bi_clustered_attention(query, key, value, labels, key_labels, scale=1.0, **counts)
        expected = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        assert_close_to_reference("output", output, expected, rtol=1e-12)


def test_the_summaries_matter_and_without_the_lift_there_is_more_error(layers, monkeypatch):
    """At its centroid a cluster of keys has less mass than in the mean over the queries: so in the median head."""
    medians = []
    for largest in (LARGEST_VARIANCE_CORRECTION, 0.0):
        monkeypatch.setattr(batched, "LARGEST_VARIANCE_CORRECTION", largest)
        errors = []
        for query, key, value, labels, key_labels in layers:
            expected = F.scaled_dot_product_attention(query, key, value, scale=1.0)
            difference = attend(query, key, value, labels, key_labels) - expected
            assert 0.01 < difference.norm() / expected.norm() < 0.9  # the settings leave something to expand
            errors.append(difference.norm(dim=(2, 3)) / expected.norm(dim=(2, 3)))
        medians.append(torch.cat(errors).median())
    assert medians[0] < 0.95 * medians[1]
