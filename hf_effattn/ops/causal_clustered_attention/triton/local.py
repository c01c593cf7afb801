"""Causal attention to the nearest keys, and to a few distant ones that a segment shares, on a GPU."""

from typing import Any

import torch
import triton.language as tl

from ...shared.triton.cluster_table import is_exact, load_top
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import CENTROID_KIND, attend
from ...shared.triton.tiles import BITS_PER_NAT, LOG2_E, LOWEST, load_operand, load_rows, store_rows, tile_config
from ..reference import Settings
from .layout import Layout, Rows

NEAR_KIND = CENTROID_KIND  # of dropout: of weights on keys one by one, as the other kind is of those on summaries


@kernel
def _causal_attention_fwd_near_kernel(
    query_ptr, key_ptr, value_ptr, seed_ptr, sink_ptr, top_ptr, exact_ptr, output_ptr, lse_ptr,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, group, N, rows_of_queries, rows_of_keys, D, Dv, first_segment, segment_length, window, shift, topk, segments,
    tiles, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`O_i` and the base-2 log-sum-exp over the segment up to itself, its window, a sink and the exact keys, if any.

    A program takes `ROWS` queries of a segment. In late segments of heads that are exact, the window is all there is.
    """
    # The last queries of a segment see most keys: they begin first.
    i_tile = tiles - 1 - tl.program_id(0) % tiles
    i_segment = first_segment + tl.program_id(0) // tiles % segments
    i_p = (tl.program_id(0) // (tiles * segments)).to(tl.int64)
    o_own = i_tile * ROWS + tl.arange(0, ROWS)
    start = i_segment * segment_length
    o_row = start + o_own
    m_row = (o_own < segment_length) & (o_row < N)
    first = tl.maximum(0, start - window)
    i_late = i_segment - first_segment
    heads = tl.num_programs(0) // (tiles * segments)
    exact = is_exact(exact_ptr, i_late * (heads // group) + i_p // group)
    first = tl.where(exact, 0, first)
    last = tl.minimum(N, start + tl.minimum(segment_length, (i_tile + 1) * ROWS))

    key_ptr += i_p // group * rows_of_keys * D
    value_ptr += i_p // group * rows_of_keys * Dv
    o_drawn = i_p * rows_of_queries + o_row
    # [ROWS, BLOCK_D]
    query = load_operand(query_ptr + o_drawn * D, m_row, 1, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    if sink_ptr is not None:
        b_highest = tl.zeros([ROWS], tl.float32) + tl.load(sink_ptr + i_p % H).to(tl.float32) * BITS_PER_NAT
        b_total += 1.0
    for begin in range(first, last, COLUMNS):
        o_key = begin + tl.arange(0, COLUMNS)
        b_place = (shift + o_key).to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + b_place * D, o_key < last, 1, D, BLOCK_D)
        b_value = load_rows(value_ptr + b_place * Dv, o_key < last, 1, Dv, BLOCK_V)
        b_output, b_highest, b_total = attend(
            query, key, b_value, o_key[None, :] <= o_row[:, None], b_output, b_highest, b_total, D, scale_log2,
            seed_ptr, o_drawn, b_place, rows_of_keys, dropout_p, NEAR_KIND, BY_PARTS, PRECISION,
        )  # fmt: skip
    if top_ptr is not None:
        top_ptr += (i_late.to(tl.int64) * heads + i_p) * topk
        for begin in range(0, tl.where(exact, 0, topk), COLUMNS):
            b_top, m_top = load_top(top_ptr, begin + tl.arange(0, COLUMNS), topk)
            key = load_operand(key_ptr + b_top * D, m_top, 1, D, BLOCK_D)
            b_value = load_rows(value_ptr + b_top * Dv, m_top, 1, Dv, BLOCK_V)
            b_output, b_highest, b_total = attend(
                query, key, b_value, m_top[None, :], b_output, b_highest, b_total, D, scale_log2,
                seed_ptr, o_drawn, b_top, rows_of_keys, dropout_p, NEAR_KIND, BY_PARTS, PRECISION,
            )  # fmt: skip
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    tl.store(lse_ptr + o_drawn, b_highest + tl.log2(b_divisor), mask=m_row)
    output_ptr += i_p // H * stride_output_b + i_p % H * stride_output_h
    p_output = output_ptr + o_row.to(tl.int64) * stride_output_n
    store_rows(p_output, b_output / b_divisor[:, None], m_row, stride_output_d, Dv, BLOCK_V)


def forward_config(settings: Settings, query: torch.Tensor, value_dim: int) -> dict[str, Any]:
    """Block sizes of the kernels that attend: dropout takes the registers of half of the columns."""
    dropout = settings.dropout_seed is not None
    config = tile_config(query, query.shape[3], value_dim, three=not dropout)
    return config | ({"COLUMNS": min(32, config["COLUMNS"])} if dropout else {})


def attend_near(
    layout: Layout, rows: Rows, output: torch.Tensor, lse: torch.Tensor, segments: tuple[int, int],
    top: torch.Tensor | None = None, exact: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the outputs `(B, H, N, Dv)` and log-sum-exps `(B · H, tokens)` of some segments, all early or all late.

    Args:
        segments: the first, and how many.
        top: `(late segments · B · H, topk)` int32 of these segments, places of keys as `layout` counts them, -1 for
            none; or None.
        exact: `(late segments, P)` of these segments, or None.
    """
    (query, key, value), settings, (first, count) = rows, layout.settings, segments
    H, D, Dv = query.shape[1], query.shape[3], value.shape[3]
    config = forward_config(settings, query, Dv)
    config["num_stages"] = min(
        2, config["num_stages"]
    )  # with two loops, a third stage would leave room for two programs only
    tiles, topk = -(-settings.segment_length // config["ROWS"]), 0 if top is None else top.shape[1]
    _causal_attention_fwd_near_kernel[(rows.heads * count * tiles,)](
        query, key, value, settings.dropout_seed, settings.sinks, top if topk else None, exact, output, lse,
        *output.stride(),
        H, rows.group, layout.length, layout.padded, key.shape[2], D, Dv, first, settings.segment_length,
        settings.window, layout.shift, topk, count, tiles, settings.scale * LOG2_E, settings.dropout_p, **config,
    )  # fmt: skip
