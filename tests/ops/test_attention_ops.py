"""Clustered, improved clustered and bi-clustered attention: values, gradients, identities, masks."""

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import (
    Case,
    attend,
    attend_to_key_clusters_with_loops,
    attend_with_loops,
    make_inputs,
    padding,
    residuals_with_loops,
)

OPS = ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
BACKENDS = ("reference", "batched")
by_name = {"ids": lambda case: case.name if isinstance(case, Case) else str(case)}
each_op = pytest.mark.parametrize("op", OPS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_op
@each_backend
@pytest.mark.parametrize(
    "case",
    [
        Case("three", N=3, M=3, D=2, Dv=2, clusters=2, topk=1),
        Case("five", N=5, M=4, D=3, Dv=2, clusters=3, topk=2),
        Case("eight", N=8, M=7, D=4, Dv=3, clusters=3, topk=3, masks="holes"),
        Case("topk_beyond_keys", N=4, M=3, D=2, Dv=2, clusters=2, topk=9),
        Case("more_key_clusters_than_keys", N=4, M=3, D=2, Dv=2, clusters=2, key_clusters=8, topk=1),
        Case("row_without_keys", N=6, M=6, D=2, Dv=2, clusters=2, topk=2, masks="row"),
        Case("grouped_heads", H=4, key_heads=2, N=6, M=5, D=2, Dv=2, clusters=2, topk=2),
    ],
    **by_name,
)
def test_equals_the_definition_written_as_loops(op, backend, case):
    inputs = make_inputs(case)
    actual = attend(op, case, inputs, backend=backend)
    key_mask = torch.ones(case.B, case.M) if inputs.key_mask is None else inputs.key_mask
    query_mask = torch.ones(case.B, case.N) if inputs.query_mask is None else inputs.query_mask
    for b in range(case.B):
        for h in range(case.H):
            group = case.H // (case.key_heads or case.H)
            kept = h // group
            query, labels = inputs.query[b, h].tolist(), inputs.labels[b, h].tolist()
            head = query, inputs.key[b, kept].tolist(), inputs.value[b, kept].tolist(), labels
            masks = key_mask[b].tolist(), query_mask[b].tolist()
            if op == "bi_clustered_attention":
                sharing = slice(kept * group, kept * group + group)
                heads = zip(inputs.query[b, sharing].tolist(), inputs.labels[b, sharing].tolist(), strict=True)
                residuals = residuals_with_loops(list(heads), case.clusters, masks[1])
                counts = case.clusters, case.key_clusters, case.topk
                key_labels = inputs.key_labels[b, kept].tolist()
                expected = attend_to_key_clusters_with_loops(*head, key_labels, residuals, *counts, *masks)
            else:
                topk = 0 if op == "clustered_attention" else case.topk
                expected = attend_with_loops(*head, case.clusters, topk, *masks)
            torch.testing.assert_close(actual[b, h], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=3e-15)


def assert_exact(case, inputs, actual):
    """The output of every query that counts is that of SDPA."""
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None, :]
    exact = F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=mask, enable_gqa=True)
    rows = torch.ones(case.B, case.N, dtype=torch.bool) if inputs.query_mask is None else inputs.query_mask
    for b in range(case.B):
        torch.testing.assert_close(actual[b][:, rows[b]], exact[b][:, rows[b]], rtol=0, atol=2e-14)


@pytest.mark.parametrize("op", OPS[1:])
@each_backend
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes", "row"])
def test_with_all_keys_recomputed_is_exact(op, backend, masks):
    case = Case("exact", H=4, key_heads=2, topk=37, masks=masks)
    inputs = make_inputs(case)
    assert_exact(case, inputs, attend(op, case, inputs, backend=backend))


@pytest.mark.slow_except("*-row-batched-*", "1-9-holes-batched-*", "7-3-holes-reference-*")
@each_op
@each_backend
@pytest.mark.parametrize("masks", ["holes", "row"])
@pytest.mark.parametrize(("topk", "key_clusters"), [(1, 9), (7, 3)])
def test_a_cluster_for_every_query_is_exact(op, backend, masks, topk, key_clusters):
    case = Case("own", H=4, key_heads=2, clusters=41, key_clusters=key_clusters, topk=topk, masks=masks)
    inputs = make_inputs(case)
    inputs.labels = torch.randperm(41, generator=torch.Generator().manual_seed(0))[:37].expand(2, 4, -1)
    assert_exact(case, inputs, attend(op, case, inputs, backend=backend))


@each_op
@each_backend
@pytest.mark.parametrize("masks", ["none", "right", "holes"])
def test_weights_sum_to_one_and_masked_keys_have_none(op, backend, masks):
    """With the identity as values the output is the attention matrix itself."""
    case = Case("weights", masks=masks, Dv=37)
    inputs = make_inputs(case)
    inputs.value = torch.eye(case.M, dtype=torch.float64).expand(case.B, case.H, -1, -1)
    weights = attend(op, case, inputs, backend=backend)
    key_mask, query_mask = (
        torch.ones(case.B, case.M, dtype=torch.bool) if mask is None else mask
        for mask in (inputs.key_mask, inputs.query_mask)
    )
    total = query_mask[:, None, :].expand(-1, case.H, -1).double()
    # Bi-clustered attention's are sums of values as large as they: a tilted mean, and a dipole that may be negative.
    first_order = op == "bi_clustered_attention"
    torch.testing.assert_close(weights.sum(dim=-1), total, rtol=0, atol=4e-15 if first_order else 2e-15)
    assert first_order or (weights >= 0).all()
    assert (weights.transpose(2, 3)[~key_mask[:, None].expand(-1, case.H, -1)] == 0).all()


@pytest.mark.slow_except("bi_clustered_attention-*")
@pytest.mark.parametrize(
    ("op", "name", "label", "message"),
    [
        *((op, "labels", 5, "^labels must lie in 0 .. clusters - 1 = 4, got 0 .. 5") for op in OPS),
        (OPS[2], "key_labels", -1, "key_labels must lie in 0 .. key_clusters - 1 = 3, got -1 .. 3"),
    ],
)
def test_labels_are_checked_in_compiled_code_too(op, name, label, message):
    case = Case("labels")
    inputs = make_inputs(case)
    getattr(inputs, name)[0, 0, 0] = label
    torch._dynamo.reset()
    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        with pytest.raises(ValueError, match=message):
            run(op, case, inputs)


def test_padding_kinds_are_what_they_say():
    assert padding("right", 2, 4).tolist() == [[True] * 4, [True, True, False, False]]
    assert not padding("row", 2, 4)[1].any()
