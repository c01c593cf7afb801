"""Walks of the past centroids over the keys as these leave the window, segment by segment, on a GPU.

A key that leaves the window is one of its centroid's top keys until `T` better ones have left it, then, and for good,
a part of the centroid's remainder. So one walk finds the top keys that every segment sees, and adds up each remainder
without ever subtracting. Epochs of query clusters are walked side by side.

Sizes: `P = B · H` problems, `S` tokens of a segment, `U` segments that have older ones, `E` epochs, `C` query
clusters, `T` top keys.
"""

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import block_width, chip_of, on_device_of
from ...shared.triton.softmax import dot_rows
from ...shared.triton.tiles import LOG2_E, LOWEST, dot_by_parts, load_rows
from ..layout import Layout
from ..reference import Settings
from .blocks import FEW_ROWS
from .steps import LENGTHS, load_count


@triton.jit
def _epoch_segments(i_e, epochs, first_served, segments, segment_length, count):
    """The first segment of an epoch and the one after its last, among those with a token that counts."""
    first = first_served << i_e
    end = tl.where(i_e == epochs - 1, segments, 2 * first)
    return first, tl.minimum(end, tl.cdiv(count, segment_length))


@triton.jit
def _add_to_rest(b_scores, b_value, b_rest, b_highest, b_total, PRECISION: tl.constexpr):
    """Takes keys with base-2 scores `(ROWS, COLUMNS)` and their values into the running remainder."""
    b_higher = tl.maximum(b_highest, tl.max(b_scores, 1))
    b_weights = tl.exp2(b_scores - b_higher[:, None])
    b_kept = tl.exp2(b_highest - b_higher)
    b_rest = b_rest * b_kept[:, None]
    b_rest += tl.dot(b_weights.to(b_value.dtype), b_value, input_precision=PRECISION)
    return b_rest, b_higher, b_total * b_kept + tl.sum(b_weights, 1)


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_fwd_walk_kernel(
    centroids_ptr, key_ptr, value_ptr, counts_ptr, top_ptr, rest_lse_ptr, rest_mean_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    problems, H, group, N, D, Dv, segment_length, segments, first_served, epochs, clusters, topk, tiles,
    value_tiles, scale_log2,
    HAS_COUNTS: tl.constexpr, HAS_TOP: tl.constexpr, HAS_REST: tl.constexpr, BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Top keys, and log-sum-exp and mean value of the others, of some centroids of one epoch for all its segments.

    New keys take the places of the smallest top keys, the largest first. Programs that walk the same centroids for
    other columns of the values find, and store, the same numbers besides.
    """
    i_v = tl.program_id(0) % value_tiles
    i_tile = tl.program_id(0) // value_tiles % tiles
    i_walk = tl.program_id(0) // value_tiles // tiles
    i_p = (i_walk % problems).to(tl.int64)
    i_e = epochs - 1 - i_walk // problems  # the longest walks begin first
    i_b, i_kh = i_p // H, i_p % H // group
    count = load_count(counts_ptr, i_b, N, HAS_COUNTS)
    first, end = _epoch_segments(i_e, epochs, first_served, segments, segment_length, count)
    if first >= end:
        return
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    value_ptr += i_v * BLOCK_V * stride_value_d
    rest_mean_ptr += i_v * BLOCK_V
    columns = tl.minimum(Dv - i_v * BLOCK_V, BLOCK_V)
    served = segments - first_served
    o_c = i_tile * ROWS + tl.arange(0, ROWS)
    m_c = o_c < clusters
    o_n, o_t, o_v = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_V)
    # [ROWS, BLOCK_D]
    p_centroid = centroids_ptr + ((i_p * epochs + i_e) * clusters + o_c) * D
    b_centroid = load_rows(p_centroid, m_c, 1, D, BLOCK_D).to(key_ptr.dtype.element_ty)
    # Places behind the last top key are never the smallest.
    b_best = tl.zeros([ROWS, BLOCK_T], tl.float32) + tl.where(o_t < topk, float("-inf"), float("inf"))[None, :]
    b_top = tl.full([ROWS, BLOCK_T], -1, tl.int32)
    b_rest = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for i_u in range(0, end - first_served):
        for start in range(0, segment_length, COLUMNS):
            o_m = i_u * segment_length + start + o_n
            m_key = start + o_n < segment_length
            # [COLUMNS, BLOCK_D]
            p_key = key_ptr + o_m.to(tl.int64) * stride_key_m
            b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
            b_scores = dot_rows(
                b_centroid, b_key, p_centroid, m_c, 1, p_key, m_key, stride_key_d, D,
                ROWS, COLUMNS, BY_PARTS, PRECISION,
            )  # fmt: skip
            b_scores *= scale_log2
            # What is no number is never chosen.
            b_scores = tl.where(m_key[None, :] & (b_scores == b_scores), b_scores, float("-inf"))
            if HAS_TOP:
                b_better = (b_scores > tl.min(b_best, 1)[:, None]) & m_c[:, None]
                rounds = tl.minimum(tl.max(tl.sum(b_better.to(tl.int32), 1), 0), topk)
                for _ in range(rounds):
                    b_new, b_place = tl.max(b_scores, 1, return_indices=True)
                    b_worst, b_slot = tl.min(b_best, 1, return_indices=True)
                    m_enters = b_new > b_worst
                    m_slot = m_enters[:, None] & (o_t[None, :] == b_slot[:, None])
                    if HAS_REST:
                        b_old = tl.sum(tl.where(m_slot, b_top, 0), 1)
                        m_old = m_enters & (b_old >= 0)
                        # [ROWS, BLOCK_V]
                        p_old = value_ptr + b_old.to(tl.int64) * stride_value_m
                        b_value = load_rows(p_old, m_old, stride_value_d, columns, BLOCK_V).to(tl.float32)
                        b_higher = tl.where(m_old, tl.maximum(b_highest, b_worst), b_highest)
                        b_weight = tl.exp2(tl.where(m_old, b_worst - b_higher, float("-inf")))
                        b_kept = tl.exp2(b_highest - b_higher)
                        b_rest = b_rest * b_kept[:, None] + b_weight[:, None] * b_value
                        b_total = b_total * b_kept + b_weight
                        b_highest = b_higher
                    b_index = i_u * segment_length + start + b_place
                    b_top = tl.where(m_slot, b_index[:, None], b_top)
                    b_best = tl.where(m_slot, b_new[:, None], b_best)
                    m_taken = m_enters[:, None] & (o_n[None, :] == b_place[:, None])
                    b_scores = tl.where(m_taken, float("-inf"), b_scores)
            if HAS_REST:
                # [COLUMNS, BLOCK_V]
                p_value = value_ptr + o_m.to(tl.int64) * stride_value_m
                b_values = load_rows(p_value, m_key, stride_value_d, columns, BLOCK_V)
                b_rest, b_highest, b_total = _add_to_rest(b_scores, b_values, b_rest, b_highest, b_total, PRECISION)
        if i_u >= first - first_served:
            o_table = (i_p * served + i_u) * clusters + o_c
            if HAS_TOP:
                m_top = m_c[:, None] & (o_t < topk)[None, :]
                tl.store(top_ptr + o_table[:, None] * topk + o_t[None, :], b_top, mask=m_top)
            if HAS_REST:
                b_divisor = tl.where(b_total > 0, b_total, 1.0)
                b_lse = tl.where(b_total > 0, b_highest + tl.log2(b_divisor), LOWEST)
                tl.store(rest_lse_ptr + o_table, b_lse, mask=m_c)
                p_mean = rest_mean_ptr + o_table[:, None] * Dv + o_v[None, :]
                tl.store(p_mean, b_rest / b_divisor[:, None], mask=m_c[:, None] & (o_v < columns)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_bwd_sum_kernel(
    rest_lse_ptr, alpha_ptr, beta_ptr, counts_ptr,
    problems, H, N, Dv, segment_length, segments, first_served, epochs, clusters, tiles,
    HAS_COUNTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds up `α` and `β` of some centroids of one epoch from its last segment to each, in place, see below."""
    i_tile = tl.program_id(0) % tiles
    i_p = (tl.program_id(0) // tiles % problems).to(tl.int64)
    i_e = tl.program_id(0) // tiles // problems
    count = load_count(counts_ptr, i_p // H, N, HAS_COUNTS)
    first, end = _epoch_segments(i_e, epochs, first_served, segments, segment_length, count)
    o_c = i_tile * ROWS + tl.arange(0, ROWS)
    m_c = o_c < clusters
    o_v = tl.arange(0, BLOCK_V)
    m_c_v = m_c[:, None] & (o_v < Dv)[None, :]
    b_alpha = tl.zeros([ROWS], tl.float32)
    b_beta = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_lse = tl.full([ROWS], LOWEST, tl.float32)
    for back in range(0, end - first):
        o_table = (i_p * (segments - first_served) + end - first_served - 1 - back) * clusters + o_c
        b_now = tl.load(rest_lse_ptr + o_table, mask=m_c, other=LOWEST)
        b_kept = tl.exp2(b_now - tl.maximum(b_lse, b_now))
        b_alpha = b_alpha * b_kept + tl.load(alpha_ptr + o_table, mask=m_c, other=0.0)
        # [ROWS, BLOCK_V]
        p_beta = beta_ptr + o_table[:, None] * Dv + o_v[None, :]
        b_beta = b_beta * b_kept[:, None] + tl.load(p_beta, mask=m_c_v, other=0.0)
        b_lse = b_now
        tl.store(alpha_ptr + o_table, b_alpha, mask=m_c)
        tl.store(p_beta, b_beta, mask=m_c_v)


@triton.jit
def _first_true(m_some, o_t):
    """The first place `(ROWS,)` of each row that is True, and whether there is one."""
    b_any, b_slot = tl.max(m_some.to(tl.int32), 1, return_indices=True)
    return m_some & (o_t[None, :] == b_slot[:, None]), b_any > 0


@triton.jit(do_not_specialize=LENGTHS)
def _causal_clustered_attention_bwd_rest_kernel(
    centroids_ptr, key_ptr, value_ptr, counts_ptr, top_ptr, rest_lse_ptr, alpha_ptr, beta_ptr,
    grad_centroids_ptr, grad_key_ptr, grad_value_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    problems, H, group, N, D, Dv, segment_length, segments, first_served, epochs, clusters, topk, tiles,
    scale, scale_log2,
    HAS_COUNTS: tl.constexpr, HAS_TOP: tl.constexpr, BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of some centroids of one epoch, and of the keys that come into their remainders in a segment.

    With `a_jtu` the weight of key `t` in the remainder of segment `u`, which has the gradient `β_u` at its mean value
    and `α_u` at its logarithm, less `β_u` times the mean: `dS_jt = Σ_u a_jtu (α_u + β_u · V_t)` over the segments from
    the one where the key came into the remainder. As `a_jtu` falls from segment to segment by the same factor for all
    keys, the sums of `α` and `β` from a segment on, relative to its log-sum-exp, serve all that come in there.
    """
    served = segments - first_served
    i_u = tl.program_id(0) % served
    i_tile = tl.program_id(0) // served % tiles
    i_p = (tl.program_id(0) // served // tiles % problems).to(tl.int64)
    i_e = tl.program_id(0) // served // tiles // problems
    i_b, i_kh, i_pk = i_p // H, i_p % H // group, i_p // group
    count = load_count(counts_ptr, i_b, N, HAS_COUNTS)
    first, end = _epoch_segments(i_e, epochs, first_served, segments, segment_length, count)
    if first >= end:
        return
    if i_u >= end - first_served:
        return
    first_u = first - first_served
    key_ptr += i_b * stride_key_b + i_kh * stride_key_h
    value_ptr += i_b * stride_value_b + i_kh * stride_value_h
    grad_key_ptr += i_pk * N * D
    grad_value_ptr += i_pk * N * Dv
    o_c = i_tile * ROWS + tl.arange(0, ROWS)
    m_c = o_c < clusters
    o_n, o_t = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_T)
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    # [ROWS, BLOCK_D], rounded as in the forward pass
    o_centroid = (i_p * epochs + i_e) * clusters + o_c
    p_centroid = centroids_ptr + o_centroid * D
    b_centroid = load_rows(p_centroid, m_c, 1, D, BLOCK_D).to(key_ptr.dtype.element_ty)
    b_grad_centroid = tl.zeros([ROWS, BLOCK_D], tl.float32)
    # What came in before the epoch began is there from its first segment on.
    o_table = (i_p * served + tl.maximum(i_u, first_u)) * clusters + o_c
    b_lse = tl.load(rest_lse_ptr + o_table, mask=m_c, other=0.0)
    b_alpha = tl.load(alpha_ptr + o_table, mask=m_c, other=0.0)
    # [ROWS, BLOCK_V]
    p_beta = beta_ptr + o_table * Dv
    b_beta = load_rows(p_beta, m_c, 1, Dv, BLOCK_V)
    if HAS_TOP:
        m_t = m_c[:, None] & (o_t < topk)[None, :]
        b_top = tl.load(top_ptr + o_table[:, None] * topk + o_t[None, :], mask=m_t, other=-1)
        # Keys that this segment's new ones drove out of the top keys.
        p_before = top_ptr + (o_table - clusters)[:, None] * topk + o_t[None, :]
        b_before = tl.load(p_before, mask=m_t & (i_u > first_u), other=-1)
        m_left = (b_before != b_top) & (b_before >= 0)
        for _left in range(tl.max(tl.sum(m_left.to(tl.int32), 1), 0)):
            m_slot, m_row = _first_true(m_left, o_t)
            m_left &= ~m_slot
            b_old = tl.sum(tl.where(m_slot, b_before, 0), 1).to(tl.int64)
            # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
            b_key = load_rows(key_ptr + b_old * stride_key_m, m_row, stride_key_d, D, BLOCK_D).to(tl.float32)
            b_value = load_rows(value_ptr + b_old * stride_value_m, m_row, stride_value_d, Dv, BLOCK_V)
            b_score = tl.sum(b_centroid.to(tl.float32) * b_key, 1) * scale_log2
            b_weight = tl.exp2(tl.where(m_row, b_score - b_lse, float("-inf")))
            b_grad_score = b_weight * (b_alpha + tl.sum(b_beta * b_value.to(tl.float32), 1)) * scale
            b_grad_centroid += b_grad_score[:, None] * b_key
            b_grad_key = b_grad_score[:, None] * b_centroid.to(tl.float32)
            p_grad_key = grad_key_ptr + b_old[:, None] * D + o_d[None, :]
            tl.atomic_add(p_grad_key, b_grad_key, mask=m_row[:, None] & (o_d < D)[None, :], sem="relaxed")
            p_grad_value = grad_value_ptr + b_old[:, None] * Dv + o_v[None, :]
            m_value = m_row[:, None] & (o_v < Dv)[None, :]
            tl.atomic_add(p_grad_value, b_weight[:, None] * b_beta, mask=m_value, sem="relaxed")
    for start in range(0, segment_length, COLUMNS):
        first_key = i_u * segment_length + start
        o_m = (first_key + o_n).to(tl.int64)
        m_key = start + o_n < segment_length
        m_rest = m_c[:, None] & m_key[None, :]
        if HAS_TOP:
            m_chosen = (b_top >= first_key) & (b_top < first_key + COLUMNS)
            for _chosen in range(tl.max(tl.sum(m_chosen.to(tl.int32), 1), 0)):
                m_slot, m_row = _first_true(m_chosen, o_t)
                m_chosen &= ~m_slot
                b_place = tl.sum(tl.where(m_slot, b_top - first_key, 0), 1)
                m_rest &= ~(m_row[:, None] & (o_n[None, :] == b_place[:, None]))
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        p_key, p_value = key_ptr + o_m * stride_key_m, value_ptr + o_m * stride_value_m
        b_key = load_rows(p_key, m_key, stride_key_d, D, BLOCK_D)
        b_scores = dot_rows(
            b_centroid, b_key, p_centroid, m_c, 1, p_key, m_key, stride_key_d, D,
            ROWS, COLUMNS, BY_PARTS, PRECISION,
        )  # fmt: skip
        b_scores = tl.where(m_rest, b_scores * scale_log2 - b_lse[:, None], float("-inf"))
        b_weights = tl.exp2(b_scores)
        # Sums over many queries leave float16's range: their products are those of float32.
        if BY_PARTS:
            b_grad_weights = dot_by_parts(p_beta, m_c, 1, p_value, m_key, stride_value_d, Dv, ROWS, COLUMNS, PRECISION)
        else:
            b_values = load_rows(p_value, m_key, stride_value_d, Dv, BLOCK_V).to(tl.float32)
            b_grad_weights = tl.dot(b_beta, tl.trans(b_values), input_precision=PRECISION)
        b_grad_scores = b_weights * (b_grad_weights + b_alpha[:, None]) * scale
        b_grad_centroid += tl.dot(b_grad_scores, b_key.to(tl.float32), input_precision=PRECISION)
        b_grad_keys = tl.dot(tl.trans(b_grad_scores), b_centroid.to(tl.float32), input_precision=PRECISION)
        p_grad_keys = grad_key_ptr + o_m[:, None] * D + o_d[None, :]
        tl.atomic_add(p_grad_keys, b_grad_keys, mask=m_key[:, None] & (o_d < D)[None, :], sem="relaxed")
        b_grad_values = tl.dot(tl.trans(b_weights), b_beta, input_precision=PRECISION)
        p_grad_values = grad_value_ptr + o_m[:, None] * Dv + o_v[None, :]
        tl.atomic_add(p_grad_values, b_grad_values, mask=m_key[:, None] & (o_v < Dv)[None, :], sem="relaxed")
    p_grad_centroid = grad_centroids_ptr + o_centroid[:, None] * D + o_d[None, :]
    tl.atomic_add(p_grad_centroid, b_grad_centroid, mask=m_c[:, None] & (o_d < D)[None, :], sem="relaxed")


def walk_config(key: torch.Tensor, value_dim: int, topk: int, *, backward: bool) -> dict:
    """Block sizes, warps and stages of a walk."""
    chip = chip_of(key)
    block_d, block_v = block_width(key.shape[3]), block_width(value_dim)
    widest = max(block_d, block_v)
    block_t = max(16, triton.next_power_of_2(topk))
    single = key.element_size() == 4
    # All top keys stay in registers during the walk.
    warps = max(4, block_t // 64)
    if backward:
        warps = max(warps, block_t // 32, widest * (2 if single else 1) // 32)
    warps = min(warps, 8)
    if single and not backward:
        # Longer float32 rows are walked by several programs, each for a part of the values.
        block_v = min(block_v, 128)
    return {
        "BLOCK_T": block_t,
        "ROWS": FEW_ROWS,
        "COLUMNS": 16 if widest > 64 or backward else 32,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BY_PARTS": single and widest > (32 if backward else 64),
        "PRECISION": chip.dot_precision(key.dtype),
        "num_warps": warps,
        "num_stages": 1,
        **chip.all_registers,
    }


def walk(
    top: torch.Tensor,
    rest_lse: torch.Tensor,
    rest_means: torch.Tensor,
    centroids: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor | None,
    layout: Layout,
    settings: Settings,
) -> None:
    """Write the top keys and, but for bi-clustered attention, the remainders of every segment and centroid.

    Args:
        top: `(P, U, C, T)` int32; the top keys come in no order, -1 where there are too few.
        rest_lse, rest_means: `(P, U, C)` and `(P, U, C, Dv)` float32, base-2 log-sum-exp and mean value.
        centroids: `(P, E, C, D)` float32.
        key, value, counts: see `make_plan`.
    """
    P, E, C, D = centroids.shape
    B, Hk, N, Dv = value.shape
    T = settings.topk
    config = walk_config(key, Dv, T, backward=False)
    has_rest = settings.method != "bi-clustered"
    tiles, value_tiles = triton.cdiv(C, config["ROWS"]), triton.cdiv(Dv, config["BLOCK_V"]) if has_rest else 1
    with on_device_of(key):
        _causal_clustered_attention_fwd_walk_kernel[(E * P * tiles * value_tiles,)](
            centroids, key, value, counts, top, rest_lse, rest_means, *key.stride(), *value.stride(),
            P, P // B, P // (B * Hk), N, D, Dv, layout.segment_length, layout.segments, layout.first_served, E, C, T,
            tiles, value_tiles, settings.scale * LOG2_E,
            HAS_COUNTS=counts is not None, HAS_TOP=T > 0, HAS_REST=has_rest, **config,
        )  # fmt: skip


def rest_backward(
    centroids: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor | None,
    top: torch.Tensor,
    rest_lse: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    layout: Layout,
    settings: Settings,
) -> torch.Tensor:
    """Gradient of the centroids `(P, E, C, D)`; adds to those of key and value, `(B · Hk, N, ·)` float32.

    `alpha` `(P, U, C)` and `beta` `(P, U, C, Dv)` are what the queries of each cluster hand back, see the kernel; they
    are overwritten.
    """
    P, E, C, D = centroids.shape
    B, Hk, N, Dv = value.shape
    T = settings.topk
    config = walk_config(key, Dv, T, backward=True)
    tiles = triton.cdiv(C, config["ROWS"])
    grad_centroids = torch.zeros_like(centroids)
    places = layout.segment_length, layout.segments, layout.first_served, E, C
    with on_device_of(key):
        _causal_clustered_attention_bwd_sum_kernel[(E * P * tiles,)](
            rest_lse, alpha, beta, counts, P, P // B, N, Dv, *places, tiles,
            HAS_COUNTS=counts is not None, ROWS=config["ROWS"], BLOCK_V=config["BLOCK_V"],
        )  # fmt: skip
        _causal_clustered_attention_bwd_rest_kernel[(E * P * tiles * layout.served,)](
            centroids, key, value, counts, top, rest_lse, alpha, beta, grad_centroids, grad_key, grad_value,
            *key.stride(), *value.stride(),
            P, P // B, P // (B * Hk), N, D, Dv, *places, T, tiles, settings.scale, settings.scale * LOG2_E,
            HAS_COUNTS=counts is not None, HAS_TOP=T > 0, **config,
        )  # fmt: skip
    return grad_centroids
