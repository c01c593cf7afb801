"""What only the kernels of the attentions over clusters can get wrong: on a GPU, else under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import Case, Inputs
from support.closeness import assert_close_to_reference
from support.kernel_draws import drawn
from support.op_cases import CLUSTERED, DEVICE, check_kernels, to_dtype, with_gradients

from hf_effattn.ops import query_residuals
from hf_effattn.ops.bi_clustered_attention import reference
from hf_effattn.ops.bi_clustered_attention.triton import backward
from hf_effattn.ops.shared.dropout import TOPK_AND_SUMMARY_WEIGHTS as KIND
from hf_effattn.ops.shared.triton import centroids as triton_centroids
from hf_effattn.ops.shared.triton import chips, cluster_table

CENTROIDS, IMPROVED, FIRST_ORDER = CLUSTERED[:2], CLUSTERED[1], CLUSTERED[2]
# On a GPU the gradients of keys and values are sums in no fixed order, unless torch is asked for one.
UNORDERED = dict.fromkeys(("gradient of key", "gradient of value"), 1e-6) if DEVICE == "cuda" else {}

SMALL = Case("small", B=1, H=2, key_heads=1, N=21, M=19, D=8, Dv=8, clusters=2, topk=4)
GROUPED = replace(SMALL, H=4, key_heads=2, key_clusters=3)
EXACT = torch.tensor([[True, False]])
GROUPS = Case("separated", B=1, H=1, N=40, M=32, clusters=3, key_clusters=3, topk=4)
# The first order has ten kernels more, which take the interpreter seconds: its own tests stand below.
each_op = pytest.mark.parametrize("op", [*CENTROIDS, pytest.param(FIRST_ORDER, marks=pytest.mark.slow)], ids=str)


def run(op, case, inputs, **options):
    return with_gradients(op, case, inputs, backend="triton", **options)


@pytest.mark.slow
@pytest.mark.parametrize("op", CENTROIDS, ids=str)
def test_half_precision_gradients_of_a_huge_cluster_stay_in_range(op):
    """A cluster's weights times its size are beyond float16 long before exact attention's gradients are."""
    case = Case("in_range", B=1, H=1, N=600, M=2, clusters=2, topk=2)
    inputs = op.make(case, torch.float16)
    inputs["labels"] = (torch.arange(600) == 599).long().expand(1, 1, -1)

    def gradients_of(dtype, backend):
        rounded = to_dtype(inputs, dtype)
        leaves = [rounded[name].to(DEVICE).requires_grad_() for name in ("query", "key", "value")]
        given = dict(zip(("query", "key", "value"), leaves, strict=True)) | {"labels": inputs["labels"].to(DEVICE)}
        output = op.call(case, rounded | given, backend=backend)["output"]
        return torch.autograd.grad(output, leaves, torch.full_like(output, 100.0))

    for actual, expected in zip(
        gradients_of(torch.float16, "triton"), gradients_of(torch.float64, "reference"), strict=True
    ):
        assert actual.isfinite().all()
        assert (actual.double() - expected).norm() < 2 * torch.finfo(torch.float16).eps * expected.norm()


@each_op
def test_one_token(op):
    """With a single key the gradients of query and key are 0 but for rounding."""
    case = Case("one_token", B=1, H=1, N=1, M=1)
    check_kernels(op, case, op.make(case, torch.float32))


@each_op
def test_a_huge_cluster_and_empty_ones(op):
    case = Case("huge", B=1, H=1, N=150, M=40, clusters=4, topk=5)
    inputs = op.make(case, torch.float32)
    inputs["labels"] = torch.where(torch.arange(150) == 77, 3, 1).expand(1, 1, 150)
    check_kernels(op, case, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_queries_of_a_large_cluster_in_parts(monkeypatch, dropout_p):
    """Only the first part corrects what the centroid gave the top keys; most clusters have no other part."""
    case = Case("huge", B=1, H=2, key_heads=1, N=150, M=40, clusters=4, topk=5)
    inputs = IMPROVED.make(case, torch.float32)
    inputs["labels"][..., ::2] = 1
    whole = run(IMPROVED, case, inputs, dropout_p=dropout_p)
    monkeypatch.setattr(cluster_table, "ROWS_OF_A_SPLIT", 32)
    split = run(IMPROVED, case, inputs, dropout_p=dropout_p)
    for name in whole:
        assert_close_to_reference(name, split[name], whole[name].double(), rtol=3e-7)
    assert DEVICE == "cuda" or not torch.equal(split["gradient of key"], whole["gradient of key"])


@each_op
def test_parts_of_the_keys_bins_and_chunks_of_scores(op, monkeypatch):
    monkeypatch.setattr(triton_centroids, "PROGRAMS", 16)
    monkeypatch.setattr(triton_centroids, "BINS", 64)
    monkeypatch.setattr(triton_centroids, "SCORE_BYTES", 1000)
    case = Case("split", B=1, H=2, key_heads=1, N=20, M=300, clusters=2, topk=3, masks="holes")
    check_kernels(op, case, op.make(case, torch.float32))


@each_op
def test_labels_outside_the_range_are_in_no_cluster(op):
    """The kernels do not ask the host: such a query gets 0, as a masked one does, and nothing else changes."""
    inputs = op.make(SMALL, torch.float32)
    outside = torch.arange(SMALL.N) % 5 == 2
    labels = inputs["labels"].masked_fill(outside, SMALL.clusters)
    labels[..., 2] = -1
    actual, expected = (
        run(op, SMALL, inputs | given) for given in ({"labels": labels}, {"query_mask": ~outside[None]})
    )
    assert (actual["output"][:, :, outside] == 0).all()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=UNORDERED.get(name, 0))


@pytest.mark.parametrize("op", CENTROIDS, ids=str)
def test_float16_holds_scores_that_fit_after_scaling(op):
    case = replace(SMALL, D=64)
    inputs = op.make(case, torch.float16)
    inputs["query"], inputs["key"] = inputs["query"] * 100, inputs["key"].abs() * 100
    assert all(tensor.isfinite().all() for tensor in run(op, case, inputs).values())


@pytest.mark.slow_except("0.0-improved_clustered_attention")
@pytest.mark.parametrize("op", CLUSTERED[1:], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradients_in_a_fixed_order_when_torch_is_asked_for_one(dropout_p, op):
    runs = []
    for deterministic in (False, True, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            runs.append(run(op, SMALL, op.make(SMALL, torch.float32), dropout_p=dropout_p))
        finally:
            torch.use_deterministic_algorithms(False)
    for name, tensor in runs[1].items():
        torch.testing.assert_close(tensor, runs[0][name], rtol=0, atol=UNORDERED.get(name, 0))
        assert torch.equal(tensor, runs[2][name])


def far_keys(case, dtype):
    """Some keys stand so far from the mean of their cluster that every dtype takes just those as exact ones."""
    inputs = FIRST_ORDER.make(case, dtype)
    inputs["key"][:, :, : case.topk] *= 6.0
    inputs["query"] *= 0.2
    return inputs


@pytest.mark.slow_except("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_of_the_first_order(dtype):
    check_kernels(FIRST_ORDER, GROUPS, far_keys(GROUPS, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kib", [163, 227])
def test_block_sizes_of_large_chips(head_dim, dtype, kib, monkeypatch):
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = replace(GROUPS, N=70, M=50, D=head_dim, Dv=head_dim, topk=3)
    check_kernels(FIRST_ORDER, case, far_keys(case, dtype))


@pytest.mark.slow_except("holes")
@pytest.mark.parametrize("masks", ["none", "holes", "right"])
def test_heads_that_attend_exactly(masks):
    case = replace(GROUPED, masks=masks)
    check_kernels(FIRST_ORDER, case, FIRST_ORDER.make(case, torch.float32), exact_heads=EXACT)


@pytest.mark.slow
def test_exact_heads_leave_the_others_alone():
    """Bit for bit: which heads are exact is read by every program for itself."""
    inputs = FIRST_ORDER.make(GROUPED, torch.float32)
    none, some = (
        with_gradients(FIRST_ORDER, GROUPED, inputs, backend="triton", exact_heads=heads)
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
    check_kernels(FIRST_ORDER, case, FIRST_ORDER.make(case, torch.float32), exact_heads=EXACT, dropout_p=0.3)


@pytest.mark.slow
def test_parts_of_a_large_cluster_and_of_the_key_clusters(monkeypatch):
    monkeypatch.setattr(cluster_table, "ROWS_OF_A_SPLIT", 32)
    monkeypatch.setattr(backward, "CENTROID_PROGRAMS", 2)
    case = replace(GROUPED, N=150, M=40, key_clusters=5)
    inputs = FIRST_ORDER.make(case, torch.float32)
    inputs["labels"][..., ::2] = 1
    check_kernels(FIRST_ORDER, case, inputs)


@pytest.mark.slow
def test_more_query_clusters_than_bits_of_a_word():
    case = replace(GROUPED, N=120, clusters=37)
    check_kernels(FIRST_ORDER, case, FIRST_ORDER.make(case, torch.float32))


def test_float16_holds_large_residuals():
    """Of a query whose weight is all on summaries: times the sum of their weights its offset would be out of range."""
    case = replace(SMALL, clusters=1, key_clusters=8, topk=1)
    inputs = FIRST_ORDER.make(case, torch.float16)
    inputs["query"][..., 0] = 20000.0 - 40000.0 * (torch.arange(case.N) % 2)
    inputs["key"] *= 1e-3
    inputs["key"][..., 0] = 0.0
    expected = with_gradients(FIRST_ORDER, case, to_dtype(inputs, torch.float64), backend="reference", scale=1.0)
    actual = with_gradients(FIRST_ORDER, case, inputs, backend="triton", scale=1.0)
    assert_close_to_reference("output", actual["output"], expected["output"], rtol=2e-3)


@pytest.mark.slow
def test_every_query_its_own_cluster_is_exact():
    case = replace(SMALL, H=1, clusters=SMALL.N)
    inputs = FIRST_ORDER.make(case, torch.float32) | {"labels": torch.arange(case.N).expand(1, 1, -1)}
    expected = F.scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"])
    actual = with_gradients(FIRST_ORDER, case, inputs, backend="triton")["output"]
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
def test_residuals(case, dtype):
    """In the dtype of the queries, rounded once; a query that is padding, or in no cluster, has 0."""
    inputs = Inputs(**FIRST_ORDER.make(case, dtype)).to_device(DEVICE)
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
    assert_close_to_reference("residuals", actual, expected, expected.to(dtype), rtol=1e-6)


@pytest.mark.slow_except("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residuals_from_sums_of_parts(dtype):
    """Neither padding behind nor what else is in the batch changes a bit."""
    case = Case("parts", H=1, N=1250, clusters=70)  # three parts, the last one short, and two blocks of clusters
    inputs, length = Inputs(**FIRST_ORDER.make(case, dtype)).to_device(DEVICE), 1100
    query_mask = torch.arange(case.N, device=DEVICE) < torch.tensor([[case.N], [length]], device=DEVICE)
    inputs.query[1, :, length:] = float("nan")
    labels, settings = inputs.labels, {"query_mask": query_mask, "rows": 1200}
    expected, mask = query_residuals(inputs.query.double(), labels, case.clusters, backend="batched", **settings)
    actual, _ = query_residuals(inputs.query, labels, case.clusters, backend="triton", **settings)
    expected = (expected * mask[:, None, :, None]).cpu()
    assert_close_to_reference("residuals", actual.cpu(), expected, expected.to(dtype), rtol=1e-6)
    text = inputs.query[1:, :, :length], labels[1:, :, :length]
    alone, _ = query_residuals(*text, case.clusters, rows=1200, backend="triton")
    assert torch.equal(actual[1:, :, :length], alone)
