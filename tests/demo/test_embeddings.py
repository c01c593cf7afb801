"""Retrieval with embeddings, on vectors whose neighbours are known."""

import pytest
import torch
from torch.nn.functional import normalize

from hf_effattn.demo.embeddings import Embedded, compare_embeddings, next_found


def embedded(rows):
    hidden = torch.tensor(rows, dtype=torch.float32)[:, None]
    return Embedded(hidden, normalize(hidden[:, 0].double(), dim=-1))


EXACT = [[1.0, 0.1, 0], [0, 1, 0.1], [1, 0, 0], [0, 1, 0]]  # passage 0 is followed by 2, passage 1 by 3


def test_equal_embeddings_change_nothing():
    change = compare_embeddings(embedded(EXACT), embedded(EXACT))
    assert (change.same_first, change.nearest_kept, change.next_found, change.hidden_error) == (1, 1, 1, 0)
    assert change.cosine_mean == pytest.approx(1)


def test_a_passage_that_moves_to_another_is_counted():
    moved = [EXACT[1], *EXACT[1:]]
    change = compare_embeddings(embedded(EXACT), embedded(moved))
    assert change.same_first == 0.75
    assert change.next_found == next_found(embedded(moved).embeddings) == 0.5
    assert change.cosine_min == pytest.approx(float(embedded(EXACT).embeddings[0] @ embedded(EXACT).embeddings[1]))
    assert change.nearest_kept < 1
