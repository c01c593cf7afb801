"""Kernels of the forward pass of causal attention over clusters.

First the queries that have older keys, grouped by cluster, go over their top keys and what else their cluster decides;
then all queries, segment by segment, go on from there over the local keys and the means of key clusters. Sizes and
numbers of columns as in `steps.py`.
"""

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import on_device_of
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.softmax import KIND, KINDS, dot_rows, softmax_step
from ...shared.triton.tiles import LOG2_E, LOWEST, load_rows
from ..layout import Layout
from ..reference import Settings
from .blocks import group_config, query_tile, segment_config
from .grouping import Plan
from .steps import LENGTHS, blocks_of_level, clusters_of_block, load_count, load_group, load_summaries


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_fwd_group_kernel(
    query_ptr, key_ptr, value_ptr, mean_key_ptr, mean_value_ptr, rest_lse_ptr, rest_mean_ptr, top_ptr, labels_ptr,
    members_ptr, counts_ptr, seed_ptr, partial_ptr, highest_ptr, total_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    H, group, N, D, Dv, segment_length, window_segments, served, levels, means, keys_per_cluster, key_clusters,
    clusters, topk, columns, scale_log2, dropout_p,
    HAS_COUNTS: tl.constexpr, HAS_MEANS: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax over the top keys of queries of one cluster and segment, as numerator, largest score and denominator.

    With `HAS_MEANS` every top key is taken out of the mean that it is part of: the mean of `n` keys, whose weight is
    `n` later on, has weight -1 here. Else the remainder of the cluster is one more column.
    """
    s = tl.program_id(0) % segment_length
    i_u = tl.program_id(0) // segment_length % served
    i_p = (tl.program_id(0) // segment_length // served).to(tl.int64)
    i_b, i_h, i_kh, i_pk = i_p // H, i_p % H, i_p % H // group, i_p // group
    first_row = (i_u + window_segments + 1) * segment_length
    rows = tl.minimum(segment_length, load_count(counts_ptr, i_b, N, HAS_COUNTS) - first_row)
    if s >= rows:
        return
    is_opener, label, b_place, m_row = load_group(labels_ptr + i_p * N + first_row, s, rows, ROWS, BLOCK_S)
    if not is_opener:
        return
    b_row = (first_row + b_place).to(tl.int64)
    i_table = (i_p * served + i_u) * clusters + label
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    top_ptr += i_table * topk
    o_n = tl.arange(0, COLUMNS)
    o_v = tl.arange(0, BLOCK_V)
    o_row = i_p * N + b_row

    # [ROWS, BLOCK_D]
    p_query = query_ptr + b_row * stride_query_n
    b_query = load_rows(p_query, m_row, stride_query_d, D, BLOCK_D)
    b_output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for start in range(0, topk, COLUMNS):
        # [COLUMNS]
        b_top = tl.load(top_ptr + start + o_n, mask=start + o_n < topk, other=-1).to(tl.int64)
        m_top = b_top >= 0
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        p_key = key_ptr + b_top * stride_key_m
        b_key = load_rows(p_key, m_top, stride_key_d, D, BLOCK_D)
        b_value = load_rows(value_ptr + b_top * stride_value_m, m_top, stride_value_d, Dv, BLOCK_V)
        b_scores = dot_rows(
            b_query, b_key, p_query, m_row, stride_query_d, p_key, m_top, stride_key_d, D,
            ROWS, COLUMNS, BY_PARTS, PRECISION,
        )  # fmt: skip
        b_scores = tl.where(m_top[None, :], b_scores * scale_log2, float("-inf"))
        b_output, b_highest, b_total = softmax_step(
            b_scores, b_value, b_output, b_highest, b_total,
            seed_ptr, o_row, b_top, columns, dropout_p, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
        if HAS_MEANS:
            b_mean, b_column = load_summaries(
                members_ptr, b_top, m_top, i_pk, i_u + 1, N, levels, served, segment_length, keys_per_cluster,
                key_clusters,
            )  # fmt: skip
            # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
            p_mean = mean_key_ptr + (i_pk * means + b_mean) * D
            b_mean_key = load_rows(p_mean, m_top, 1, D, BLOCK_D)
            b_mean_value = load_rows(mean_value_ptr + (i_pk * means + b_mean) * Dv, m_top, 1, Dv, BLOCK_V)
            b_scores = dot_rows(
                b_query, b_mean_key, p_query, m_row, stride_query_d, p_mean, m_top, 1, D,
                ROWS, COLUMNS, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_scores = tl.where(m_top[None, :], b_scores * scale_log2, float("-inf"))
            b_output, b_highest, b_total = softmax_step(
                b_scores, b_mean_value, b_output, b_highest, b_total,
                seed_ptr, o_row, b_column, columns, dropout_p, True, HAS_DROPOUT, PRECISION,
            )  # fmt: skip
    if not HAS_MEANS:
        rest_lse = tl.load(rest_lse_ptr + i_table)
        # [BLOCK_V]
        b_rest = tl.load(rest_mean_ptr + i_table * Dv + o_v, mask=o_v < Dv, other=0.0)
        b_higher = tl.maximum(b_highest, rest_lse)
        b_kept = tl.exp2(b_highest - b_higher)
        b_weight = tl.exp2(rest_lse - b_higher)
        b_total = b_total * b_kept + b_weight
        if HAS_DROPOUT:
            o_rest = N + tl.zeros([1], tl.int32)
            b_weight *= tl.sum(dropout_factor(seed_ptr, o_row, o_rest, columns, dropout_p, KINDS, KIND), 1)
        b_output = b_output * b_kept[:, None] + b_weight[:, None] * b_rest[None, :]
        b_highest = b_higher
    m_output = m_row[:, None] & (o_v < Dv)[None, :]
    tl.store(partial_ptr + o_row[:, None] * Dv + o_v[None, :], b_output, mask=m_output)
    tl.store(highest_ptr + o_row, b_highest, mask=m_row)
    tl.store(total_ptr + o_row, b_total, mask=m_row)


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_fwd_kernel(
    query_ptr, key_ptr, value_ptr, mean_key_ptr, mean_value_ptr, sizes_ptr, counts_ptr, seed_ptr,
    partial_ptr, highest_ptr, total_ptr, output_ptr, lse_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, group, N, D, Dv, segment_length, window_segments, served, levels, means, keys_per_cluster, key_clusters,
    segments, tiles, columns, scale_log2, dropout_p,
    HAS_COUNTS: tl.constexpr, HAS_MEANS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and base-2 log-sum-exp of queries of one segment: local keys, means of key clusters, what was before."""
    i_tile = tl.program_id(0) % tiles
    i_segment = tl.program_id(0) // tiles % segments
    i_p = (tl.program_id(0) // tiles // segments).to(tl.int64)
    i_b, i_h, i_kh, i_pk = i_p // H, i_p % H, i_p % H // group, i_p // group
    first_row = i_segment * segment_length + i_tile * ROWS
    last_row = tl.minimum((i_segment + 1) * segment_length, load_count(counts_ptr, i_b, N, HAS_COUNTS))
    last_row = tl.minimum(last_row, first_row + ROWS)
    if first_row >= last_row:
        return
    older = tl.maximum(i_segment - window_segments, 0)
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    o_row = first_row + tl.arange(0, ROWS)
    m_row = o_row < last_row
    b_row = o_row.to(tl.int64)
    o_state = i_p * N + b_row
    o_n, o_v = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_V)
    m_output = m_row[:, None] & (o_v < Dv)[None, :]

    # [ROWS, BLOCK_D]
    p_query = query_ptr + b_row * stride_query_n
    b_query = load_rows(p_query, m_row, stride_query_d, D, BLOCK_D)
    m_older = m_row & (older > 0)
    m_partial = m_older[:, None] & (o_v < Dv)[None, :]
    b_output = tl.load(partial_ptr + o_state[:, None] * Dv + o_v[None, :], mask=m_partial, other=0.0)
    b_highest = tl.load(highest_ptr + o_state, mask=m_older, other=LOWEST)
    b_total = tl.load(total_ptr + o_state, mask=m_older, other=0.0)
    for start in range(older * segment_length, last_row, COLUMNS):
        o_m = start + o_n
        m_key = o_m < last_row
        b_m = o_m.to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        p_key = key_ptr + b_m * stride_key_m
        b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
        b_value = load_rows(value_ptr + b_m * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
        b_scores = dot_rows(
            b_query, b_key, p_query, m_row, stride_query_d, p_key, m_key, stride_key_d, D,
            ROWS, COLUMNS, BY_PARTS, PRECISION,
        )  # fmt: skip
        b_scores = tl.where(o_m[None, :] <= o_row[:, None], b_scores * scale_log2, float("-inf"))
        b_output, b_highest, b_total = softmax_step(
            b_scores, b_value, b_output, b_highest, b_total,
            seed_ptr, o_state, o_m, columns, dropout_p, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
    if HAS_MEANS:
        base = 0
        first_column = 0
        for level in range(levels):
            G = clusters_of_block(level, segment_length, keys_per_cluster, key_clusters)
            o_block = i_pk * means + base + (older >> (level + 1)) * G
            for start in range(0, ((older >> level) & 1) * G, COLUMNS):
                o_g = start + o_n
                m_g = o_g < G
                b_size = tl.load(sizes_ptr + o_block + o_g, mask=m_g, other=0)
                # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
                p_key = mean_key_ptr + (o_block + o_g) * D
                b_key = load_rows(p_key, m_g, 1, D, BLOCK_D)
                b_value = load_rows(mean_value_ptr + (o_block + o_g) * Dv, m_g, 1, Dv, BLOCK_V)
                b_scores = dot_rows(
                    b_query, b_key, p_query, m_row, stride_query_d, p_key, m_g, 1, D,
                    ROWS, COLUMNS, BY_PARTS, PRECISION,
                )  # fmt: skip
                b_bias = tl.log2(tl.maximum(b_size, 1).to(tl.float32))
                b_scores = tl.where((b_size > 0)[None, :], b_scores * scale_log2 + b_bias[None, :], float("-inf"))
                b_output, b_highest, b_total = softmax_step(
                    b_scores, b_value, b_output, b_highest, b_total,
                    seed_ptr, o_state, N + first_column + o_g, columns, dropout_p, False, HAS_DROPOUT, PRECISION,
                )  # fmt: skip
            base += blocks_of_level(level, served) * G
            first_column += G

    p_output = output_ptr + i_b * stride_output_b + i_h * stride_output_h
    p_output += b_row[:, None] * stride_output_n + o_v[None, :] * stride_output_d
    b_total = tl.where(b_total > 0, b_total, 1.0)
    tl.store(p_output, b_output / b_total[:, None], mask=m_output)
    tl.store(lse_ptr + o_state, b_highest + tl.log2(b_total), mask=m_row)


def softmax_columns(layout: Layout, settings: Settings) -> int:
    """Columns of a query's softmax as `triton_steps` numbers them."""
    return layout.length + (layout.first_cluster_columns[-1] if settings.method == "bi-clustered" else 1)


def attend(
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor | None,
    plan: Plan,
    layout: Layout,
    settings: Settings,
    dropout_seed: torch.Tensor | None,
) -> None:
    """Write the rows of `output` `(B, H, N, Dv)` that count, and their base-2 log-sum-exp, `lse` `(P, N)`."""
    B, H, N, D = query.shape
    Dv, group = value.shape[3], H // key.shape[1]
    has_means = settings.method == "bi-clustered"
    S, U = layout.segment_length, layout.served
    partial, (highest, total) = lse.new_empty(B * H, N if U else 0, Dv), lse.new_empty(2, B * H, N if U else 0)
    strides = *query.stride(), *key.stride(), *value.stride()
    summaries = U, layout.levels, plan.mean_keys.shape[1], settings.keys_per_cluster, settings.key_clusters
    sizes = H, group, N, D, Dv, S, layout.window_segments, *summaries
    factors = softmax_columns(layout, settings), settings.scale * LOG2_E, settings.dropout_p
    switches = {"HAS_COUNTS": counts is not None, "HAS_MEANS": has_means}
    dropout = dropout_seed is not None
    tile = query_tile(query, Dv, layout.segments)
    with on_device_of(query):
        if U:
            _causal_clustered_attention_fwd_group_kernel[(B * H * U * S,)](
                query, key, value, plan.mean_keys, plan.mean_values, plan.rest_lse, plan.rest_means, plan.top,
                plan.labels, plan.key_members, counts, dropout_seed, partial, highest, total,
                *strides, *sizes, plan.top.shape[2], settings.topk, *factors,
                **switches, **group_config(query, Dv, S, dropout, backward=False),
            )  # fmt: skip
        tiles = triton.cdiv(S, tile)
        _causal_clustered_attention_fwd_kernel[(B * H * layout.segments * tiles,)](
            query, key, value, plan.mean_keys, plan.mean_values, plan.mean_sizes, counts, dropout_seed,
            partial, highest, total, output, lse,
            *strides, *output.stride(), *sizes, layout.segments, tiles, *factors,
            **switches, **segment_config(query, Dv, tile, dropout, "output"),
        )  # fmt: skip
