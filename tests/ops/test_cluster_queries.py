"""Clustering of queries: both forms agree, fixed seeds, masks, and what the keys' metric is."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import padding

from hf_effattn.ops import cluster_queries, improved_clustered_attention

BACKENDS = ("reference", "batched")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
VARIANTS = {
    "kmeans": {},
    "keys_metric": {"key": True},
    "lsh": {"method": "lsh", "iterations": 10},
    "seeds_only": {"iterations": 0},
    "fitted_on_some": {"fit_queries": 40, "key": True},
}


def cluster(variant, query, clusters, key=None, key_mask=None, **options):
    settings = dict(VARIANTS[variant])
    if settings.pop("key", False):
        settings |= {"key": key, "key_mask": key_mask}
    return cluster_queries(query, clusters, **settings, **options)


def blobs(clusters=6, members=20, D=8, heads=3, spread=0.05):
    """Queries around well separated centers, shuffled, with the center's number of each."""
    torch.manual_seed(0)
    centers = 5 * F.normalize(torch.randn(1, heads, clusters, D), dim=-1)
    truth = torch.arange(clusters).repeat_interleave(members)[torch.randperm(clusters * members)]
    return centers[:, :, truth] + spread * torch.randn(1, heads, len(truth), D), truth


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes", "row"])
@pytest.mark.parametrize(("N", "clusters"), [(101, 7), (30, 29), (700, 20)])
def test_both_forms_agree(variant, masks, N, clusters):
    torch.manual_seed(N)
    query, key = torch.randn(2, N, 3, 12).double().transpose(1, 2), torch.randn(2, 3, 45, 12).double()
    masks = {"query_mask": padding(masks, 2, N), "key_mask": padding(masks, 2, 45)}
    reference, batched = (cluster(variant, query, clusters, key=key, backend=backend, **masks) for backend in BACKENDS)
    assert torch.equal(reference, batched)
    assert batched.dtype == torch.int64
    assert batched.min() >= 0
    assert batched.max() < clusters


@each_backend
@pytest.mark.parametrize("variant", ["kmeans", "keys_metric"])
def test_finds_separated_groups(backend, variant):
    query, truth = blobs()
    key = torch.randn(1, 3, 64, 8)
    labels = cluster(variant, query, 6, key=key, backend=backend)
    for head in labels[0]:
        pairs = {(int(a), int(b)) for a, b in zip(head, truth, strict=True)}
        assert len(pairs) == 6  # one label for each group and no group split


@each_backend
def test_lsh_codes_separate_opposite_queries(backend):
    query = torch.cat([torch.ones(1, 1, 10, 8), -torch.ones(1, 1, 10, 8)], dim=2)
    labels = cluster_queries(query, 2, method="lsh", backend=backend)[0, 0]
    assert len(labels[:10].unique()) == len(labels[10:].unique()) == 1
    assert labels[0] != labels[-1]


@each_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_labels_every_time_and_no_global_randomness(backend, variant):
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8)
    state = torch.get_rng_state()
    first = cluster(variant, query, 9, key=key, backend=backend)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(first, cluster(variant, query, 9, key=key, backend=backend))
    others = [cluster(variant, query, 9, key=key, backend=backend, seed=seed) for seed in range(1, 6)]
    assert any(not torch.equal(first, other) for other in others)


@each_backend
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masks", ["right", "left", "holes"])
def test_a_padded_batch_gets_the_labels_of_its_texts_alone(backend, variant, masks):
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 90, 8), torch.randn(2, 2, 90, 8)
    mask = padding(masks, 2, 90)
    query[~mask[:, None].expand(-1, 2, -1)] = 1e4
    padded = cluster(variant, query, 9, key=key, key_mask=mask, query_mask=mask, backend=backend)
    for b in range(2):
        row = mask[b]
        alone = cluster(variant, query[b : b + 1, :, row], 9, key=key[b : b + 1, :, row], backend=backend)
        assert torch.equal(padded[b : b + 1, :, row], alone)
        assert (padded[b, :, ~row] == 0).all()


@each_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_few_queries_get_a_cluster_each(backend, variant):
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    labels = cluster(variant, query, 9, key=key, backend=backend)
    assert torch.equal(labels, torch.arange(5).expand(2, 3, 5))


@each_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_queries_share_a_cluster_and_leave_others_empty(backend, variant):
    # One coordinate: no sum is rounded, so equal queries have equal distances in whatever order they are added up.
    query = 3 * torch.eye(8)[:1].expand(1, 2, 60, 8)
    labels = cluster(variant, query, 7, key=torch.randn(1, 2, 60, 8), backend=backend)
    assert (labels == labels[..., :1]).all()


@each_backend
def test_keys_metric_ignores_what_no_key_sees(backend):
    """Keys live in the first half of the dimensions, so differences in the second half change no score."""
    query, truth = blobs(D=4)
    noise = 30 * torch.randn(1, 3, len(truth), 4)
    key = torch.cat([torch.randn(1, 3, 64, 4), torch.full((1, 3, 64, 4), 3.0)], dim=-1)  # equal keys: a shift
    labels = cluster_queries(torch.cat([query, noise], dim=-1), 6, key=key, backend=backend)
    for head in labels[0]:
        assert len({(int(a), int(b)) for a, b in zip(head, truth, strict=True)}) == 6


@each_backend
@pytest.mark.parametrize("keys", ["equal", "one", "masked"])
def test_keys_metric_without_any_spread(backend, keys):
    query = torch.randn(1, 2, 50, 8)
    key = torch.ones(1, 2, 1 if keys == "one" else 20, 8)
    mask = torch.zeros(1, 20, dtype=torch.bool) if keys == "masked" else None
    labels = cluster_queries(query, 5, key=key, key_mask=mask, backend=backend)
    assert labels.min() >= 0
    assert labels.max() < 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_labels_are_computed_in_float32(dtype):
    query = (100 * torch.randn(1, 2, 80, 8)).to(dtype)
    key = torch.randn(1, 2, 80, 8).to(dtype)
    assert torch.equal(cluster_queries(query, 7, key=key), cluster_queries(query.float(), 7, key=key.float()))


def test_queries_that_are_not_finite_still_get_legal_labels():
    query = torch.full((1, 1, 50, 8), torch.nan)
    labels = cluster_queries(query, 7, key=query)
    assert labels.min() >= 0
    assert labels.max() < 7


def test_no_gradient_and_one_graph():
    query = torch.randn(1, 2, 50, 8, requires_grad=True)
    eager = cluster_queries(query, 7, key=query)
    assert not eager.requires_grad
    compiled = torch.compile(cluster_queries, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, 7, key=query), eager)


def test_more_iterations_lower_the_error():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 400, 16) for _ in range(3))
    exact = F.scaled_dot_product_attention(query, key, value)

    def error(**options):
        labels = cluster_queries(query, 40, key=key, **options)
        return (improved_clustered_attention(query, key, value, labels, clusters=40, topk=16) - exact).norm()

    assert error(iterations=5) < error(iterations=0)
    assert error() < error(method="lsh", iterations=10)


@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(1, 120),
    clusters=st.integers(1, 130),
    D=st.integers(1, 9),
    masks=st.sampled_from(["none", "right", "left", "holes", "row", "few"]),
    variant=st.sampled_from(sorted(VARIANTS)),
)
def test_any_sizes_give_legal_labels(N, clusters, D, masks, variant):
    torch.manual_seed(N)
    mask = padding(masks, 2, N)
    query = torch.randn(2, 2, N, D)
    labels = cluster(variant, query, clusters, key=query, key_mask=mask, query_mask=mask)
    assert labels.shape == (2, 2, N)
    assert labels.min() >= 0
    assert labels.max() < clusters
