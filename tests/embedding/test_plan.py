"""Batches: every document in one, within the bound, fixed by the lengths; and what they are expected to take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_effattn.embedding import plan
from hf_effattn.embedding.plan import Pace, at_quantiles, fitting_runs, plan_windows

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 500))
def test_runs_cover_all_and_keep_to_the_bound(lengths, bound):
    runs = fitting_runs(lengths, bound)
    assert [index for start, end in runs for index in range(start, end)] == list(range(len(lengths)))
    for start, end in runs:
        assert end - start == 1 or max(lengths[start:end]) * (end - start) <= bound
    for start, end in runs[:-1]:  # the next one would have been too much
        assert max(lengths[start : end + 1]) * (end + 1 - start) > bound


@given(LENGTHS, st.integers(1, 500))
def test_every_document_is_in_one_batch_of_its_window(lengths, bound):
    windows = plan_windows(lengths, bound)
    inside = [[index for batch in window for index in batch.documents] for window in windows]
    assert [index for window in inside for index in sorted(window)] == list(range(len(lengths)))
    for batch in (batch for window in windows for batch in window):
        mine = [lengths[index] for index in batch.documents]
        assert mine == sorted(mine)
        assert (batch.tokens, batch.longest) == (sum(mine), max(mine))
        assert len(mine) == 1 or batch.longest * len(mine) <= bound


def test_windows_are_bounded(monkeypatch):
    monkeypatch.setattr(plan, "WINDOW_BATCHES", 2)
    windows = plan_windows([10] * 9 + [500] + [1], 20)
    assert [sum(len(batch.documents) for batch in window) for window in windows] == [4, 4, 1, 1, 1]
    monkeypatch.setattr(plan, "WINDOW_DOCUMENTS", 3)
    assert [len(window[0].documents) for window in plan_windows([1] * 8, 20)] == [3, 3, 2]


def test_quantiles_are_of_tokens():
    lengths = [1] * 98 + [1000, 2000]
    assert at_quantiles(lengths, lengths, (0.01, 0.3, 0.9)) == [30, 98, 99]
    assert at_quantiles([5], [5], (0.1, 0.5, 0.9)) == [0]


def test_a_pace_knows_the_cost_that_grows_with_the_length():
    def cost(longest, tokens):
        return (0.002 + 1e-6 * longest) * tokens

    lengths, tokens = [100, 2000, 8000], [16_000, 16_000, 8000]
    pace = Pace(lengths, tokens, list(map(cost, lengths, tokens)))
    assert pace.seconds(5000, 15_000) == pytest.approx(cost(5000, 15_000))
    assert Pace([64, 64], [100, 300], [1.0, 3.0]).seconds(64, 50) == pytest.approx(0.5)
    falling = Pace([64, 128], [100, 100], [2.0, 1.0])  # no speed grows without end
    assert falling.seconds(10_000, 100) == pytest.approx(np.mean([2.0, 1.0]))
