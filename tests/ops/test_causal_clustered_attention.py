"""Causal attention over clusters: values, gradients, identities, masks, and that no output sees a later token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.causal_cases import (
    EMPTY,
    METHODS,
    PEAKED,
    Case,
    attend,
    exact,
    exact_heads,
    inputs_with_empty_clusters,
    make_inputs,
    make_sinks,
    peaked_inputs,
)
from support.closeness import assert_close_to_reference

from hf_effattn.ops import causal_clustered_attention
from hf_effattn.ops.causal_clustered_attention import batched, segment_batches
from hf_effattn.ops.causal_clustered_attention.local import LocalPart

each_method = pytest.mark.parametrize("method", METHODS)
each_backend = pytest.mark.parametrize("backend", ["reference", "batched"])


SOME_EXACT = {"max_predicted_error": 0.04, "H": 6, "key_heads": 3, "clusters": 2, "key_clusters": 2}
CASES = (
    Case("plain"),
    Case("one_token", N=1),
    Case("shorter_than_the_window", N=7),
    Case("first_token_beyond_the_window", N=9),
    Case("whole_segments", N=64),
    Case("no_window", window=0),
    Case("window_of_many_segments", window=17),
    Case("segments_of_one_token", segment_length=1, window=3, N=23),
    Case("segments_in_halves", segment_length=193, window=30, N=600, H=4, key_heads=2),
    Case("segments_in_halves_and_dropout", segment_length=193, window=30, N=600, dropout_p=0.3),
    Case("odd_dimensions", D=5, Dv=3, segment_length=7, window=6),
    Case("one_cluster", clusters=1),
    Case("one_cluster_and_dropout", clusters=1, topk=11, dropout_p=0.3, H=4, key_heads=2, Dv=5),
    Case(
        "one_cluster_some_heads_exact",
        clusters=1,
        max_predicted_error=0.1,
        H=6,
        key_heads=3,
        key_clusters=2,
        masks="holes",
    ),
    Case("more_clusters_than_queries", clusters=100),
    Case("topk_beyond_the_first_older_keys", topk=11),
    Case("topk_beyond_keys", topk=99),
    Case("one_key_cluster", key_clusters=1),
    Case("no_iterations", iterations=0),
    Case("all_heads_exact", max_predicted_error=0.0, H=4, key_heads=2, clusters=2, key_clusters=2),
    Case("some_heads_exact", **SOME_EXACT),
    Case("some_heads_exact_and_dropout", **SOME_EXACT, dropout_p=0.3),
    Case("some_heads_exact_and_holes", **SOME_EXACT, masks="holes"),
    Case("right_padding", masks="right"),
    Case("left_padding", masks="left", N=61),
    Case("holes", masks="holes"),
    Case("row_fully_padded", masks="row"),
    Case("grouped_heads", H=6, key_heads=2),
    Case("one_key_head_and_holes", H=3, key_heads=1, masks="holes"),
    Case("sinks", H=3, sinks=True),
    Case("sinks_of_grouped_heads_and_holes", H=6, key_heads=2, masks="holes", sinks=True),
    Case("some_heads_exact_and_sinks", **SOME_EXACT, sinks=True),
    Case("dropout", dropout_p=0.3),
    Case("dropout_and_sinks", dropout_p=0.3, sinks=True),
    Case("dropout_and_left_padding", dropout_p=0.3, masks="left", H=4, key_heads=2),
)
# Without masks a second item would only be another draw.
CASES = tuple(replace(case, B=1) if case.masks == "none" else case for case in CASES)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def with_gradients(method, case, dtype=torch.float64, run=attend, **options):
    """Output and the gradients of query, key, value and sinks, for a fixed random gradient of the output."""
    *tensors, mask = make_inputs(case, dtype)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    sinks = make_sinks(case, dtype)
    if sinks is not None:
        options["sinks"] = sinks.requires_grad_()
    output = run(method, case, *leaves, mask, **options)
    leaves += [] if sinks is None else [sinks]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, leaves, weights.to(output.dtype))
    names = ("output", "query", "key", "value", "sinks")[: 1 + len(leaves)]
    return dict(zip(names, (output.detach(), *gradients), strict=True))


@pytest.mark.slow_except("*-bi-clustered", "plain-*", "*_and_holes-*")
@each_method
@each_case
def test_fast_form_equals_reference(method, case):
    expected = with_gradients(method, case, backend="reference")
    actual = with_gradients(method, case, backend="batched")
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if "exact" in case.name], ids=lambda case: case.name)
def test_heads_are_exact_where_a_case_says_so(case):
    exact, heads = exact_heads(case)
    assert 0 < exact < heads or (case.name == "all_heads_exact" and 0 < exact == heads)


@each_method
def test_fast_form_equals_reference_with_empty_clusters(method):
    expected, actual = (
        attend(method, EMPTY, *inputs_with_empty_clusters(), backend=backend) for backend in ("reference", "batched")
    )
    assert_close_to_reference("output", actual, expected, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("segment_length", [1, 4])
def test_fast_form_equals_reference_where_weights_are_smaller_than_numbers_can_be(method, segment_length):
    """Older keys, all of them exact or not, that weigh down to e^-3000 beside the largest.

    Below e^-60 all weights were once alike, and where one was 0, a place without a key was as good as the key.
    """
    case = Case(
        "far", B=1, N=19, D=4, Dv=4, clusters=2, topk=2, key_clusters=2, segment_length=segment_length, window=2
    )
    for seed in range(4):
        query, key, value, _ = make_inputs(case, seed=seed)
        found = {}
        for backend in ("reference", "batched"):
            leaves = [query.requires_grad_(), (1000 * key.detach()).requires_grad_(), value.requires_grad_()]
            output = attend(method, case, *leaves, None, backend=backend)
            found[backend] = (output.detach(), *torch.autograd.grad(output.square().sum(), leaves))
        for name, actual, expected in zip(("output", "query", "key", "value"), *reversed(found.values()), strict=True):
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
    found = {}
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "batched")):
        leaves = [rows.to(dtype).requires_grad_() for rows in inputs[:3]]
        output = attend(method, PEAKED, *leaves, inputs[3], backend=backend)
        gradients = torch.autograd.grad(output[:, :, PEAKED.segment_length :].square().sum(), leaves)
        found[backend] = dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))
    for name, expected in found["reference"].items():
        assert_close_to_reference(name, found["batched"][name], expected, rtol=2e-6)


@each_method
@each_backend
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes"])
def test_a_window_over_all_is_exact_attention(method, backend, masks):
    case = Case("wide", window=64, masks=masks, key_heads=1, sinks=masks in ("none", "holes"))
    actual = with_gradients(method, case, backend=backend)
    expected = with_gradients(method, case, run=lambda method, case, *inputs, **options: exact(*inputs, **options))
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("method", METHODS[1:])
@each_backend
@pytest.mark.parametrize("masks", ["none", "left"])
def test_topk_of_all_older_keys_is_exact_attention(method, backend, masks):
    case = Case("all", topk=53, masks=masks)
    actual = with_gradients(method, case, backend=backend)
    expected = with_gradients(method, case, run=lambda method, case, *inputs: exact(*inputs))
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


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


@each_method
@pytest.mark.parametrize("masks", ["left", "right"])
def test_padding_changes_nothing(method, masks):
    case = Case("padded", masks=masks, N=60)
    query, key, value, mask = make_inputs(case, torch.float32)
    for tensor in (query, key, value):
        tensor.masked_fill_(~mask[:, None, :, None], torch.nan)
    output = attend(method, case, query, key, value, mask)
    alone = attend(method, case, *(tensor[1:, :, mask[1]] for tensor in (query, key, value)), None)
    assert torch.equal(output[1:, :, mask[1]], alone)
    assert (output[1:, :, ~mask[1]] == 0).all()


@each_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_close_as_exact_attention_in_it(method, dtype):
    """All older keys are top keys, so both compute the same; rounding alone parts them."""
    case = Case("low", N=96, D=16, Dv=16, topk=96, segment_length=8, window=8, clusters=6)
    run = {"run": lambda method, case, *inputs: exact(*inputs)}
    expected, baseline = with_gradients(method, case, **run), with_gradients(method, case, dtype, **run)
    if method == "clustered":
        case = replace(case, window=96)
    actual = with_gradients(method, case, dtype)
    for name in expected:
        assert actual[name].dtype == dtype
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=0.0)


@given(
    st.sampled_from(METHODS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(2, 90),
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(1, 24),
    st.sampled_from(["none", "left", "right", "holes"]),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
def test_no_output_sees_a_later_token(method, dtype, N, segment_length, window, D, masks, heads, sinks, share, seed):
    case = Case(
        "leak",
        H=heads[0],
        key_heads=heads[1],
        N=N,
        D=D,
        masks=masks,
        segment_length=segment_length,
        window=window,
        sinks=sinks,
    )
    inputs = make_inputs(case, dtype, seed)
    before = attend(method, case, *inputs)
    token = int(share * N)
    generator = torch.Generator().manual_seed(seed)
    changed = [tensor.clone() for tensor in inputs[:3]]
    for tensor in changed:
        # One token or all that follow, near to what they were or far away.
        last = N if seed % 2 else token + 1
        noise = torch.randn(tensor[:, :, token:last].shape, generator=generator, dtype=torch.float64)
        tensor[:, :, token:last] += (noise * 10.0 ** (seed % 5 - 2)).to(dtype)
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


@pytest.mark.slow_except("bi-clustered")
@each_method
def test_dropout_keeps_the_mean(method):
    case = Case("mean", B=1, H=1, N=24, D=4, Dv=4)
    query, key, value, mask = make_inputs(case)
    repeated = [tensor.expand(200, -1, -1, -1) for tensor in (query, key, value)]
    dropped = attend(method, case, *repeated, mask, dropout_p=0.2)
    expected = attend(method, case, query, key, value, mask)
    spread = dropped.std(dim=0) / 200**0.5
    assert ((dropped.mean(dim=0) - expected[0]).abs() < 5 * spread + 1e-12).all()
    assert (dropped.std(dim=0) > 0).all()


@each_method
def test_compiles_to_one_op(method):
    case = Case("compiled", N=24)
    inputs = make_inputs(case, torch.float32)
    expected = with_gradients(method, case, torch.float32)

    def run(method, case, *inputs):
        return attend_compiled(*inputs)

    attend_compiled = torch.compile(
        lambda *inputs: causal_clustered_attention(
            *inputs[:3],
            method=method,
            clusters=case.clusters,
            topk=case.topk,
            key_clusters=case.key_clusters,
            segment_length=case.segment_length,
            window=case.window,
            fit_queries=case.fit_queries,
            key_mask=inputs[3],
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    actual = with_gradients(method, case, torch.float32, run=run)
    assert inputs[3] is None
    for name in expected:
        assert torch.equal(actual[name], expected[name])


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
        ({"sinks": [0.0]}, TypeError, "sinks must be a floating-point tensor or None, got list"),
        ({"sinks": torch.ones(1, dtype=torch.int64)}, TypeError, "sinks must be a floating-point tensor .* got torch"),
        ({"sinks": torch.ones(5)}, ValueError, "sinks must have a number for each of the . heads of query"),
        ({"key_mask": torch.ones(1, 6)}, TypeError, "key_mask must be boolean"),
        ({"key_mask": torch.ones(1, 5, dtype=torch.bool)}, ValueError, "key_mask must have shape"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_says_what_is_wrong(change, error, message):
    tensors = [torch.zeros(1, 2, 6, 4) for _ in range(3)]
    with pytest.raises(error, match=message):
        causal_clustered_attention(*tensors, **{"clusters": 2} | change)


def test_more_key_clusters_than_keys_need_no_memory():
    tensors = [torch.zeros(1, 2, 6, 4) for _ in range(3)]
    sizes = {"clusters": 2, "segment_length": 2, "window": 0}
    assert causal_clustered_attention(*tensors, **sizes, key_clusters=2**40).shape == tensors[0].shape


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ([1.0], "query must be a tensor, got list"),
        (torch.zeros(1, 2, 6, 4).to(torch.float8_e4m3fn), "query must be dense and of 16 bits or more"),
        (torch.zeros(1, 2, 6, 4).to_sparse(), "query must be dense and of 16 bits or more"),
    ],
    ids=["list", "float8", "sparse"],
)
def test_refuses_what_is_no_such_tensor(query, message):
    with pytest.raises(TypeError, match=message):
        causal_clustered_attention(query, *[torch.zeros(1, 2, 6, 4)] * 2, clusters=2)


def test_refuses_other_keys_than_its_own():
    with pytest.raises(ValueError, match="got 3 queries and 6 keys"):
        causal_clustered_attention(torch.zeros(1, 2, 3, 4), *[torch.zeros(1, 2, 6, 4)] * 2, clusters=2)


def test_a_local_part_goes_back_as_its_part_of_one_softmax():
    """Of more queries than torch's step looks at together, with grouped heads."""
    n = 257
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64)
    key, value, others = (torch.randn(2, n, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    grad = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    leaves = [rows.requires_grad_() for rows in (query, key, value)]
    own = (query @ key[:, None].transpose(2, 3)).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    scores = torch.cat([own, query.detach() @ others[:, None].transpose(2, 3)], dim=3)
    output = scores.softmax(dim=3) @ torch.cat([value, others], dim=1)[:, None]
    expected = torch.autograd.grad(output, leaves, grad)
    with torch.no_grad():
        part = LocalPart(query, key, value, causal=True)
        actual = part.backward(grad, output, scores.logsumexp(dim=3, keepdim=True))
    for name, found, wanted in zip(("query", "key", "value"), actual, expected, strict=True):
        assert_close_to_reference(name, found, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("module", "name", "number"), [(segment_batches, "BATCH_NUMBERS", 300), (batched, "SQUARE", 3)]
)
@each_method
def test_how_much_is_done_at_once_changes_nothing(method, module, name, number, monkeypatch):
    """How many segments, and how many of their rows."""
    case = Case("runs", H=4, key_heads=2, masks="left")
    expected = with_gradients(method, case)
    monkeypatch.setattr(module, name, number)
    actual = with_gradients(method, case)
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


def test_clusters_are_fitted_on_32_queries_each():
    query, key, value = (torch.randn(1, 2, 512, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    sizes = {"clusters": 3, "topk": 8, "key_clusters": 2, "segment_length": 128, "window": 16}
    found = {
        count: causal_clustered_attention(query, key, value, fit_queries=count, **sizes) for count in (None, 96, 48)
    }
    assert torch.equal(found[None], found[96])
    assert not torch.equal(found[None], found[48])
