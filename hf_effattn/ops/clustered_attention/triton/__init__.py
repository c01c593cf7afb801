"""Clustered and improved clustered attention on a GPU: launchers, and what torch needs to know of the ops.

Queries are sorted by cluster; a pass of the centroids over the keys; then their members attend to the top keys, or get
a copy where there are none.
"""

from typing import NamedTuple

import torch

from ...shared.gradients import register_op
from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.centroids import centroid_pass
from ...shared.triton.chips import block_width
from ...shared.triton.cluster_table import _cluster_table_bwd_query_kernel, add_exact_keys
from ...shared.triton.cluster_table_forward import _cluster_table_fwd_kernel, blocks_of_queries
from ...shared.triton.recorded import recorded
from ...shared.triton.sort import SortedRows, cluster_means, empty_sorted, sort_by_cluster
from ...shared.triton.tiles import LOG2_E, tile_config
from ..reference import Inputs
from .centroid_backward import by_key, centroid_backward
from .kernels import (
    _clustered_attention_bwd_query_kernel,
    _clustered_attention_fwd_kernel,
    _improved_clustered_attention_bwd_cluster_kernel,
    _improved_clustered_attention_bwd_dot_kernel,
    _improved_clustered_attention_fwd_rest_kernel,
)

TILE = 64  # queries that one program copies to
ONLY_TOP_KEYS = {"HAS_SUMMARIES": False, "HAS_REST": True}


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass; without top keys the last four are empty."""

    order: torch.Tensor  # and the next two: the queries sorted by cluster, see `SortedRows`
    starts: torch.Tensor
    tiles: torch.Tensor
    centroids: torch.Tensor  # `(B · H, C, D)` float32
    lse: torch.Tensor  # base-2 log-sum-exp of the centroids' scores over all keys, `(B · H, C)`
    rest: torch.Tensor  # `O^b`, without top keys `O^c`, `(B · H, C, Dv)` float32
    top: torch.Tensor  # `(B · H, C, topk)` int32, the sets `T_j`
    top_scores: torch.Tensor  # their scores as exponents of 2
    mass: torch.Tensor  # `m_j`, `(B · H, C)`
    top_lse: torch.Tensor  # base-2 log-sum-exp of each query's scores over `T_j`, `(B · H, N)`


def _tile(x: Inputs) -> int:
    return tile_config(x.query, x.query.shape[3], x.value.shape[3])["ROWS"] if x.topk else TILE


def fake(x: Inputs) -> list[torch.Tensor]:
    """What `forward` returns, without numbers."""
    B, H, N, D = x.query.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return x.query.new_empty(B * H, *shape, dtype=dtype)

    saved = Saved(
        *empty_sorted(x.labels, x.clusters, _tile(x)),
        centroids=empty(x.clusters, D),
        lse=empty(x.clusters),
        rest=empty(x.clusters, x.value.shape[3]),
        top=empty(x.clusters, x.topk, dtype=torch.int32),
        top_scores=empty(x.clusters, x.topk),
        mass=empty(x.clusters if x.topk else 0),
        top_lse=empty(N if x.topk else 0),
    )
    return [empty_output(x.query, x.value), *saved]


@recorded
def forward(x: Inputs) -> list[torch.Tensor]:
    """`V_i = m_j softmax(scale · Q_i K_T^T) V_T + Σ_{t∉T} A^c_jt V_t`, and the tensors of `Saved`."""
    query, key, value, labels, clusters, topk, key_mask, query_mask, scale, dropout_p, dropout_seed = x
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    output = unwritten_output(query, value)
    members = sort_by_cluster(labels, query_mask, clusters, _tile(x))
    centroids = cluster_means(query, members)
    parts = centroid_pass(centroids, key, value, key_mask, scale, topk, dropout_p, dropout_seed)
    lse, rest, mass, top_lse = (
        query.new_empty(B * H, *size, dtype=torch.float32)
        for size in ((clusters,), (clusters, Dv), (clusters if topk else 0,), (N if topk else 0,))
    )
    tiles, splits = members.tiles.shape[1], parts.lse.shape[1]
    if topk == 0:
        _clustered_attention_fwd_kernel[(B * H * tiles,)](
            parts.values, parts.lse, members.order, members.starts, members.tiles, output, rest, lse,
            *output.stride(), H, N, Dv, clusters, tiles, splits, TILE=TILE, BLOCK_V=block_width(Dv),
        )  # fmt: skip
    else:
        config = tile_config(query, D, Dv)
        if topk <= 32:
            config["COLUMNS"] = min(32, config["COLUMNS"])
        blocks, sizes = blocks_of_queries(query, clusters, topk, 0, config)
        _improved_clustered_attention_fwd_rest_kernel[(B * H * clusters,)](
            parts.values, parts.lse, parts.top, parts.top_scores, value, dropout_seed, rest, mass, lse,
            *value.stride(), Hk, H // Hk * clusters, M, Dv, topk, splits, dropout_p,
            BLOCK_T=max(8, 2048 // config["BLOCK_V"]), BLOCK_V=config["BLOCK_V"],
        )  # fmt: skip
        _cluster_table_fwd_kernel[(B * H * blocks[0],)](
            query, key, value, dropout_seed, None, members.order, members.starts, parts.top, mass,
            rest, *[None] * 5, output, top_lse, None, *query.stride(), *key.stride(), *value.stride(),
            *output.stride(), H, H // Hk, N, D, Dv, clusters, 0, *blocks, topk, scale, scale * LOG2_E, dropout_p,
            **ONLY_TOP_KEYS, **sizes, **config,
        )  # fmt: skip
    top, top_scores = (table.view(B * H, clusters, topk) for table in (parts.top, parts.top_scores))
    sorted_rows = members.order, members.starts, members.tiles
    return [output, *Saved(*sorted_rows, centroids, lse, rest, top, top_scores, mass, top_lse)]


@recorded
def gradients(
    grad_output: torch.Tensor, saved_tensors: list[torch.Tensor], x: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and sets `T_j` held fixed."""
    saved = Saved(*saved_tensors)
    query, key, value, _, clusters, topk, _, _, scale, dropout_p, dropout_seed = x
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    grad_query, *of_keys = (torch.empty_like(tensor) for tensor in (query, key, value))
    if B == 0:
        return grad_query, of_keys[0], of_keys[1]
    config = tile_config(query, D, Dv, backward=True)
    tile = config["ROWS"] if topk else TILE
    if saved.tiles.shape[1] != N // tile + clusters + 1:
        raise RuntimeError(f"the forward pass had tiles of {_tile(x)} rows, this one {tile}")
    members = SortedRows(saved.order, saved.starts, saved.tiles, clusters, tile)
    sorted_tiles = saved.order, saved.starts, saved.tiles
    tiles = saved.tiles.shape[1]
    strides = *query.stride(), *key.stride(), *value.stride(), *grad_output.stride()
    grads = cluster_means(grad_output, members)
    if topk:
        row_dot, extra = torch.empty_like(saved.top_lse), torch.empty_like(saved.top_scores)
        delta, correction = torch.empty_like(saved.lse), torch.empty_like(saved.centroids)
        block_d, block_v = block_width(D), block_width(Dv)
        _improved_clustered_attention_bwd_dot_kernel[(B * H * tiles,)](
            query, key, value, grad_output, dropout_seed, *sorted_tiles, saved.top, saved.top_lse, row_dot,
            *strides, H, H // Hk, N, D, Dv, clusters, tiles, topk, scale * LOG2_E, dropout_p,
            **config,
        )  # fmt: skip
        _improved_clustered_attention_bwd_cluster_kernel[(B * H * clusters,)](
            key, value, dropout_seed, saved.order, saved.starts, saved.top, saved.top_scores, saved.lse,
            saved.rest, saved.mass, grads, row_dot, delta, extra, correction, *key.stride(), *value.stride(),
            Hk, H // Hk * clusters, N, M, D, Dv, clusters, topk, scale, dropout_p,
            BLOCK_N=128, BLOCK_T=max(8, 2048 // max(block_d, block_v)), BLOCK_D=block_d, BLOCK_V=block_v,
        )  # fmt: skip
    else:
        delta = torch.linalg.vecdot(saved.rest, grads)
    grad_centroids, sums = centroid_backward(x, saved.centroids, grads, saved.lse, delta, members)
    splits = grad_centroids.shape[1]
    if topk:
        rest = saved.centroids, grads, saved.lse, saved.mass, saved.top_scores, extra
        add_exact_keys(x, grad_output, members, saved.top, saved.top_lse, row_dot, sums, columns=topk, rest=rest)
    if topk:
        _cluster_table_bwd_query_kernel[(B * H * tiles,)](
            query, key, value, grad_output, dropout_seed, None, *sorted_tiles, saved.top, saved.top_lse, row_dot,
            saved.mass, correction, *[None] * 7, grad_centroids, grad_query, *strides, *grad_query.stride(),
            H, H // Hk, N, D, Dv, clusters, 0, tiles, topk, splits, scale, scale * LOG2_E, dropout_p,
            PART=16, **ONLY_TOP_KEYS, **config,
        )  # fmt: skip
    else:
        _clustered_attention_bwd_query_kernel[(B * H * tiles,)](
            grad_centroids, *sorted_tiles, grad_query, *grad_query.stride(),
            H, N, D, clusters, tiles, splits, TILE=TILE, BLOCK_D=block_width(D),
        )  # fmt: skip
    for target, of_rows in zip(of_keys, by_key(sums, key, value), strict=True):
        target.copy_(of_rows)
    return grad_query, of_keys[0], of_keys[1]


clustered_attention = register_op(
    "clustered_attention_triton", Inputs, forward, gradients, fake=fake, keeps=slice(1, None)
)
