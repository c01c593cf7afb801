"""Every rival is exact in its exact limit, gets better with its budget, and the scripts keep what they print."""

import json
import os
import subprocess
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hf_effattn.measuring.errors import relative_error
from hf_effattn.measuring.ladder import LadderErrors
from hf_effattn.samples.texts import Passages, bundled_books
from scripts.benchmark import _inputs, _rivals, layers, neighbour, rivals

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
        (_rivals.order_zero, {"clusters": 8, "topk": N, "key_clusters": 5}),
        (_rivals.order_zero, {"clusters": 8, "topk": 4, "key_clusters": N}),
        (_rivals.tilted, {"clusters": N, "key_clusters": 5}),
        (_rivals.tilted, {"clusters": 8, "key_clusters": N}),
        (_rivals.tilted, {"clusters": 8, "key_clusters": N, "dipole": True}),
        (_rivals.wildcat, {"coreset": N}),
        (_rivals.wildcat, {"coreset": N, "bins": 4}),
        (_rivals.hyper_attention, {"block": N, "samples": 8}),
        (_rivals.hyper_attention, {"block": 16, "samples": N}),
        (_rivals.nystromformer, {"landmarks": N, "iterations": 40}),
        (_rivals.top_keys, {"topk": N}),
    ],
)
def test_a_rival_is_exact_in_its_exact_limit(inputs, function, settings):
    assert error_of(function, inputs, **settings) < 1e-9


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (_rivals.order_zero, [{"clusters": 8, "topk": size, "key_clusters": 8} for size in (4, 16, 48)]),
        (_rivals.tilted, [{"clusters": size, "key_clusters": size} for size in (4, 16, 48)]),
        (_rivals.wildcat, [{"coreset": size, "temperature": 2.0} for size in (8, 24, 63)]),
        (_rivals.hyper_attention, [{"block": 16, "samples": size} for size in (8, 32, 60)]),
        (_rivals.nystromformer, [{"landmarks": size} for size in (2, 8, 32)]),
        (_rivals.top_keys, [{"topk": size} for size in (4, 16, 48)]),
    ],
)
def test_a_rival_gets_better_with_its_budget(inputs, function, settings):
    errors = [error_of(function, inputs, **one) for one in settings]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_the_weights_of_a_coreset_are_those_of_nystrom(inputs):
    """`W [V, 1]` of `W = h(S, S)^-1 h(S, K)` with the exponential kernel itself."""
    keys, values = inputs[1][0], inputs[2][0]
    core, weighted = _rivals.weighted_coreset(keys, values, 12, 0.2, torch.Generator().manual_seed(0))
    kernel = torch.linalg.solve((0.2 * core @ core.mT).exp(), (0.2 * core @ keys.mT).exp())
    expected = kernel @ torch.cat([values, values.new_ones(3, N, 1)], dim=2)
    torch.testing.assert_close(weighted, expected)


def test_neighbours_in_the_order_of_a_gray_code_differ_in_one_sign():
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    order = _rivals.gray_order(signs[None], torch.eye(4))
    steps = (signs[order][1:] != signs[order][:-1]).sum(dim=1)
    assert steps.tolist() == [1] * 15


def test_softmax_attention_with_values_of_another_width(inputs):
    query, key, value = (rows.flatten(0, 1) for rows in inputs)
    bias = torch.randn(len(query), 1, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wide = torch.cat([value, value[..., :1]], dim=2)
    narrow = _rivals.softmax_attention(query, key, value, bias)
    torch.testing.assert_close(_rivals.softmax_attention(query, key, wide, bias)[..., :-1], narrow)


@pytest.mark.slow
def test_benchmark_rivals(real_model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(rivals, "held_out_inputs", _inputs.attention_inputs)
    for name, (make, settings) in rivals.RIVALS.items():
        monkeypatch.setitem(rivals.RIVALS, name, (make, settings[:1]))
    make = rivals.RIVALS[rivals.OURS[0]][0]
    small = rivals.rows_of("clusters topk key_clusters", (8, 8, 8), (16, 32, 16))
    monkeypatch.setitem(rivals.RIVALS, rivals.OURS[0], (make, small))
    monkeypatch.setattr(rivals, "TRAINED", {rivals.OURS[0]: small[:1]})
    monkeypatch.setattr(rivals, "ORACLE_QUERIES", 16)
    output = tmp_path / "rivals.json"
    rivals.main("512", repeats=1, output=output)
    *rows, training = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert (training["part"], training["method"], training["error"]) == (rivals.TRAINING, rivals.OURS[0], None)
    assert training["speedup"] == pytest.approx(training["sdpa_ms"] / training["ms"])
    assert {row["method"] for row in rows} == {*rivals.RIVALS, rivals.ORACLE}
    assert all(0 < row["error"] < 2 and len(row["layer_errors"]) == 3 for row in rows)
    assert [row["name"] for row in rows if row["speedup"] is None] == ["topk=64", "topk=256"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(rivals, "measure", None)
    monkeypatch.setattr(rivals, "measure_training", None)
    rivals.main("512", repeats=1, output=output)
    assert json.loads(output.read_text(encoding="utf-8"))["rows"] == [*rows, training]


def test_verdicts_by_hand():
    def row(method, speedup, error):
        return {"length": 8, "method": method, "name": "x", "speedup": speedup, "error": error}

    rows = [row(rivals.OURS[0], 2.0, 0.09), row("WildCat", 3.0, 0.25), row("WildCat", 1.5, 0.04)]
    rows.append(row(rivals.ORACLE, None, 0.01))
    lines = dict(zip(rivals.TARGETS, rivals.verdicts(rows), strict=True))
    assert lines[0.3].endswith("bi-clustered 2.00x, beaten by WildCat (3.00x)")
    assert lines[0.1].endswith("bi-clustered 2.00x, no rival is faster")
    assert lines[0.05].endswith("no setting of bi-clustered stays below it; WildCat does")
    assert lines[0.02].endswith("no setting of bi-clustered stays below it; no method does")
    best = rivals.best_settings(rows)
    assert list(best[best["error at most"] == 0.3]["method"]) == ["WildCat", "bi-clustered"]


@pytest.mark.slow
def test_held_out_inputs(real_model_folder, large_data):
    for name in _inputs.HELD_OUT:
        large_data(name)
    layers = _inputs.held_out_inputs(600)
    assert [tensor.shape for inputs in layers for tensor in inputs] == [(1, 12, 600, 32)] * 18
    with pytest.raises(ValueError, match="are asked for"):
        _inputs.held_out_inputs(10**7)


def test_benchmark_neighbour(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbour, "METHODS", {"clustered": {"clusters": 8}})
    small = partial(torch.randn, 1, 2, 128, 8)
    monkeypatch.setattr(neighbour, "inputs_of", lambda length: (small(), small(), small()))
    output = tmp_path / "neighbour.json"
    neighbour.main("128", repeats=1, output=output)
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [(row["where"], row["method"]) for row in rows] == [
        (where, method) for where in (neighbour.ALONE, neighbour.BESIDE) for method in ("SDPA", "clustered")
    ]
    assert neighbour.table(rows).shape == (2, 1)
    neighbour.main("128", repeats=1, output=output)
    assert json.loads(output.read_text(encoding="utf-8"))["rows"] == rows


def test_the_busy_process_is_ended_whatever_happens(monkeypatch):
    started = []
    popen = subprocess.Popen

    def recorded(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(neighbour.subprocess, "Popen", recorded)
    running = neighbour.busy_process()
    running.__enter__()
    assert started[0].poll() is None
    assert not running.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert started[0].returncode is not None
    # One whose parent is not the process that it is told of ends by itself.
    orphan = popen([neighbour.sys.executable, "-c", neighbour.BUSY, str(os.getppid())])
    assert orphan.wait(timeout=60) == 0


@pytest.mark.slow
def test_heads_that_share_a_budget(real_model_folder, tmp_path, monkeypatch):
    """Calibrated on bundled novels instead of books, measured on others; the least time keeps each budget."""

    def tokens_of(tokenizer, part, name, length):
        return Passages(tokenizer, bundled_books()).spread(length, layers.BOOKS)[layers.CALIBRATED.index(name)][None]

    ladder = [
        {"method": "bi-clustered", "clusters": C, "topk": k, "key_clusters": C, "max_predicted_error": None}
        for C, k in ((8, 8), (32, 64))
    ]
    monkeypatch.setattr(layers, "tokens_of", tokens_of)
    monkeypatch.setattr(layers, "default_ladder", lambda **given: ladder)
    # So short, exact attention is the fastest. Both passes shall be slow with the first rung.
    monkeypatch.setattr(
        LadderErrors, "costs", lambda found, training=False: torch.tensor([3.0 if training else 1.0, 2.0, 9.0])
    )
    monkeypatch.setattr(
        _inputs, "held_out_tokens", lambda tokenizer, files: [Passages(tokenizer, bundled_books()).longest(500)[0]]
    )
    monkeypatch.setattr(layers, "TRAINED", {})
    size = {"clusters": 16, "topk": 16, "key_clusters": 16}
    monkeypatch.setitem(rivals.RIVALS, rivals.OURS[0], (rivals.RIVALS[rivals.OURS[0]][0], [size]))
    known = [{"length": 400, "method": rivals.OURS[0], "name": rivals.label(size), "speedup": 1.0, "error": 0.01}]
    monkeypatch.setattr(layers, "RIVALS_FILE", tmp_path / "rivals.json")
    layers.RIVALS_FILE.write_text(json.dumps({"rows": known}), encoding="utf-8")
    output = tmp_path / "layers.json"
    layers.main("400", repeats=1, output=output)
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    shared = {row["budget"]: row for row in rows if "budget" in row and "part" not in row}
    assert list(shared) == list(rivals.TARGETS)
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
    lines = layers.verdicts(rows)
    assert [line["error at most"] for line in lines] == list(rivals.TARGETS)
    assert [line["others"] for line in lines] == [None] * len(lines)
    assert lines[0]["one setting"] == next(row["speedup"] for row in rows if row["method"] == rivals.OURS[0])
