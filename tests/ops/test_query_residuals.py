"""What is known of a head before it attends: the queries' residuals from their centroids, the predicted error."""

import sys

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import Case, attend, make_inputs

from hf_effattn.ops import predicted_error, query_residuals
from hf_effattn.ops.bi_clustered_attention.residuals import spread_rows, sum_of_products

CASES = (
    Case("plain"),
    Case("holes", masks="holes", N=61, M=61),
    Case("left_padding", masks="left"),
    Case("row_fully_padded", masks="row"),
    Case("grouped_heads", H=6, key_heads=2, masks="right"),
    Case("one_query", N=1, M=1),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def counted(mask, b):
    return slice(None) if mask is None else mask[b]


def residuals(rows, labels):
    """Rows `(n, D)` less the mean of their cluster."""
    means = {label: rows[labels == label].mean(dim=0) for label in set(labels.tolist())}
    return torch.stack([row - means[label] for row, label in zip(rows, labels.tolist(), strict=True)])


def residuals_of(case, inputs, b, p):
    """Those of all query heads that share key head `p`, and count, in the order of heads."""
    group, rows = case.H // (case.key_heads or case.H), counted(inputs.query_mask, b)
    heads = range(p * group, p * group + group)
    return torch.cat([residuals(inputs.query[b, h, rows], inputs.labels[b, h, rows]) for h in heads])


def found_residuals(case, inputs, **options):
    return query_residuals(
        inputs.query, inputs.labels, case.clusters, key_heads=case.key_heads, query_mask=inputs.query_mask, **options
    )


def found_error(case, inputs, **options):
    return predicted_error(
        *found_residuals(case, inputs), inputs.key, inputs.key_labels, case.key_clusters, key_mask=inputs.key_mask,
        **options,
    )  # fmt: skip


@each_case
def test_residuals_against_a_direct_computation(case):
    inputs = make_inputs(case)
    residuals, mask = found_residuals(case, inputs)
    heads = case.key_heads or case.H
    assert residuals.shape == (case.B, heads, case.H // heads * case.N, case.D)
    assert (mask is None) == (inputs.query_mask is None)
    for b in range(case.B):
        for p in range(heads):
            if inputs.query_mask is not None and not inputs.query_mask[b].any():
                assert not mask[b].any()
                continue
            expected = residuals_of(case, inputs, b, p)
            torch.testing.assert_close(residuals[b, p, counted(mask, b)], expected, rtol=0, atol=2e-15)


@pytest.fixture(params=["cpu", "accelerator"])
def device_kind(request, monkeypatch):
    """What the tensors say that they are on: on an accelerator there are fewer steps, and sums in parts."""
    if request.param == "accelerator":
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    return request.param


@pytest.mark.parametrize("case", [*CASES, Case("parts", H=4, key_heads=2, N=64, M=48)], ids=lambda case: case.name)
def test_predicted_error_against_a_direct_computation(case, device_kind):
    inputs = make_inputs(case)
    errors = found_error(case, inputs, scale=0.7)
    for b in range(case.B):
        keys = counted(inputs.key_mask, b)
        for p in range(case.key_heads or case.H):
            if inputs.key_mask is not None and not inputs.key_mask[b].any():
                assert errors[b, p] == 0
                continue
            eta = 0.7 * residuals_of(case, inputs, b, p)
            within = residuals(inputs.key[b, p, keys], inputs.key_labels[b, p, keys])
            scores = eta @ within.T  # what every offset scores of what remains of every key
            torch.testing.assert_close(errors[b, p], scores.square().mean() / 4, rtol=1e-12, atol=0)


@pytest.mark.parametrize("masks", ["right", "left", "holes"])
@pytest.mark.parametrize("rows", [7, 2048])
@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan")])
def test_a_padded_batch_gives_what_its_texts_give(masks, rows, garbage):
    case = Case("padded", H=4, key_heads=2, masks=masks)
    inputs = make_inputs(case)
    mask = inputs.query_mask[1]
    inputs.query[1, :, ~mask], inputs.key[1, :, ~mask] = garbage, -garbage
    residuals, counted = found_residuals(case, inputs, rows=rows)
    keys = inputs.key, inputs.key_labels, case.key_clusters
    errors = predicted_error(residuals, counted, *keys, key_mask=inputs.key_mask, rows=rows)
    assert residuals.isfinite().all()
    query, labels = inputs.query[1:, :, mask], inputs.labels[1:, :, mask]
    key, key_labels = inputs.key[1:, :, mask], inputs.key_labels[1:, :, mask]
    alone, alone_mask = query_residuals(query, labels, case.clusters, key_heads=2, rows=rows)
    assert alone_mask is None
    torch.testing.assert_close(residuals[1:, :, counted[1]], alone, rtol=0, atol=1e-15)
    expected = predicted_error(alone, None, key, key_labels, case.key_clusters, rows=rows)
    torch.testing.assert_close(errors[1:], expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtype_and_gradient(dtype):
    case = Case("dtype")
    inputs = make_inputs(case, dtype)
    inputs.query.requires_grad_()
    residuals, _ = found_residuals(case, inputs)
    error = found_error(case, inputs)
    assert residuals.dtype == error.dtype == torch.promote_types(dtype, torch.float32)
    assert not residuals.requires_grad
    assert not error.requires_grad
    expected = found_error(case, make_inputs(case, dtype).to(torch.float64))
    torch.testing.assert_close(error.double(), expected, rtol=1e-5, atol=0)


def test_autocast_changes_nothing(device_kind):
    """Whether a head attends exactly is no matter of the precision that a model's products are in."""
    case = Case("autocast")
    expected = found_error(case, make_inputs(case, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        actual = found_error(case, make_inputs(case, torch.float32))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("masks", ["none", "right"])
def test_of_query_heads_that_share_keys_the_worst_counts(masks, device_kind):
    """Among flat heads a spiky one would be lost in the mean."""
    case = Case("worst", H=4, key_heads=2, masks=masks)
    inputs = make_inputs(case)
    inputs.query[:, 1] *= 5
    errors = found_error(case, inputs, group=2)
    by_head = []
    for head in range(case.H):
        head_slices = slice(head, head + 1), slice(head // 2, head // 2 + 1)
        query, labels = inputs.query[:, head_slices[0]], inputs.labels[:, head_slices[0]]
        residuals = query_residuals(query, labels, case.clusters, query_mask=inputs.query_mask)
        keys = inputs.key[:, head_slices[1]], inputs.key_labels[:, head_slices[1]]
        by_head.append(predicted_error(*residuals, *keys, case.key_clusters, key_mask=inputs.key_mask))
    expected = torch.cat(by_head, dim=1).unflatten(1, (2, 2)).amax(dim=2)
    torch.testing.assert_close(errors, expected, rtol=1e-12, atol=0)


def test_sums_in_parts_are_those_of_the_whole(monkeypatch):
    rows = torch.randn(2, 3, 160, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    in_parts = sum_of_products(rows, 6)
    assert sum_of_products(rows[:, :, :37], 6).shape == (6, 8, 8)
    monkeypatch.setattr(sys.modules[sum_of_products.__module__], "PARTS", 1)
    whole = sum_of_products(rows, 6)
    torch.testing.assert_close(in_parts, whole, rtol=0, atol=1e-12)
    assert not torch.equal(in_parts, whole)  # the sums are in another order
    torch.testing.assert_close(whole, (rows.mT @ rows).flatten(0, 1), rtol=0, atol=1e-12)


def test_spread_rows_are_even_and_count():
    tensor = torch.zeros(2, 1, 10, 1)
    places, counts = spread_rows(tensor, None, 4)
    assert (places.tolist(), counts) == ([0, 2, 5, 7], None)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 3:9], mask[1, 5:7] = True, True
    places, counts = spread_rows(tensor, mask, 3)
    assert places[0].tolist() == [3, 5, 7]
    assert places[1, :2].tolist() == [5, 6]
    assert counts.tolist() == [[True, True, True], [True, True, False]]


def test_a_spiky_head_is_predicted_worse_than_a_flat_one_and_is():
    case = Case("spiky", B=1, H=3, N=200, M=200, clusters=8, key_clusters=8, topk=4)
    inputs = make_inputs(case)
    inputs.query *= torch.tensor([0.1, 0.5, 2.0])[None, :, None, None].double()
    exact = F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)
    actual = attend("bi_clustered_attention", case, inputs)
    error = (actual - exact)[0].flatten(1).norm(dim=1) / exact[0].flatten(1).norm(dim=1)
    predicted = found_error(case, inputs)[0]
    assert predicted.argsort().tolist() == error.argsort().tolist() == [0, 1, 2]
    assert predicted[2] > 0.5 > predicted[0]
    # Queries scaled by s: the variance of their scores grows as s².
    torch.testing.assert_close(found_error(case, inputs, scale=0.5), 4 * found_error(case, inputs, scale=0.25))


@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize("sizes", [{"N": 0}, {"M": 0}, {"B": 0}], ids=["no_query", "no_key", "no_text"])
def test_nothing_is_no_error(sizes, masks, device_kind):
    case = Case("nothing", H=4, key_heads=2, masks=masks, **sizes)
    error = found_error(case, make_inputs(case), group=2)
    assert error.shape == (case.B, 2)
    assert not error.any()


def test_queries_that_are_their_own_centroids_have_no_error():
    case = Case("own", clusters=37)
    inputs = make_inputs(case)
    inputs.labels = torch.arange(37).expand(case.B, case.H, -1)
    assert found_error(case, inputs).max() < 1e-30


def test_arguments():
    case = Case("arguments")
    inputs = make_inputs(case)
    with pytest.raises(ValueError, match="clusters must be at least 1, got 0"):
        query_residuals(inputs.query, inputs.labels, 0)
    with pytest.raises(ValueError, match="labels must be"):
        query_residuals(inputs.query, inputs.labels[:, :, 1:], case.clusters)
