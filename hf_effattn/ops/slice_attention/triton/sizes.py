"""Which tokens are sinks and how many tokens each slice has, found on the GPU in one launch."""

import torch
import triton.language as tl

from ...shared.triton.launch import kernel
from ...shared.triton.tiles import load_mask
from ..reference import Inputs

MOST_AT_ONCE = 8192  # tokens that a program looks for sinks among in one step: the steps wait for each other
SLICES = 64  # whose sizes a program finds


@kernel
def _slice_attention_sizes_kernel(
    mask_ptr, stride_mask_b, stride_mask_n, sink_mask_ptr, stride_sink_b, stride_sink_n,
    sink_ptr, sink_count_ptr, inverse_size_ptr, N, L, slices, blocks,
    TOKENS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One over the tokens of some slices, 1 for a slice without any; the first program of a text finds its sinks."""
    i_b = (tl.program_id(0) // blocks).to(tl.int64)
    i_block = tl.program_id(0) % blocks
    if sink_mask_ptr is not None:  # noqa: SIM102 - decided when it is compiled, the other while it runs
        if i_block == 0:
            count = 0
            for start in range(0, N, TOKENS):
                o_n = start + tl.arange(0, TOKENS)
                m_sink = load_mask(sink_mask_ptr, i_b, o_n, o_n < N, stride_sink_b, stride_sink_n)
                m_sink = load_mask(mask_ptr, i_b, o_n, m_sink, stride_mask_b, stride_mask_n)
                b_sink = m_sink.to(tl.int32)
                rank = count + tl.cumsum(b_sink, 0) - 1
                tl.store(sink_ptr + i_b * N + rank, o_n.to(tl.int64), mask=m_sink)
                count += tl.sum(b_sink, 0)
            tl.store(sink_count_ptr + i_b, count)
    o_s = i_block * SLICES + tl.arange(0, SLICES)
    sizes = tl.minimum(N - o_s * L, L)
    if mask_ptr is not None:
        sizes = tl.zeros([SLICES], tl.int32)
        for first in range(0, L, COLUMNS):
            o_c = first + tl.arange(0, COLUMNS)
            # [SLICES, COLUMNS]
            o_n = o_s[:, None] * L + o_c[None, :]
            m_token = (o_c < L)[None, :] & (o_n < N)
            m_token = load_mask(mask_ptr, i_b, o_n, m_token, stride_mask_b, stride_mask_n)
            sizes += tl.sum(m_token.to(tl.int32), 1)
    b_inverse = 1.0 / tl.maximum(sizes, 1).to(tl.float32)
    tl.store(inverse_size_ptr + i_b * slices + o_s, b_inverse, mask=o_s < slices)


def sinks_and_sizes(x: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The sinks that count `(B, N)`, in front, and their number `(B,)`; one over the slices' tokens `(B, slices)`.

    Without sinks None and None.
    """
    query, mask, sink_mask, L = x.query, x.key_mask, x.sink_mask, x.slice_length
    B, _, N, _ = query.shape
    slices = -(-N // L)
    inverse_sizes = query.new_empty(B, slices, dtype=torch.float32)
    sinks = counts = None
    if sink_mask is not None:
        sinks, counts = (sink_mask.new_empty(size, dtype=torch.int64) for size in (sink_mask.shape, B))
    blocks = -(-slices // SLICES)
    _slice_attention_sizes_kernel[(B * blocks,)](
        mask, *((0, 0) if mask is None else mask.stride()),
        sink_mask, *((0, 0) if sink_mask is None else sink_mask.stride()),
        sinks, counts, inverse_sizes, N, L, slices, blocks,
        TOKENS=max(32, min(MOST_AT_ONCE, 1 << (N - 1).bit_length())), SLICES=SLICES, COLUMNS=32, num_warps=8,
    )  # fmt: skip
    return sinks, counts, inverse_sizes
