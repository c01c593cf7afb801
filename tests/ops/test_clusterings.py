"""What every clustering promises in every form: both forms agree, fixed seeds, masks, few and equal points."""

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import padding
from support.op_cases import DEVICE

from hf_effattn.ops import cluster_queries, improved_clustered_attention, kmeans

FORMS = ("reference", "batched")
VARIANTS = {
    "points": {},
    "kmeans": {},
    "keys_metric": {"key": True},
    "lsh": {"method": "lsh", "iterations": 10},
    "seeds_only": {"iterations": 0},
    "fitted_on_some": {"fit_queries": 40, "key": True},
}
each_form = pytest.mark.parametrize("backend", FORMS)
each_variant = pytest.mark.parametrize("variant", VARIANTS)
# The others are the same kernels with less in them.
every_form = pytest.mark.parametrize(
    ("variant", "backend"),
    [
        *((variant, backend) for variant in VARIANTS for backend in FORMS),
        *((variant, "triton") for variant in ("kmeans", "keys_metric", "lsh")),
    ],
)


def cluster(variant, query, clusters, key=None, key_mask=None, query_mask=None, **options):
    """Labels `(B, H, N)`; "points" are clustered head by head by `kmeans`."""
    device = DEVICE if options.get("backend") == "triton" else "cpu"
    query, key, key_mask, query_mask = (x if x is None else x.to(device) for x in (query, key, key_mask, query_mask))
    settings = VARIANTS[variant] | options
    if variant == "points":
        mask = None if query_mask is None else query_mask.repeat_interleave(query.shape[1], dim=0)
        return kmeans(query.flatten(0, 1), clusters, mask=mask, **settings)[0].unflatten(0, query.shape[:2])
    if settings.pop("key", False):
        settings |= {"key": key, "key_mask": key_mask}
    return cluster_queries(query, clusters, query_mask=query_mask, **settings).cpu()


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def blobs(clusters=6, members=20, D=8, heads=3, spread=0.05):
    """Queries around well separated centers, shuffled, with the center's number of each."""
    torch.manual_seed(0)
    centers = 5 * F.normalize(torch.randn(1, heads, clusters, D), dim=-1)
    truth = torch.arange(clusters).repeat_interleave(members)[torch.randperm(clusters * members)]
    return centers[:, :, truth] + spread * torch.randn(1, heads, len(truth), D), truth


def assert_labels_are_the_groups(labels, truth):
    """One label for each group and no group split."""
    for head in labels[0]:
        pairs = {(int(a), int(b)) for a, b in zip(head, truth, strict=True)}
        assert len(pairs) == len(head.unique()) == len(truth.unique())


@pytest.mark.slow_except("30-29-*", "700-20-*", "101-7-left-*", "101-7-few-*")
@each_variant
@pytest.mark.parametrize(
    ("N", "clusters", "masks"),
    [
        *((101, 7, masks) for masks in ("none", "right", "left", "holes", "row", "few")),
        (30, 29, "none"),
        (30, 29, "holes"),
        (700, 20, "right"),
    ],
)
def test_both_forms_agree(variant, N, clusters, masks):
    query, key = draw(2, N, 3, 12, dtype=torch.float64).transpose(1, 2), draw(2, 3, 45, 12, seed=1).double()
    masks = {"query_mask": padding(masks, 2, N), "key_mask": padding(masks, 2, 45)}
    reference, batched = (cluster(variant, query, clusters, key=key, backend=form, **masks) for form in FORMS)
    assert torch.equal(reference, batched)
    assert batched.dtype == torch.int64
    assert batched.min() >= 0
    assert batched.max() < clusters


@each_form
@pytest.mark.parametrize("variant", ["kmeans", "keys_metric"])
def test_finds_separated_groups(backend, variant):
    query, truth = blobs()
    assert_labels_are_the_groups(cluster(variant, query, 6, key=torch.randn(1, 3, 64, 8), backend=backend), truth)


@each_form
def test_lsh_codes_separate_opposite_queries(backend):
    query = torch.cat([torch.ones(1, 1, 10, 8), -torch.ones(1, 1, 10, 8)], dim=2)
    labels = cluster("lsh", query, 2, backend=backend)
    assert_labels_are_the_groups(labels, torch.arange(20) // 10)


@every_form
def test_same_labels_every_time_and_no_global_randomness(variant, backend):
    query, key = draw(1, 2, 60, 8), draw(1, 2, 60, 8, seed=1)
    state = torch.get_rng_state()
    first = cluster(variant, query, 7, key=key, backend=backend)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(first, cluster(variant, query, 7, key=key, backend=backend))
    if backend != "triton":
        others = [cluster(variant, query, 7, key=key, backend=backend, seed=seed) for seed in range(1, 6)]
        assert any(not torch.equal(first, other) for other in others)


@pytest.mark.slow_except("*-reference-*", "*-batched-*", "keys_metric-triton-holes")
@pytest.mark.parametrize("masks", ["left", "holes"])
@every_form
def test_a_padded_batch_gets_the_labels_of_its_texts_alone(variant, backend, masks):
    query, key, mask = draw(2, 2, 40, 8), draw(2, 2, 40, 8, seed=1), padding(masks, 2, 40)
    query[~mask[:, None].expand(-1, 2, -1)] = torch.nan
    key[~mask[:, None].expand(-1, 2, -1)] = torch.nan
    padded = cluster(variant, query, 6, key=key, key_mask=mask, query_mask=mask, backend=backend)
    for b in range(2):
        row = mask[b]
        alone = cluster(variant, query[b : b + 1, :, row], 6, key=key[b : b + 1, :, row], backend=backend)
        assert torch.equal(padded[b : b + 1, :, row], alone)
        assert (padded[b, :, ~row] == 0).all()


@every_form
def test_few_points_get_a_cluster_each(variant, backend):
    query, key = draw(2, 1, 12, 8), draw(2, 1, 12, 8, seed=1)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 3::2] = True
    labels = cluster(variant, query, 9, key=key, query_mask=mask, backend=backend)
    assert labels[0, 0, 3::2].tolist() == list(range(5))
    assert (labels[1] == 0).all()
    assert torch.equal(cluster(variant, query, 12, key=key, backend=backend), torch.arange(12).expand(2, 1, -1))


@each_form
@each_variant
def test_equal_points_share_a_cluster_and_leave_others_empty(backend, variant):
    # One coordinate: no sum is rounded, so equal points have equal distances in whatever order they are added up.
    query = 3 * torch.eye(8)[:1].expand(1, 2, 60, 8)
    labels = cluster(variant, query, 7, key=draw(1, 2, 60, 8), backend=backend)
    assert (labels == labels[..., :1]).all()


@every_form
def test_values_that_are_not_finite_still_give_legal_labels(variant, backend):
    query, key = draw(1, 2, 40, 8), draw(1, 2, 40, 8, seed=1)
    query[0, 0, 7], query[0, 1], key[0, 1, 3] = torch.inf, torch.nan, torch.nan
    labels = cluster(variant, query, 7, key=key, backend=backend)
    assert labels.min() >= 0
    assert labels.max() < 7


@each_form
def test_keys_metric_ignores_what_no_key_sees(backend):
    """Keys live in the first half of the dimensions, so differences in the second half change no score."""
    query, truth = blobs(D=4)
    noise = 30 * torch.randn(1, 3, len(truth), 4)
    key = torch.cat([torch.randn(1, 3, 64, 4), torch.full((1, 3, 64, 4), 3.0)], dim=-1)  # equal keys: a shift
    labels = cluster_queries(torch.cat([query, noise], dim=-1), 6, key=key, backend=backend)
    assert_labels_are_the_groups(labels, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["points", "keys_metric"])
def test_labels_are_computed_in_float32(dtype, variant):
    query, key = draw(1, 2, 80, 8, dtype=dtype), draw(1, 2, 80, 8, seed=1, dtype=dtype)
    labels, expected = (
        cluster(variant, rows[0], 7, key=rows[1]) for rows in ((query, key), (query.float(), key.float()))
    )
    assert torch.equal(labels, expected)


@pytest.mark.parametrize("variant", ["points", "keys_metric"])
def test_no_gradient_and_one_graph(variant):
    query = draw(1, 2, 50, 8).requires_grad_()
    eager = cluster(variant, query, 7, key=query)
    assert not eager.requires_grad
    compiled = torch.compile(cluster, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(variant, query, 7, key=query), eager)


def test_points_are_clustered_as_queries_are():
    query, mask = draw(2, 3, 101, 6, dtype=torch.float64), padding("holes", 2, 101)
    options = {"query_mask": mask, "iterations": 4}
    assert torch.equal(*(cluster(variant, query, 7, **options) for variant in ("points", "kmeans")))


def test_more_iterations_lower_the_error():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 400, 16) for _ in range(3))
    exact = F.scaled_dot_product_attention(query, key, value)

    def error(**options):
        labels = cluster_queries(query, 40, key=key, **options)
        return (improved_clustered_attention(query, key, value, labels, clusters=40, topk=16) - exact).norm()

    assert error(iterations=5) < error(iterations=0)
    assert error() < error(method="lsh", iterations=10)
