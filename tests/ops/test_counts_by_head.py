"""Bi-clustered attention with counts of its own for every head: each head is what it is alone; chunks kept for the way
back give the gradients of chunks computed again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from support.attention_cases import Case, Inputs, attend, make_inputs
from torch.utils.checkpoint import checkpoint

from hf_effattn.ops.bi_clustered_attention import batched
from hf_effattn.ops.shared.kept_objects import as_tensors, from_tensors

OP = "bi_clustered_attention"
CASE = Case("by head", H=6, key_heads=3, N=29, M=29, masks="right")
CLUSTERS, KEY_CLUSTERS, TOPK = [5, 2, 5], [4, 3, 4], [6, 50, 6]
EXACT = torch.tensor([[False, False, True], [False, False, False]])


def inputs_of_counts() -> Inputs:
    """Labels of every head below its own counts; the gradients of all three tensors are wanted."""
    inputs = make_inputs(CASE)
    counts = torch.tensor(CLUSTERS).repeat_interleave(2)[:, None], torch.tensor(KEY_CLUSTERS)[:, None]
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    labels, key_labels = inputs.labels % counts[0], inputs.key_labels % counts[1]
    return replace(
        inputs, **dict(zip(("query", "key", "value"), leaves, strict=True)), labels=labels, key_labels=key_labels
    )


def both_passes(inputs: Inputs, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value."""
    options = {"clusters": CLUSTERS, "key_clusters": KEY_CLUSTERS, "topk": TOPK} | options
    output = attend(OP, CASE, inputs, **options)
    return [output, *gradients_of(output, inputs)]


def gradients_of(output: torch.Tensor, inputs: Inputs, again: bool = True) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
    leaves = inputs.query, inputs.key, inputs.value
    return torch.autograd.grad((output * weights).sum(), leaves, retain_graph=again)


@pytest.mark.slow_except("none exact-batched", "some exact-batched")
@pytest.mark.parametrize("backend", ["reference", "batched", "triton"])
@pytest.mark.parametrize("exact_heads", [None, EXACT], ids=["none exact", "some exact"])
def test_every_head_is_what_it_is_alone(exact_heads, backend):
    inputs = inputs_of_counts()
    if backend == "triton":
        inputs = inputs.to(torch.float32)
        for tensor in (inputs.query, inputs.key, inputs.value):
            tensor.requires_grad_()
    together = both_passes(inputs, exact_heads=exact_heads, backend=backend)
    for head, (clusters, key_clusters, topk) in enumerate(zip(CLUSTERS, KEY_CLUSTERS, TOPK, strict=True)):
        queries, kv_head = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        alone = replace(
            inputs,
            query=inputs.query[:, queries].detach().double().requires_grad_(),
            key=inputs.key[:, kv_head].detach().double().requires_grad_(),
            value=inputs.value[:, kv_head].detach().double().requires_grad_(),
            labels=inputs.labels[:, queries],
            key_labels=inputs.key_labels[:, kv_head],
        )
        exact = None if exact_heads is None else exact_heads[:, kv_head]
        counts = {"clusters": clusters, "key_clusters": key_clusters, "topk": topk}
        weights = torch.randn(together[0].shape, generator=torch.Generator().manual_seed(0), dtype=together[0].dtype)
        output = attend(OP, CASE, alone, exact_heads=exact, backend="reference", **counts)
        leaves = alone.query, alone.key, alone.value
        gradients = torch.autograd.grad((output * weights[:, queries]).sum(), leaves)
        expected = [output, *gradients]
        tolerance = {"rtol": 2e-4, "atol": 2e-5} if backend == "triton" else {"rtol": 1e-9, "atol": 1e-12}
        for place, tensor in enumerate(together):
            part = tensor[:, queries if place < 2 else kv_head]
            torch.testing.assert_close(part.double(), expected[place], **tolerance)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"clusters": [5, 5]}, "clusters must be one number, or one for each of the 3 heads of key, got 2"),
        ({"topk": [6, 0, 6]}, "topk must be at least 1, got 0"),
        ({"key_clusters": [4, 3, 2]}, r"key_labels must lie in 0 .. key_clusters - 1 = 1, got 0 .. 3"),
    ],
)
def test_counts_that_do_not_fit(given, match):
    with pytest.raises(ValueError, match=match):
        both_passes(inputs_of_counts(), **given)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("kept", [0, 99])
def test_kept_chunks_give_the_gradients_of_chunks_computed_again(kept, dropout_p, monkeypatch, two_threads):
    """Twice of one graph, in a checkpoint, and where other threads would make other chunks."""
    monkeypatch.setattr(batched, "MOST_KEPT", 0)
    options = {"exact_heads": EXACT, "dropout_p": dropout_p}
    inputs = inputs_of_counts()
    torch.manual_seed(1)
    expected = both_passes(inputs, **options)

    monkeypatch.setattr(batched, "MOST_KEPT", kept)
    torch.manual_seed(1)
    output = attend(OP, CASE, inputs, clusters=CLUSTERS, key_clusters=KEY_CLUSTERS, topk=TOPK, **options)
    close = {"rtol": 1e-10, "atol": 1e-13}
    for threads in (2, 2, 1):
        torch.set_num_threads(threads)
        torch.testing.assert_close(gradients_of(output, inputs), tuple(expected[1:]), **close)

    def run(query: torch.Tensor) -> torch.Tensor:
        with_query = replace(inputs, query=query)
        return attend(OP, CASE, with_query, clusters=CLUSTERS, key_clusters=KEY_CLUSTERS, topk=TOPK, **options)

    torch.manual_seed(1)
    output = checkpoint(run, inputs.query, use_reentrant=False)
    torch.testing.assert_close(gradients_of(output, inputs, again=False), tuple(expected[1:]), **close)


def test_a_checkpoint_whose_threads_finish_in_another_order(monkeypatch):
    inputs = inputs_of_counts()
    expected = both_passes(inputs)
    passes = count()

    def run_in_turn(run: Callable[[Any], None], chunks: Iterable[Any], device: torch.device) -> None:
        for chunk in list(chunks)[:: (-1) ** next(passes)]:
            with torch.no_grad():
                run(chunk)

    monkeypatch.setattr(batched, "for_every_chunk", run_in_turn)

    def run(query: torch.Tensor) -> torch.Tensor:
        options = {"clusters": CLUSTERS, "key_clusters": KEY_CLUSTERS, "topk": TOPK}
        return attend(OP, CASE, replace(inputs, query=query), **options)

    output = checkpoint(run, inputs.query, use_reentrant=False)
    torch.testing.assert_close(gradients_of(output, inputs), tuple(expected[1:]), rtol=1e-10, atol=1e-13)


def kept_bytes(inputs: Inputs) -> int:
    """What autograd holds for the way back beside the inputs and the output."""
    pointers = {tensor.untyped_storage().data_ptr() for tensor in (inputs.query, inputs.key, inputs.value)}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = len(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = attend(OP, CASE, inputs, clusters=CLUSTERS, key_clusters=KEY_CLUSTERS, topk=TOPK)
    pointers.add(output.untyped_storage().data_ptr())
    return sum(size for place, size in held.items() if place not in pointers)


def test_only_small_tables_are_kept_and_none_without_a_way_back(monkeypatch):
    inputs = inputs_of_counts()
    sizes = []
    for kept in (0, 99):
        monkeypatch.setattr(batched, "MOST_KEPT", kept)
        sizes.append(kept_bytes(inputs))
    assert sizes[1] > 3 * sizes[0]
    calls: list[Any] = []
    monkeypatch.setattr(batched, "as_tensors", lambda computed: calls.append(computed) or [])
    with torch.no_grad():
        attend(OP, CASE, inputs, clusters=CLUSTERS, key_clusters=KEY_CLUSTERS, topk=TOPK)
    assert calls == []
    attend(OP, CASE, inputs, clusters=CLUSTERS, key_clusters=KEY_CLUSTERS, topk=TOPK)
    assert [len(computed) for computed in calls] == [6]  # neighbours have other counts: a chunk for each head
    monkeypatch.setattr(batched, "MOST_KEPT", 0)
    attend(OP, CASE, inputs, clusters=CLUSTERS, key_clusters=KEY_CLUSTERS, topk=TOPK)
    assert calls[1] == []


@dataclass(frozen=True)
class Inner:
    view: torch.Tensor
    number: float


class Outer:
    def __init__(self, base: torch.Tensor) -> None:
        self.whole, self.empty, self.none = base, base[:0], None
        self.inner = [Inner(base.view(3, 4).t()[1:], 0.1), True]
        self.other = torch.ones(2, dtype=torch.bool)


def test_objects_come_back_from_tensors_that_share_no_memory():
    base = torch.arange(12.0)
    kept = Outer(base)
    tensors = as_tensors([(1, "two"), kept])
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    assert len(places) == len(set(places)) == 3
    assert base.untyped_storage().data_ptr() in places
    pair, back = from_tensors(tensors, (Inner, Outer))
    assert pair == [1, "two"]
    assert (back.none, back.inner[0].number, back.inner[1]) == (None, 0.1, True)
    pairs = ((back.inner[0].view, kept.inner[0].view), (back.empty, kept.empty), (back.other, kept.other))
    for tensor, other in (*pairs, (back.whole, kept.whole)):
        assert torch.equal(tensor, other)
        assert (tensor.stride(), tensor.dtype) == (other.stride(), other.dtype)
    with pytest.raises(KeyError, match="Inner"):
        from_tensors(tensors, (Outer,))
