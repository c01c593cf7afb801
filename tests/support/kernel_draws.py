"""What kernels draw for dropout, for references that shall drop the same."""

from functools import cache

import torch
import triton
import triton.language as tl
from support.op_cases import DEVICE

from hf_effattn.ops.shared.dropout import KINDS_OF_WEIGHTS
from hf_effattn.ops.shared.triton.dropout import dropout_factor


@triton.jit
def _draw_kernel(
    seed_ptr, factor_ptr, columns, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    o_row, o_column = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BLOCK)
    factor = dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    tl.store(factor_ptr + o_row[:, None] * columns + o_column[None, :], factor, mask=(o_column < columns)[None, :])


@cache
def drawn(seed: int, rows: int, columns: int, dropout_p: float, kind: int) -> torch.Tensor:
    """The factors of a matrix of weights of a kind, `(rows, columns)`, of at most 128 columns."""
    factor = torch.zeros(rows, columns, device=DEVICE)
    seeds = torch.tensor([seed], device=DEVICE)
    _draw_kernel[(rows,)](seeds, factor, columns, dropout_p, KINDS=KINDS_OF_WEIGHTS, KIND=kind, BLOCK=128)
    return factor
