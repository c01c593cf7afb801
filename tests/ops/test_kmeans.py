"""K-means alone: what it finds, against Lloyd's algorithm written as loops, masks, its own clusters, its arguments."""

from importlib import import_module

import pytest
import torch
from support.attention_cases import padding

from hf_effattn.ops import kmeans
from hf_effattn.ops.kmeans.sampling import SHARE_BITS, Seeding, first_seed_share, seed_rows

BACKENDS = ("reference", "batched")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def few_seeds_per_group(monkeypatch):
    for form in BACKENDS:
        monkeypatch.setattr(import_module(f"hf_effattn.ops.kmeans.{form}"), "SEEDING", Seeding(3, 512))


def random_points(P=3, N=101, D=6, seed=0):
    return torch.randn(P, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lloyd_with_loops(points, centroids, iterations):
    """Labels and centroids of one problem after so many rounds, on Python lists."""
    points, centroids = points.tolist(), centroids.tolist()

    def closest(point):
        distances = [sum((x - y) ** 2 for x, y in zip(point, c, strict=True)) for c in centroids]
        return distances.index(min(distances))

    for _ in range(iterations):
        labels = [closest(point) for point in points]
        for j in range(len(centroids)):
            members = [point for point, label in zip(points, labels, strict=True) if label == j]
            if members:
                centroids[j] = [sum(column) / len(members) for column in zip(*members, strict=True)]
    return [closest(point) for point in points], centroids


def inertia(points, labels, centroids):
    nearest = centroids.take_along_dim(labels[..., None], dim=1)
    return (points - nearest).square().sum().item()


@each_backend
@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_is_lloyds_algorithm_from_its_own_seeds(backend, iterations):
    points = random_points()
    _, seeds = kmeans(points, 7, iterations=0, backend=backend)
    labels, centroids = kmeans(points, 7, iterations=iterations, backend=backend)
    for p in range(3):
        expected_labels, expected_centroids = lloyd_with_loops(points[p], seeds[p], iterations)
        assert labels[p].tolist() == expected_labels
        torch.testing.assert_close(
            centroids[p], torch.tensor(expected_centroids, dtype=torch.float64), rtol=0, atol=3e-15
        )


@each_backend
def test_seeds_are_farthest_first(backend):
    points = random_points()
    _, seeds = kmeans(points, 7, iterations=0, backend=backend)
    for p in range(3):
        for j in range(1, 7):
            to_chosen = torch.cdist(points[p], seeds[p, :j]).amin(dim=1)
            assert torch.equal(seeds[p, j], points[p, to_chosen.argmax()])


@each_backend
def test_many_seeds_are_found_in_groups(backend, few_seeds_per_group):
    """Seeds `i, i + g, ...` are farthest-first among the rows `i, i + g, ...`."""
    points = random_points(P=2)
    _, seeds = kmeans(points, 7, iterations=0, backend=backend)
    groups = 3  # 7 seeds, at most 3 in a group
    for p in range(2):
        for i in range(groups):
            rows, chosen = points[p, i::groups], seeds[p, i::groups]
            for j in range(1, len(chosen)):
                to_chosen = torch.cdist(rows, chosen[:j]).amin(dim=1)
                assert torch.equal(chosen[j], rows[to_chosen.argmax()])


@pytest.mark.parametrize(("length", "clusters", "counts"), [(101, 7, [34, 34, 33]), (50, 10, [13, 13, 12, 12])])
def test_each_group_of_seeds_has_rows_and_a_start_of_its_own(length, clusters, counts):
    """Groups with a row less have their last one twice."""
    seeding, share = Seeding(3, 4096), first_seed_share(5) / 2**SHARE_BITS
    rows, first = seed_rows(seeding, length, clusters, 5)
    groups = rows.view(len(counts), -1).tolist()
    for i, (group, count) in enumerate(zip(groups, counts, strict=True)):
        expected = list(range(i, length, len(counts)))
        assert len(expected) == count
        assert group == expected + expected[-1:] * (counts[0] - count)
    assert first.tolist() == [int(share * count) for count in counts]
    assert len(set(first.tolist())) > 1


@pytest.mark.parametrize("masks", ["none", "holes", "row", "few"])
@pytest.mark.parametrize("clusters", [1, 5, 40])
def test_both_forms_agree(masks, clusters):
    points = random_points(P=4, N=90)
    mask = padding(masks, 4, 90)
    (labels, centroids), expected = (
        kmeans(points, clusters, mask=mask, iterations=3, fit_points=50, backend=backend) for backend in BACKENDS[::-1]
    )
    assert torch.equal(labels, expected[0])
    torch.testing.assert_close(centroids, expected[1], rtol=0, atol=2e-15)


@each_backend
def test_an_empty_cluster_keeps_its_seed(backend):
    """Of equal points each is as near to the first centroid as to the others, which stay empty."""
    points = torch.randint(-3, 4, (1, 1, 5)).float().expand(2, 30, 5)  # no rounding anywhere
    labels, centroids = kmeans(points, 4, backend=backend)
    assert (labels == 0).all()
    assert torch.equal(centroids, points[:, :4])


def test_inertia_falls_with_iterations_and_a_fit_on_some_is_close():
    points = random_points(P=2, N=700)
    after = [inertia(points, *kmeans(points, 20, iterations=i)) for i in (0, 1, 2, 5, 20)]
    assert after == sorted(after, reverse=True)
    assert inertia(points, *kmeans(points, 20, fit_points=350)) < 1.1 * after[-1]


def test_finds_as_good_clusters_as_many_random_starts():
    """Farthest-first needs one start where well separated groups would catch a random one in a bad optimum."""
    generator = torch.Generator().manual_seed(0)
    centers = 10 * torch.randn(1, 8, 4, generator=generator)
    points = (centers[:, :, None] + torch.randn(1, 8, 20, 4, generator=generator)).flatten(1, 2)
    reached = inertia(points, *kmeans(points, 8))
    starts = []
    for _ in range(4):
        seeds = points[0, torch.randperm(160, generator=generator)[:8]]
        labels, centroids = lloyd_with_loops(points[0], seeds, 10)
        starts.append(inertia(points, torch.tensor([labels]), torch.tensor([centroids])))
    assert reached <= 1.0001 * min(starts)


def test_same_result_every_time_other_seeds_other_starts():
    points = random_points()
    first = kmeans(points, 9)
    assert all(torch.equal(a, b) for a, b in zip(first, kmeans(points, 9), strict=True))
    starts = {int((kmeans(points, 9, iterations=0, seed=seed)[1] == points[:, :1]).sum()) for seed in range(40)}
    assert len(starts) > 1


@each_backend
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 1, 1)])
def test_small_sizes(backend, shape):
    labels, centroids = kmeans(torch.ones(shape), 2, backend=backend)
    assert labels.shape == shape[:2]
    assert centroids.shape == (shape[0], 2, shape[2])
    assert (labels == 0).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clusters": 0}, ValueError, "clusters must be at least 1, got 0"),
        ({"iterations": -1}, ValueError, "iterations must be at least 0"),
        ({"fit_points": 0}, ValueError, "fit_points must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": 2**63}, ValueError, "seed must be at most"),
        ({"points": torch.zeros(3, 4)}, ValueError, "points must have 3 dimensions"),
        ({"points": torch.zeros(3, 4, 5).int()}, TypeError, "points must be a floating-point tensor"),
        ({"mask": torch.ones(2, 9)}, TypeError, "mask must be boolean"),
        (
            {"mask": torch.ones(2, 8).bool()},
            ValueError,
            r"mask must have shape \(B, length\) = \(2, 9\), got \(2, 8\)",
        ),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        kmeans(**({"points": torch.zeros(2, 9, 3), "clusters": 2} | changes))
