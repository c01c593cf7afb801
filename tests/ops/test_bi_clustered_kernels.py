"""GPU kernels of first-order bi-clustered attention alone: exact heads, dropout, dtypes, parts."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from ops.test_attention_kernels import DEVICE, FIRST_ORDER, NAMES, SMALL, check, on_device, run
from support.attention_cases import Case, attend, make_inputs
from support.closeness import assert_close_to_reference

from hf_effattn.ops import query_residuals
from hf_effattn.ops.bi_clustered_attention import reference
from hf_effattn.ops.bi_clustered_attention.triton import backward
from hf_effattn.ops.shared.dropout import KINDS_OF_WEIGHTS
from hf_effattn.ops.shared.dropout import TOPK_AND_SUMMARY_WEIGHTS as KIND
from hf_effattn.ops.shared.triton import chips, cluster_table
from hf_effattn.ops.shared.triton.dropout import dropout_factor

GROUPED = replace(SMALL, H=4, key_heads=2, key_clusters=3)
EXACT = torch.tensor([[True, False]])
GROUPS = Case("separated", B=1, H=1, N=40, M=32, clusters=3, key_clusters=3, topk=4)


def far_keys(case, dtype):
    """Some keys stand so far from the mean of their cluster that every dtype takes just those as exact ones."""
    inputs = make_inputs(case, dtype)
    inputs.key[:, :, : case.topk] *= 6.0
    inputs.query *= 0.2
    return inputs


@pytest.mark.slow_except("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    check(FIRST_ORDER, GROUPS, far_keys(GROUPS, dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kib", [163, 227])
def test_block_sizes_of_large_chips(head_dim, dtype, kib, monkeypatch):
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = replace(GROUPS, N=70, M=50, D=head_dim, Dv=head_dim, topk=3)
    check(FIRST_ORDER, case, far_keys(case, dtype), dtype)


def with_exact_heads(case, exact_heads, dtype=torch.float32, backend="triton", **options):
    inputs = on_device(make_inputs(case), dtype)
    return run(FIRST_ORDER, case, inputs, exact_heads=exact_heads.to(DEVICE), backend=backend, **options)


@pytest.mark.slow_except("holes")
@pytest.mark.parametrize("masks", ["none", "holes", "right"])
def test_heads_that_attend_exactly(masks):
    case = replace(GROUPED, masks=masks)
    expected = with_exact_heads(case, EXACT, torch.float64, "reference")
    for name, tensor in with_exact_heads(case, EXACT).items():
        assert_close_to_reference(name, tensor, expected[name], rtol=1e-6)


@pytest.mark.slow
def test_exact_heads_leave_the_others_alone():
    """Bit for bit: which heads are exact is read by every program for itself."""
    none = with_exact_heads(GROUPED, torch.zeros_like(EXACT))
    some = with_exact_heads(GROUPED, EXACT)
    for name in NAMES:
        head = none[name].shape[1] // 2
        torch.testing.assert_close(some[name][:, head:], none[name][:, head:], rtol=0, atol=0)
        assert not torch.equal(some[name][:, :head], none[name][:, :head])


@triton.jit
def _fill_kernel(seed_ptr, factor_ptr, rows, columns, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr):
    o_row, o_column = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, 64)
    factor = dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    tl.store(factor_ptr + o_row[:, None] * columns + o_column[None, :], factor, mask=(o_column < columns)[None, :])


@pytest.fixture
def drawn_by_kernels(monkeypatch):
    """The reference drops what the kernels drop, which have draws of their own."""

    def factors(shape, like, dropout_p, seed, problem, weights):
        """Rows of all problems are numbered through."""
        rows = (problem + 1) * shape[0]
        factor = torch.zeros(rows, shape[1], device=DEVICE)
        seeds = torch.tensor([seed], device=DEVICE)
        _fill_kernel[(rows,)](seeds, factor, rows, shape[1], dropout_p, KINDS=KINDS_OF_WEIGHTS, KIND=weights)
        return factor[-shape[0] :].to(like)

    def exact_rows(query_length, key_length, query_rows, key_rows, like, dropout_p, seed, problem):
        factor = factors((query_length, key_length), like, dropout_p, int(seed), problem, KIND)
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
    found = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        torch.manual_seed(5)
        found.append(with_exact_heads(case, EXACT, dtype, backend, dropout_p=0.3))
    for name in NAMES:
        assert_close_to_reference(name, found[1][name], found[0][name], rtol=1e-6)


@pytest.mark.slow
def test_keys_in_no_cluster_are_not_attended_to():
    """As masked ones are; the kernels do not ask the host whether a label is legal."""
    case = replace(GROUPED, masks="none")
    inputs, masked = (on_device(make_inputs(case), torch.float32) for _ in range(2))
    outside = torch.arange(case.M, device=DEVICE) % 5 == 2
    inputs.key_labels = inputs.key_labels.masked_fill(outside, case.key_clusters)
    inputs.key_labels[..., 2] = -1
    masked.key_mask = ~outside[None]
    actual, expected = run(FIRST_ORDER, case, inputs), run(FIRST_ORDER, case, masked)
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0 if DEVICE == "cpu" else 1e-6)


@pytest.mark.slow
def test_parts_of_a_large_cluster_and_of_the_key_clusters(monkeypatch):
    monkeypatch.setattr(cluster_table, "ROWS_OF_A_SPLIT", 32)
    monkeypatch.setattr(backward, "CENTROID_PROGRAMS", 2)
    case = replace(GROUPED, N=150, M=40, key_clusters=5)
    inputs = make_inputs(case)
    inputs.labels[..., ::2] = 1
    check(FIRST_ORDER, case, inputs)


@pytest.mark.slow
def test_more_query_clusters_than_bits_of_a_word():
    check(FIRST_ORDER, replace(GROUPED, N=120, clusters=37), make_inputs(replace(GROUPED, N=120, clusters=37)))


def test_float16_holds_large_offsets():
    """Of a query whose weight is all on summaries: times the sum of their weights its offset would be out of range."""
    case = replace(SMALL, clusters=1, key_clusters=8, topk=1)
    inputs = on_device(make_inputs(case), torch.float16)
    inputs.query[..., 0], inputs.key = 20000.0 - 40000.0 * (torch.arange(case.N, device=DEVICE) % 2), inputs.key * 1e-3
    inputs.key[..., 0] = 0.0
    expected = attend(FIRST_ORDER, case, inputs.to(torch.float64), backend="reference", scale=1.0)
    actual = attend(FIRST_ORDER, case, inputs, backend="triton", scale=1.0)
    assert_close_to_reference("output", actual.cpu(), expected.cpu(), rtol=2e-3)


def test_every_query_its_own_cluster_is_exact():
    case = replace(SMALL, H=1, clusters=SMALL.N)
    inputs = on_device(make_inputs(case), torch.float32)
    inputs.labels = torch.arange(case.N, device=DEVICE).expand(1, 1, -1)
    expected = torch.nn.functional.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)
    actual = attend(FIRST_ORDER, case, inputs, backend="triton")
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
    inputs = on_device(make_inputs(case), dtype)
    outside = torch.arange(case.N, device=DEVICE) % 5 == 2
    inputs.query[:, :, outside] = 0.0  # all of one cluster, so that the PyTorch form gives them 0 too
    inputs.labels = inputs.labels.masked_fill(outside, case.clusters)
    settings = {"key_heads": case.key_heads, "query_mask": inputs.query_mask, "rows": 280}
    expected, expected_mask = query_residuals(inputs.query.double(), inputs.labels, case.clusters + 1, **settings)
    actual, mask = query_residuals(inputs.query, inputs.labels, case.clusters, backend="triton", **settings)
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
    inputs, length = on_device(make_inputs(case), dtype), 1100
    query_mask = torch.arange(case.N, device=DEVICE) < torch.tensor([[case.N], [length]], device=DEVICE)
    inputs.query[1, :, length:] = float("nan")
    labels, settings = inputs.labels, {"query_mask": query_mask, "rows": 1200}
    expected, mask = query_residuals(inputs.query.double(), labels, case.clusters, backend="batched", **settings)
    actual, _ = query_residuals(inputs.query, labels, case.clusters, backend="triton", **settings)
    expected = (expected * mask[:, None, :, None]).cpu()
    assert_close_to_reference("offsets", actual.cpu(), expected, expected.to(dtype), rtol=1e-6)
    one = inputs.query[1:, :, :length], labels[1:, :, :length]
    alone, _ = query_residuals(*one, case.clusters, rows=1200, backend="triton")
    assert torch.equal(actual[1:, :, :length], alone)
