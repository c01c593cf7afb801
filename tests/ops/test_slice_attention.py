"""Slice attention: values, gradients, identities, masks, causality, for every form that runs on a CPU."""

from functools import partial
from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.closeness import assert_close_to_reference
from support.slice_cases import CASES, Case, attend, make_inputs, with_gradients

from hf_effattn.measuring.cost import peak_memory_added
from hf_effattn.ops import slice_attention

BACKENDS = ("reference", "batched")
LOWEST = torch.finfo(torch.float64).min


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def attend_with_loops(case: Case, inputs: dict[str, torch.Tensor], b: int, h: int) -> tuple[list, list, list]:
    """Spec of one head in plain Python: output rows, slice means and log-sum-exps (Eq. 8, 11, 12, 14)."""
    group = case.H // (case.key_heads or case.H)
    query, key, value = (
        inputs[name][b, h if name == "query" else h // group].tolist() for name in ("query", "key", "value")
    )
    token = inputs["key_mask"][b].tolist() if "key_mask" in inputs else [True] * case.N
    sinks = inputs["sink_mask"][b].tolist() if "sink_mask" in inputs else [False] * case.N
    of_query = inputs["query_positions"][h].tolist() if case.positions else [[0.0] * case.D] * case.L
    of_key = inputs["key_positions"][h // group].tolist() if case.positions else [[0.0] * case.D] * case.window
    outputs, means, lses = [], [], []
    for start in range(0, case.N, case.L):
        rows = []
        for i in range(start, min(start + case.L, case.N)):
            if not token[i]:
                outputs.append([0.0] * case.Dv)
                lses.append(LOWEST)
                continue
            place = [q + p for q, p in zip(query[i], of_query[i - start], strict=True)]
            first = start - case.extension
            weights = {}
            for t in range(case.N):
                if not token[t] or (case.causal and t > i):
                    continue
                if first <= t < first + case.window:
                    keys = [k + p for k, p in zip(key[t], of_key[t - first], strict=True)]
                elif sinks[t]:
                    keys = key[t]
                else:
                    continue
                weights[t] = exp(sum(a * b for a, b in zip(place, keys, strict=True)) * case.D**-0.5)
            total = sum(weights.values())
            rows.append([sum(w * value[t][d] for t, w in weights.items()) / total for d in range(case.Dv)])
            outputs.append(rows[-1])
            lses.append(log(total))
        means.append([sum(row[d] for row in rows) / max(1, len(rows)) for d in range(case.Dv)])
    return outputs, means, lses


@each_backend
@each_case
def test_equals_the_definition_written_as_loops(case, backend):
    inputs = make_inputs(case)
    actual = attend(case, inputs, backend=backend)
    for b in range(case.B):
        for h in range(case.H):
            expected = attend_with_loops(case, inputs, b, h)
            for tensor, rows in zip(actual, expected, strict=True):
                torch.testing.assert_close(tensor[b, h], torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-14)


@each_case
def test_fast_form_equals_the_reference_with_its_gradients(case):
    expected = with_gradients(case, make_inputs(case), backend="reference")
    actual = with_gradients(case, make_inputs(case), backend="batched")
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_case
def test_low_precision_is_as_good_as_plain_pytorch(case, dtype):
    inputs = make_inputs(case, dtype)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    expected = with_gradients(case, double, backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    for name, actual in with_gradients(case, inputs, backend="batched").items():
        assert_close_to_reference(name, actual, expected[name], baseline[name], rtol=1e-6)


@each_backend
@pytest.mark.parametrize("causal", [False, True])
def test_one_slice_is_full_attention(backend, causal):
    case = Case("one_slice", N=23, L=32, ratio=2, causal=causal)
    inputs = make_inputs(case)
    output, pooled, _ = attend(case, inputs, backend=backend)
    expected = F.scaled_dot_product_attention(*(inputs[x] for x in ("query", "key", "value")), is_causal=causal)
    assert_close_to_reference("output", output, expected, rtol=1e-14)
    assert_close_to_reference("pooled", pooled[:, :, 0], expected.mean(dim=2), rtol=1e-14)


@each_backend
def test_slices_of_one_token_return_the_values(backend):
    case = Case("slices_of_one", L=1, causal=True, positions=True)
    inputs = make_inputs(case)
    output, pooled, _ = attend(case, inputs, backend=backend)
    assert torch.equal(output, inputs["value"])
    assert torch.equal(pooled, inputs["value"])


@each_backend
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_a_sequence_merge_to_full_attention(backend, causal):
    """Sinks complete the windows: with every key a sink each slice sees the whole sequence once."""
    case = Case("all_sinks", N=29, L=4, ratio=2, causal=causal)
    inputs = make_inputs(case)
    inputs["sink_mask"] = torch.ones(case.B, case.N, dtype=torch.bool)
    output, _, lse = attend(case, inputs, backend=backend)
    expected = F.scaled_dot_product_attention(*(inputs[x] for x in ("query", "key", "value")), is_causal=causal)
    assert_close_to_reference("output", output, expected, rtol=1e-14)
    scores = inputs["query"] @ inputs["key"].transpose(2, 3) * case.D**-0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(case.N, case.N, dtype=torch.bool).tril(), -torch.inf)
    assert_close_to_reference("lse", lse, scores.logsumexp(dim=-1), rtol=1e-14)


@each_backend
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_causal_form_never_looks_ahead(backend, ratio):
    """Changing a token changes no output before it, bit for bit, and no mean of a slice that ended before it."""
    case = Case("causal", N=37, L=6, ratio=ratio, causal=True, positions=True, sinks=True)
    inputs = make_inputs(case)
    before = attend(case, inputs, backend=backend)
    for t in (0, 5, 6, 17, 36):
        changed = {name: tensor.clone() for name, tensor in inputs.items()}
        for name in ("query", "key", "value"):
            changed[name][:, :, t] += 3.0
        after = attend(case, changed, backend=backend)
        assert torch.equal(after[0][:, :, :t], before[0][:, :, :t])
        assert torch.equal(after[2][:, :, :t], before[2][:, :, :t])
        assert torch.equal(after[1][:, :, : t // case.L], before[1][:, :, : t // case.L])
        assert not torch.equal(after[0][:, :, t], before[0][:, :, t])


@each_backend
def test_right_padding_equals_the_single_run(backend):
    case = Case("padded", masks="right", ratio=2, positions=True)
    inputs = make_inputs(case)
    length = int(inputs["key_mask"][-1].sum())
    padded = attend(case, inputs, backend=backend)
    alone = {name: tensor[-1:, :, :length] for name, tensor in inputs.items() if name in ("query", "key", "value")}
    alone |= {name: tensor for name, tensor in inputs.items() if name.endswith("positions")}
    expected = attend(case, alone, backend=backend)
    for actual, single in zip(padded, expected, strict=True):
        assert_close_to_reference("padded", actual[-1:, :, : single.shape[2]], single, rtol=1e-15)
    assert (padded[0][-1, :, length:] == 0).all()
    assert (padded[1][-1, :, -(-length // case.L) :] == 0).all()


@each_backend
@pytest.mark.parametrize("garbage", [1e4, float("inf"), float("nan")])
def test_values_of_masked_rows_change_nothing(backend, garbage):
    case = Case("garbage", masks="holes", ratio=2, sinks=True, positions=True)
    clean = with_gradients(case, make_inputs(case), backend=backend)
    inputs = make_inputs(case)
    for name in ("query", "key", "value"):
        inputs[name].transpose(1, 2)[~inputs["key_mask"]] = garbage
    dirty = with_gradients(case, inputs, backend=backend)
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=0, atol=0)
    for name in ("query", "key", "value"):
        assert (dirty[f"gradient of {name}"].transpose(1, 2)[~inputs["key_mask"]] == 0).all()


@each_backend
def test_large_scores_stay_finite(backend):
    case = Case("large", ratio=3, positions=True, masks="holes")
    inputs = make_inputs(case, torch.float32)
    inputs["query"] *= 300
    results = with_gradients(case, inputs, backend=backend)
    assert all(tensor.isfinite().all() for tensor in results.values())


def test_strides_do_not_matter():
    case = Case("strided", ratio=2)
    inputs = make_inputs(case)
    expected = attend(case, inputs)
    packed = torch.stack([inputs["query"], inputs["key"], inputs["value"]], dim=-1).unbind(dim=-1)  # inner stride 3
    for actual, single in zip(attend(case, dict(zip(inputs, packed, strict=True))), expected, strict=True):
        torch.testing.assert_close(actual, single, rtol=0, atol=0)


def test_inputs_are_left_alone():
    case = Case("untouched", masks="holes", sinks=True, positions=True)
    inputs, kept = make_inputs(case), make_inputs(case)
    with_gradients(case, inputs)
    assert all(torch.equal(inputs[name], kept[name]) for name in kept)


@pytest.mark.parametrize("case", [c for c in CASES if c.sinks or c.name in ("plain", "grouped_heads")], ids=str)
def test_dropout_is_the_same_in_both_forms_and_replays(case):
    results = []
    for backend in (*BACKENDS, "batched"):
        torch.manual_seed(11)
        results.append(with_gradients(case, make_inputs(case), backend=backend, dropout_p=0.4))
    for name in results[0]:
        assert_close_to_reference(name, results[1][name], results[0][name], rtol=1e-13)
        assert torch.equal(results[1][name], results[2][name])
    if case.name != "row_fully_padded":
        assert not torch.equal(results[1]["output"], attend(case, make_inputs(case), dropout_p=0.4)[0])


def test_dropout_keeps_the_mean():
    case = Case("dropout", B=1, H=1, ratio=2)
    inputs = make_inputs(case)
    torch.manual_seed(0)
    draws = torch.stack([attend(case, inputs, dropout_p=0.2)[0] for _ in range(2000)])
    error = (draws.mean(dim=0) - attend(case, inputs)[0]).abs() / (draws.std(dim=0) / 2000**0.5)
    assert error.max() < 5.5  # standard errors, over 592 values


@pytest.mark.parametrize("case", [CASES[0], CASES[9], CASES[16]], ids=lambda case: case.name)
def test_compiles_as_one_graph(case):
    expected = with_gradients(case, make_inputs(case))
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = {name: tensor.detach() for name, tensor in make_inputs(case).items()}
    leaves = [inputs[name].requires_grad_() for name in ("query", "key", "value")]
    outputs = compiled(case, inputs)
    for name, actual in zip(("output", "pooled"), outputs, strict=False):
        torch.testing.assert_close(actual.detach(), expected[name], rtol=0, atol=0)
    generator = torch.Generator().manual_seed(1)
    counted = inputs.get("key_mask", torch.ones(case.B, case.N, dtype=torch.bool))[:, None]
    loss = sum(
        (tensor * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)).sum()
        for tensor in (*outputs[:2], outputs[2].masked_fill(~counted, 0.0))
    )
    for name, gradient in zip(("query", "key", "value"), torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(gradient, expected[f"gradient of {name}"], rtol=0, atol=0)


def test_registered_with_torch_library():
    """torch's own check of the schema, the fake function and the autograd formula."""
    case = Case("opcheck", N=11, L=4, ratio=2, masks="holes", sinks=True, positions=True)
    inputs = make_inputs(case)
    leaves = {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    names = ("key_mask", "query_positions", "key_positions", "sink_mask")
    mask, query_positions, key_positions, sinks = (leaves[name] for name in names)
    tensors = leaves["query"], leaves["key"], leaves["value"]
    arguments = (*tensors, case.L, case.extension, False, mask, 0.3, query_positions, key_positions, sinks, 0.0, None)
    torch.library.opcheck(torch.ops.hf_effattn.slice_attention.default, arguments)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)),
    L=st.integers(1, 20),
    part=st.floats(0, 1),
    switches=st.tuples(*[st.booleans()] * 3),
    masks=st.sampled_from(["none", "right", "left", "holes", "row", "few"]),
    group=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_any_sizes(sizes, L, part, switches, masks, group, seed):
    N, D, Dv = sizes
    causal, positions, sinks = switches
    ratio = 1 + 2 * round(part * L) / L
    flags = {"causal": causal, "positions": positions, "sinks": sinks, "masks": masks, "key_heads": 2 // group}
    case = Case("any", N=N, D=D, Dv=Dv, L=L, ratio=ratio, **flags)
    expected = with_gradients(case, make_inputs(case, seed=seed), backend="reference")
    actual = with_gradients(case, make_inputs(case, seed=seed), backend="batched")
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-10)


def test_memory_grows_with_length_not_with_its_square():
    """Bytes alive at the peak of forward and backward, counted by the allocator: doubling N at most doubles them."""
    peaks = []
    for N in (2048, 4096):
        case = Case("memory", B=1, H=2, N=N, L=16, ratio=3)
        inputs = make_inputs(case, torch.float32)
        peaks.append(peak_memory_added(partial(with_gradients, case, inputs), torch.device("cpu"))[1])
    assert 0 < peaks[1] < 2.2 * peaks[0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slice_length": 0}, ValueError, "slice_length must be at least 1, got 0"),
        ({"slice_length": 2.0}, TypeError, "slice_length must be an int, got float"),
        ({"extension_ratio": 3.5}, ValueError, r"extension_ratio must lie in \[1, 3\], got 3.5"),
        ({"extension_ratio": 0.5}, ValueError, r"extension_ratio must lie in \[1, 3\], got 0.5"),
        ({"extension_ratio": "2"}, TypeError, "extension_ratio must be a number, got str"),
        ({"extension_ratio": 1.1}, ValueError, "takes 0.4 tokens of each neighbour"),
        ({"key": torch.zeros(2, 2, 5, 4)}, ValueError, "value .* must agree with key"),
        ({"key_mask": torch.ones(2, 9)}, TypeError, "key_mask must be boolean"),
        ({"sink_mask": torch.ones(2, 8, dtype=torch.bool)}, ValueError, r"sink_mask must have shape .*\(2, 9\)"),
        ({"query_positions": torch.zeros(2, 9, 4)}, ValueError, r"query_positions must have shape .*\(2, 8, 4\)"),
        ({"key_positions": torch.zeros(2, 8, 4).double()}, ValueError, "key_positions must share dtype and device"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must lie in"),
        ({"backend": "fast"}, ValueError, "backend must be one of"),
    ],
)
def test_mistakes_raise(changes, error, message):
    arguments = dict.fromkeys(("query", "key", "value"), torch.zeros(2, 2, 9, 4)) | {"slice_length": 8} | changes
    with pytest.raises(error, match=message):
        slice_attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


def test_queries_and_keys_of_different_length_raise():
    query, rows = torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 8, 4)
    with pytest.raises(ValueError, match="self-attention: query has 9 rows and key 8"):
        slice_attention(query, rows, rows, slice_length=4)


def test_forward_mode_is_the_references():
    case = Case("forward_mode", N=7, L=3, D=3, Dv=2)
    inputs = make_inputs(case)

    def run(value, backend):
        return attend(case, inputs | {"value": value}, backend=backend)[0]

    value = inputs["value"].clone()
    tangent = torch.func.jvp(lambda v: run(v, "reference"), (value,), (torch.ones_like(value),))[1]
    torch.testing.assert_close(tangent, torch.ones_like(tangent), rtol=0, atol=1e-15)  # weights sum to 1
    with pytest.raises(ValueError, match='need backend="reference"'):
        torch.func.jvp(lambda v: run(v, "batched"), (value,), (torch.ones_like(value),))


@each_backend
def test_an_empty_sequence_gives_empty_outputs(backend):
    rows = torch.zeros(2, 2, 0, 4)
    for terms in ({}, {"key_positions": torch.ones(2, 4, 4)}, {"query_positions": torch.ones(2, 4, 4)}):
        output, pooled = slice_attention(rows, rows, rows, slice_length=4, backend=backend, **terms)
        assert output.shape == (2, 2, 0, 4)
        assert pooled.shape == (2, 2, 0, 4)
