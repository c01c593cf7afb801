"""Backward pass of the centroids' attention; clustered and improved clustered attention share it.

Per query of cluster `j`, with `ḡ_j` the mean gradient of its queries' outputs and `n_j` their number:
`dS̄_jt = A_jt (ḡ_j · V_t - δ_j)`, and then `dQ_i = scale Σ_t dS̄_jt K_t` for its members,
`dK_t = scale Σ_j n_j dS̄_jt Qc_j` and `dV_t = Σ_j n_j A_jt ḡ_j`. Means instead of sums stay in range in float16, and so
do `n_j` over the mean size of a cluster, which multiplies the sums once they are made.
"""

import torch
import triton.language as tl

from ...shared.triton.centroids import split_count
from ...shared.triton.cluster_table import load_sizes
from ...shared.triton.dropout import dropout_factor
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import CENTROID_KIND, KINDS, add_to_queries, dot_rows
from ...shared.triton.sort import SortedRows
from ...shared.triton.tiles import LOG2_E, load_mask, load_operand, load_rows, store_rows, tile_config
from ..reference import Inputs


@kernel
def _clustered_attention_bwd_key_kernel(
    centroids_ptr, key_ptr, value_ptr, key_mask_ptr, seed_ptr, grads_ptr, lse_ptr, delta_ptr, starts_ptr,
    grad_key_ptr, grad_value_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d, stride_mask_b, stride_mask_m,
    stride_gk_b, stride_gk_h, stride_gk_m, stride_gk_d, stride_gv_b, stride_gv_h, stride_gv_m, stride_gv_d,
    key_heads, rows, M, D, Dv, clusters, blocks, mean_size, scale, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dK_t` and `dV_t` of a tile of `ROWS` keys: a walk over the centroids."""
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    o_m = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    i_b, i_h = i_p // key_heads, i_p % key_heads
    m_key = load_mask(key_mask_ptr, i_b, o_m, o_m < M, stride_mask_b, stride_mask_m)
    o_m64 = o_m.to(tl.int64)
    p_key = key_ptr + i_b * stride_key_b + i_h * stride_key_h + o_m64 * stride_key_m
    p_value = value_ptr + i_b * stride_value_b + i_h * stride_value_h + o_m64 * stride_value_m
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    key = load_operand(p_key, m_key, stride_key_d, D, BLOCK_D)
    value = load_operand(p_value, m_key, stride_value_d, Dv, BLOCK_V)
    b_grad_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_grad_value = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for first in range(0, rows, COLUMNS):
        o_c = first + tl.arange(0, COLUMNS)
        m_c = o_c < rows
        o_row = i_p * rows + o_c
        p_centroid, p_grad = centroids_ptr + o_row * D, grads_ptr + o_row * Dv
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        b_centroid = load_rows(p_centroid, m_c, 1, D, BLOCK_D).to(key[0].dtype)
        b_grad = load_rows(p_grad, m_c, 1, Dv, BLOCK_V).to(value[0].dtype)
        b_lse = tl.load(lse_ptr + o_row, mask=m_c, other=0.0)
        b_delta = tl.load(delta_ptr + o_row, mask=m_c, other=0.0)
        b_size = load_sizes(starts_ptr, i_p * (rows // clusters), o_c, m_c, clusters)
        b_scores = dot_rows(key, (b_centroid, p_centroid, m_c, 1), D, BY_PARTS, PRECISION)
        b_grad_weights = dot_rows(value, (b_grad, p_grad, m_c, 1), Dv, BY_PARTS, PRECISION)
        b_scores = tl.where(m_key[:, None], b_scores * scale_log2, float("-inf"))
        b_weights = tl.exp2(b_scores - b_lse[None, :])
        # [ROWS, COLUMNS], every member of a cluster counted
        b_weights *= (b_size / mean_size)[None, :]
        b_dropped = b_weights
        if seed_ptr is not None:
            b_factor = tl.trans(dropout_factor(seed_ptr, o_row, o_m, M, dropout_p, KINDS, CENTROID_KIND))
            b_dropped = b_weights * b_factor
            b_grad_weights *= b_factor
        b_grad_scores = b_weights * (b_grad_weights - b_delta[None, :])
        b_grad_value += tl.dot(b_dropped.to(b_grad.dtype), b_grad, input_precision=PRECISION)
        b_grad_key += tl.dot(b_grad_scores.to(b_centroid.dtype), b_centroid, input_precision=PRECISION)
    p_gk = grad_key_ptr + i_b * stride_gk_b + i_h * stride_gk_h + o_m64 * stride_gk_m
    p_gv = grad_value_ptr + i_b * stride_gv_b + i_h * stride_gv_h + o_m64 * stride_gv_m
    store_rows(p_gk, b_grad_key * (scale * mean_size), o_m < M, stride_gk_d, D, BLOCK_D)
    store_rows(p_gv, b_grad_value * mean_size, o_m < M, stride_gv_d, Dv, BLOCK_V)


@kernel
def _clustered_attention_bwd_centroid_kernel(
    centroids_ptr, key_ptr, value_ptr, key_mask_ptr, seed_ptr, grads_ptr, lse_ptr, delta_ptr, grad_centroids_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d, stride_mask_b, stride_mask_m,
    key_heads, rows, M, D, Dv, blocks, splits, split_length, scale, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`scale Σ_t dS̄_jt K_t` of a tile of `ROWS` centroids, over one part of the keys."""
    i_split = tl.program_id(0) // blocks % splits
    i_p = (tl.program_id(0) // (blocks * splits)).to(tl.int64)
    o_c = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    m_c = o_c < rows
    o_row = i_p * rows + o_c
    i_b, i_h = i_p // key_heads, i_p % key_heads
    key_ptr += i_b * stride_key_b + i_h * stride_key_h
    value_ptr += i_b * stride_value_b + i_h * stride_value_h
    p_centroid, p_grad = centroids_ptr + o_row * D, grads_ptr + o_row * Dv
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    b_centroid = load_rows(p_centroid, m_c, 1, D, BLOCK_D).to(key_ptr.dtype.element_ty)
    b_grad = load_rows(p_grad, m_c, 1, Dv, BLOCK_V).to(value_ptr.dtype.element_ty)
    centroid, grad = (b_centroid, p_centroid, m_c, 1), (b_grad, p_grad, m_c, 1)
    b_lse = tl.load(lse_ptr + o_row, mask=m_c, other=0.0)
    b_delta = tl.load(delta_ptr + o_row, mask=m_c, other=0.0)
    b_grad_centroid = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(i_split * split_length, tl.minimum(M, (i_split + 1) * split_length), COLUMNS):
        o_m = start + tl.arange(0, COLUMNS)
        m_key = load_mask(key_mask_ptr, i_b, o_m, o_m < M, stride_mask_b, stride_mask_m)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + o_m.to(tl.int64) * stride_key_m, m_key, stride_key_d, D, BLOCK_D)
        value = load_operand(value_ptr + o_m.to(tl.int64) * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
        b_grad_centroid = add_to_queries(
            centroid, grad, b_lse, b_delta, key, value, m_key[None, :], None, None, b_grad_centroid, D, Dv, scale_log2,
            seed_ptr, o_row, o_m, M, dropout_p, CENTROID_KIND, BY_PARTS, PRECISION,
        )  # fmt: skip
    store_rows(grad_centroids_ptr + (o_row * splits + i_split) * D, b_grad_centroid * scale, m_c, 1, D, BLOCK_D)


def centroid_backward(
    x: Inputs,
    centroids: torch.Tensor,
    grads: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    members: SortedRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients through the centroids' attention.

    Args:
        x: the inputs of the op.
        centroids: `(B · H, C, D)` float32.
        grads: mean gradient `ḡ` of the outputs of each cluster, `(B · H, C, Dv)` float32.
        lse: base-2 log-sum-exp of the scores of each centroid, `(B · H, C)`.
        delta: `δ`, `(B · H, C)`.
        members: the queries, sorted.

    Returns:
        `(B · H · C, splits, D)` float32, parts of what each query of a cluster gets as gradient; the gradients of key
        and value side by side, `(B · Hk · M, D + Dv)` float32.
    """
    key, value, key_mask, dropout_seed = x.key, x.value, x.key_mask, x.dropout_seed
    B, Hk, M, D = key.shape
    Dv = value.shape[3]
    rows = centroids.shape[0] * centroids.shape[1] // max(1, B * Hk)
    sums = key.new_empty(B * Hk * M, D + Dv, dtype=torch.float32)
    grad_key, grad_value = by_key(sums, key, value)
    mask_strides = (0, 0) if key_mask is None else key_mask.stride()
    config = tile_config(key, D, Dv, backward=True)
    key_config = tile_config(key, D, Dv, backward=True, two_sums=True)
    blocks = -(-rows // config["ROWS"])
    splits = split_count(B * Hk * blocks, M, config["COLUMNS"])
    split_length = -(-M // (splits * config["COLUMNS"])) * config["COLUMNS"]
    grad_centroids = key.new_empty(B * Hk * rows, splits, D, dtype=torch.float32)
    key_blocks = -(-M // key_config["ROWS"])
    mean_size = max(1.0, members.order.shape[1] / members.clusters)
    _clustered_attention_bwd_key_kernel[(B * Hk * key_blocks,)](
        centroids, key, value, key_mask, dropout_seed, grads, lse, delta, members.starts, grad_key, grad_value,
        *key.stride(), *value.stride(), *mask_strides, *grad_key.stride(), *grad_value.stride(),
        Hk, rows, M, D, Dv, members.clusters, key_blocks, mean_size, x.scale, x.scale * LOG2_E, x.dropout_p,
        **key_config,
    )  # fmt: skip
    _clustered_attention_bwd_centroid_kernel[(B * Hk * blocks * splits,)](
        centroids, key, value, key_mask, dropout_seed, grads, lse, delta, grad_centroids,
        *key.stride(), *value.stride(), *mask_strides,
        Hk, rows, M, D, Dv, blocks, splits, split_length, x.scale, x.scale * LOG2_E, x.dropout_p,
        **config,
    )  # fmt: skip
    return grad_centroids, sums


def by_key(sums: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of `sums` `(B · Hk · M, D + Dv)` of the sizes of key and value."""
    return sums.view(*key.shape[:3], sums.shape[1]).split([key.shape[3], value.shape[3]], dim=3)
