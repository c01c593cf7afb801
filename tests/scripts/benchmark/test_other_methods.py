"""Other methods are exact in their exact limit and better with their budget; the scripts keep what they print."""

import json

import pytest
import torch
import torch.nn.functional as F
from support.script_runs import rows_of

from hf_effattn.measuring.candidate_errors import CandidateErrors
from hf_effattn.measuring.errors import relative_error
from hf_effattn.samples.texts import Passages, bundled_books
from scripts.benchmark import _inputs, _other_methods, layer_budgets, other_methods

N = 64


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 3, N, 8, generator=generator, dtype=torch.float64) for _ in range(3))


def error_of(function, inputs, **settings):
    return relative_error(F.scaled_dot_product_attention(*inputs), function(*inputs, **settings))


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (_other_methods.order_zero, {"clusters": 8, "topk": N, "key_clusters": 5}),
        (_other_methods.order_zero, {"clusters": 8, "topk": 4, "key_clusters": N}),
        (_other_methods.tilted, {"clusters": N, "key_clusters": 5}),
        (_other_methods.tilted, {"clusters": 8, "key_clusters": N}),
        (_other_methods.tilted, {"clusters": 8, "key_clusters": N, "dipole": True}),
        (_other_methods.wildcat, {"coreset": N}),
        (_other_methods.wildcat, {"coreset": N, "bins": 4}),
        (_other_methods.hyper_attention, {"block": N, "samples": 8}),
        (_other_methods.hyper_attention, {"block": 16, "samples": N}),
        (_other_methods.nystromformer, {"landmarks": N, "iterations": 40}),
        (_other_methods.top_keys, {"topk": N}),
    ],
)
def test_a_method_is_exact_in_its_exact_limit(inputs, function, settings):
    assert error_of(function, inputs, **settings) < 1e-9


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (_other_methods.order_zero, [{"clusters": 8, "topk": size, "key_clusters": 8} for size in (4, 16, 48)]),
        (_other_methods.tilted, [{"clusters": size, "key_clusters": size} for size in (4, 16, 48)]),
        (_other_methods.wildcat, [{"coreset": size, "temperature": 2.0} for size in (8, 24, 63)]),
        (_other_methods.hyper_attention, [{"block": 16, "samples": size} for size in (8, 32, 60)]),
        (_other_methods.nystromformer, [{"landmarks": size} for size in (2, 8, 32)]),
        (_other_methods.top_keys, [{"topk": size} for size in (4, 16, 48)]),
    ],
)
def test_a_method_gets_better_with_its_budget(inputs, function, settings):
    errors = [error_of(function, inputs, **options) for options in settings]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_the_weights_of_a_coreset_are_those_of_nystrom(inputs):
    """`W [V, 1]` of `W = h(S, S)^-1 h(S, K)` with the exponential kernel itself."""
    keys, values = inputs[1][0], inputs[2][0]
    core, weighted = _other_methods.weighted_coreset(keys, values, 12, 0.2, torch.Generator().manual_seed(0))
    kernel = torch.linalg.solve((0.2 * core @ core.mT).exp(), (0.2 * core @ keys.mT).exp())
    expected = kernel @ torch.cat([values, values.new_ones(3, N, 1)], dim=2)
    torch.testing.assert_close(weighted, expected)


def test_neighbours_in_the_order_of_a_gray_code_differ_in_one_sign():
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    order = _other_methods.gray_order(signs[None], torch.eye(4))
    steps = (signs[order][1:] != signs[order][:-1]).sum(dim=1)
    assert steps.tolist() == [1] * 15


def test_softmax_attention_with_values_of_another_width(inputs):
    query, key, value = (rows.flatten(0, 1) for rows in inputs)
    bias = torch.randn(len(query), 1, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wide = torch.cat([value, value[..., :1]], dim=2)
    narrow = _other_methods.softmax_attention(query, key, value, bias)
    torch.testing.assert_close(_other_methods.softmax_attention(query, key, wide, bias)[..., :-1], narrow)


@pytest.mark.slow
def test_benchmark_other_methods(real_model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(other_methods, "held_out_inputs", _inputs.attention_inputs)
    for name, (make, settings) in other_methods.CURVES.items():
        monkeypatch.setitem(other_methods.CURVES, name, (make, settings[:1]))
    make = other_methods.CURVES[other_methods.OURS[0]][0]
    small = other_methods.rows_of("clusters topk key_clusters", (8, 8, 8), (16, 32, 16))
    monkeypatch.setitem(other_methods.CURVES, other_methods.OURS[0], (make, small))
    monkeypatch.setattr(other_methods, "FEW", {other_methods.OURS[0]: small[:1]})
    monkeypatch.setattr(other_methods, "ORACLE_QUERIES", 16)
    output = tmp_path / "other_methods.json"
    other_methods.main("512", repeats=1, output=output)
    *rows, training = rows_of(output)
    assert (training["part"], training["method"]) == (other_methods.TRAINING, other_methods.OURS[0])
    assert training["speedup"] == pytest.approx(training["sdpa_ms"] / training["ms"])
    assert {row["method"] for row in rows} == {*other_methods.CURVES, other_methods.ORACLE}
    assert all(0 < row["error"] < 2 and len(row["layer_errors"]) == 3 for row in rows)
    assert [row["name"] for row in rows if row["speedup"] is None] == ["topk=64", "topk=256"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(other_methods, "measure", None)
    monkeypatch.setattr(other_methods, "measure_training", None)
    other_methods.main("512", repeats=1, output=output)
    assert rows_of(output) == [*rows, training]


def test_the_best_settings_by_hand():
    def row(method, speedup, error):
        return {"length": 8, "method": method, "name": "x", "speedup": speedup, "error": error}

    rows = [row(other_methods.OURS[0], 2.0, 0.09), row("WildCat", 3.0, 0.25), row("WildCat", 1.5, 0.04)]
    rows.append(row(other_methods.ORACLE, None, 0.01))
    best = other_methods.best_settings(rows)
    expected = {0.3: ["WildCat", "bi-clustered"], 0.1: ["bi-clustered", "WildCat"], 0.05: ["WildCat"], 0.02: []}
    for target, methods in expected.items():
        assert list(best[best["error at most"] == target]["method"]) == methods, target


@pytest.mark.slow
def test_held_out_inputs(real_model_folder, large_data):
    for name in _inputs.HELD_OUT:
        large_data(name)
    layers = _inputs.held_out_inputs(600)
    assert [tensor.shape for inputs in layers for tensor in inputs] == [(1, 12, 600, 32)] * 18
    with pytest.raises(ValueError, match="are asked for"):
        _inputs.held_out_inputs(10**7)


@pytest.mark.slow
def test_heads_that_share_a_budget(real_model_folder, tmp_path, monkeypatch):
    """Calibrated on bundled novels instead of books, measured on others; the least time keeps each budget."""

    def tokens_of(tokenizer, part, name, length):
        return Passages(tokenizer, bundled_books()).spread(length, layer_budgets.BOOKS)[
            layer_budgets.CALIBRATED.index(name)
        ][None]

    candidates = [
        {"method": "bi-clustered", "clusters": C, "topk": k, "key_clusters": C, "max_predicted_error": None}
        for C, k in ((8, 8), (32, 64))
    ]
    monkeypatch.setattr(layer_budgets, "tokens_of", tokens_of)
    monkeypatch.setattr(layer_budgets, "default_candidates", lambda **given: candidates)
    # So short, exact attention is the fastest. Both passes shall be slow with the first candidate.
    monkeypatch.setattr(
        CandidateErrors, "costs", lambda self, training=False: torch.tensor([3.0 if training else 1.0, 2.0, 9.0])
    )
    monkeypatch.setattr(
        _inputs, "held_out_tokens", lambda tokenizer, files: [Passages(tokenizer, bundled_books()).longest(500)[0]]
    )
    monkeypatch.setattr(other_methods, "FEW", {})
    size = {"clusters": 16, "topk": 16, "key_clusters": 16}
    monkeypatch.setitem(
        other_methods.CURVES, other_methods.OURS[0], (other_methods.CURVES[other_methods.OURS[0]][0], [size])
    )
    known = [
        {
            "length": 400,
            "method": other_methods.OURS[0],
            "name": other_methods.label(size),
            "speedup": 1.0,
            "error": 0.01,
        }
    ]
    monkeypatch.setattr(layer_budgets, "OTHER_METHODS", tmp_path / "other_methods.json")
    layer_budgets.OTHER_METHODS.write_text(json.dumps({"rows": known}), encoding="utf-8")
    output = tmp_path / "layer_budgets.json"
    layer_budgets.main("400", repeats=1, output=output)
    rows = rows_of(output)
    shared = {row["budget"]: row for row in rows if "budget" in row and "part" not in row}
    assert list(shared) == list(other_methods.TARGETS)
    for budget, row in shared.items():
        assert row["error"] <= 1.2 * budget
        assert row["error"] == pytest.approx(sum(row["layer_errors"]) / 6)
        assert row["margin"] >= 1
    assert shared[0.3]["error"] > 2 * shared[0.05]["error"]
    assert {0, 1} <= {index for row in shared.values() for heads in row["heads"] for index in heads}
    trained = [row for row in rows if row.get("part")]
    assert [row["name"] for row in trained] == ["max_error=0.2", "max_error=0.1", "max_error=0.05"]
    assert {index for row in trained for heads in row["heads"] for index in heads} <= {1, 2}
    assert all(row["error"] <= 1.2 * row["budget"] for row in trained)
    lines = layer_budgets.verdicts(rows)
    assert [line["error at most"] for line in lines] == list(other_methods.TARGETS)
    assert [line["others"] for line in lines] == [None] * len(lines)
    assert lines[0]["one setting"] == next(row["speedup"] for row in rows if row["method"] == other_methods.OURS[0])


def test_a_setting_on_the_frontier_is_beaten_by_none():
    rows = [
        {"length": 8, "method": "i-clustered", "name": str(n), "ms": ms, "error": error, "speedup": 1.0}
        for n, (ms, error) in enumerate([(1.0, 0.5), (2.0, 0.6), (3.0, 0.2), (3.5, 0.2)])
    ]
    other_methods.mark_frontier(rows)
    assert [row["on_frontier"] for row in rows] == [True, False, True, False]
