"""Pieces of the GPU kernels: sorting by cluster, cluster means, top-k, the pass of the centroids over the keys."""

from itertools import product
from math import log

import pytest
import torch
from support.closeness import assert_close_to_reference

from hf_effattn.ops.shared.triton import centroids as triton_centroids
from hf_effattn.ops.shared.triton import sort as triton_sort
from hf_effattn.ops.shared.triton import topk as triton_topk
from hf_effattn.ops.shared.triton.centroids import bin_length, centroid_pass, score_chunks, split_count
from hf_effattn.ops.shared.triton.sort import cluster_means, sort_both_by_cluster, sort_by_cluster
from hf_effattn.ops.shared.triton.topk import select_topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def clusters_of_rows(labels, mask, clusters):
    """The cluster of each row `(P, N)`, `clusters` for a row in none."""
    member = (labels >= 0) & (labels < clusters)
    if mask is not None:
        member &= mask[:, None]
    return torch.where(member, labels, clusters).flatten(0, 1)


@pytest.mark.parametrize(
    ("B", "H", "N", "clusters", "tile", "masked", "dtype"),
    [
        (2, 3, 37, 5, 16, True, torch.int64),
        (1, 1, 1, 1, 16, False, torch.int32),
        pytest.param(1, 2, 2300, 3, 32, True, torch.int64, marks=pytest.mark.slow),  # in three parts
        (2, 1, 40, 15, 16, True, torch.int64),
        (1, 1, 90, 60, 16, False, torch.int16),
        (1, 1, 70, 514, 16, False, torch.int64),  # more clusters than rows
        (1, 2, 64, 4, 64, False, torch.uint8),
    ],
)
def test_rows_are_sorted_and_every_row_is_in_one_tile(B, H, N, clusters, tile, masked, dtype):
    generator = torch.Generator().manual_seed(N)
    low = 0 if dtype == torch.uint8 else -2
    labels = torch.randint(low, clusters + 2, (B, N, H), generator=generator).to(dtype).transpose(1, 2)
    mask = torch.rand(B, N, generator=generator) > 0.3 if masked else None
    actual = sort_by_cluster(labels.to(DEVICE), None if mask is None else mask.to(DEVICE), clusters, tile)
    order, starts, tiles = (tensor.cpu() for tensor in (actual.order, actual.starts, actual.tiles))
    expected = clusters_of_rows(labels.long(), mask, clusters)
    for p in range(B * H):
        assert torch.equal(order[p].long(), expected[p].argsort(stable=True))
        counts = torch.bincount(expected[p], minlength=clusters + 1)
        assert starts[p].tolist() == [0, *counts.cumsum(0).tolist()]
        covered = torch.zeros(N, dtype=torch.int64)
        for slot, cluster in enumerate(tiles[p].tolist()):
            start, end = starts[p, cluster].item(), starts[p, cluster + 1].item()
            first = start + (slot - start // tile - cluster) * tile
            assert first >= start
            covered[first : max(first, min(first + tile, end))] += 1
        assert (covered == 1).all()


@pytest.mark.slow
def test_more_clusters_than_a_program_counts_at_once(monkeypatch):
    labels = torch.randint(-1, 60, (1, 2, 1300), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = sort_by_cluster(labels, None, 59, 16)
    monkeypatch.setattr(triton_sort, "MOST_BINS", 16)
    actual = sort_by_cluster(labels, None, 59, 16)
    for name in ("order", "starts", "tiles"):
        assert torch.equal(getattr(actual, name), getattr(expected, name))


@pytest.mark.parametrize("masked", [(True, True), (False, True)], ids=["both", "one"])
def test_two_sets_of_rows_are_sorted_as_each_alone(masked):
    """In the same launches, whatever they differ in; not all programs of the second have a head."""
    generator = torch.Generator().manual_seed(0)
    sets = []
    for has_mask, (B, H, N, clusters, tile, dtype) in zip(
        masked, ((2, 2, 37, 5, 16, torch.int64), (1, 3, 90, 20, 32, torch.int32)), strict=True
    ):
        labels = torch.randint(-1, clusters + 1, (B, N, H), generator=generator, dtype=dtype).transpose(1, 2)
        mask = (torch.rand(B, N, generator=generator) > 0.3).to(DEVICE) if has_mask else None
        sets.append((labels.to(DEVICE), mask, clusters, tile))
    for arguments, actual in zip(sets, sort_both_by_cluster(*sets), strict=True):
        alone = sort_by_cluster(*arguments)
        for name in ("order", "starts", "tiles"):
            assert torch.equal(getattr(actual, name), getattr(alone, name))


def test_one_huge_cluster_is_many_tiles():
    labels = torch.full((1, 1, 200), 1, device=DEVICE)
    assert (sort_by_cluster(labels, None, 3, 16).tiles == 1).sum() >= 200 // 16


@pytest.mark.slow_except("torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cluster_means(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 330, 2, 20, generator=generator).to(dtype).transpose(1, 2)
    labels = torch.randint(-1, 4, (2, 2, 330), generator=generator)
    labels[..., ::2] = 1  # more rows than a program loads at once
    mask = torch.rand(2, 330, generator=generator) > 0.3
    rows[:, :, ~mask[0]] = torch.where(mask[0, 0], rows[:, :, ~mask[0]], float("nan"))  # in no cluster, in no mean
    mask[1] = mask[0]
    members = sort_by_cluster(labels.to(DEVICE), mask.to(DEVICE), 5, 16)
    means = cluster_means(rows.to(DEVICE), members).cpu()
    expected_clusters = clusters_of_rows(labels, mask, 5)
    for p in range(4):
        for j in range(5):
            chosen = rows.flatten(0, 1)[p][expected_clusters[p] == j].double()
            expected = chosen.mean(dim=0) if len(chosen) else torch.zeros(20, dtype=torch.float64)
            assert_close_to_reference("mean", means[p, j], expected, rtol=1e-6)


def best_columns(row, topk):
    """Columns of the largest finite numbers, the first of equals, ascending."""
    columns = [column for column, value in enumerate(row.tolist()) if value > float("-inf")]
    return sorted(sorted(columns, key=lambda column: (-row[column].item(), column))[:topk])


@pytest.mark.parametrize("whole_row", [4096, 64], ids=["in_registers", "in_parts"])
@pytest.mark.parametrize(("rows", "columns", "topk"), [(5, 37, 6), (2, 130, 64), (2, 70, 70), (3, 1, 1)])
def test_topk_is_exact_and_takes_the_first_of_equals(monkeypatch, whole_row, rows, columns, topk):
    monkeypatch.setattr(triton_topk, "WHOLE_ROW", whole_row)
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    values[0] = values[0].round()  # many equals
    values[0, values[0] == 0] = 0.0
    values[1, 5:] = float("-inf")
    values[-1, 1:] *= 1e30
    indices, chosen = (tensor.cpu() for tensor in select_topk(values.to(DEVICE), topk))
    for row in range(rows):
        expected = best_columns(values[row], topk)
        missing = topk - len(expected)
        assert indices[row].tolist() == expected + [-1] * missing
        assert chosen[row].tolist() == values[row, expected].tolist() + [float("-inf")] * missing


def test_topk_of_rows_without_a_number():
    indices, chosen = select_topk(torch.full((3, 20), float("-inf"), device=DEVICE), 4)
    assert (indices == -1).all()
    assert (chosen == float("-inf")).all()


def make_pass(B=2, H=2, key_heads=2, M=101, D=16, Dv=12, clusters=5, masked=True):
    generator = torch.Generator().manual_seed(M)
    centroids = torch.randn(B * H, clusters, D, generator=generator)
    key = torch.randn(B, M, key_heads, D, generator=generator).transpose(1, 2)
    value = torch.randn(B, M, key_heads, Dv, generator=generator).transpose(1, 2)
    key[:, :, M // 2] = key[:, :, 0]  # equal scores
    mask = None
    if masked:
        mask = torch.rand(B, M, generator=generator) > 0.4
        mask[-1, 3:] = False
    return centroids, key, value, mask


def check_pass(centroids, key, value, mask, topk):
    """Attention, log-sum-exp, top keys and their marks against float64, where equal scores may differ in a bit."""
    arguments = [tensor if tensor is None else tensor.to(DEVICE) for tensor in (centroids, key, value, mask)]
    parts = centroid_pass(*arguments, 0.3, topk)
    B, Hk, _, D = key.shape
    scores = 0.3 * centroids.double().view(B, Hk, -1, D) @ key.double().transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    expected = (scores.softmax(dim=-1).nan_to_num(0.0) @ value.double()).flatten(0, 2)
    lse = parts.lse.cpu().double() * log(2)
    merged = (lse.softmax(dim=1)[..., None] * parts.values.cpu()).sum(dim=1)
    assert_close_to_reference("values", merged, expected, rtol=1e-6)
    expected_lse = scores.logsumexp(dim=-1).flatten()
    seen = expected_lse > float("-inf")
    assert_close_to_reference("lse", lse.logsumexp(dim=1)[seen], expected_lse[seen], rtol=1e-6)
    scores = scores.flatten(0, 2)
    for row, top, top_scores in zip(scores, parts.top.cpu(), parts.top_scores.cpu(), strict=True):
        best = row.topk(topk).values
        best = best[best > float("-inf")].sort().values
        assert top[len(best) :].tolist() == [-1] * (topk - len(best))
        top, top_scores = top[: len(best)].long(), top_scores[: len(best)].double() * log(2)
        assert len(top.unique()) == len(top)
        torch.testing.assert_close(row[top].sort().values, best, rtol=0, atol=1e-9)
        torch.testing.assert_close(top_scores, row[top], rtol=0, atol=4e-6)
    tables, rows = B * Hk, len(parts.top) // (B * Hk)
    marks = torch.zeros(tables, key.shape[2], 2, dtype=torch.int32, device=DEVICE)
    alone = centroid_pass(*arguments[:2], None, arguments[3], 0.3, topk, marks=marks)
    assert torch.equal(alone.top, parts.top)
    bits = marks[..., None].cpu() >> torch.arange(32) & 1  # (tables, keys, words, 32)
    for table, row in product(range(tables), range(rows)):
        top = parts.top[table * rows + row].cpu()
        assert bits[table, :, row // 32, row % 32].nonzero()[:, 0].tolist() == sorted(top[top >= 0].tolist())
    assert bits.sum() == (parts.top >= 0).sum()
    return parts


@pytest.mark.slow_except("sizes0", "sizes1")
@pytest.mark.parametrize(
    "sizes", [{"topk": 6}, {"topk": 101, "clusters": 3}, {"topk": 7, "H": 4, "clusters": 18, "masked": False}]
)
def test_centroid_pass(sizes):
    topk = sizes.pop("topk")
    check_pass(*make_pass(**sizes), topk)


def test_centroid_pass_in_parts_of_the_keys(monkeypatch):
    monkeypatch.setattr(triton_centroids, "PROGRAMS", 16)
    parts = check_pass(*make_pass(B=1, M=300, key_heads=1, clusters=3), 6)
    assert parts.lse.shape[1] > 1


@pytest.mark.slow_except("16-21-4-*")
@pytest.mark.parametrize("score_bytes", [2**28, 1500], ids=["at_once", "in_chunks"])
@pytest.mark.parametrize(("fewest", "candidates", "length"), [(64, 2048, 2), (16, 48, 9), (16, 21, 4)])
def test_long_rows_through_bins(monkeypatch, score_bytes, fewest, candidates, length):
    """Only the largest score of every few keys is kept; the chosen bins' keys are scored again."""
    monkeypatch.setattr(triton_centroids, "BINS", fewest)
    monkeypatch.setattr(triton_centroids, "FEW_CANDIDATES", candidates)
    monkeypatch.setattr(triton_centroids, "CANDIDATES", candidates)
    monkeypatch.setattr(triton_centroids, "SCORE_BYTES", score_bytes)
    assert bin_length(150, 5) == length
    check_pass(*make_pass(B=1, M=170, clusters=3), 3)
    check_pass(*make_pass(B=1, M=150, H=1, key_heads=1, clusters=2, masked=False), 5)


@pytest.mark.parametrize(
    ("M", "topk", "length"),
    [
        (2047, 32, 1),
        (4096, 32, 4),
        (16384, 32, 16),
        (65536, 32, 16),
        (16384, 64, 8),
        (16384, 128, 4),
        (2**20, 128, 16),
        (16384, 2000, 1),
        (16384, 0, 16),
    ],
)
def test_bins_leave_few_candidates(M, topk, length):
    assert bin_length(M, topk) == length


def test_chunks_are_whole_tables_or_parts_of_one():
    assert score_chunks(3, 10, triton_centroids.SCORE_BYTES // 20) == [(0, 20), (20, 30)]
    assert score_chunks(2, 10, triton_centroids.SCORE_BYTES // 4) == [
        (0, 4), (4, 8), (8, 10), (10, 14), (14, 18), (18, 20)
    ]  # fmt: skip
    assert score_chunks(2, 3, 1) == [(0, 6)]
    assert score_chunks(0, 3, 1) == []


def test_splits_fill_the_chip_and_keep_parts_long():
    assert split_count(1, 2**20, 64) == 64
    assert split_count(triton_centroids.PROGRAMS, 2**20, 64) == 1
    assert split_count(1, 512, 64) == 2
    assert split_count(1, 0, 64) == 1
