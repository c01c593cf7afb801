"""The benchmark of budgets: coverage as by hand on kept rows, and its measurements on small inputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_effattn.measuring.candidate_errors import CANDIDATES
from scripts.benchmark import budget

HEADS = (2, 3)  # layers, heads


def row(part: str, error: float, bound: float, first_bound: float | None = None) -> dict[str, Any]:
    """A text on which every candidate but the last has that error in every head."""

    def filled(value: float) -> list[list[list[float]]]:
        of_candidates = [value] * (len(CANDIDATES) - 1) + [0.001]
        return [[[number] * HEADS[1] for number in of_candidates] for _ in range(HEADS[0])]

    return {
        "kind": "errors",
        "length": 4096,
        "part": part,
        "text": "",
        "errors": filled(error),
        "bounds": filled(bound),
    } | ({} if first_bound is None else {"first_bounds": filled(first_bound)})


def test_coverage_with_and_without_a_tolerance() -> None:
    rows = [row("calibrated", 0.08, 0.08), row("calibrated", 0.08, 0.08)]
    # Within; beyond and told; beyond and not told; within but thought beyond.
    rows += [
        row("books", 0.09, 0.095),
        row("books", 0.2, 0.3),
        row("meetings", 0.12, 0.09),
        row("meetings", 0.09, 0.11),
    ]
    row_of_budget = budget.coverage(rows).set_index("budget").loc[0.1]
    assert row_of_budget["margin"] == 1.0
    assert row_of_budget["triples"] == 4 * 6
    assert row_of_budget["within"] == pytest.approx(0.5)
    assert row_of_budget["within, books"] == pytest.approx(0.5)
    assert row_of_budget["within, tolerance"] == pytest.approx(0.75)
    assert row_of_budget["recomputed"] == pytest.approx(0.5)
    assert row_of_budget["worst"] == pytest.approx(0.2)
    assert row_of_budget["worst, tolerance"] == pytest.approx(0.12)
    # At half of it only the last candidate, which no text disturbs.
    assert budget.coverage(rows).set_index("budget").loc[0.05, "within"] == 1.0


def test_all_queries_tell_of_a_head_that_the_first_leave_open() -> None:
    rows = [row("calibrated", 0.08, 0.08)] * 2
    # Told by the first, rightly and not; open, and kept or recomputed by all.
    rows += [row("books", 0.09, 0.2, 0.095), row("books", 0.12, 0.2, 0.095)]
    rows += [row("meetings", 0.09, 0.095, 0.2), row("meetings", 0.12, 0.2, 0.2)]
    row_of_budget = budget.coverage(rows).set_index("budget").loc[0.1]
    assert row_of_budget["undecided"] == pytest.approx(0.5)
    assert row_of_budget["recomputed"] == pytest.approx(0.25)
    assert row_of_budget["within, tolerance"] == pytest.approx(0.75)


@pytest.mark.slow
def test_errors_and_times_are_those_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [tuple(torch.randn(1, 3, 300, 8, generator=generator) for _ in range(3)) for _ in range(2)]
    monkeypatch.setattr(budget, "inputs_of", lambda run, *_: layers)
    runs = [{"part": "calibrated", "text": f"{number}", "length": 300} for number in range(2)]
    runs.append({"part": "books", "text": budget.HELD_OUT[0], "length": 300})
    rows = [budget.measure_errors(run) for run in runs]
    errors = budget.stacked(rows, "errors")
    assert errors.shape == (3, len(CANDIDATES), 2, 3)
    assert (errors[0].mean(dim=(1, 2)).diff() < 0.02).all()
    bounds, first_bounds = budget.stacked(rows, "bounds"), budget.stacked(rows, "first_bounds")
    assert bounds.shape == first_bounds.shape == errors.shape
    assert (first_bounds > bounds).float().mean() > 0.9  # a fourth of the queries and three times the margin
    measured = budget.measure_speed(rows, 300, repeats=1)
    times = [line for line in measured if line["kind"] == "speed"]
    assert [line["call"] for line in times[:5]] == [
        "exact", "per head", "per head, checked", "per head, tolerance", "uniform"
    ]  # fmt: skip
    assert len(times) == 1 + 4 * len(budget.BUDGETS)
    assert all(line["ms"] > 0 for line in times)
    added = [line for line in measured if line["kind"] == "check"]
    assert [(line["budget"], line["added"] > -1) for line in added] == [(line, True) for line in budget.BUDGETS]


def test_heads_of_a_decoder_that_share_keys_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 1500, 8, generator=generator) for heads in (4, 2, 2))
    monkeypatch.setattr(budget, "inputs_of", lambda *_: [(query, key, value)])
    row = budget.measure_errors({"part": "books", "text": "0", "length": 1500}, decoder=True)
    errors = budget.stacked([row], "errors")
    assert errors.shape == (1, len(CANDIDATES), 1, 2)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    output = budget.candidates(decoder=True)[0].run(query, key, value, causal=True)
    of_heads = (output - exact).square().sum(dim=(0, 2, 3)).div(exact.square().sum(dim=(0, 2, 3))).sqrt()
    assert errors[0, 0, 0].tolist() == pytest.approx(of_heads.view(2, 2).amax(dim=1).tolist(), abs=1e-4)
