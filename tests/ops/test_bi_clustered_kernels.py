"""GPU kernels of first-order bi-clustered attention alone: exact heads, dropout, dtypes, parts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import Case, Inputs
from support.closeness import assert_close_to_reference
from support.kernel_draws import drawn
from support.op_cases import CLUSTERED, DEVICE, check_kernels, to_dtype, with_gradients

from hf_effattn.ops import query_offsets
from hf_effattn.ops.bi_clustered_attention import reference
from hf_effattn.ops.bi_clustered_attention.triton import backward
from hf_effattn.ops.shared.dropout import TOPK_AND_SUMMARY_WEIGHTS as KIND
from hf_effattn.ops.shared.triton import chips, cluster_table

OP = CLUSTERED[2]
SMALL = Case("small", B=1, H=2, key_heads=1, N=21, M=19, D=8, Dv=8, clusters=2, topk=4)
GROUPED = replace(SMALL, H=4, key_heads=2, key_clusters=3)
EXACT = torch.tensor([[True, False]])
GROUPS = Case("separated", B=1, H=1, N=40, M=32, clusters=3, key_clusters=3, topk=4)


def far_keys(case, dtype):
    """Some keys stand so far from the mean of their cluster that every dtype takes just those as exact ones."""
    inputs = OP.make(case, dtype)
    inputs["key"][:, :, : case.topk] *= 6.0
    inputs["query"] *= 0.2
    return inputs


@pytest.mark.slow_except("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    check_kernels(OP, GROUPS, far_keys(GROUPS, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kib", [163, 227])
def test_block_sizes_of_large_chips(head_dim, dtype, kib, monkeypatch):
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = replace(GROUPS, N=70, M=50, D=head_dim, Dv=head_dim, topk=3)
    check_kernels(OP, case, far_keys(case, dtype))


@pytest.mark.slow_except("holes")
@pytest.mark.parametrize("masks", ["none", "holes", "right"])
def test_heads_that_attend_exactly(masks):
    case = replace(GROUPED, masks=masks)
    check_kernels(OP, case, OP.make(case, torch.float32), exact_heads=EXACT)


@pytest.mark.slow
def test_exact_heads_leave_the_others_alone():
    """Bit for bit: which heads are exact is read by every program for itself."""
    inputs = OP.make(GROUPED, torch.float32)
    none, some = (
        with_gradients(OP, GROUPED, inputs, backend="triton", exact_heads=heads)
        for heads in (torch.zeros_like(EXACT), EXACT)
    )
    for name in none:
        head = none[name].shape[1] // 2
        torch.testing.assert_close(some[name][:, head:], none[name][:, head:], rtol=0, atol=0)
        assert not torch.equal(some[name][:, :head], none[name][:, :head])


@pytest.fixture
def drawn_by_kernels(monkeypatch):
    """The reference drops what the kernels drop, which have draws of their own."""

    def factors(shape, like, dropout_p, seed, problem, weights):
        """Rows of all problems are numbered through."""
        return drawn(int(seed), (problem + 1) * shape[0], shape[1], dropout_p, weights)[-shape[0] :].to(like)

    def exact_rows(query_length, key_length, query_rows, key_rows, like, dropout_p, seed, problem):
        factor = factors((query_length, key_length), like, dropout_p, seed, problem, KIND)
        factor = factor if query_rows is None else factor[query_rows]
        yield slice(0, len(factor)), factor if key_rows is None else factor[:, key_rows]

    monkeypatch.setattr(reference, "dropout_factor", factors)
    monkeypatch.setattr(reference, "exact_dropout_rows", exact_rows)


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.usefixtures("drawn_by_kernels")
def test_dropout_of_exact_keys_summaries_and_exact_heads(masks):
    """One exact key: then both forms have it in the same place."""
    case = replace(GROUPED, topk=1, masks=masks)
    check_kernels(OP, case, OP.make(case, torch.float32), exact_heads=EXACT, dropout_p=0.3)


@pytest.mark.slow
def test_parts_of_a_large_cluster_and_of_the_key_clusters(monkeypatch):
    monkeypatch.setattr(cluster_table, "ROWS_OF_A_SPLIT", 32)
    monkeypatch.setattr(backward, "CENTROID_PROGRAMS", 2)
    case = replace(GROUPED, N=150, M=40, key_clusters=5)
    inputs = OP.make(case, torch.float32)
    inputs["labels"][..., ::2] = 1
    check_kernels(OP, case, inputs)


@pytest.mark.slow
def test_more_query_clusters_than_bits_of_a_word():
    case = replace(GROUPED, N=120, clusters=37)
    check_kernels(OP, case, OP.make(case, torch.float32))


def test_float16_holds_large_offsets():
    """Of a query whose weight is all on summaries: times the sum of their weights its offset would be out of range."""
    case = replace(SMALL, clusters=1, key_clusters=8, topk=1)
    inputs = OP.make(case, torch.float16)
    inputs["query"][..., 0] = 20000.0 - 40000.0 * (torch.arange(case.N) % 2)
    inputs["key"] *= 1e-3
    inputs["key"][..., 0] = 0.0
    expected = with_gradients(OP, case, to_dtype(inputs, torch.float64), backend="reference", scale=1.0)
    actual = with_gradients(OP, case, inputs, backend="triton", scale=1.0)
    assert_close_to_reference("output", actual["output"], expected["output"], rtol=2e-3)


def test_every_query_its_own_cluster_is_exact():
    case = replace(SMALL, H=1, clusters=SMALL.N)
    inputs = OP.make(case, torch.float32) | {"labels": torch.arange(case.N).expand(1, 1, -1)}
    expected = F.scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"])
    actual = with_gradients(OP, case, inputs, backend="triton")["output"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.slow_except("blocks-torch.float32", "padded-*")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("blocks", B=1, N=300, D=70, clusters=40),
        Case("padded", H=6, key_heads=2, masks="row"),
        Case("one_query", N=1, M=1),
    ],
    ids=lambda case: case.name if isinstance(case, Case) else str(case),
)
def test_offsets(case, dtype):
    """In the dtype of the queries, rounded once; a query that is padding, or in no cluster, has 0."""
    inputs = Inputs(**OP.make(case, dtype)).to_device(DEVICE)
    outside = torch.arange(case.N, device=DEVICE) % 5 == 2
    inputs.query[:, :, outside] = 0.0  # all of one cluster, so that the PyTorch form gives them 0 too
    inputs.labels = inputs.labels.masked_fill(outside, case.clusters)
    settings = {"key_heads": case.key_heads, "query_mask": inputs.query_mask, "rows": 280}
    expected, expected_mask = query_offsets(inputs.query.double(), inputs.labels, case.clusters + 1, **settings)
    actual, mask = query_offsets(inputs.query, inputs.labels, case.clusters, backend="triton", **settings)
    assert actual.dtype == dtype
    if mask is not None:
        assert torch.equal(mask, expected_mask)
        expected = expected * mask[:, None, :, None]
    actual, expected = actual.cpu(), expected.cpu()
    assert_close_to_reference("offsets", actual, expected, expected.to(dtype), rtol=1e-6)


@pytest.mark.slow_except("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offsets_from_sums_of_parts(dtype):
    """Neither padding behind nor what else is in the batch changes a bit."""
    case = Case("parts", H=1, N=1250, clusters=70)  # three parts, the last one short, and two blocks of clusters
    inputs, length = Inputs(**OP.make(case, dtype)).to_device(DEVICE), 1100
    query_mask = torch.arange(case.N, device=DEVICE) < torch.tensor([[case.N], [length]], device=DEVICE)
    inputs.query[1, :, length:] = float("nan")
    labels, settings = inputs.labels, {"query_mask": query_mask, "rows": 1200}
    expected, mask = query_offsets(inputs.query.double(), labels, case.clusters, backend="batched", **settings)
    actual, _ = query_offsets(inputs.query, labels, case.clusters, backend="triton", **settings)
    expected = (expected * mask[:, None, :, None]).cpu()
    assert_close_to_reference("offsets", actual.cpu(), expected, expected.to(dtype), rtol=1e-6)
    one = inputs.query[1:, :, :length], labels[1:, :, :length]
    alone, _ = query_offsets(*one, case.clusters, rows=1200, backend="triton")
    assert torch.equal(actual[1:, :, :length], alone)
