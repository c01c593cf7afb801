"""How many kernels an op launches: on a GPU each costs microseconds, whatever it does, and the host longer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from hf_effattn import ops
from hf_effattn.ops.causal_clustered_attention import DEFAULT_SEGMENT_LENGTH, DEFAULT_WINDOW
from hf_effattn.ops.causal_clustered_attention.reference import Settings
from hf_effattn.ops.shared.triton import chips
from hf_effattn.patching.methods.causal import CausalBiClustered

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are caught in Triton's interpreter")
KIB = 1024
HEADS, HEAD_DIM = 2, 16


@contextmanager
def caught_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that would be launched on an H100; nothing runs, and what they should write is 0."""
    names: list[str] = []

    def launch(self: GridExecutor, *arguments: Any, **options: Any) -> None:
        names.append(self.fn.__name__)

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(chips, "INTERPRETER", chips.Chip("cuda", 227 * KIB))
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        yield names


def drawn(length: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    return tuple(torch.zeros(1, HEADS, length, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))


def cluster(length: int, masked: bool = False) -> None:
    query, key, _ = drawn(length)
    mask = torch.ones(1, length, dtype=torch.bool) if masked else None
    ops.cluster_queries(
        query.detach(), 100, key=key.detach(), key_mask=mask, query_mask=mask, iterations=3, backend="triton"
    )


def attend(op: str, length: int, **options: Any) -> torch.Tensor:
    labels = torch.zeros(1, HEADS, length, dtype=torch.int64)
    return getattr(ops, op)(*drawn(length), labels, clusters=100, backend="triton", **options)


def slices(length: int) -> torch.Tensor:
    sinks = torch.zeros(1, length, dtype=torch.bool)
    return ops.slice_attention(
        *drawn(length), slice_length=32, extension_ratio=3, sink_mask=sinks, backend="triton"
    )[0]  # fmt: skip


def blocks(length: int) -> torch.Tensor:
    order = torch.arange(length)[None]
    return ops.sorted_block_attention(*drawn(length), order, block_length=length // 64, backend="triton")


def words(length: int) -> torch.Tensor:
    inputs = (torch.zeros(1, rows, 32, dtype=torch.bfloat16, requires_grad=True) for rows in (length, 64))
    return ops.neural_clustering(*inputs, backend="triton")[0]


def residuals(length: int) -> None:
    ops.query_residuals(drawn(length)[0], torch.zeros(1, HEADS, length, dtype=torch.int64), 100, backend="triton")


def bi_clustered(length: int) -> torch.Tensor:
    key_labels = torch.zeros(1, HEADS, length, dtype=torch.int64)
    return attend("bi_clustered_attention", length, key_labels=key_labels, key_clusters=32, topk=64)


def causal(length: int, method: str = "bi-clustered", **options: Any) -> torch.Tensor:
    """All segments at once: at these lengths there is room for their tables."""
    sizes = {"clusters": 16, "topk": 256, "key_clusters": 16}
    return ops.causal_clustered_attention(*drawn(length), method=method, **sizes, backend="triton", **options)


improved = partial(attend, "improved_clustered_attention", topk=32)


@pytest.mark.parametrize("length", [1024, 4096, 16384])
@pytest.mark.parametrize(
    ("call", "forward", "backward"),
    [
        (cluster, 7, 0),  # the metric in two, the seeds, three rounds, all labels
        (partial(cluster, masked=True), 8, 0),  # and the rows that count
        (residuals, 2, 0),
        (partial(attend, "clustered_attention"), 5, 4),
        (improved, 8, 7),
        (bi_clustered, 12, 7),
        (slices, 2, 6),  # with sinks and sizes
        (blocks, 1, 2),
        (words, 3, 3),
        (causal, 31, 10),
        (partial(causal, max_predicted_error=0.1), 32, 10),
        (partial(causal, method="i-clustered"), 23, 10),
    ],
    ids=[
        *("cluster_queries", "masked", "offsets", "clustered", "improved", "bi", "slices", "blocks", "words"),
        *("causal", "causal with exact heads", "causal i-clustered"),
    ],
)
def test_launches_of_a_layer(monkeypatch, call, forward, backward, length):
    """Short keys have a bin each, and no candidates to score again; one segment has no older keys."""
    if length == 1024 and "causal" in str(call):
        forward, backward = 1, 2
    if call in (improved, bi_clustered) and length == 1024:
        forward -= 1
    with caught_launches(monkeypatch) as launches:
        output = call(length)
        assert len(launches) == forward, launches
        if backward:
            launches.clear()
            output.float().sum().backward()
            assert len(launches) == backward, launches


class StepsOfTorch(TorchDispatchMode):
    """Names of the steps that torch itself launches: all but views, and tensors that are 0 or unwritten."""

    VIEWS = ("view", "transpose", "slice", "select", "unsqueeze", "expand", "detach", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        on_host = "generator" in kwargs or name == "_local_scalar_dense"  # K-means draws its first seed there
        if not (on_host or "zeros" in name or name.startswith("empty") or name.endswith(self.VIEWS)):
            self.names += [name] * (2 if name == "constant_pad_nd" else 1)  # zeros, then a copy
        return func(*args, **kwargs)


@pytest.mark.parametrize("length", [4096, 16384])
def test_a_causal_layer_is_34_launches(monkeypatch, length):
    """As models are patched, heads that run exactly included; with the words of the exact keys and labels, zeros."""
    query, key, value = (rows.detach() for rows in drawn(length))
    sizes = CausalBiClustered().of_older_keys
    given = Settings(
        query, key, value, None, None, None, "bi-clustered", sizes["clusters"], sizes["topk"], sizes["key_clusters"],
        DEFAULT_SEGMENT_LENGTH, DEFAULT_WINDOW, 3, 2048, sizes["max_predicted_error"], 0, 0.1, 0.0, False,
    )  # fmt: skip
    forward = import_module("hf_effattn.ops.causal_clustered_attention.triton")._forward
    with caught_launches(monkeypatch) as launches, StepsOfTorch() as torch_steps:
        forward(given)
    assert len(launches) + len(torch_steps.names) + 2 == 34, (launches, torch_steps.names)
