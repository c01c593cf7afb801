"""Clustered attention on a GPU: queries sorted by cluster, the centroids' attention, a copy to the members.

Nothing is asked of the host between the inputs and the output, so that CUDA graphs can record it. Labels are not
checked: a query whose label is outside `0 .. clusters - 1` is in no cluster and gets 0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...shared.gradients import register_op
from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.centroids import centroid_pass, merge_splits
from ...shared.triton.chips import LENGTHS, block_width, on_device_of
from ...shared.triton.cluster_table import load_split_sum
from ...shared.triton.sort import SortedRows, cluster_means, empty_sorted, sort_by_cluster
from ...shared.triton.tiles import load_tile
from ..reference import Inputs
from .backward import centroid_backward

TILE = 64  # queries that one program writes


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs.

    Attributes:
        order, starts, tiles: the queries sorted by cluster, see `SortedRows`.
        centroids: `(B · H, C, D)` float32.
        merged: `O^c`, `(B · H, C, Dv)` float32.
        lse: base-2 log-sum-exp of the centroids' scores over all keys, `(B · H, C)`.
    """

    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    centroids: torch.Tensor
    merged: torch.Tensor
    lse: torch.Tensor


@triton.jit(do_not_specialize=LENGTHS)
def _clustered_attention_fwd_kernel(
    values_ptr, partial_lse_ptr, order_ptr, starts_ptr, tiles_ptr, output_ptr, merged_ptr, lse_ptr,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, N, Dv, clusters, tiles, splits,
    TILE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`O_i = O^c_j` for a tile of members of `j`; the first tile of a cluster keeps `O^c_j` for the backward pass."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, o_place, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, TILE
    )
    o_v = tl.arange(0, BLOCK_V)
    in_cluster = cluster < clusters
    i_row = i_p * clusters + tl.where(in_cluster, cluster, 0)
    b_value, lse = merge_splits(values_ptr, partial_lse_ptr, i_row, splits, Dv, BLOCK_V)
    first = tl.load(starts_ptr + i_p * (clusters + 2) + cluster)
    if in_cluster & (tl.min(o_place, 0) == first):
        tl.store(merged_ptr + i_row * Dv + o_v, b_value, mask=o_v < Dv)
        tl.store(lse_ptr + i_row, lse)
    # Rows in no cluster get 0.
    b_output = tl.zeros([TILE, BLOCK_V], tl.float32) + tl.where(in_cluster, b_value, 0.0)[None, :]
    p_output = output_ptr + i_p // H * stride_output_b + i_p % H * stride_output_h
    p_output += b_row[:, None] * stride_output_n + o_v[None, :] * stride_output_d
    tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=m_row[:, None] & (o_v < Dv)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _clustered_attention_bwd_query_kernel(
    grad_centroids_ptr, order_ptr, starts_ptr, tiles_ptr, grad_query_ptr,
    stride_gq_b, stride_gq_h, stride_gq_n, stride_gq_d,
    H, N, D, clusters, tiles, splits,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dQ_i` of a tile of members of one cluster: the sum over the parts of the keys."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, N, clusters, tiles, TILE
    )
    o_d = tl.arange(0, BLOCK_D)
    i_row = i_p * clusters + tl.where(cluster < clusters, cluster, 0)
    b_grad = load_split_sum(grad_centroids_ptr, i_row, splits, D, BLOCK_D)
    b_grad = tl.zeros([TILE, BLOCK_D], tl.float32) + tl.where(cluster < clusters, b_grad, 0.0)[None, :]
    p_grad = grad_query_ptr + i_p // H * stride_gq_b + i_p % H * stride_gq_h
    p_grad += b_row[:, None] * stride_gq_n + o_d[None, :] * stride_gq_d
    tl.store(p_grad, b_grad.to(grad_query_ptr.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])


def _forward(x: Inputs) -> list[torch.Tensor]:
    """`V_i = A^c_{l(i)} V`, and the tensors of `Saved`."""
    B, H, N, _ = x.query.shape
    Dv = x.value.shape[3]
    output = unwritten_output(x.query, x.value)
    members = sort_by_cluster(x.labels, x.query_mask, x.clusters, TILE)
    centroids = cluster_means(x.query, members)
    found = centroid_pass(centroids, x.key, x.value, x.key_mask, x.scale, 0, x.dropout_p, x.dropout_seed)
    merged = x.query.new_empty(B * H, x.clusters, Dv, dtype=torch.float32)
    lse = x.query.new_empty(B * H, x.clusters, dtype=torch.float32)
    tiles = members.tiles.shape[1]
    if B:
        with on_device_of(x.query):
            _clustered_attention_fwd_kernel[(B * H * tiles,)](
                found.values, found.lse, members.order, members.starts, members.tiles, output, merged, lse,
                *output.stride(), H, N, Dv, x.clusters, tiles, found.lse.shape[1], TILE=TILE, BLOCK_V=block_width(Dv),
            )  # fmt: skip
    return [output, *Saved(members.order, members.starts, members.tiles, centroids, merged, lse)]


def _fake(x: Inputs) -> list[torch.Tensor]:
    B, H, _, D = x.query.shape
    empty = x.query.new_empty
    saved = Saved(
        *empty_sorted(x.labels, x.clusters, TILE),
        centroids=empty(B * H, x.clusters, D, dtype=torch.float32),
        merged=empty(B * H, x.clusters, x.value.shape[3], dtype=torch.float32),
        lse=empty(B * H, x.clusters, dtype=torch.float32),
    )
    return [empty_output(x.query, x.value), *saved]


def gradients(
    grad_output: torch.Tensor, saved_tensors: list[torch.Tensor], x: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels held fixed."""
    saved = Saved(*saved_tensors)
    B, H, N, D = x.query.shape
    tiles = saved.tiles.shape[1]
    members = SortedRows(saved.order, saved.starts, saved.tiles, x.clusters, TILE)
    grads = cluster_means(grad_output, members)
    with torch.autocast(x.query.device.type, enabled=False):
        delta = torch.linalg.vecdot(saved.merged, grads)
    grad_centroids, grad_key, grad_value = centroid_backward(x, saved.centroids, grads, saved.lse, delta, members)
    grad_query = torch.empty_like(x.query)
    if grad_query.numel():
        with on_device_of(x.query):
            _clustered_attention_bwd_query_kernel[(B * H * tiles,)](
                grad_centroids, saved.order, saved.starts, saved.tiles, grad_query, *grad_query.stride(),
                H, N, D, x.clusters, tiles, grad_centroids.shape[1], TILE=TILE, BLOCK_D=block_width(D),
            )  # fmt: skip
    return grad_query, grad_key.to(x.key.dtype), grad_value.to(x.value.dtype)


clustered_attention = register_op(
    "clustered_attention_triton", Inputs, _forward, gradients, fake=_fake, keeps=slice(1, None)
)
