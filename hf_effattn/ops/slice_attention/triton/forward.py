"""The kernels of the forward pass of slice attention: sinks and sizes of slices, then the attention."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ...shared.triton.launch import kernel
from ...shared.triton.recorded import recorded
from ...shared.triton.softmax import softmax_step
from ...shared.triton.tiles import LOG2_E, LOWEST, load_mask, load_rows, store_rows
from ..batched import empty_outputs
from ..reference import Inputs
from .tiles import (
    KIND,
    dot_with_positions,
    load_with_positions,
    part_range,
    part_visible,
    sink_visible,
    tile_config,
    tile_rows,
)

LOWEST_LSE = tl.constexpr(torch.finfo(torch.float32).min)
LN_2 = tl.constexpr(0.6931471805599453)
MOST_AT_ONCE = 8192  # tokens that a program searches for sinks in one step, as the steps wait for each other
SLICES = 64  # slices whose sizes a program counts


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


@kernel
def _slice_attention_fwd_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, query_positions_ptr, key_positions_ptr, sink_ptr, sink_count_ptr,
    inverse_size_ptr, seed_ptr, output_ptr, pooled_ptr, lse_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_n, stride_key_d,
    stride_value_b, stride_value_h, stride_value_n, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    stride_mask_b, stride_mask_n,
    H, group, N, L, extension, D, Dv, slices, tiles, tiles_per_slice, last_part, scale_log2, dropout_p,
    CAUSAL: tl.constexpr, HAS_QUERY_POSITIONS: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`Y_l` of a tile of rows, its log-sum-exps, and the means of its slices (or this tile's part of one mean)."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    i_tile = tl.program_id(0) % tiles
    i_b, i_h, i_kh = i_p // H, i_p % H, i_p % H // group
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    key_positions_ptr += i_kh * (L + 2 * extension) * D
    window = L + 2 * extension
    first_slice, o_row, m_row = tile_rows(i_tile, L, N, tiles_per_slice, SLICES, ROWS)
    m_token = load_mask(mask_ptr, i_b, o_row, m_row, stride_mask_b, stride_mask_n)
    p_query = query_ptr + o_row.to(tl.int64) * stride_query_n
    p_place = query_positions_ptr + (i_h * L + o_row % L) * D
    o_d = tl.arange(0, BLOCK_D)
    # [ROWS, BLOCK_D]
    b_query = load_with_positions(p_query, m_token, stride_query_d, p_place, m_token, o_d, D, HAS_QUERY_POSITIONS)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    o_n = tl.arange(0, COLUMNS)
    for part in range(tl.where(extension > 0, -1, 0), last_part + 1):
        begin, end = part_range(part, first_slice, L, extension, N, SLICES)
        if CAUSAL:
            end = tl.minimum(end, tl.max(o_row, 0) + 1)
        for start in range(begin, end, COLUMNS):
            o_key = start + o_n
            m_key = load_mask(mask_ptr, i_b, o_key, o_key < end, stride_mask_b, stride_mask_n)
            m_visible, o_place = part_visible(o_row, m_token, o_key, m_key, part, L, extension, CAUSAL)
            m_place = (o_place >= 0) & (o_place < window)
            p_key = key_ptr + o_key.to(tl.int64) * stride_key_n
            p_key_place = key_positions_ptr + o_place.to(tl.int64) * D
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            b_key = load_with_positions(p_key, m_key, stride_key_d, p_key_place, m_place, o_d, D, HAS_KEY_POSITIONS)
            b_value = load_rows(value_ptr + o_key.to(tl.int64) * stride_value_n, m_key, stride_value_d, Dv, BLOCK_V)
            b_scores = dot_with_positions(
                b_query, p_query, m_token, stride_query_d, p_place,
                b_key, p_key, m_key, stride_key_d, p_key_place, m_place, D,
                ROWS, COLUMNS, HAS_QUERY_POSITIONS, HAS_KEY_POSITIONS, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_scores = tl.where(m_visible, b_scores * scale_log2, float("-inf"))
            b_output, b_highest, b_total = softmax_step(
                b_scores, b_value, b_output, b_highest, b_total,
                seed_ptr, i_p * N + o_row, o_place, window + N, dropout_p, KIND, PRECISION,
            )  # fmt: skip
    if sink_ptr is not None:
        count = tl.load(sink_count_ptr + i_b)
        for start in range(0, count, COLUMNS):
            m_key = start + o_n < count
            # [COLUMNS]
            o_key = tl.load(sink_ptr + i_b * N + start + o_n, mask=m_key, other=0)
            m_visible = sink_visible(o_row, m_token, o_key, m_key, L, extension, CAUSAL)
            p_key = key_ptr + o_key * stride_key_n
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
            b_value = load_rows(value_ptr + o_key * stride_value_n, m_key, stride_value_d, Dv, BLOCK_V)
            b_scores = dot_with_positions(
                b_query, p_query, m_token, stride_query_d, p_place,
                b_key, p_key, m_key, stride_key_d, p_key, m_key, D,
                ROWS, COLUMNS, HAS_QUERY_POSITIONS, False, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_scores = tl.where(m_visible, b_scores * scale_log2, float("-inf"))
            b_output, b_highest, b_total = softmax_step(
                b_scores, b_value, b_output, b_highest, b_total,
                seed_ptr, i_p * N + o_row, window + o_key, window + N, dropout_p, KIND, PRECISION,
            )  # fmt: skip

    o_v = tl.arange(0, BLOCK_V)
    b_output = tl.where(m_token[:, None], b_output / tl.where(b_total > 0.0, b_total, 1.0)[:, None], 0.0)
    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h + o_row.to(tl.int64) * stride_output_n
    store_rows(p_output, b_output, m_row, stride_output_d, Dv, BLOCK_V)
    b_lse = (b_highest + tl.log2(tl.where(b_total > 0.0, b_total, 1.0))) * LN_2
    tl.store(lse_ptr + i_p * N + o_row, tl.where(m_token, b_lse, LOWEST_LSE), mask=m_row)
    for i_s in range(first_slice, tl.minimum(first_slice + SLICES, slices)):
        b_sum = tl.sum(tl.where((o_row // L == i_s)[:, None], b_output, 0.0), 0)
        b_mean = b_sum * tl.load(inverse_size_ptr + i_b * slices + i_s)
        p_mean = pooled_ptr + ((i_p * slices + i_s) * tiles_per_slice + i_tile % tiles_per_slice) * Dv + o_v
        tl.store(p_mean, b_mean.to(pooled_ptr.dtype.element_ty), mask=o_v < Dv)


@dataclass(frozen=True)
class Call:
    """What both passes hand to their kernels."""

    tensors: dict[str, Any]  # mask, positions, sinks and sizes of the slices, by the kernels' names for them
    numbers: dict[str, Any]  # lengths, counts and the dropout probability
    flags: dict[str, Any]  # what exists

    @classmethod
    def of(cls, x: Inputs) -> "Call":
        """Prepares a call; nothing is asked of the host."""
        query, key_mask = x.query, x.key_mask
        _, H, N, D = query.shape
        sinks, counts, inverse_sizes = sinks_and_sizes(x)
        tensors = {
            "mask_ptr": key_mask,
            "query_positions_ptr": query if x.query_positions is None else x.query_positions.contiguous(),
            "key_positions_ptr": query if x.key_positions is None else x.key_positions.contiguous(),
            "sink_ptr": sinks,
            "sink_count_ptr": counts,
            "inverse_size_ptr": inverse_sizes,
            "seed_ptr": None if x.dropout_seed is None else x.dropout_seed.to(query.device, non_blocking=True),
        }
        numbers = {
            "stride_mask_b": 0 if key_mask is None else key_mask.stride(0),
            "stride_mask_n": 0 if key_mask is None else key_mask.stride(1),
            "H": H,
            "group": H // x.key.shape[1],
            "N": N,
            "L": x.slice_length,
            "extension": x.extension,
            "D": D,
            "slices": -(-N // x.slice_length),
            "last_part": 1 if x.extension and not x.causal else 0,
            "dropout_p": x.dropout_p,
        }
        flags = {
            "CAUSAL": x.causal,
            "HAS_QUERY_POSITIONS": x.query_positions is not None,
            "HAS_KEY_POSITIONS": x.key_positions is not None,
        }
        return cls(tensors, numbers, flags)

    def tiling(self, config: dict[str, Any]) -> dict[str, int]:
        """Tiles of a head and tiles of a slice, under a choice of block sizes."""
        length = self.numbers["L"]
        per_slice = 1 if length <= config["ROWS"] else -(-length // config["ROWS"])
        return {"tiles": -(-self.numbers["slices"] // config["SLICES"]) * per_slice, "tiles_per_slice": per_slice}


def strides(prefix: str, tensor: torch.Tensor) -> dict[str, int]:
    """The strides of a `(B, heads, N, D)` tensor by the kernels' names for them."""
    return {f"stride_{prefix}_{dim}": stride for dim, stride in zip("bhnd", tensor.stride(), strict=True)}


@recorded
def forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output `(B, H, N, Dv)`, means `(B, H, slices, Dv)` and log-sum-exps `(B, H, N)`."""
    (query, key, value), call = x[:3], Call.of(x)
    B, H, _, D = query.shape
    Dv, slices = value.shape[3], call.numbers["slices"]
    output, _, lse = empty_outputs(x)
    config = tile_config(query, call.numbers["L"], D, Dv)
    tiling = call.tiling(config)
    per_slice = tiling["tiles_per_slice"]
    # A slice of several tiles gets a part of its mean from each.
    pooled = query.new_empty(B, H, slices, per_slice, Dv, dtype=torch.float32 if per_slice > 1 else query.dtype)
    _slice_attention_fwd_kernel[(B * H * tiling["tiles"],)](
        query, key, value, output_ptr=output, pooled_ptr=pooled, lse_ptr=lse, Dv=Dv,
        scale_log2=x.scale * LOG2_E, **call.tensors, **call.numbers, **call.flags, **tiling, **config,
        **strides("query", query), **strides("key", key), **strides("value", value),
        **strides("output", output),
    )  # fmt: skip
    pooled = pooled.sum(dim=3).to(query.dtype) if per_slice > 1 else pooled[:, :, :, 0]
    return output, pooled, lse
