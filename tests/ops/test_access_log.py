"""No race between programs, no access out of bounds, no read of unwritten memory: in every kernel, as its op runs it.

The interpreter shows none of these by wrong numbers. A GPU would, now and then.
"""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support import attention_cases, block_cases, causal_cases, clustering_cases, slice_cases
from support.access_log import logged_accesses
from support.op_cases import BLOCKS, NEURAL_CLUSTERING, SLICES, with_gradients

from hf_effattn import ops
from hf_effattn.ops.shared.triton import chips

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the log is of Triton's interpreter")
OPS = Path(ops.__file__).parent


@triton.jit
def _stores_twice_kernel(output_ptr, BLOCK: tl.constexpr):
    tl.store(output_ptr + tl.arange(0, BLOCK), tl.program_id(0))


@triton.jit
def _reads_the_neighbour_kernel(output_ptr):
    i = tl.program_id(0)
    tl.store(output_ptr + i, tl.load(output_ptr + (i + 1) % tl.num_programs(0)))


@triton.jit
def _adds_and_reads_kernel(total_ptr, output_ptr):
    if tl.program_id(0) == 0:
        tl.atomic_add(total_ptr, 1)
    else:
        tl.store(output_ptr, tl.load(total_ptr))


@triton.jit
def _reads_past_the_end_kernel(output_ptr, length, BLOCK: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(output_ptr + o_n, tl.load(output_ptr + o_n + length, mask=o_n < length), mask=o_n < length)


@triton.jit
def _reads_what_it_stored_kernel(output_ptr, BLOCK: tl.constexpr):
    o_n = tl.arange(0, BLOCK)
    tl.store(output_ptr + o_n, o_n)
    tl.store(output_ptr + BLOCK + o_n, tl.load(output_ptr + BLOCK - 1 - o_n))


@triton.jit
def _arrives_kernel(output_ptr, BARRIER: tl.constexpr, LAST: tl.constexpr):
    """Each program stores a number, which the one that arrives as the `LAST` of three takes twice."""
    i = tl.program_id(0)
    tl.store(output_ptr + i, i)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(output_ptr + 3, 1) == LAST - 1:
        for k in range(LAST):
            tl.store(output_ptr + k, 2 * tl.load(output_ptr + k))


def control(name: str) -> None:
    """Launch a kernel that does what `name` says."""
    output = torch.zeros(32, dtype=torch.int32)
    if name == "two stores":
        _stores_twice_kernel[(2,)](output, BLOCK=16)
    elif name == "neighbour":
        _reads_the_neighbour_kernel[(3,)](output)
    elif name == "atomic":
        _adds_and_reads_kernel[(2,)](output, output[1:])
    elif name == "bounds":
        _reads_past_the_end_kernel[(1,)](output, 32, BLOCK=32)
    elif name in ("arrival", "no barrier", "not last"):
        _arrives_kernel[(3,)](output, BARRIER=name != "no barrier", LAST=2 if name == "not last" else 3)
    elif name == "unwritten":
        _reads_the_neighbour_kernel[(1,)](torch.empty(1, dtype=torch.int32))
    else:
        _reads_what_it_stored_kernel[(1,)](output, BLOCK=16)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("two stores", "store by two programs"),
        ("neighbour", "load by one program and store by another"),
        ("atomic", "atomic operation by one program and plain access by another"),
        ("bounds", "access outside of all arguments"),
        ("unwritten", "read of memory that nobody has written"),
        ("own store", "load of what the program itself stored"),
    ],
)
def test_the_log_finds_what_is_planted(monkeypatch, name, fault):
    with logged_accesses(monkeypatch) as log:
        control(name)
    assert [line.partition(": ")[2] for line in log.findings] == [fault]


def test_the_last_to_arrive_may_do_as_it_likes(monkeypatch):
    """Behind a barrier, which one thread's arrival says nothing about others' stores without."""
    with logged_accesses(monkeypatch) as log:
        control("arrival")
        assert not log.findings
        for name in ("no barrier", "not last"):
            control(name)
            races = ["load by one program and store by another", "store by two programs"]
            load = ["load of what the program itself stored"]
            assert [line.partition(": ")[2] for line in log.findings] == races + load
            log.findings.clear()


def backward(output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Gradients of everything that has one."""
    outputs = output if isinstance(output, tuple) else (output,)
    sum(tensor.float().sum() for tensor in outputs if tensor.requires_grad).backward()


def attention(op: str, dtype: torch.dtype, deterministic: bool = False, sizes: dict | None = None, **options) -> None:
    case = attention_cases.Case("", B=2, H=2, key_heads=1, N=45, M=51, D=20, Dv=12, clusters=3, topk=5, masks="holes")
    case = attention_cases.replace(case, **sizes or {})
    inputs = attention_cases.make_inputs(case, dtype)
    for tensor in (inputs.query, inputs.key, inputs.value):
        tensor.requires_grad_()
    torch.use_deterministic_algorithms(deterministic)
    try:
        backward(attention_cases.attend(op, case, inputs, backend="triton", **options))
    finally:
        torch.use_deterministic_algorithms(False)


def cluster_queries(dtype: torch.dtype, method: str, masks: str, metric: bool = True) -> None:
    case = attention_cases.Case("", B=2, H=2, key_heads=1, N=90, M=51, D=20, clusters=7, masks=masks)
    inputs = attention_cases.make_inputs(case, dtype)
    options = {"key": inputs.key, "key_mask": inputs.key_mask} if metric else {}
    options |= {"query_mask": inputs.query_mask, "iterations": 2, "fit_queries": 64, "backend": "triton"}
    ops.cluster_queries(inputs.query, 7, method=method, **options)


def cluster_on_a_large_chip(masks: str) -> None:
    """Parts of the rows arrive at each round."""
    query = torch.randn(2, 2, 600, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = attention_cases.padding(masks, 2, 600)
    kept, chips.INTERPRETER = chips.INTERPRETER, chips.Chip("cuda", 227 * chips.KIB)
    try:
        ops.cluster_queries(query, 7, key=query, key_mask=mask, query_mask=mask, iterations=2, backend="triton")
    finally:
        chips.INTERPRETER = kept


def query_residuals(dtype: torch.dtype, masks: str) -> None:
    """A few, and several parts of the rows with several blocks of clusters."""
    for N, clusters, rows in ((90, 20, 64), (1250, 70, 1200)):
        case = attention_cases.Case("", B=2, H=2, N=N, D=40, clusters=clusters, masks=masks)
        inputs = attention_cases.make_inputs(case, dtype)
        given = inputs.query, inputs.labels, clusters
        ops.query_residuals(*given, query_mask=inputs.query_mask, rows=rows, backend="triton")


def kmeans(dtype: torch.dtype, masks: str) -> None:
    points = torch.randn(2, 90, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    ops.kmeans(points, 7, iterations=2, mask=attention_cases.padding(masks, 2, 90), backend="triton")


def slices(dtype: torch.dtype, **sizes: object) -> None:
    case = slice_cases.Case("", **{"B": 2, "H": 2, "N": 45} | sizes)
    with_gradients(SLICES, case, SLICES.make(case, dtype), backend="triton")


def causal(dtype: torch.dtype, method: str = "bi-clustered", **sizes: object) -> None:
    """Several segments with a short last one, and a first block that begins with places without a key."""
    case = causal_cases.Case("", **{"N": 45, "B": 1, "segment_length": 12, "window": 5} | sizes)
    query, key, value, mask = causal_cases.make_inputs(case, dtype)
    leaves = [rows.requires_grad_() for rows in (query, key, value)]
    backward(causal_cases.attend(method, case, *leaves, mask, backend="triton"))


def blocks(dtype: torch.dtype, **sizes: object) -> None:
    case = block_cases.Case("", **{"B": 2, "H": 2, "N": 45} | sizes)
    with_gradients(BLOCKS, case, BLOCKS.make(case, dtype), backend="triton")


def words(dtype: torch.dtype, similarity: str, masks: str) -> None:
    case = clustering_cases.Case("", N=90, k=11, d=70, masks=masks, similarity=similarity)
    with_gradients(NEURAL_CLUSTERING, case, NEURAL_CLUSTERING.make(case, dtype), backend="triton")


def calls(dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Every op with everything that makes its launchers choose differently."""
    many_rows = {"B": 1, "N": 1100, "M": 24, "topk": 3}
    long_rows = {"B": 1, "H": 1, "N": 9, "M": 2200, "masks": "none"}
    for op in ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention"):
        if not (OPS / op / "triton").exists():
            continue
        yield partial(attention, op, dtype, deterministic=True)
        yield partial(attention, op, dtype, dropout_p=0.2)
        yield partial(attention, op, dtype, sizes=many_rows)
        yield partial(attention, op, dtype, sizes=long_rows)
    yield partial(attention, "bi_clustered_attention", dtype, exact_heads=torch.tensor([[True], [False]]))
    for masks in ("none", "holes"):
        yield partial(cluster_queries, dtype, "kmeans", masks)
        yield partial(cluster_queries, dtype, "kmeans", masks, metric=False)
        yield partial(cluster_queries, dtype, "lsh", masks)
        yield partial(cluster_on_a_large_chip, masks)
        yield partial(query_residuals, dtype, masks)
        yield partial(kmeans, dtype, masks)
        yield partial(words, dtype, "dot", masks)
        yield partial(words, dtype, "cosine", masks)
        yield partial(blocks, dtype, masks=masks, gated=True, key_heads=1)
    yield partial(causal, dtype)
    yield partial(causal, dtype, "i-clustered", B=2, masks="holes")
    yield partial(causal, dtype, H=4, key_heads=2, key_clusters=2, max_predicted_error=0.1, dropout_p=0.2)
    yield partial(causal, dtype, "clustered", segment_length=70, N=150, D=20, Dv=12)
    yield partial(slices, dtype)
    yield partial(slices, dtype, key_heads=1, ratio=2, positions=True, sinks=True, masks="holes")
    yield partial(slices, dtype, causal=True, ratio=1.5, positions=True)
    yield partial(slices, dtype, B=1, N=150, L=140, ratio=1.1, positions=True, sinks=True)
    yield partial(blocks, dtype, causal=True)
    yield partial(blocks, dtype, causal=True, strict=True, block_length=5)
    yield partial(blocks, dtype, N=150, clusters=2, masks="right")


def kernels_in_the_package() -> Iterator[str]:
    """Names of all functions that are launched as kernels."""
    for path in OPS.glob("*/triton/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield node.name


@pytest.mark.slow_except("clustering")
@pytest.mark.parametrize(
    "call",
    [
        partial(attention, "improved_clustered_attention", torch.bfloat16),
        partial(kmeans, torch.bfloat16, "holes"),
        partial(cluster_on_a_large_chip, "holes"),
        partial(causal, torch.bfloat16, H=1, N=30),
        partial(slices, torch.bfloat16, key_heads=1, ratio=2, positions=True, sinks=True, masks="holes"),
        partial(blocks, torch.bfloat16, masks="holes", gated=True, key_heads=1),
        partial(words, torch.bfloat16, "cosine", "holes"),
    ],
    ids=["attention", "clustering", "arrivals", "causal", "slices", "blocks", "words"],
)
def test_a_few_calls_are_clean(monkeypatch, call):
    with logged_accesses(monkeypatch) as log:
        call()
    assert len(log.kernels) > 3
    assert not log.findings


@pytest.mark.slow
def test_every_kernel_is_clean(monkeypatch):
    """In float32; the few calls above have bfloat16."""
    with logged_accesses(monkeypatch) as log:
        for call in calls(torch.float32):
            call()
            assert not log.findings, call
    assert set(kernels_in_the_package()) <= log.kernels
