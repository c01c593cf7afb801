"""What only the kernels of the attentions over clusters can get wrong: on a GPU, else under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from support.attention_cases import Case
from support.closeness import assert_close_to_reference
from support.op_cases import CLUSTERED, DEVICE, check_kernels, to_dtype, with_gradients

from hf_effattn.ops.shared.triton import centroids as triton_centroids
from hf_effattn.ops.shared.triton import cluster_table

CENTROIDS, IMPROVED, FIRST_ORDER = CLUSTERED[:2], CLUSTERED[1], CLUSTERED[2]
# On a GPU the gradients of keys and values are sums in no fixed order, unless torch is asked for one.
UNORDERED = dict.fromkeys(("gradient of key", "gradient of value"), 1e-6) if DEVICE == "cuda" else {}

SMALL = Case("small", B=1, H=2, key_heads=1, N=21, M=19, D=8, Dv=8, clusters=2, topk=4)
# The first order has ten kernels more, which take the interpreter seconds: test_bi_clustered_kernels.py has its own.
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


def test_low_precision_with_few_top_keys():
    """Every cluster has keys far ahead of the rest, so that every dtype chooses the same."""
    case = Case("separated", B=1, H=1, N=40, M=32, clusters=3, topk=4)
    inputs = IMPROVED.make(case, torch.bfloat16)
    inputs["key"][:, :, :4] *= 4.0
    inputs["query"] = inputs["key"][:, :, :4].mean(dim=2, keepdim=True) + 0.1 * inputs["query"]
    check_kernels(IMPROVED, case, inputs)


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
    found = []
    for deterministic in (False, True, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            found.append(run(op, SMALL, op.make(SMALL, torch.float32), dropout_p=dropout_p))
        finally:
            torch.use_deterministic_algorithms(False)
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, found[0][name], rtol=0, atol=UNORDERED.get(name, 0))
        assert torch.equal(tensor, found[2][name])
