"""Causal attention over clusters: values, gradients, identities, masks, and that no output sees a later token."""

import pytest
import torch
from support.causal_cases import (
    CASES,
    EMPTY,
    KERNEL_CASES,
    METHODS,
    PEAKED,
    Case,
    attend,
    exact,
    exact_heads,
    inputs_with_empty_clusters,
    make_inputs,
    peaked_inputs,
)
from support.closeness import assert_close_to_reference
from support.op_cases import CAUSAL, with_gradients

from hf_effattn.ops import causal_clustered_attention
from hf_effattn.ops.causal_clustered_attention.local import LocalPart

each_method = pytest.mark.parametrize("method", METHODS)
each_backend = pytest.mark.parametrize("backend", ["reference", "batched"])


@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *KERNEL_CASES) if "exact" in case.name], ids=lambda case: case.name
)
def test_heads_are_exact_where_a_case_says_so(case):
    exact, heads = exact_heads(case)
    assert 0 < exact < heads or (case.name == "all_heads_exact" and 0 < exact == heads)


@each_method
def test_fast_form_equals_reference_with_empty_clusters(method):
    expected, actual = (
        attend(method, EMPTY, *inputs_with_empty_clusters(), backend=backend) for backend in ("reference", "batched")
    )
    assert_close_to_reference("output", actual, expected, rtol=1e-12)


@pytest.mark.slow_except("4-*")
@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("segment_length", [1, 4])
def test_fast_form_equals_reference_where_weights_are_smaller_than_numbers_can_be(method, segment_length):
    """Older keys, all of them exact or not, that weigh down to e^-3000 beside the largest.

    Below e^-60 all weights were once alike, and where one was 0, a place without a key was as good as the key.
    """
    case = Case(
        "far", B=1, N=19, D=4, Dv=4, clusters=2, topk=2, key_clusters=2, segment_length=segment_length, window=2
    )
    for seed in range(2):
        query, key, value, _ = make_inputs(case, seed=seed)
        runs = {}
        for backend in ("reference", "batched"):
            leaves = [query.requires_grad_(), (1000 * key.detach()).requires_grad_(), value.requires_grad_()]
            output = attend(method, case, *leaves, None, backend=backend)
            runs[backend] = (output.detach(), *torch.autograd.grad(output.square().sum(), leaves))
        for name, actual, expected in zip(("output", "query", "key", "value"), *reversed(runs.values()), strict=True):
            # Where one key takes all, gradients of queries and keys are small beside what they are sums of: their
            # errors depend on the processor, from 1e-7 to 1.01e-6.
            assert_close_to_reference(name, actual, expected, rtol=2e-6 if name in ("query", "key") else 1e-10)


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("length", [1.0, 20.0])
def test_float32_of_peaked_clusters_is_as_close_as_the_reference_in_it(method, length):
    """A query short beside its centroid's needs keys that weigh 1e-13 in the centroid's attention.

    They were once found as a difference of sums, and lost. (Without top keys the sink's gradient vanishes, and float32
    holds none of it.) The first segment is left out: it is torch's exact attention and no cluster's.
    """
    inputs = peaked_inputs(length)
    runs = {}
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "batched")):
        leaves = [rows.to(dtype).requires_grad_() for rows in inputs[:3]]
        output = attend(method, PEAKED, *leaves, inputs[3], backend=backend)
        gradients = torch.autograd.grad(output[:, :, PEAKED.segment_length :].square().sum(), leaves)
        runs[backend] = dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))
    for name, expected in runs["reference"].items():
        assert_close_to_reference(name, runs["batched"][name], expected, rtol=2e-6)


def assert_exact(op, case, backend):
    """Outputs and gradients are those of softmax attention."""
    inputs = op.make(case)
    actual = with_gradients(op, case, inputs, backend=backend)
    expected = with_gradients(op, case, inputs, run=lambda case, inputs: {"output": exact(*inputs.values())})
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("op", CAUSAL, ids=str)
@each_backend
@pytest.mark.parametrize("masks", ["none", "left", "holes"])
def test_a_window_over_all_is_exact_attention(op, backend, masks):
    assert_exact(op, Case("wide", window=64, masks=masks, key_heads=1, sinks=masks != "left"), backend)


@pytest.mark.slow_except("*-batched-*", "none-reference-causal i-clustered")
@pytest.mark.parametrize("op", CAUSAL[1:], ids=str)
@each_backend
@pytest.mark.parametrize("masks", ["none", "left"])
def test_topk_of_all_older_keys_is_exact_attention(op, backend, masks):
    assert_exact(op, Case("all", topk=53, masks=masks), backend)


@each_backend
def test_a_cluster_for_every_key_is_exact_attention(backend):
    case = Case("own", key_clusters=64)
    inputs = make_inputs(case)
    actual = attend("bi-clustered", case, *inputs, backend=backend)
    assert_close_to_reference("output", actual, exact(*inputs), rtol=1e-12)


@each_method
@each_backend
def test_equal_queries_get_exact_attention_of_their_centroid(method, backend):
    """A centroid of equal queries is that query: its scores are theirs."""
    case = Case("equal", key_clusters=64)
    query, key, value, mask = make_inputs(case)
    query = query[:, :, :1].expand(query.shape)
    actual = attend(method, case, query, key, value, mask, backend=backend)
    assert_close_to_reference("output", actual, exact(query, key, value, mask), rtol=1e-12)


@each_method
@each_backend
def test_weights_sum_to_one(method, backend):
    case = Case("ones", masks="holes")
    query, key, value, mask = make_inputs(case)
    output = attend(method, case, query, key, torch.ones_like(value), mask, backend=backend)
    expected = mask[:, None, :, None].to(output).expand(output.shape)
    torch.testing.assert_close(output, expected, rtol=0, atol=3e-15)


@pytest.mark.slow_except("none-*-i-clustered", "none-*-bi-clustered", "left-*-clustered")
@each_method
@pytest.mark.parametrize(("masks", "dtype"), [("none", torch.float32), ("left", torch.bfloat16)], ids=str)
def test_no_output_sees_a_later_token(method, masks, dtype):
    """One token is changed, or all that follow it, to something near or far away."""
    case = Case("leak", H=4, key_heads=2, N=43, masks=masks, segment_length=5, window=7, sinks=masks == "left")
    inputs = make_inputs(case, dtype)
    before, others = attend(method, case, *inputs), make_inputs(case, dtype, seed=7)
    for token in range(0, case.N, 4):
        last = case.N if token % 8 else token + 1
        changed = [tensor.clone() for tensor in inputs[:3]]
        for tensor, noise in zip(changed, others, strict=False):
            tensor[:, :, token:last] += noise[:, :, token:last] * 10.0 ** (token % 5 - 2)
        after = attend(method, case, *changed, inputs[3])
        assert torch.equal(before[:, :, :token], after[:, :, :token])


@each_method
def test_a_later_token_reaches_every_later_segment(method):
    """The negative of the test before: what must not be seen earlier is seen later."""
    case = Case("seen", N=40)
    query, key, value, mask = make_inputs(case)
    before = attend(method, case, query, key, value, mask)
    value = value.clone()
    value[:, :, 9] += 1.0
    changed = (attend(method, case, query, key, value, mask) != before).any(dim=-1)
    assert changed[:, :, 9:].all()
    assert not changed[:, :, :9].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": "improved"}, ValueError, "method must be one of 'clustered', 'i-clustered', 'bi-clustered'"),
        ({"clusters": 0}, ValueError, "clusters must be at least 1, got 0"),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"segment_length": 0}, ValueError, "segment_length must be at least 1, got 0"),
        ({"window": -1}, ValueError, "window must be at least 0, got -1"),
        ({"window": 1.5}, TypeError, "window must be an int"),
        ({"key_clusters": 0}, ValueError, "key_clusters must be at least 1"),
        ({"max_predicted_error": -0.1}, ValueError, "max_predicted_error must be at least 0, got -0.1"),
        ({"max_predicted_error": float("nan")}, ValueError, "max_predicted_error must be at least 0, got nan"),
        ({"scale": "a"}, TypeError, "scale must be a number, got 'a'"),
        ({"dropout_p": "a"}, TypeError, "dropout_p must be a number, got 'a'"),
        ({"key_mask": [True] * 6}, TypeError, "key_mask must be a tensor or None, got list"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must lie in \[0, 1\)"),
        ({"backend": "fast"}, ValueError, "backend must be one of"),
        ({"attention_sinks": [0.0]}, TypeError, "attention_sinks must be a floating-point tensor or None, got list"),
        (
            {"attention_sinks": torch.ones(1, dtype=torch.int64)},
            TypeError,
            "attention_sinks must be a floating-point tensor .* got torch",
        ),
        (
            {"attention_sinks": torch.ones(5)},
            ValueError,
            "attention_sinks must have a number for each of the . heads of query",
        ),
        ({"key_mask": torch.ones(1, 6)}, TypeError, "key_mask must be boolean"),
        ({"key_mask": torch.ones(1, 5, dtype=torch.bool)}, ValueError, "key_mask must have shape"),
        ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
        ({"query": torch.zeros(1, 2, 6, 4).to(torch.float8_e4m3fn)}, TypeError, "query must be dense and of 16 bits"),
        ({"query": torch.zeros(1, 2, 6, 4).to_sparse()}, TypeError, "query must be dense and of 16 bits or more"),
        ({"query": torch.zeros(1, 2, 3, 4)}, ValueError, "got 3 queries and 6 keys"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_says_what_is_wrong(change, error, message):
    tensors = {name: torch.zeros(1, 2, 6, 4) for name in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        causal_clustered_attention(**tensors | {"clusters": 2} | change)


def test_more_key_clusters_than_keys_need_no_memory():
    tensors = [torch.zeros(1, 2, 6, 4) for _ in range(3)]
    sizes = {"clusters": 2, "segment_length": 2, "window": 0}
    assert causal_clustered_attention(*tensors, **sizes, key_clusters=2**40).shape == tensors[0].shape


def test_a_local_part_goes_back_as_its_part_of_one_softmax():
    """Of more queries than torch's step looks at together, with grouped heads."""
    n = 257
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64)
    key, value, others = (torch.randn(2, n, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    grad = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    leaves = [rows.requires_grad_() for rows in (query, key, value)]
    local = (query @ key[:, None].transpose(2, 3)).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    scores = torch.cat([local, query.detach() @ others[:, None].transpose(2, 3)], dim=3)
    output = scores.softmax(dim=3) @ torch.cat([value, others], dim=1)[:, None]
    expected = torch.autograd.grad(output, leaves, grad)
    with torch.no_grad():
        part = LocalPart(query, key, value, causal=True)
        actual = part.backward(grad, output, scores.logsumexp(dim=3, keepdim=True))
    for name, gradient, wanted in zip(("query", "key", "value"), actual, expected, strict=True):
        assert_close_to_reference(name, gradient, wanted, rtol=1e-12)


def test_clusters_are_fitted_on_32_queries_each():
    query, key, value = (torch.randn(1, 2, 512, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    sizes = {"clusters": 3, "topk": 8, "key_clusters": 2, "segment_length": 128, "window": 16}
    outputs = {
        count: causal_clustered_attention(query, key, value, fit_queries=count, **sizes) for count in (None, 96, 48)
    }
    assert torch.equal(outputs[None], outputs[96])
    assert not torch.equal(outputs[None], outputs[48])
