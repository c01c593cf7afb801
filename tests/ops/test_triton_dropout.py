"""The dropout factors of the kernels: a function of seed, kind and place, without places that share a draw."""

import pytest
import torch
import triton
import triton.language as tl

from hf_effattn.ops.sorted_clusters.triton_dropout import dropout_factor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, KINDS, DROPOUT_P = 256, 3, 0.3


@triton.jit
def draw_kernel(
    seed_ptr, factors_ptr, first_row, row_length, dropout_p,
    KINDS: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    o_row, o_column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    b_factor = dropout_factor(seed_ptr, first_row + o_row, o_column, row_length, dropout_p, KINDS, KIND)
    tl.store(factors_ptr + o_row[:, None] * SIZE + o_column[None, :], b_factor)


def draw(seed=5, first_row=0, row_length=SIZE, kind=0):
    factors = torch.empty(SIZE, SIZE, device=DEVICE)
    seeds = torch.tensor([seed], device=DEVICE)
    draw_kernel[(1,)](seeds, factors, first_row, row_length, DROPOUT_P, KINDS=KINDS, KIND=kind, SIZE=SIZE)
    return factors.cpu()


def test_factors_are_0_or_scaled_and_repeat():
    factors = draw()
    torch.testing.assert_close(factors.unique(), torch.tensor([0.0, 1 / (1 - DROPOUT_P)]))
    assert torch.equal(factors, draw())
    # The share that is kept, within 5 standard errors.
    assert abs((factors > 0).double().mean() - (1 - DROPOUT_P)) < 5 * (DROPOUT_P * (1 - DROPOUT_P)) ** 0.5 / SIZE


def test_the_place_decides_whatever_the_tile_is():
    assert torch.equal(draw(first_row=100)[:100], draw()[100:200])


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 6},
        {"seed": 5 + 2**33},
        {"kind": 1},
        {"first_row": SIZE},
        {"first_row": 2**24},  # 2**32 weights further on: a counter of 32 bits would be back where it began
        {"first_row": 2**23},
        {"first_row": 2**31 - SIZE, "row_length": 2**20},
    ],
    ids=str,
)
def test_other_places_draw_on_their_own(other):
    """Two draws agree as often as chance has it, within 5 standard errors; so do neighbours."""
    one, two = draw() > 0, draw(**other) > 0
    agree = DROPOUT_P**2 + (1 - DROPOUT_P) ** 2
    for first, second in ((one, two), (two[1:], two[:-1]), (two[:, 1:], two[:, :-1])):
        assert abs((first == second).double().mean() - agree) < 5 * (agree * (1 - agree)) ** 0.5 / (SIZE - 1)
