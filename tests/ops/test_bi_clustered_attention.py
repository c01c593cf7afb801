"""Bi-clustered attention: identities of the first order, heads that attend exactly, its error beside order zero's."""

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import Case, attend, make_inputs
from support.closeness import assert_close_to_reference
from support.op_cases import CLUSTERED, to_dtype, with_gradients

from hf_effattn.ops import bi_clustered_attention

OP = "bi_clustered_attention"
BI_CLUSTERED = CLUSTERED[2]
BACKENDS = ("reference", "batched")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
by_name = {"ids": lambda case: case.name}
MASKS = ("none", "holes", "row")


def exact(inputs):
    """SDPA, with grouped heads and masked keys."""
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None, :]
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=mask, enable_gqa=True)


def assert_equal_where_counted(inputs, actual, expected, atol=2e-14):
    """Equal in every query that counts; larger sums than plain attention's: means, tangents, a dipole."""
    for b, rows in enumerate(inputs.query_mask if inputs.query_mask is not None else [slice(None)] * len(actual)):
        torch.testing.assert_close(actual[b][:, rows], expected[b][:, rows], rtol=0, atol=atol)


@each_backend
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("topk", [1, 36])
def test_a_cluster_for_every_key_is_exact(topk, masks, backend):
    case = Case("own", H=4, key_heads=2, key_clusters=37, topk=topk, masks=masks)
    inputs = make_inputs(case)
    inputs.key_labels = torch.arange(37).expand(2, 2, -1)
    assert_equal_where_counted(inputs, attend(OP, case, inputs, backend=backend), exact(inputs))


@each_backend
@pytest.mark.parametrize("masks", MASKS)
def test_keys_alike_within_their_cluster_are_exact(masks, backend):
    """Nothing is left to expand: a key's score is its cluster's tangent, whatever the values."""
    case = Case("alike", H=4, key_heads=2, key_clusters=5, topk=3, masks=masks)
    inputs = make_inputs(case)
    inputs.key = inputs.key[:, :, :5].gather(2, inputs.key_labels[..., None].expand(-1, -1, -1, case.D))
    assert_equal_where_counted(inputs, attend(OP, case, inputs, backend=backend), exact(inputs))


@each_backend
@pytest.mark.parametrize("masks", MASKS)
def test_keys_that_no_offset_tells_apart_are_exact(masks, backend):
    """Queries differ from their centroids along one axis, keys from their clusters' means along all others."""
    case = Case("apart", H=4, key_heads=2, masks=masks)
    inputs = make_inputs(case)
    middles = inputs.query[:, :, : case.clusters, 1:].gather(
        2, inputs.labels[..., None].expand(-1, -1, -1, case.D - 1)
    )
    inputs.query = torch.cat([inputs.query[..., :1], middles], dim=3)
    places = inputs.key[:, :, : case.key_clusters, :1].gather(2, inputs.key_labels[..., None])
    inputs.key = torch.cat([places, inputs.key[..., 1:]], dim=3)
    assert_equal_where_counted(inputs, attend(OP, case, inputs, backend=backend), exact(inputs))


@each_backend
@pytest.mark.parametrize("size", [0.3, 0.9, 5.0])
def test_a_key_that_is_read_by_its_mean_is_lifted(size, backend):
    """Offsets ± η, one cluster of keys with means of 0: its mass at the centroid, by hand, beside one exact key."""
    eta = torch.tensor([[size, 0.0], [-size, 0.0]], dtype=torch.float64)
    centroid = torch.tensor([0.4, -0.3], dtype=torch.float64)
    query = torch.cat([centroid + eta, centroid[None]])[None, None]
    key = torch.tensor([[2.0, 0.0], [0.5, 1.0], [-0.5, -1.0], [-2.0, 0.0]], dtype=torch.float64)
    value = torch.eye(4, dtype=torch.float64)[None, None]
    covariance = eta.T @ eta / 3
    scores, distances = key @ centroid, (key @ covariance * key).sum(dim=1)
    lifted = (scores + (distances / 2).clamp(max=0.5)).exp()
    lifted[0] = scores[0].exp()  # the exact key: the farther of two that are as far, as it weighs more
    zeros = torch.zeros(1, 1, 4, dtype=torch.long)
    counts = {"clusters": 1, "key_clusters": 1, "topk": 1, "scale": 1.0}
    actual = bi_clustered_attention(query, key[None, None], value, zeros[..., :3], zeros, **counts, backend=backend)
    torch.testing.assert_close(actual[0, 0, 2], lifted / lifted.sum(), rtol=0, atol=1e-14)


EXACT = torch.tensor([[True, False], [False, True]])
OPTIONS = {
    "exact_heads": {"exact_heads": EXACT},
    "exact_heads_and_dropout": {"exact_heads": EXACT, "dropout_p": 0.3},
    "all_exact": {"exact_heads": torch.ones(2, 2, dtype=torch.bool), "dropout_p": 0.3},
    "none_exact": {"exact_heads": torch.zeros(2, 2, dtype=torch.bool)},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def assert_both_forms_agree(case, **options):
    inputs = BI_CLUSTERED.make(case) | {name: options.pop(name) for name in ("query_mask",) if name in options}
    expected, actual = (with_gradients(BI_CLUSTERED, case, inputs, backend=form, **options) for form in BACKENDS)
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


@pytest.mark.slow_except("holes-*")
@each_option
@pytest.mark.parametrize("masks", MASKS)
def test_gradients_are_those_of_the_reference(masks, options):
    assert_both_forms_agree(Case("gradients", H=6, key_heads=2, masks=masks), **options)


@pytest.mark.parametrize(("dropout_p", "masks"), [(0.0, "none"), (0.3, "holes")])
def test_exact_heads_of_more_queries_than_are_held_at_once(dropout_p, masks):
    case = Case("long", B=1, H=4, key_heads=2, N=1100, M=70, D=4, Dv=3, clusters=3, masks=masks)
    assert_both_forms_agree(case, exact_heads=EXACT[:1], dropout_p=dropout_p)


@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize("threads", [1, 3])
def test_exact_heads_on_several_threads(threads, masks):
    """Of so many queries that they are not cut evenly, and of values as wide as keys, for torch's own step."""
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_both_forms_agree(Case("cut", H=6, key_heads=2, N=37, D=4, Dv=4, masks=masks), exact_heads=EXACT)
    finally:
        torch.set_num_threads(kept)


def test_exact_heads_whose_first_queries_are_all_padding():
    """The dropout of those is drawn and thrown away, so that padding shifts none."""
    case = Case("padded", B=1, H=2, key_heads=2, N=1100, M=20, D=4, Dv=3, clusters=3)
    query_mask = (torch.arange(case.N) >= 700)[None]
    assert_both_forms_agree(case, query_mask=query_mask, exact_heads=EXACT[:1], dropout_p=0.3)


@each_backend
@pytest.mark.parametrize("masks", MASKS)
def test_exact_heads_equal_sdpa_and_the_others_do_not_change(masks, backend):
    case = Case("exact", H=4, key_heads=2, masks=masks)
    inputs = make_inputs(case)
    actual = attend(OP, case, inputs, exact_heads=EXACT, backend=backend)
    for_queries = EXACT.repeat_interleave(2, dim=1)[:, :, None, None]
    expected = torch.where(for_queries, exact(inputs), attend(OP, case, inputs, backend=backend))
    assert_equal_where_counted(inputs, actual, expected, atol=4e-15)
    if inputs.query_mask is not None:
        assert (actual.transpose(1, 2)[~inputs.query_mask] == 0).all()


@each_backend
def test_dropout_of_exact_heads_is_that_of_their_weights(backend):
    """With the identity as values: a weight is 0, or divided by what is kept."""
    case = Case("dropout", B=1, H=1, N=700, M=50, Dv=50)
    inputs = make_inputs(case)
    inputs.value = torch.eye(50, dtype=torch.float64)[None, None]
    every = torch.ones(1, 1, dtype=torch.bool)
    ratio = attend(OP, case, inputs, exact_heads=every, dropout_p=0.2, backend=backend) / exact(inputs)
    kept = ratio != 0
    torch.testing.assert_close(ratio[kept], torch.full_like(ratio[kept], 1.25))
    assert abs(kept.double().mean() - 0.8) < 5 * (0.2 * 0.8 / kept.numel()) ** 0.5  # standard errors
    assert not torch.equal(kept[0, 0, :100], kept[0, 0, 512:612])  # each part has draws of its own


@pytest.mark.slow_except("batched-*", "reference-exact_heads")
@each_option
@each_backend
def test_masked_rows_have_no_influence(backend, options):
    case = Case("garbage", H=4, key_heads=2, masks="holes")
    inputs = BI_CLUSTERED.make(case)
    clean = with_gradients(BI_CLUSTERED, case, inputs, backend=backend, **options)
    for garbage in (1e4, float("inf"), float("nan")):
        dirty = inputs | {
            name: inputs[name].masked_fill(~inputs[mask][:, None, :, None], garbage)
            for name, mask in (("query", "query_mask"), ("key", "key_mask"), ("value", "key_mask"))
        }
        for name, tensor in with_gradients(BI_CLUSTERED, case, dirty, backend=backend, **options).items():
            assert torch.equal(tensor, clean[name]), name


@each_backend
def test_no_weight_on_clusters_leaves_no_dipole(backend):
    """Exact keys that take all weight: the ratio of the clusters' weights is 0 over 0 to float32, not the result."""
    case = Case("certain", H=1, topk=2)
    inputs = BI_CLUSTERED.make(case, torch.float32)
    inputs["key"][:, :, 0] *= 200
    inputs["query"] = inputs["key"][:, :, :1] / 100 + 0.01 * inputs["query"]
    results = with_gradients(BI_CLUSTERED, case, inputs, backend=backend)
    assert all(tensor.isfinite().all() for tensor in results.values())
    torch.testing.assert_close(results["output"], inputs["value"][:, :, :1].expand_as(results["output"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_dtypes_of_heads_that_attend_exactly(dropout_p, dtype):
    """The error is what plain PyTorch has in the same dtype. All keys are exact, so that each dtype takes the same."""
    case = Case("dtype", H=4, key_heads=2)
    options = {"exact_heads": EXACT, "dropout_p": dropout_p, "topk": case.M}
    rounded = BI_CLUSTERED.make(case, dtype)
    expected, baseline = (
        with_gradients(BI_CLUSTERED, case, some, backend="reference", **options)
        for some in (to_dtype(rounded, torch.float64), rounded)
    )
    for name, tensor in with_gradients(BI_CLUSTERED, case, rounded, backend="batched", **options).items():
        assert tensor.dtype == dtype
        assert_close_to_reference(name, tensor, expected[name], baseline[name], rtol=1e-6)


def clustered_data(spread, N=512, groups=16, D=16):
    """Queries and keys around centers, `spread` from them, and the labels of the centers: `(1, 4, N, D)`."""
    generator = torch.Generator().manual_seed(0)
    tensors, labels = [], []
    for _ in range(2):
        centers = torch.randn(1, 4, groups, D, generator=generator, dtype=torch.float64)
        label = torch.randint(groups, (1, 4, N), generator=generator)
        noise = torch.randn(1, 4, N, D, generator=generator, dtype=torch.float64)
        tensors.append(centers.gather(2, label[..., None].expand(-1, -1, -1, D)) + spread * noise)
        labels.append(label)
    # Values that turn with the keys, as a model's do.
    value = tensors[1] @ torch.randn(D, D, generator=generator, dtype=torch.float64) / D**0.5
    return *tensors, value, *labels


def order_zero(query, key, value, label, key_label, groups, topk):
    """A head's attention to the keys nearest to the centroid and to the plain means of the clusters of the others."""
    centroids, mean_keys, mean_values = (
        torch.stack([rows[labels == c].mean(dim=0) for c in range(groups)])
        for rows, labels in ((query, label), (key, key_label), (value, key_label))
    )
    top = (centroids @ key.T).topk(topk).indices[label]  # (N, topk)
    rest = torch.bincount(key_label, minlength=groups) - F.one_hot(key_label[top], groups).sum(dim=1)
    exact_scores = torch.einsum("nd,ntd->nt", query, key[top])
    weights = torch.cat([exact_scores, query @ mean_keys.T + rest.log()], dim=1).softmax(dim=1)
    return torch.einsum("nt,ntd->nd", weights[:, :topk], value[top]) + weights[:, topk:] @ mean_values


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_error_is_far_below_that_of_order_zero(spread):
    query, key, value, labels, key_labels = clustered_data(spread)
    expected = F.scaled_dot_product_attention(query, key, value)
    counts = {"clusters": 16, "key_clusters": 16, "topk": 8}
    first = bi_clustered_attention(query, key, value, labels, key_labels, **counts)
    zero = torch.stack(
        [order_zero(query[0, h] / 4, key[0, h], value[0, h], labels[0, h], key_labels[0, h], 16, 8) for h in range(4)]
    )
    assert (first - expected).norm() < 0.4 * (zero - expected).norm()


@pytest.mark.parametrize("size", [10.0, 1000.0])
def test_large_scores_lose_no_cluster(size):
    """What is left of a cluster without its exact keys may score hundreds below the empty places of its blocks."""
    generator = torch.Generator().manual_seed(0)
    labels, key_labels = (torch.randint(0, count, (1, 2, n), generator=generator) for count, n in ((8, 40), (6, 70)))
    middles = size * torch.randn(1, 2, 8, 5, generator=generator, dtype=torch.float64)
    query = middles.gather(2, labels[..., None].expand(-1, -1, -1, 5))
    query = query + 0.01 * torch.randn(query.shape, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(1, 2, 70, D, generator=generator, dtype=torch.float64) + 3 for D in (5, 3))
    outputs = [
        bi_clustered_attention(
            query, key, value, labels, key_labels, clusters=8, key_clusters=6, topk=4, backend=backend
        )
        for backend in ("reference", "batched")
    ]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-13)
