"""Causal attention to the nearest keys, and to a few older ones that a segment shares, on a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import on_device_of
from ...shared.triton.cluster_table import CENTROID_KIND, load_top
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import KINDS, dot_rows, softmax_weights
from ...shared.triton.tiles import LOG2_E, LOWEST, load_rows, tile_config
from ..reference import Settings
from .layout import Layout, Rows

NEAR_KIND = CENTROID_KIND  # of dropout: of weights on keys one by one, as the other kind is of those on summaries


@triton.jit
def attend_to_rows(
    b_query, p_query, m_query, key_ptr, value_ptr, seed_ptr, o_row, b_place, m_key, m_pair, b_output, b_highest,
    b_total, D, Dv, rows_of_keys, scale_log2, dropout_p,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes rows of contiguous keys and values, which exist where `m_key`, into the running softmax where `m_pair`.

    For dropout queries `o_row` and the places of keys are numbered through.
    """
    p_key = key_ptr + b_place * D
    # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
    b_key = load_rows(p_key, m_key, 1, D, BLOCK_D)
    b_value = load_rows(value_ptr + b_place * Dv, m_key, 1, Dv, BLOCK_V)
    b_scores = dot_rows(
        b_query, b_key, p_query, m_query, 1, p_key, m_key, 1, D, ROWS, COLUMNS, BY_PARTS, PRECISION
    )  # fmt: skip
    b_scores = tl.where(m_pair, b_scores * scale_log2, float("-inf"))
    b_weights, b_kept, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
    if HAS_DROPOUT:
        b_weights *= dropout_factor(seed_ptr, o_row, b_place, rows_of_keys, dropout_p, KINDS, NEAR_KIND)
    b_weights = b_weights.to(b_value.dtype)
    b_output = tl.dot(b_weights, b_value, b_output * b_kept[:, None], input_precision=PRECISION)
    return b_output, b_highest, b_total


@kernel
def _causal_attention_fwd_near_kernel(
    query_ptr, key_ptr, value_ptr, seed_ptr, top_ptr, exact_ptr, output_ptr, lse_ptr,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, group, N, rows_of_queries, rows_of_keys, D, Dv, first_segment, segment_length, window, shift, topk, segments,
    tiles, scale_log2, dropout_p,
    HAS_TOP: tl.constexpr, HAS_EXACT: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`O_i` and the base-2 log-sum-exp over the segment up to itself, its window, and the exact keys if it has any.

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
    exact = False
    if HAS_EXACT:
        exact = tl.load(exact_ptr + i_late * (heads // group) + i_p // group) != 0
        first = tl.where(exact, 0, first)
    last = tl.minimum(N, start + tl.minimum(segment_length, (i_tile + 1) * ROWS))

    key_ptr += i_p // group * rows_of_keys * D
    value_ptr += i_p // group * rows_of_keys * Dv
    o_drawn = i_p * rows_of_queries + o_row
    p_query = query_ptr + o_drawn * D
    # [ROWS, BLOCK_D]
    b_query = load_rows(p_query, m_row, 1, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for begin in range(first, last, COLUMNS):
        o_key = begin + tl.arange(0, COLUMNS)
        b_output, b_highest, b_total = attend_to_rows(
            b_query, p_query, m_row, key_ptr, value_ptr, seed_ptr, o_drawn, (shift + o_key).to(tl.int64), o_key < last,
            o_key[None, :] <= o_row[:, None], b_output, b_highest, b_total, D, Dv, rows_of_keys, scale_log2, dropout_p,
            HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
        )  # fmt: skip
    if HAS_TOP:
        top_ptr += (i_late.to(tl.int64) * heads + i_p) * topk
        for begin in range(0, tl.where(exact, 0, topk), COLUMNS):
            b_top, m_top = load_top(top_ptr, begin + tl.arange(0, COLUMNS), topk)
            b_output, b_highest, b_total = attend_to_rows(
                b_query, p_query, m_row, key_ptr, value_ptr, seed_ptr, o_drawn, b_top, m_top, m_top[None, :], b_output,
                b_highest, b_total, D, Dv, rows_of_keys, scale_log2, dropout_p,
                HAS_DROPOUT, ROWS, COLUMNS, BLOCK_D, BLOCK_V, BY_PARTS, PRECISION,
            )  # fmt: skip
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    b_output = b_output / b_divisor[:, None]
    tl.store(lse_ptr + o_drawn, b_highest + tl.log2(b_divisor), mask=m_row)
    o_v = tl.arange(0, BLOCK_V)
    p_output = output_ptr + i_p // H * stride_output_b + i_p % H * stride_output_h
    p_output += o_row.to(tl.int64)[:, None] * stride_output_n + o_v[None, :] * stride_output_d
    tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=m_row[:, None] & (o_v < Dv)[None, :])


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
    config["num_stages"] = min(2, config["num_stages"])  # of two loops: more ahead would leave room for two programs
    tiles, topk = -(-settings.segment_length // config["ROWS"]), 0 if top is None else top.shape[1]
    with on_device_of(query):
        _causal_attention_fwd_near_kernel[(rows.heads * count * tiles,)](
            query, key, value, settings.dropout_seed, top, exact, output, lse, *output.stride(),
            H, rows.group, layout.length, layout.padded, key.shape[2], D, Dv, first, settings.segment_length,
            settings.window, layout.shift, topk, count, tiles, settings.scale * LOG2_E, settings.dropout_p,
            HAS_TOP=topk > 0, HAS_EXACT=exact is not None, HAS_DROPOUT=settings.dropout_seed is not None, **config,
        )  # fmt: skip
