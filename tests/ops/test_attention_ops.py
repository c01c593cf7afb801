"""Clustered, improved clustered and bi-clustered attention: values, gradients, identities, masks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import (
    CASES,
    Case,
    attend,
    attend_to_key_clusters_with_loops,
    attend_with_loops,
    make_inputs,
    offsets_with_loops,
    padding,
)
from support.closeness import assert_close_to_reference

from hf_effattn.measuring.cost import peak_memory_added
from hf_effattn.ops.bi_clustered_attention import batched as bi_batched
from hf_effattn.ops.bi_clustered_attention import reference as bi_reference

OPS = ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
BACKENDS = ("reference", "batched")
by_name = {"ids": lambda case: case.name if isinstance(case, Case) else str(case)}
each_op = pytest.mark.parametrize("op", OPS)
each_op_with_topk = pytest.mark.parametrize("op", OPS[1:])
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_case = pytest.mark.parametrize("case", CASES, **by_name)


def with_gradients(op, case, inputs, **options):
    """Output and the gradients of query, key and value, for a fixed random gradient of the output."""
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    inputs.query, inputs.key, inputs.value = leaves
    output = attend(op, case, inputs, **options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, leaves, weights.to(output.dtype))
    return dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))


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
                offsets = offsets_with_loops(list(heads), case.clusters, masks[1])
                counts = case.clusters, case.key_clusters, case.topk
                key_labels = inputs.key_labels[b, kept].tolist()
                expected = attend_to_key_clusters_with_loops(*head, key_labels, offsets, *counts, *masks)
            else:
                topk = 0 if op == "clustered_attention" else case.topk
                expected = attend_with_loops(*head, case.clusters, topk, *masks)
            torch.testing.assert_close(actual[b, h], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=3e-15)


@each_op
@each_case
def test_fast_form_equals_reference(op, case):
    expected = with_gradients(op, case, make_inputs(case), backend="reference")
    actual = with_gradients(op, case, make_inputs(case), backend="batched")
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("plain", "prime_lengths", "odd_dimensions", "holes")], **by_name
)
def test_dtypes_against_float64(op, dtype, case):
    """The error is what plain PyTorch has in the same dtype. All keys are recomputed where low precision could

    choose another set of top keys: then the two would rightly differ.
    """
    topk = {} if op == "clustered_attention" else {"topk": case.M}
    rounded = make_inputs(case, dtype)
    expected = with_gradients(op, case, rounded.to(torch.float64), backend="reference", **topk)
    baseline = with_gradients(op, case, rounded.to(dtype), backend="reference", **topk)
    actual = with_gradients(op, case, rounded.to(dtype), backend="batched", **topk)
    for name in expected:
        assert actual[name].dtype == dtype
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)


@each_op_with_topk
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_with_few_top_keys(op, dtype):
    """As above with `topk < M`: every cluster has keys far ahead of the rest, so every dtype chooses the same."""
    case = Case("separated", N=40, M=32, clusters=4, topk=4)
    rounded = make_inputs(case, dtype)
    rounded.key[:, :, :4] *= 4.0
    rounded.query = (rounded.key[:, :, :4].mean(dim=2, keepdim=True) + 0.1 * rounded.query).to(dtype)
    expected = with_gradients(op, case, rounded.to(torch.float64), backend="reference")
    baseline = with_gradients(op, case, rounded.to(dtype), backend="reference")
    actual = with_gradients(op, case, rounded.to(dtype), backend="batched")
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)


@pytest.mark.slow_except(
    "0.3-holes-batched-bi_clustered_attention",
    "0.3-holes-batched-improved_clustered_attention",
    "0.3-holes-batched-clustered_attention",
)
@each_op
@each_backend
@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck(op, backend, masks, dropout_p, monkeypatch):
    # A variance correction is no function of the inputs to the gradient, which holds it fixed: here it is 0.
    for form in (bi_reference, bi_batched):
        monkeypatch.setattr(form, "LARGEST_VARIANCE_CORRECTION", 0.0)
    case = Case("small", key_heads=1, N=7, M=6, D=3, Dv=2, clusters=3, topk=2, masks=masks)
    inputs = make_inputs(case)

    def run(query, key, value):
        torch.manual_seed(5)
        inputs.query, inputs.key, inputs.value = query, key, value
        return attend(op, case, inputs, backend=backend, dropout_p=dropout_p)

    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    assert torch.autograd.gradcheck(run, leaves)


def assert_exact(case, inputs, actual):
    """The output of every query that counts is that of SDPA."""
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None, :]
    exact = F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=mask)
    rows = torch.ones(case.B, case.N, dtype=torch.bool) if inputs.query_mask is None else inputs.query_mask
    for b in range(case.B):
        torch.testing.assert_close(actual[b][:, rows[b]], exact[b][:, rows[b]], rtol=0, atol=5e-15)


@each_op_with_topk
@each_backend
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes", "row"])
def test_with_all_keys_recomputed_is_exact(op, backend, masks):
    case = Case("exact", topk=37, masks=masks)
    inputs = make_inputs(case)
    assert_exact(case, inputs, attend(op, case, inputs, backend=backend))


@each_backend
@pytest.mark.parametrize("topk", [1, 7, 36])
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes", "row"])
def test_a_cluster_for_every_key_is_exact(backend, topk, masks):
    case = Case("own_key_cluster", key_clusters=41, topk=topk, masks=masks)
    inputs = make_inputs(case)
    inputs.key_labels = torch.randperm(41)[:37].expand(case.B, case.H, 37)
    assert_exact(case, inputs, attend("bi_clustered_attention", case, inputs, backend=backend))


@pytest.mark.parametrize("op", OPS[:2])
@each_backend
def test_a_cluster_for_every_query_is_exact(op, backend):
    case = Case("own_cluster", clusters=37, topk=3)
    inputs = make_inputs(case)
    inputs.labels = torch.randperm(37).expand(case.B, case.H, 37)
    exact = F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)
    torch.testing.assert_close(attend(op, case, inputs, backend=backend), exact, rtol=0, atol=4e-15)


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


@each_op
@each_backend
@pytest.mark.parametrize("masks", ["right", "left", "holes"])
def test_a_padded_batch_equals_its_texts_alone(op, backend, masks):
    case = Case("padded", masks=masks)
    inputs = make_inputs(case)
    padded = attend(op, case, inputs, backend=backend)
    mask = inputs.query_mask[-1]
    alone = make_inputs(case)
    for name in ("query", "key", "value"):
        setattr(alone, name, getattr(inputs, name)[-1:, :, mask if name == "query" else inputs.key_mask[-1]])
    alone.labels, alone.key_labels = inputs.labels[-1:, :, mask], inputs.key_labels[-1:, :, inputs.key_mask[-1]]
    alone.key_mask = alone.query_mask = None
    expected = attend(op, case, alone, backend=backend)
    torch.testing.assert_close(padded[-1:, :, mask], expected, rtol=0, atol=0 if backend == "batched" else 2e-15)
    assert (padded[-1:, :, ~mask] == 0).all()


@each_op
@each_backend
@pytest.mark.parametrize("garbage", [1e4, float("inf"), float("nan")])
def test_values_of_masked_rows_change_nothing(op, backend, garbage):
    case = Case("garbage", masks="right")
    clean = with_gradients(op, case, make_inputs(case), backend=backend)
    inputs = make_inputs(case)
    inputs.key[-1, :, ~inputs.key_mask[-1]] = garbage
    inputs.value[-1, :, ~inputs.key_mask[-1]] = -garbage
    inputs.query[-1, :, ~inputs.query_mask[-1]] = garbage
    dirty = with_gradients(op, case, inputs, backend=backend)
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=0, atol=0)
    assert (dirty["key"][-1, :, ~inputs.key_mask[-1]] == 0).all()
    assert (dirty["value"][-1, :, ~inputs.key_mask[-1]] == 0).all()
    assert (dirty["query"][-1, :, ~inputs.query_mask[-1]] == 0).all()


@each_op
@each_backend
def test_queries_that_see_no_key_give_zero_output_and_gradient(op, backend):
    case = Case("no_keys")
    inputs = make_inputs(case)
    inputs.key_mask = torch.tensor([True, False])[:, None].expand(-1, case.M)  # every query counts
    results = with_gradients(op, case, inputs, backend=backend)
    assert all((tensor[1] == 0).all() for tensor in results.values())
    assert all((tensor[0] != 0).any() for tensor in results.values())


@each_op
@each_backend
def test_large_scores_stay_finite(op, backend):
    case = Case("large")
    inputs = make_inputs(case, torch.float32)
    inputs.query *= 300
    results = with_gradients(op, case, inputs, backend=backend)
    assert all(tensor.isfinite().all() for tensor in results.values())


@each_op
@each_backend
def test_float16_holds_scores_that_fit_after_scaling(op, backend):
    """Products of queries and keys beyond 65,504 that the scale brings back into range."""
    case = Case("float16", D=64)
    inputs = make_inputs(case, torch.float16)
    inputs.query, inputs.key = inputs.query * 100, inputs.key.abs() * 100
    if (op, backend) == ("bi_clustered_attention", "reference"):
        # Queries like their centroid: in float16 itself the dipole of such keys overflows with the queries' offsets.
        inputs.query = inputs.query.abs().mean(dim=2, keepdim=True) + inputs.query / 1000
    assert (inputs.query.float() @ inputs.key.float().transpose(2, 3)).abs().max() > torch.finfo(torch.float16).max
    results = with_gradients(op, case, inputs, backend=backend)
    assert all(tensor.isfinite().all() for tensor in results.values())


@each_op
def test_strides_do_not_matter(op):
    case = Case("strided")
    inputs = make_inputs(case)
    expected = attend(op, case, inputs)
    packed = torch.stack([inputs.query, inputs.key, inputs.value], dim=-1).unbind(dim=-1)  # inner stride 3
    inputs.query, inputs.key, inputs.value = packed
    torch.testing.assert_close(attend(op, case, inputs), expected, rtol=0, atol=0)
    inputs.value = inputs.value[:, :1].expand(-1, case.H, -1, -1)  # stride 0
    dense = make_inputs(case)
    dense.value = inputs.value.contiguous()
    torch.testing.assert_close(attend(op, case, inputs), attend(op, case, dense), rtol=0, atol=0)


@each_op
def test_inputs_are_left_alone(op):
    case = Case("untouched", masks="holes")
    inputs, kept = make_inputs(case), make_inputs(case)
    with_gradients(op, case, inputs)
    for name in ("query", "key", "value", "labels", "key_labels", "key_mask", "query_mask"):
        assert torch.equal(getattr(inputs, name), getattr(kept, name))


@each_op
@pytest.mark.parametrize("masks", ["none", "holes"])
def test_dropout_is_the_same_in_both_forms_and_replays(op, masks):
    case = Case("dropout", H=4, key_heads=2, masks=masks)
    results = []
    for backend in (*BACKENDS, "batched"):
        torch.manual_seed(11)
        results.append(with_gradients(op, case, make_inputs(case), backend=backend, dropout_p=0.4))
    for name in results[0]:
        assert_close_to_reference(name, results[1][name], results[0][name], rtol=1e-12)
        assert torch.equal(results[1][name], results[2][name])
    assert not torch.equal(results[1]["output"], attend(op, case, make_inputs(case), dropout_p=0.4))


@pytest.mark.slow_except("clustered_attention")
@each_op
def test_dropout_keeps_the_mean(op):
    case = Case("dropout", B=1, H=1)
    inputs = make_inputs(case)
    torch.manual_seed(0)
    draws = torch.stack([attend(op, case, inputs, dropout_p=0.2) for _ in range(2000)])
    error = (draws.mean(dim=0) - attend(op, case, inputs)).abs() / (draws.std(dim=0) / 2000**0.5)
    assert error.max() < 5.5  # standard errors, over 592 values


@each_op
@pytest.mark.parametrize("masks", ["none", "holes"])
def test_compiles_as_one_graph(op, masks):
    case = Case("compiled", masks=masks)
    expected = with_gradients(op, case, make_inputs(case))
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(case)
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    inputs.query, inputs.key, inputs.value = leaves
    output = compiled(op, case, inputs)
    torch.testing.assert_close(output.detach(), expected["output"], rtol=0, atol=0)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, gradient in zip(("query", "key", "value"), torch.autograd.grad(output, leaves, weights), strict=True):
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


@each_op
def test_labels_are_checked_in_compiled_code_too(op):
    case = Case("labels")
    inputs = make_inputs(case)
    inputs.labels[0, 0, 0] = case.clusters
    torch._dynamo.reset()
    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        with pytest.raises(ValueError, match=r"^labels must lie in 0 .. clusters - 1 = 4, got 0 .. 5"):
            run(op, case, inputs)


def test_key_labels_are_checked_in_compiled_code_too():
    case = Case("key_labels")
    inputs = make_inputs(case)
    inputs.key_labels[0, 0, 0] = -1
    torch._dynamo.reset()
    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        with pytest.raises(ValueError, match=r"key_labels must lie in 0 .. key_clusters - 1 = 3, got -1 .. 3"):
            run("bi_clustered_attention", case, inputs)


@each_op
def test_forward_mode_and_second_derivatives_are_the_references(op):
    """The fast form raises where torch would take a derivative that it does not have for 0."""
    case = Case("forward_mode", N=7, M=6, D=3, Dv=2, clusters=3, topk=2)
    inputs = make_inputs(case)

    def run(value, backend):
        inputs.value = value
        return attend(op, case, inputs, backend=backend)

    value = inputs.value.clone()
    tangent = torch.func.jvp(lambda v: run(v, "reference"), (value,), (torch.ones_like(value),))[1]
    torch.testing.assert_close(tangent, torch.ones_like(tangent), rtol=0, atol=1e-15)  # weights sum to 1
    with pytest.raises(ValueError, match='need backend="reference"'):
        torch.func.jvp(lambda v: run(v, "batched"), (value,), (torch.ones_like(value),))
    leaf = value.requires_grad_()
    (gradient,) = torch.autograd.grad(run(leaf, "batched").square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(gradient.sum(), leaf)


@each_op
def test_registered_with_torch_library(op):
    """torch's own check of the schema, the fake function and the autograd formula."""
    case = Case("opcheck", N=11, M=9, clusters=3, topk=2, masks="holes")
    inputs = make_inputs(case)
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    groups = {
        "clustered_attention": (inputs.labels, case.clusters, 0),
        "improved_clustered_attention": (inputs.labels, case.clusters, case.topk),
        "bi_clustered_attention": (
            *(inputs.labels, inputs.key_labels),
            *([count] * inputs.key.shape[1] for count in (case.clusters, case.key_clusters, case.topk)),
        ),
    }
    masks = [inputs.key_mask, inputs.query_mask]
    if op == "bi_clustered_attention":
        masks.append(torch.tensor([[True, False], [False, False]]))  # heads that attend exactly
    arguments = (*leaves, *groups[op], *masks, 0.3, 0.0, None)
    if op == "bi_clustered_attention":
        arguments += (False,)  # what is kept for the way back is nothing that a fake tensor could tell
    torch.library.opcheck(getattr(torch.ops.hf_effattn, op).default, arguments)


@settings(max_examples=60, deadline=None)
@given(
    op=st.sampled_from(OPS),
    sizes=st.tuples(*[st.integers(1, 40)] * 2, *[st.integers(1, 9)] * 2),
    clusters=st.integers(1, 20),
    key_clusters=st.integers(1, 45),
    topk=st.integers(1, 45),
    masks=st.sampled_from(["none", "right", "left", "holes", "row", "few"]),
    seed=st.integers(0, 2**16),
)
def test_any_sizes(op, sizes, clusters, key_clusters, topk, masks, seed):
    N, M, D, Dv = sizes
    counts = {"clusters": clusters, "key_clusters": key_clusters, "topk": topk}
    case = Case("any", N=N, M=M, D=D, Dv=Dv, **counts, masks=masks)
    expected = with_gradients(op, case, make_inputs(case, seed=seed), backend="reference")
    actual = with_gradients(op, case, make_inputs(case, seed=seed), backend="batched")
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-10)


@each_op
def test_memory_grows_with_length_not_with_its_square(op):
    """Bytes alive at the peak of forward and backward, counted by the allocator: doubling N at most doubles them."""
    peaks = []
    for N in (2048, 4096):
        case = Case("memory", B=1, H=2, N=N, M=N, D=16, Dv=16, clusters=16, topk=8)
        inputs = make_inputs(case, torch.float32)
        peaks.append(peak_memory_added(partial(with_gradients, op, case, inputs), torch.device("cpu"))[1])
    assert 0 < peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 4096 * 4096 * 4  # one head's matrix would already be more


def test_padding_kinds_are_what_they_say():
    assert padding("right", 2, 4).tolist() == [[True] * 4, [True, True, False, False]]
    assert not padding("row", 2, 4)[1].any()
