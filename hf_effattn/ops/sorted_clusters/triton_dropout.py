"""Dropout factors that every kernel of an op draws alike."""

import triton
import triton.language as tl


@triton.jit
def dropout_factor(seed_ptr, rows, columns, row_length, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr):
    """0 or `1 / (1 - dropout_p)` for the weights at `rows` × `columns` of a matrix with rows of `row_length`.

    A function of the seed, the kind of weights and the place alone, whatever the tiles are. The place counts in 64
    bits, in two words of Philox's counter: products of 64 bits, as `tl.rand` would need there, are slow on GPUs.
    """
    seed = tl.load(seed_ptr) * KINDS + KIND
    offsets = rows.to(tl.int64)[:, None] * row_length + columns[None, :]
    low, high = offsets.to(tl.uint32), (offsets >> 32).to(tl.uint32)
    drawn, _, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return tl.where(tl.uint_to_uniform_float(drawn) >= dropout_p, 1.0 / (1.0 - dropout_p), 0.0)
