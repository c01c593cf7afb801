"""The Triton kernels of causal attention over clusters: on a GPU, or under Triton's interpreter."""

from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.causal_cases import (
    EMPTY,
    METHODS,
    PEAKED,
    Case,
    attend,
    exact,
    inputs_with_empty_clusters,
    make_inputs,
    peaked_inputs,
)
from support.closeness import assert_close_to_reference, assert_equal_but_for_order

from hf_effattn.ops import causal_clustered_attention
from hf_effattn.ops.causal_clustered_attention.reference import Settings
from hf_effattn.ops.shared.dropout import KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from hf_effattn.ops.shared.triton.dropout import dropout_factor

OP = "hf_effattn.ops.causal_clustered_attention"
SEED = 2**40 + 17
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_method = pytest.mark.parametrize("method", METHODS)
SMALL = {"B": 1, "H": 1, "N": 19, "clusters": 3, "iterations": 1}
CASES = (
    Case("one_token", **SMALL | {"N": 1}),
    Case("shorter_than_the_window", **SMALL | {"N": 7}),
    Case("first_token_beyond_the_window", **SMALL | {"N": 9}),
    Case("many_levels", **SMALL | {"N": 34, "clusters": 2, "iterations": 3}),
    Case("segments_of_one_token", **SMALL | {"N": 6}, segment_length=1, window=1),
    Case("segments_beyond_a_tile", **SMALL | {"N": 111, "clusters": 2}, segment_length=37, window=30),
    Case("odd_dimensions", **SMALL, D=5, Dv=20, segment_length=5, window=6),
    Case("values_walked_in_two_parts", **SMALL, D=4, Dv=140, segment_length=5, window=5),
    Case("clusters_beyond_a_tile_and_queries", **SMALL | {"N": 25, "clusters": 18}, segment_length=8, window=0),
    Case("more_top_keys_than_a_tile", **SMALL | {"N": 49}, topk=35, segment_length=12, window=0),
    Case("prefill_and_holes", **SMALL | {"B": 2, "N": 29}, masks="holes", prefill=True),
    Case("left_padding", **SMALL | {"B": 2, "N": 25}, masks="left"),
    Case("row_fully_padded_and_grouped_heads", **SMALL | {"B": 2, "H": 2, "N": 13}, key_heads=1, masks="row"),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def kernel_inputs(case, dtype=torch.float32, seed=0):
    """Inputs of a case on the device of the kernels."""
    return tuple(None if tensor is None else tensor.to(DEVICE) for tensor in make_inputs(case, dtype, seed))


def with_gradients(inputs, run):
    """Output and the gradients of query, key and value, for a fixed random gradient of the output."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    output = run(*leaves, inputs[3])
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, leaves, weights.to(output))
    return dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))


def by_backend(method, case, inputs, backend, **options):
    return with_gradients(inputs, lambda *rows: attend(method, case, *rows, backend=backend, **options))


def in_dtype(inputs, dtype):
    return *(tensor.to(dtype) for tensor in inputs[:3]), inputs[3]


def assert_all_close(actual, expected, baseline=None, rtol=1e-6):
    for name in expected:
        if not expected[name].any():
            # The softmax of a single key has no slope; a kernel is left with the rounding of a difference, which every
            # processor's matrix products round in their own way. Inputs are of size 1; 2e-7 was seen.
            torch.testing.assert_close(actual[name].double(), expected[name], rtol=0, atol=1e-6)
            continue
        own = None if baseline is None else baseline[name]
        assert_close_to_reference(name, actual[name], expected[name], own, rtol=rtol)


# Bi-clustered attention launches every kernel of the other two.
@pytest.mark.slow_except(
    *(f"{case.name}-bi-clustered" for case in CASES if case.name != "many_levels"),
    *(f"{case}-{method}" for case in ("left_padding", "segments_of_one_token") for method in METHODS[:2]),
)
@each_method
@each_case
def test_equals_reference(method, case):
    inputs = kernel_inputs(case)
    expected = by_backend(method, case, in_dtype(inputs, torch.float64), "reference")
    baseline = by_backend(method, case, inputs, "reference")
    assert_all_close(by_backend(method, case, inputs, "triton"), expected, baseline)


@pytest.mark.slow_except("i-clustered")
@pytest.mark.parametrize("method", METHODS[1:])
def test_equals_reference_with_empty_clusters(method):
    inputs = tuple(None if rows is None else rows.to(DEVICE) for rows in inputs_with_empty_clusters())
    expected = by_backend(method, EMPTY, inputs, "reference")
    assert_all_close(by_backend(method, EMPTY, in_dtype(inputs, torch.float32), "triton"), expected, rtol=3e-6)


@pytest.mark.slow_except("i-clustered")
@pytest.mark.parametrize("method", METHODS[1:])
def test_peaked_clusters_keep_their_remainder(method):
    """Values alone: where one weight is all but 1 its gradient is a difference of roundings."""
    inputs = tuple(None if rows is None else rows.to(DEVICE) for rows in peaked_inputs(20.0))
    expected = attend(method, PEAKED, *inputs, backend="reference")
    actual = attend(method, PEAKED, *in_dtype(inputs, torch.float32), backend="triton")
    assert_close_to_reference("output", actual, expected, rtol=2e-7)


def settings_of(method, case):
    """What the public op hands on."""
    names = "keys_per_cluster", "key_clusters", "segment_length", "window", "iterations"
    topk = 0 if method == "clustered" else min(case.topk, case.N)
    counts = min(case.clusters, case.N), topk, *(getattr(case, name) for name in names)
    return Settings(method, *counts, 2048, 0, case.prefill, case.D**-0.5, case.dropout_p)


def decisions(method, case, inputs, seed=None):
    """The plan that the kernels made."""
    forward = import_module(f"{OP}.triton")._forward
    plan = forward(*inputs, seed, *settings_of(method, case).values())[2:]
    return import_module(f"{OP}.triton.grouping").Plan(*plan)


def attend_to_plan(query, key, value, plan, method, case, factors=None):
    """The formula, query by query in plain PyTorch, for clusters and top keys that were decided by others."""
    layout = settings_of(method, case).layout(case.N)
    outputs = []
    for p in range(case.B * case.H):
        b, h = divmod(p, case.H)
        pk = p // (case.H // key.shape[1])
        heads = query[b, h] * case.D**-0.5, key[b, pk % key.shape[1]], value[b, pk % key.shape[1]]
        rows = [attend_row(*heads, i, p, pk, plan, method, layout, factors) for i in range(case.N)]
        outputs.append(torch.stack(rows))
    return torch.stack(outputs).view(case.B, case.H, case.N, -1)


def attend_row(query, key, value, i, p, pk, plan, method, layout, factors):
    """Query `i` of head `p`, key/value head `pk`, of `(N, D)` scaled queries, keys and values."""
    N, S = layout.length, layout.segment_length
    segment = i // S
    old = layout.older(segment) * S
    columns = [torch.arange(old, i + 1, device=query.device)]
    keys, values, logs = [key[old : i + 1]], [value[old : i + 1]], [key.new_zeros(i + 1 - old)]
    scores = None
    if old:
        u, label = segment - layout.first_served, int(plan.labels[p, i])
        top = plan.top[p, u, label].long()
        top = top[top >= 0]
        columns.append(top)
        keys.append(key[top])
        values.append(value[top])
        logs.append(key.new_zeros(len(top)))
        if method == "bi-clustered":
            base = dict(zip(range(layout.levels), first_means(layout), strict=False))
            for level, index in layout.blocks(segment):
                block = torch.arange(layout.block_keys(level), device=query.device) + index * layout.block_keys(level)
                members = plan.key_members[pk, level, block]
                for mean in members.unique():
                    inside = block[members == mean]
                    rest = len(inside) - int(torch.isin(inside, top).sum())
                    if rest == 0:
                        continue
                    place = (int(mean) - base[level]) % layout.clusters_of_block(level)
                    columns.append(torch.tensor([N + layout.first_cluster_columns[level] + place], device=key.device))
                    keys.append(key[inside].mean(dim=0, keepdim=True))
                    values.append(value[inside].mean(dim=0, keepdim=True))
                    logs.append(torch.tensor([float(rest)], device=key.device).log().to(key))
        else:
            epoch = next(e for e, (first, end, _) in enumerate(layout.epochs()) if first <= segment < end)
            members = plan.past_rows[p, epoch] == epoch * plan.centroids.shape[2] + label
            rest = torch.ones(old, dtype=torch.bool, device=key.device)
            rest[top] = False
            scores = key[:old][rest] @ query[members].mean(dim=0)
            values.append(value[:old][rest])
            columns.append(torch.full((len(scores),), N, device=key.device))
    own = torch.cat(keys) @ query[i] + torch.cat(logs)
    weights = (own if scores is None else torch.cat([own, scores])).softmax(dim=0)
    if factors is not None:
        weights = weights * factors[p, i, torch.cat(columns)].to(weights)
    return weights @ torch.cat(values)


def first_means(layout):
    """Where the means of every level begin."""
    count = import_module(f"{OP}.triton.grouping").block_count
    first = [0]
    for level in range(layout.levels):
        first.append(first[-1] + count(level, layout.served) * layout.clusters_of_block(level))
    return first


def assert_equals_formula(method, case, inputs, actual, plan, factors=None):
    """Twice the error of plain PyTorch in the same dtype is allowed."""

    def run(*rows):
        return attend_to_plan(*rows[:3], plan, method, case, factors)

    expected, baseline = with_gradients(in_dtype(inputs, torch.float64), run), with_gradients(inputs, run)
    assert_all_close(actual, expected, baseline)


@pytest.mark.slow_except("torch.bfloat16-bi-clustered")
@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_equals_the_formula_for_its_own_clusters(method, dtype):
    case = Case("low", **SMALL | {"H": 2, "N": 25}, key_heads=1, D=20, Dv=16, segment_length=5)
    inputs = kernel_inputs(case, dtype)
    actual = by_backend(method, case, inputs, "triton")
    assert all(tensor.dtype == dtype for tensor in actual.values())
    assert_equals_formula(method, case, inputs, actual, decisions(method, case, inputs))


@pytest.mark.slow_except("i-clustered")
@pytest.mark.parametrize("method", METHODS[1:])
def test_top_keys_are_the_largest_scores(method):
    """Scores that grow and shrink along the text: all new keys enter, and none does."""
    case = Case("order", B=1, H=1, N=96, clusters=5, topk=7, segment_length=8, window=0)
    query, key, value, _ = kernel_inputs(case)
    key *= torch.linspace(-3, 3, case.N, device=DEVICE).abs()[:, None]
    plan = decisions(method, case, (query, key, value, None))
    layout = settings_of(method, case).layout(case.N)
    for epoch, (first, end, _) in enumerate(layout.epochs()):
        scores = plan.centroids[0, epoch] @ key[0, 0].T
        for segment in range(first, end):
            older = layout.older(segment) * case.segment_length
            expected = scores[:, :older].topk(min(case.topk, older)).indices.sort().values
            found = plan.top[0, segment - layout.first_served].sort().values[:, -expected.shape[1] :]
            used = plan.sizes[0, epoch] > 0
            assert torch.equal(found[used].long(), expected[used])


@each_method
def test_a_window_over_all_is_exact_attention(method):
    assert_is_exact(method, Case("wide", N=19, window=64, masks="holes", key_heads=1))


@pytest.mark.slow_except("none-i-clustered")
@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("masks", ["none", "left"])
def test_topk_of_all_older_keys_is_exact_attention(method, masks):
    assert_is_exact(method, Case("all", **SMALL | {"B": 2}, topk=19, masks=masks))


def test_a_cluster_for_every_key_is_exact_attention():
    assert_is_exact("bi-clustered", Case("own", **SMALL | {"N": 29}, keys_per_cluster=1, key_clusters=64))


def assert_is_exact(method, case):
    inputs = kernel_inputs(case)
    expected, baseline = with_gradients(in_dtype(inputs, torch.float64), exact), with_gradients(inputs, exact)
    assert_all_close(by_backend(method, case, inputs, "triton"), expected, baseline)


@pytest.mark.slow_except("bi-clustered")
@each_method
def test_weights_sum_to_one(method):
    case = Case("ones", **SMALL | {"B": 2, "N": 25}, masks="holes")
    query, key, value, mask = kernel_inputs(case)
    output = attend(method, case, query, key, torch.ones_like(value), mask, backend="triton")
    expected = mask[:, None, :, None].to(output).expand(output.shape)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@each_method
@pytest.mark.parametrize("masks", ["left", "right"])
def test_padding_changes_nothing(method, masks):
    case = Case("padded", **SMALL | {"B": 2, "N": 25}, masks=masks)
    *rows, mask = kernel_inputs(case)
    for tensor in rows:
        tensor.masked_fill_(~mask[:, None, :, None], torch.nan)
    padded = by_backend(method, case, (*rows, mask), "triton")
    assert all((tensor[1, :, ~mask[1]] == 0).all() for tensor in padded.values())
    alone = attend(method, case, *(tensor[1:, :, mask[1]] for tensor in rows), None, backend="triton")
    assert torch.equal(padded["output"][1:, :, mask[1]], alone)


@pytest.mark.slow
@given(
    st.sampled_from(METHODS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(2, 18),
    st.integers(2, 9),
    st.integers(0, 6),
    st.sampled_from(["none", "left", "holes"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**20),
)
@hypothesis_settings(max_examples=8, deadline=None)
def test_no_output_sees_a_later_token(method, dtype, N, segment_length, window, masks, share, seed):
    sizes = {"B": 1 if masks == "none" else 2, "H": 2, "key_heads": 1, "clusters": 2, "iterations": 1}
    case = Case("leak", N=N, masks=masks, segment_length=segment_length, window=window, **sizes)
    inputs = kernel_inputs(case, dtype, seed)
    before = attend(method, case, *inputs, backend="triton")
    token = int(share * N)
    changed = [tensor.clone() for tensor in inputs[:3]]
    for tensor in changed:
        # One token or all that follow, near to what they were or far away.
        part = tensor[:, :, token : N if seed % 2 else token + 1]
        noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        part += (noise * 10.0 ** (seed % 5 - 2)).to(part)
    after = attend(method, case, *changed, inputs[3], backend="triton")
    assert torch.equal(before[:, :, :token], after[:, :, :token])


@triton.jit
def draw_factors_kernel(seed_ptr, factors_ptr, columns, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr):
    o_row = tl.program_id(0) + tl.arange(0, 1)
    o_column = tl.arange(0, 128)
    b_factor = dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    tl.store(factors_ptr + o_row[:, None] * columns + o_column[None, :], b_factor, mask=(o_column < columns)[None, :])


@pytest.mark.slow
@each_method
def test_dropout_drops_the_same_weights_in_both_passes(method, monkeypatch):
    """Against the formula with the factors that the kernels draw."""
    case = Case("dropout", **SMALL | {"H": 2, "N": 23}, key_heads=1, dropout_p=0.4)
    inputs = kernel_inputs(case)
    settings = settings_of(method, case)
    columns = import_module(f"{OP}.triton.forward").softmax_columns(settings.layout(case.N), settings)
    factors = torch.empty(case.H, case.N, columns, device=DEVICE)
    seed = torch.tensor([SEED], device=DEVICE)
    draw_factors_kernel[(case.H * case.N,)](
        seed, factors, columns, case.dropout_p, KINDS=KINDS_OF_WEIGHTS, KIND=TOPK_AND_SUMMARY_WEIGHTS
    )
    torch.testing.assert_close(factors.unique().cpu(), torch.tensor([0.0, 1 / (1 - case.dropout_p)]))
    monkeypatch.setattr(import_module(OP), "draw_seed", lambda *_: seed)
    actual = by_backend(method, case, inputs, "triton")
    assert_equals_formula(method, case, inputs, actual, decisions(method, case, inputs, seed), factors)


@pytest.mark.slow
def test_readers_of_a_block_in_parts(monkeypatch):
    monkeypatch.setattr(import_module(f"{OP}.triton"), "READERS_OF_A_SPLIT", 5)
    case = Case("parts", **SMALL | {"N": 31})
    inputs = kernel_inputs(case)
    expected = by_backend("bi-clustered", case, in_dtype(inputs, torch.float64), "reference")
    baseline = by_backend("bi-clustered", case, inputs, "reference")
    assert_all_close(by_backend("bi-clustered", case, inputs, "triton"), expected, baseline)


@pytest.mark.slow_except("clustered")
@each_method
def test_strides_do_not_matter(method):
    case = Case("strided", **SMALL | {"H": 2})
    inputs = kernel_inputs(case)
    expected = by_backend(method, case, inputs, "triton")
    strided = torch.stack([tensor.contiguous() for tensor in inputs[:3]], dim=-1).unbind(-1)
    actual = by_backend(method, case, (*strided, None), "triton")
    assert_equal_but_for_order(actual, expected)


@pytest.mark.slow_except("i-clustered")
@each_method
def test_large_scores_stay_finite(method):
    case = Case("large", **SMALL)
    query, *rest = kernel_inputs(case)
    results = by_backend(method, case, (query * 300, *rest), "triton")
    assert all(tensor.isfinite().all() for tensor in results.values())


@pytest.mark.slow
def test_reruns_are_bit_equal_and_all_of_it_where_torch_is_told_so():
    case = Case("reruns", **SMALL | {"H": 2, "N": 23}, key_heads=1, masks="holes")
    first, second = (by_backend("i-clustered", case, kernel_inputs(case), "triton") for _ in range(2))
    assert torch.equal(first["output"], second["output"])
    torch.use_deterministic_algorithms(True)
    try:
        ordered = by_backend("i-clustered", case, kernel_inputs(case), "triton")
    finally:
        torch.use_deterministic_algorithms(False)
    batched = by_backend("i-clustered", case, kernel_inputs(case), "batched")
    assert all(torch.equal(ordered[name], batched[name]) for name in ordered)


@each_method
def test_no_tokens(method):
    for sizes in ({"N": 0}, {"B": 0, "N": 9}):
        results = by_backend(method, Case("none", **{"B": 1} | sizes), kernel_inputs(Case("none", **sizes)), "triton")
        assert all((tensor == 0).all() for tensor in results.values())


def test_refuses_more_top_keys_than_fit(monkeypatch):
    monkeypatch.setattr(import_module(OP), "LARGEST_KERNEL_TOPK", 8)
    tensors = [torch.zeros(1, 1, 12, 4, device=DEVICE)] * 3
    with pytest.raises(ValueError, match="the kernels take a topk up to 8, got 12"):
        causal_clustered_attention(*tensors, clusters=2, topk=20, backend="triton")
    causal_clustered_attention(*tensors, clusters=2, topk=20, method="clustered", segment_length=4, backend="triton")


@pytest.mark.slow
@each_method
def test_registered_with_torch_library(method):
    """torch's own check of the schemas, the fake functions and the autograd formula."""
    forward = import_module(f"{OP}.triton")._forward
    case = Case("opcheck", **SMALL | {"B": 2, "N": 15}, masks="holes")
    *rows, mask = kernel_inputs(case)
    leaves = [tensor.detach().requires_grad_() for tensor in rows]
    torch.library.opcheck(forward, (*leaves, mask, None, *settings_of(method, case).values()))


@pytest.mark.slow_except("clustered")
@each_method
def test_compiles_to_one_op(method):
    case = Case("compiled", **SMALL)
    inputs = kernel_inputs(case)
    names = "clusters", "topk", "keys_per_cluster", "key_clusters", "segment_length", "window", "iterations"
    chosen = {name: getattr(case, name) for name in names}
    attend_compiled = torch.compile(
        lambda *rows: causal_clustered_attention(*rows, method=method, backend="triton", **chosen),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = by_backend(method, case, inputs, "triton")
    actual = with_gradients(inputs, lambda *rows: attend_compiled(*rows[:3]))
    assert_equal_but_for_order(actual, expected)
