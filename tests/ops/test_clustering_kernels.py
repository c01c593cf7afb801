"""The clustering kernels, under Triton's interpreter or on a GPU, against the PyTorch forms."""

from importlib import import_module

import pytest
import torch
from support.attention_cases import padding
from support.closeness import assert_close_to_reference

from hf_effattn.ops import cluster_queries, kmeans
from hf_effattn.ops.cluster_queries import reference
from hf_effattn.ops.cluster_queries.triton import keys_metric
from hf_effattn.ops.kmeans.sampling import KERNEL_SEEDING, strided_rows
from hf_effattn.ops.kmeans.triton.rows import find_rows
from hf_effattn.ops.shared.triton import chips

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {"kmeans": {}, "keys_metric": {"metric": True}, "lsh": {"method": "lsh", "bits": 16}}
each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def planes_of_the_kernel(monkeypatch, request):
    """The batched form gets the hash planes that the kernel draws, rounded as there."""
    dtype = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype")
    monkeypatch.setattr(
        import_module("hf_effattn.ops.cluster_queries.batched"),
        "hash_planes",
        lambda head_dim, bits, seed: kernel_planes(head_dim, bits, seed, dtype or torch.float32),
    )


def kernel_planes(head_dim, bits, seed, dtype=torch.float32):
    query = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=DEVICE)
    return import_module("hf_effattn.ops.cluster_queries.triton").draw_planes(query, bits, seed)


def test_hash_planes_are_independent_normal_numbers():
    planes = kernel_planes(64, 64, seed=3)
    assert torch.equal(planes, kernel_planes(64, 64, seed=3))
    assert abs(planes.mean()) < 4 / 64
    assert abs(planes.var() - 1) < 4 * (2 / 64**2) ** 0.5
    correlations = torch.corrcoef(torch.cat([planes.T, kernel_planes(64, 64, seed=2**62).T]))
    assert correlations.fill_diagonal_(0).abs().max() < 6 / 64**0.5


@pytest.fixture(autouse=True)
def seeds_of_the_kernel(monkeypatch):
    """The other forms look for seeds in the kernels' groups."""
    for form in ("reference", "batched"):
        monkeypatch.setattr(import_module(f"hf_effattn.ops.kmeans.{form}"), "SEEDING", KERNEL_SEEDING)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def on_device(mask):
    return None if mask is None else mask.to(DEVICE)


def blobs(B, H, N, D, groups, seed=0):
    """Queries so well separated, far from 0, that rounding decides no label, in transformers' memory layout."""
    generator = torch.Generator().manual_seed(seed)
    centers = 20 + 5 * torch.randn(B, H, groups, D, generator=generator)
    group = torch.randint(groups, (B, H, N, 1), generator=generator)
    query = centers.take_along_dim(group, dim=2) + 0.2 * torch.randn(B, H, N, D, generator=generator)
    return query.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2)


def cluster(query, clusters, method, key=None, key_mask=None, **options):
    options = dict(METHODS[method]) | options
    if options.pop("metric", False):
        options |= {"key": key, "key_mask": key_mask}
    return cluster_queries(query, clusters, iterations=2, **options)


def assert_same_labels(query, clusters, method, share=1.0, **options):
    """`share` of the labels are those of the batched form in float32."""
    actual = cluster(query, clusters, method, backend="triton", **options)
    options = {name: x.float() if name == "key" else x for name, x in options.items()}
    expected = cluster(query.float(), clusters, method, backend="batched", **options)
    assert actual.dtype == torch.int64
    assert (actual == expected).float().mean() >= share
    return actual


@pytest.mark.slow_except("none-lsh", "holes-*")
@each_method
@pytest.mark.parametrize("masks", ["none", "left", "holes", "row", "few"])
def test_labels_are_those_of_the_batched_form(method, masks):
    query, key = blobs(2, 2, 37, 20, groups=6), 1 + randn(2, 2, 45, 20)
    masks = {"query_mask": on_device(padding(masks, 2, 37)), "key_mask": on_device(padding(masks, 2, 45))}
    assert_same_labels(query, 5, method, key=key, **masks)


@pytest.mark.slow_except("70-60-21")
@pytest.mark.parametrize(
    ("N", "D", "clusters"), [(1, 16, 1), (2, 1, 1), (67, 3, 2), (70, 60, 21), (33, 100, 20), (20, 256, 3)]
)
def test_awkward_sizes(N, D, clusters):
    assert_same_labels(blobs(1, 1, N, D, groups=clusters + 3), clusters, "keys_metric", key=randn(1, 1, 29, D))


@pytest.mark.parametrize("masked", [False, True])
def test_fitted_on_some(masked):
    query, key = blobs(2, 1, 90, 8, groups=6), randn(2, 1, 90, 8)
    mask = on_device(padding("holes", 2, 90)) if masked else None
    assert_same_labels(query, 5, "keys_metric", key=key, key_mask=mask, query_mask=mask, fit_queries=32)


@pytest.mark.parametrize("method", ["kmeans", "keys_metric"])
def test_seeds_in_groups(method):
    assert_same_labels(blobs(1, 2, 150, 8, groups=21), 20, method, key=randn(1, 2, 20, 8))


def test_one_metric_for_the_heads_that_share_keys():
    query, key = blobs(2, 4, 40, 12, groups=6), randn(2, 2, 30, 12)
    key[:, 1] *= torch.linspace(0.1, 5, 12, device=DEVICE)
    grouped = assert_same_labels(query, 5, "keys_metric", key=key)
    assert torch.equal(
        grouped, cluster(query, 5, "keys_metric", key=key.repeat_interleave(2, dim=1), backend="triton")
    )


@pytest.mark.parametrize(
    ("M", "D", "masked", "dtype"),
    [
        (300, 20, False, torch.float32),  # more rows than a program of each part takes at once
        (300, 16, True, torch.bfloat16),
        (40, 40, True, torch.float32),  # parts without rows
        (5, 3, False, torch.float16),
    ],
)
def test_metric_is_that_of_the_reference(M, D, masked, dtype):
    key = 3 + randn(2, 2, M, D, dtype=dtype)
    key_rows = find_rows(key, on_device(padding("holes", 2, M)) if masked else None, 290)
    metric = keys_metric(key, key_rows).view(2, 2, D, D)
    for b in range(2):
        rows = strided_rows(M, 290) if key_rows.fit is None else key_rows.fit[b][key_rows.fit[b] >= 0].long()
        fitted = key[b][:, rows.to(DEVICE)].double()
        for h in range(2):
            # 16-bit keys are multiplied as they are, 3 from 0: nine times their variance cancels.
            rtol = 1e-6 if dtype == torch.float32 else 1e-5
            assert_close_to_reference("metric", metric[b, h], reference.keys_metric(fitted[h]), rtol=rtol)


@pytest.fixture
def large_chip(monkeypatch):
    """The interpreter runs what is launched on an H100, where one launch labels the fitted rows and adds them up."""
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", 227 * chips.KIB))


@pytest.mark.slow_except("none-kmeans", "holes-keys_metric")
@pytest.mark.parametrize("method", ["kmeans", "keys_metric"])
@pytest.mark.parametrize("masks", ["none", "holes"])
def test_labels_of_a_large_chip(method, masks, large_chip):
    """Three parts of the rows, of which the last is not whole."""
    query, key = blobs(2, 2, 600, 16, groups=8).bfloat16(), randn(2, 1, 45, 16, dtype=torch.bfloat16)
    masks = {"query_mask": on_device(padding(masks, 2, 600)), "key_mask": on_device(padding(masks, 2, 45))}
    assert_same_labels(query, 8, method, key=key, **masks)


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter is two chips")
@pytest.mark.slow_except("kmeans-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["kmeans", "lsh"])
def test_one_launch_or_two_are_the_same_bit_for_bit(method, dtype, request):
    """Of whole numbers, whose sums do not depend on the order."""
    query = torch.randint(-6, 7, (1, 1, 700, 24), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = cluster(query, 70, method, backend="triton")
    request.getfixturevalue("large_chip")
    assert torch.equal(cluster(query, 70, method, backend="triton"), expected)


def test_padding_behind_parts_of_a_large_chip(large_chip):
    query, key = randn(1, 1, 520, 8).half(), randn(1, 1, 40, 8).half()
    padded = torch.cat([query, torch.full((1, 1, 300, 8), torch.nan, dtype=torch.float16, device=DEVICE)], dim=2)
    mask = torch.arange(820, device=DEVICE)[None] < 520
    labels = cluster(padded, 9, "keys_metric", key=key, query_mask=mask, backend="triton")
    assert torch.equal(labels[:, :, :520], cluster(query, 9, "keys_metric", key=key, backend="triton"))


def test_random_queries():
    """Without groups to find rounding decides some labels, a few of which other centroids then decide."""
    query, key = randn(1, 2, 100, 16), randn(1, 2, 60, 16)
    assert_same_labels(query, 10, "keys_metric", share=0.99, key=key)
    assert_same_labels(query, 10, "lsh", share=0.99)


@pytest.mark.parametrize("shift", [0, 8])
def test_bfloat16_points_are_next_to_the_nearest_centroid(shift):
    """Of a product only the centroid, taken from the origin, is rounded to bfloat16: to one part in 256."""
    points = randn(2, 150, 16).add(shift).bfloat16()
    labels, centroids = kmeans(points, 12, iterations=2, backend="triton")
    points, centroids = points.double() - shift, centroids.double() - shift
    distances = torch.cdist(points, centroids)
    chosen = distances.gather(2, labels[..., None])[..., 0]
    rounding = 2**-8 * (points.norm(dim=2) + 1) * (centroids.norm(dim=2).amax(dim=1)[:, None] + 1)
    assert (chosen.square() - distances.amin(dim=2).square() <= 4 * rounding).all()
    assert (chosen == distances.amin(dim=2)).float().mean() > 0.97


@pytest.mark.parametrize("method", ["kmeans", "keys_metric"])
def test_one_query_that_is_not_finite_leaves_the_others_their_clusters(method):
    """In a product with the table of members, 0 times NaN would reach every centroid of the head."""
    query, key = blobs(1, 1, 60, 8, groups=4), randn(1, 1, 60, 8)
    expected = cluster(query, 4, method, key=key, backend="triton")[0, 0, 1:]
    query[0, 0, 0] = torch.nan
    actual = cluster(query, 5, method, key=key, backend="triton")[0, 0, 1:]
    # The same sets of queries, under other numbers.
    assert len(torch.stack([actual, expected]).unique(dim=1)[0]) == len(expected.unique()) == len(actual.unique()) == 4


@pytest.mark.parametrize("keys", ["equal", "one", "masked", "none"])
def test_keys_without_spread_leave_the_plain_distance(keys):
    query = blobs(1, 1, 40, 8, groups=5)
    key = torch.ones(1, 1, {"one": 1, "none": 0}.get(keys, 20), 8, device=DEVICE)
    mask = torch.zeros(1, 20, dtype=torch.bool, device=DEVICE) if keys == "masked" else None
    labels = cluster(query, 5, "keys_metric", key=key, key_mask=mask, backend="triton")
    assert torch.equal(labels, cluster(query, 5, "kmeans", backend="batched"))


def test_large_common_shift_costs_no_digits():
    """Distances do not see where the origin is, so labels must not either."""
    query = torch.round(64 * blobs(1, 2, 60, 16, groups=6)) / 64
    labels = cluster(query, 6, "kmeans", backend="triton")
    assert torch.equal(labels, cluster(query + 4096, 6, "kmeans", backend="triton"))


@pytest.mark.parametrize("masks", ["none", "holes", "row", "few"])
def test_kmeans_centroids(masks):
    points = blobs(1, 3, 50, 10, groups=6)[0]
    mask = on_device(padding(masks, 3, 50))
    labels, centroids = kmeans(points, 5, iterations=3, mask=mask, backend="triton")
    expected_labels, expected = kmeans(points.double(), 5, iterations=3, mask=mask, backend="reference")
    assert torch.equal(labels, expected_labels)
    assert centroids.dtype == torch.float32
    error = (centroids - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= 1e-6


def test_many_points_are_summed_in_blocks():
    """The same ones with padding behind them."""
    points = blobs(1, 1, 420, 7, groups=6)[0]
    expected_labels, expected = kmeans(points.double(), 6, iterations=2, backend="reference")
    labels, centroids = kmeans(points, 6, iterations=2, backend="triton")
    assert torch.equal(labels, expected_labels)
    assert_close_to_reference("centroids", centroids, expected, rtol=1e-6)
    padded = torch.cat([points, points.new_full((1, 100, 7), torch.nan)], dim=1)
    mask = torch.arange(520, device=DEVICE)[None] < 420
    again_labels, again = kmeans(padded, 6, iterations=2, mask=mask, backend="triton")
    assert torch.equal(again_labels[:, :420], labels)
    assert torch.equal(again, centroids)


def test_kmeans_keeps_empty_clusters_and_few_points():
    points = torch.randint(-3, 4, (1, 1, 5), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    labels, centroids = kmeans(points.expand(2, 30, 5), 4, backend="triton")
    assert (labels == 0).all()
    torch.testing.assert_close(centroids, points.expand(2, 4, 5), rtol=1e-6, atol=0)
    labels, centroids = kmeans(randn(2, 3, 5), 4, backend="triton")
    assert torch.equal(labels, torch.arange(3, device=DEVICE).expand(2, 3))
    assert torch.equal(centroids[:, :3], randn(2, 3, 5))
    assert (centroids[:, 3] == 0).all()
    labels, centroids = kmeans(randn(2, 0, 5), 4, backend="triton")
    assert labels.shape == (2, 0)
    assert (centroids == 0).all()


@pytest.mark.slow
def test_one_graph_and_legal_ops():
    query, key = blobs(1, 2, 30, 8, groups=5), randn(1, 2, 30, 8)
    mask = on_device(padding("left", 1, 30))
    import_module("hf_effattn.ops.cluster_queries.triton")
    torch.library.opcheck(
        torch.ops.hf_effattn.cluster_queries_triton.default, (query, key, mask, None, 4, "kmeans", 1, 16, 64, 0)
    )
    torch.library.opcheck(torch.ops.hf_effattn.kmeans_triton.default, (query, mask, 4, 1, 64, 0))

    def labels(query):
        return cluster_queries(query, 4, key=key, iterations=1, backend="triton")

    assert torch.equal(torch.compile(labels, fullgraph=True, backend="aot_eager")(query), labels(query))


def test_rows_longer_than_a_tile_are_walked_in_parts(monkeypatch):
    triton_form = import_module("hf_effattn.ops.kmeans.triton")
    query = blobs(1, 1, 40, 40, groups=6)
    expected = cluster(query, 5, "kmeans", backend="triton")
    monkeypatch.setattr(triton_form, "assign_blocks", lambda *sizes: (16, 16, 16, 4, 1))
    parts = {"BLOCK_C": 16, "BLOCK_R": 16, "BLOCK_K": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton_form, "update_blocks", lambda *sizes: parts)
    assert torch.equal(cluster(query, 5, "kmeans", backend="triton"), expected)


def test_more_bits_than_a_kernel_takes():
    with pytest.raises(ValueError, match='up to 256 bits, got 300; use backend="batched"'):
        cluster_queries(randn(1, 1, 9, 4), 2, method="lsh", bits=300, backend="triton")
