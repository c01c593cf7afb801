"""Dropout factors that every kernel of an op draws alike."""

import triton
import triton.language as tl


@triton.jit
def dropout_factor(seed_ptr, rows, columns, row_length, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr):
    """0 or `1 / (1 - dropout_p)` for the weights at `rows` × `columns` of a matrix with rows of `row_length`.

    A function of the seed, the kind of weights and the place alone, whatever the tiles are.
    """
    seed = tl.load(seed_ptr) * KINDS + KIND
    offsets = rows.to(tl.int64)[:, None] * row_length + columns[None, :]
    return tl.where(tl.rand(seed, offsets) >= dropout_p, 1.0 / (1.0 - dropout_p), 0.0)
