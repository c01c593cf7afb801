"""Slice attention: values, gradients, identities, masks, causality, for every form that runs on a CPU."""

from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from support.closeness import assert_close_to_reference
from support.slice_cases import CASES, Case, attend, make_inputs

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


@each_backend
def test_an_empty_sequence_gives_empty_outputs(backend):
    rows = torch.zeros(2, 2, 0, 4)
    for terms in ({}, {"key_positions": torch.ones(2, 4, 4)}, {"query_positions": torch.ones(2, 4, 4)}):
        output, pooled = slice_attention(rows, rows, rows, slice_length=4, backend=backend, **terms)
        assert output.shape == (2, 2, 0, 4)
        assert pooled.shape == (2, 2, 0, 4)
