"""Pieces of the forms for a CPU: the largest of many numbers, chunks of heads on threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Barrier, current_thread
from weakref import WeakSet

import pytest
import torch
from support.attention_cases import Case, attend, make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_effattn.ops import cluster_queries, kmeans
from hf_effattn.ops.bi_clustered_attention import batched
from hf_effattn.ops.shared import head_threads
from hf_effattn.ops.shared.cluster_blocks import ClusterBlocks
from hf_effattn.ops.shared.head_threads import for_every_chunk, heads_of_threads
from hf_effattn.ops.shared.row_chunks import RowChunk
from hf_effattn.ops.shared.topk import largest
from hf_effattn.patching.methods import clustered, make_method

OPS = ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
CPU = torch.device("cpu")
each_op = pytest.mark.parametrize("op", OPS)


def test_blocks_of_neighbours_equal_sorted_ones_of_one_cluster():
    rows, table, blocks = torch.randn(3, 8, 5), torch.randn(3, 4), torch.randn(3, 7)
    index = torch.arange(3).repeat_interleave(8)
    sorted_rows = ClusterBlocks.of(index, torch.full((3, 1), 8), length=8)
    neighbours = ClusterBlocks.whole(3, 8, CPU)
    assert torch.equal(neighbours.clusters, sorted_rows.clusters)
    for call in (
        lambda layout: layout.pack(rows, rows.square()),
        lambda layout: layout.pack_with_ones(rows),
        lambda layout: layout.unpack(layout.pack(rows), 3),
        lambda layout: layout.of_cluster(table),
        lambda layout: layout.sum(blocks, 3),
    ):
        assert torch.equal(call(neighbours), call(sorted_rows))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    ("M", "topk"), [(1, 1), (31, 4), (32, 1), (39, 1), (133, 4), (1000, 31), (2051, 64), (4099, 1), (512, 512)]
)
def test_largest_equals_torchs(M, topk, in_order):
    scores = torch.randn(2, 70, M, generator=torch.Generator().manual_seed(M), dtype=torch.float64)
    places = largest(scores, topk, in_order=in_order)
    expected = scores.topk(topk, dim=2).indices
    if not in_order:
        places, expected = places.sort(dim=2).values, expected.sort(dim=2).values
    assert torch.equal(places, expected)


@pytest.mark.parametrize("in_order", [False, True])
def test_largest_of_equal_numbers_and_of_none(in_order):
    """Of ties any are right, each once; places that hold no key are taken last."""
    scores = torch.randint(5, (3, 9, 1003), generator=torch.Generator().manual_seed(0)).float()
    scores[..., 40:] = -torch.inf
    places = largest(scores, 30, in_order=in_order)
    assert places.dtype == torch.int64
    assert all(len(set(row)) == 30 for row in places.flatten(0, 1).tolist())
    values, expected = scores.gather(2, places), scores.topk(30, dim=2).values
    if not in_order:
        values = values.sort(dim=2, descending=True).values
    assert torch.equal(values, expected)


def outputs_and_gradients(op: str, case: Case, seed: int = 0, **options) -> list[torch.Tensor]:
    inputs = make_inputs(case, seed=seed)
    leaves = [tensor.requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    torch.manual_seed(3)
    output = attend(op, case, inputs, backend="batched", **options)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


SIZES = Case("threads", H=6, key_heads=3, N=90, M=90, masks="right")


@each_op
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_one_thread_and_two_give_the_same(op, dropout_p, two_threads):
    on_two = outputs_and_gradients(op, SIZES, dropout_p=dropout_p)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    for actual, expected in zip(on_two, outputs_and_gradients(op, SIZES, dropout_p=dropout_p), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("max_predicted_error", [None, 0.5])
@pytest.mark.parametrize("masks", ["none", "right"])
def test_keys_and_queries_are_grouped_alike_on_any_number_of_threads(masks, max_predicted_error, two_threads):
    inputs = make_inputs(Case("threads", H=6, key_heads=3, N=90, M=90, masks=masks), seed=0)
    method = make_method("bi-clustered", clusters=7, topk=3, key_clusters=5, max_predicted_error=max_predicted_error)
    on_two = method.group(inputs.query, inputs.key, inputs.key_mask)
    torch.set_num_threads(1)
    on_one = method.group(inputs.query, inputs.key, inputs.key_mask)
    assert len(on_two) == len(on_one) == (2 if max_predicted_error is None else 3)
    assert all(torch.equal(*pair) for pair in zip(on_two, on_one, strict=True))
    assert [int(labels.amax()) for labels in on_one[:2]] == [6, 4]


ALL_ROWS, SOME_ROWS, OWN_CLUSTERS = {}, {"fit_queries": 24}, {"clusters": 64, "key_clusters": 96}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("masks", "key_heads"), [("none", 6), ("holes", 3), ("row", 3)])
@pytest.mark.parametrize(
    "settings",
    [ALL_ROWS, SOME_ROWS, OWN_CLUSTERS, {"distance": "vectors"}, {"clustering": "lsh", "bits": 40}, {"iterations": 0}],
    ids=str,
)
def test_one_walk_finds_what_the_ops_find(settings, key_heads, masks, dtype):
    """Rows of a head lie apart, as a model's projections leave them, or, from a mask on, wherever they are taken."""
    inputs = make_inputs(Case("walk", H=6, key_heads=key_heads, N=95, M=95, masks=masks), seed=0)
    query, key = (x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.query, inputs.key))
    method = make_method("bi-clustered", **{"clusters": 7, "key_clusters": 5, "seed": 3} | settings)
    *labels, predicted = method._group_on_cpu(query, key, inputs.key_mask, 0.7)
    *expected, of_ops = method._group_heads(query, key, inputs.key_mask, 0.7)
    # Rounding decides between centroids as near as each other.
    share = 1 if dtype == torch.float64 else 0.98
    for actual, wanted in zip(labels, expected, strict=True):
        assert (actual == wanted).double().mean() >= share
    torch.testing.assert_close(predicted, of_ops.to(predicted.dtype), rtol=1e-12 if share == 1 else 0.05, atol=1e-14)


def test_without_numbers_a_walk_tells_its_sizes_and_leaves_nothing():
    """Of real tensors of the same length afterwards, nothing is known from before."""
    method = make_method("bi-clustered", clusters=7, key_clusters=5)
    with FakeTensorMode():
        empty = torch.randn(1, 2, 61, 8)
        shapes = method.group(empty, empty, None)
    query = torch.randn(1, 2, 61, 8)
    labels = method.group(query, query, None)
    assert [(tensor.shape, tensor.dtype) for tensor in shapes] == [(tensor.shape, tensor.dtype) for tensor in labels]
    assert labels[0].max() < 7


def test_a_walk_is_fitted_on_as_many_queries_as_the_method_says(monkeypatch):
    monkeypatch.setattr(clustered, "DEFAULT_FIT_QUERIES", 8)
    monkeypatch.setattr(clustered.BiClustered, "fit_per_cluster", 6)
    query, key = (torch.randn(1, 2, 95, 8, dtype=torch.float64) for _ in range(2))
    method = make_method("bi-clustered", clusters=7, key_clusters=5, max_predicted_error=None)
    for find in (method._group_on_cpu, method._group_heads):
        labels, *_ = find(query, key, None, None)
        assert torch.equal(labels, cluster_queries(query, 7, key=key, fit_queries=42))
    assert not torch.equal(labels, cluster_queries(query, 7, key=key, fit_queries=28))


def test_points_in_blocks_have_the_labels_of_all_at_once(monkeypatch):
    points = torch.randn(3, 700, 6, dtype=torch.float64)
    expected = kmeans(points, 9)
    monkeypatch.setattr(import_module("hf_effattn.ops.kmeans.batched"), "BLOCK_BYTES", 1)
    for actual, wanted in zip(kmeans(points, 9), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize(("heads", "threads", "expected"), [(12, 2, [6, 6]), (3, 2, [1, 2]), (1, 2, [1]), (5, 1, [5])])
def test_every_thread_gets_heads(heads, threads, expected, two_threads):
    torch.set_num_threads(threads)
    parts = heads_of_threads(heads, CPU)
    assert [part.stop - part.start for part in parts] == expected
    assert [head for part in parts for head in range(part.start, part.stop)] == list(range(heads))


def chunks(count: int) -> list[RowChunk]:
    return [RowChunk(batch, 0, 1, 1, batch, None, None) for batch in range(count)]


def test_chunks_run_on_threads_of_one_thread_each(two_threads):
    seen, together = [], Barrier(2, timeout=60)  # passed only by two chunks at once

    def run(chunk):
        together.wait()
        seen.append((chunk.batch, current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for_every_chunk(run, chunks(6), CPU)
    assert sorted(batch for batch, *_ in seen) == list(range(6))
    assert {threads for *_, threads, _ in seen} == {1}
    assert not any(grad for *_, grad in seen)
    assert len({name for _, name, *_ in seen}) == 2
    with ThreadPoolExecutor(1) as pool:  # threads to come are told nothing of the chunks' one
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2


@pytest.mark.parametrize(("count", "threads", "each"), [(3, 4, 1), (2, 5, 2), (2, 4, 2)])
def test_fewer_chunks_than_threads_run_at_once_on_several_each(count, threads, each, two_threads):
    """With 12 heads on 16 threads they ran one after the other."""
    torch.set_num_threads(threads)
    seen, together = [], Barrier(count, timeout=60)

    def run(chunk):
        together.wait()
        inner = []
        for_every_chunk(lambda chunk: inner.append((chunk.batch, current_thread())), chunks(3), CPU)
        assert inner == [(batch, current_thread()) for batch in range(3)]
        seen.append((current_thread(), torch.get_num_threads()))

    for_every_chunk(run, chunks(count), CPU)
    assert len({thread for thread, _ in seen}) == count
    assert [number for _, number in seen] == [each] * count
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("count", "alone"), [(4, True), (1, False)])
def test_a_chunk_inside_of_another_runs_as_one(count, alone, two_threads):
    """Where a chunk has a thread for itself, so do those in it, one after the other; else they are shared out."""
    seen = []

    def run(outer):
        def note(inner):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            seen.append((current_thread().name, torch.get_num_threads(), torch.is_grad_enabled(), product.dtype))

        for_every_chunk(note, chunks(3), CPU)
        if alone:
            assert [row[0] for row in seen].count(current_thread().name) >= 3

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for_every_chunk(run, chunks(count), CPU)
    assert len(seen) == 3 * count
    assert {row[1:] for row in seen} == {(1, False, torch.float32)}
    assert len({name for name, *_ in seen}) <= 2
    assert all(name.startswith("hf_effattn") for name, *_ in seen)


flushes = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor knows no such mode")


@flushes
@pytest.mark.parametrize("default", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "threads"), [(1, 1), (9, 2)])
@pytest.mark.parametrize("of_caller", [False, True])
def test_a_chunk_takes_denormals_as_zero_and_the_caller_does_as_before(
    count, threads, of_caller, default, two_threads
):
    seen = []
    torch.set_num_threads(threads)

    def denormal():
        return torch.full((), 1e-40, dtype=torch.float32).mul(2).item()

    def run(chunk):
        seen.append(denormal())
        if chunk.batch == count - 1:
            raise ArithmeticError

    torch.set_flush_denormal(of_caller)
    torch.set_default_dtype(default)
    try:
        with pytest.raises(ArithmeticError):
            for_every_chunk(run, chunks(count), CPU)
        assert seen == [0.0] * count
        assert (denormal() == 0) == of_caller
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(False)


FIRST_USE = """
import torch
from hf_effattn.ops.shared.head_threads import for_every_chunk

def small():
    return torch.full((2**22,), 1e-40).mul_(2).count_nonzero().item()

torch.set_num_threads(2)
for_every_chunk(lambda chunk: small(), [0], torch.device("cpu"))  # fewer chunks than threads: each on all of them
assert small() == 2**22
"""


@flushes
@pytest.mark.slow
def test_threads_that_a_chunk_starts_keep_denormals():
    """OpenMP's take the mode of the thread that first needs them, for all that the process does later."""
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", FIRST_USE], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_gradients_of_keys_wait_for_their_own_head_alone(two_threads, monkeypatch):
    """A head that attends exactly is cut into a part per thread, whose gradients are each as large as its keys."""
    case = Case("exact", H=12, N=40, M=40)
    inputs, alive, most = make_inputs(case), WeakSet(), []
    find = batched.exact_backward

    def counted(*arguments):
        gradients = find(*arguments)
        alive.add(gradients[1])
        most.append(len(alive))
        return gradients

    monkeypatch.setattr(batched, "exact_backward", counted)
    leaves = [tensor.requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    output = attend("bi_clustered_attention", case, inputs, backend="batched", exact_heads=torch.ones(2, 12) > 0)
    torch.autograd.grad(output.sum(), leaves)
    assert len(most) == 2 * 2 * 12
    assert max(most) <= 4  # those of the heads that two threads are at


@pytest.mark.parametrize("count", [1, 2, 9])
def test_what_a_chunk_raises_is_raised(count, two_threads):
    def run(chunk):
        if chunk.batch == count - 1:
            raise ArithmeticError("in a chunk")

    with pytest.raises(ArithmeticError, match="in a chunk"):
        for_every_chunk(run, chunks(count), CPU)
    done = []
    for_every_chunk(lambda chunk: done.append(chunk.batch), chunks(9), CPU)
    assert sorted(done) == list(range(9))


@each_op
def test_inference_mode(op, two_threads):
    inputs = make_inputs(SIZES)
    expected = attend(op, SIZES, inputs)
    with torch.inference_mode():
        actual = attend(op, SIZES, make_inputs(SIZES))
        assert actual.is_inference()
    assert torch.equal(actual, expected)
    # A tensor of inference mode is read outside of it.
    inputs.query = torch.inference_mode()(lambda: inputs.query.clone())()
    assert torch.equal(attend(op, SIZES, inputs), expected)


@each_op
def test_several_threads_of_python_at_once(op, two_threads):
    expected = [outputs_and_gradients(op, SIZES, seed=seed) for seed in range(6)]
    head_threads._workers.cache_clear()  # the pool, too, is made by all of them at once
    together = Barrier(3, timeout=60)

    def run(seed):
        together.wait()
        return outputs_and_gradients(op, SIZES, seed=seed)

    with ThreadPoolExecutor(3) as pool:
        for actual, alone in zip(pool.map(run, range(6)), expected, strict=True):
            for tensor, same in zip(actual, alone, strict=True):
                torch.testing.assert_close(tensor, same, rtol=1e-12, atol=1e-14)


FORKED = """
import os, sys
import torch
from hf_effattn.ops import bi_clustered_attention

torch.set_num_threads(2)
tensors = [torch.randn(1, 4, 40, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
labels = [torch.randint(4, (1, 4, 40), generator=torch.Generator().manual_seed(n)) for n in range(2)]

def run():
    return bi_clustered_attention(*tensors, *labels, clusters=4, key_clusters=4, topk=4)

expected = run()  # starts the threads, which a child has not
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(run(), expected) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_forked_process_starts_its_own_threads():
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", FORKED], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
