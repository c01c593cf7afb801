"""Improved clustered attention on a GPU: launchers, and what torch needs to know of the op.

Nothing is asked of the host between the inputs and the output, so that CUDA graphs can record it. Labels are not
checked: a query whose label is outside `0 .. clusters - 1` is in no cluster and gets 0. The order in which clusters
add to the gradient of a key that they share is not fixed, except under `torch.use_deterministic_algorithms(True)`.
"""

from typing import Any, NamedTuple

import torch
import triton

from ...clustered_attention.triton.backward import centroid_backward
from ...shared.dropout import CENTROID_WEIGHTS, KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from ...shared.gradients import register_op
from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.centroids import centroid_pass
from ...shared.triton.chips import block_width, on_device_of
from ...shared.triton.cluster_table import _cluster_table_bwd_query_kernel
from ...shared.triton.cluster_table_forward import _cluster_table_fwd_kernel, blocks_of_queries
from ...shared.triton.sort import SortedRows, cluster_means, empty_sorted, sort_by_cluster
from ...shared.triton.tiles import LOG2_E, tile_config
from ..reference import Inputs
from .backward import (
    LARGEST_SPLIT,
    ROWS_OF_A_SPLIT,
    _improved_clustered_attention_bwd_cluster_kernel,
    _improved_clustered_attention_bwd_dot_kernel,
    _improved_clustered_attention_bwd_key_kernel,
)
from .forward import _improved_clustered_attention_fwd_rest_kernel

ONLY_TOP_KEYS = {"HAS_SUMMARIES": False, "HAS_REST": True, "HAS_EXACT": False}


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs.

    Attributes:
        order, starts, tiles: the queries sorted by cluster, see `SortedRows`.
        centroids: `(B · H, C, D)` float32.
        top: `(B · H, C, topk)` int32, the sets `T_j`.
        top_scores: their scores as exponents of 2.
        lse: base-2 log-sum-exp of the centroids' scores over all keys, `(B · H, C)`.
        rest: `O^b`, `(B · H, C, Dv)` float32.
        mass: `m_j`, `(B · H, C)`.
        top_lse: base-2 log-sum-exp of each query's scores over `T_j`, `(B · H, N)`.
    """

    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    centroids: torch.Tensor
    top: torch.Tensor
    top_scores: torch.Tensor
    lse: torch.Tensor
    rest: torch.Tensor
    mass: torch.Tensor
    top_lse: torch.Tensor


def _tile(query: torch.Tensor, value: torch.Tensor) -> int:
    return tile_config(query, query.shape[3], value.shape[3])["ROWS"]


def _forward(x: Inputs) -> list[torch.Tensor]:
    """`V_i = m_j softmax(scale · Q_i K_T^T) V_T + Σ_{t∉T} A^c_jt V_t`, and the tensors of `Saved`."""
    query, key, value, labels, clusters, topk, key_mask, query_mask, scale, dropout_p, dropout_seed = x
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    config = tile_config(query, D, Dv)
    if topk <= 32:
        config["COLUMNS"] = min(32, config["COLUMNS"])
    output = unwritten_output(query, value)
    members = sort_by_cluster(labels, query_mask, clusters, config["ROWS"])
    centroids = cluster_means(query, members)
    found = centroid_pass(centroids, key, value, key_mask, scale, topk, dropout_p, dropout_seed)
    rest = query.new_empty(B * H, clusters, Dv, dtype=torch.float32)
    mass, lse = (query.new_empty(B * H, clusters, dtype=torch.float32) for _ in range(2))
    top_lse = query.new_empty(B * H, N, dtype=torch.float32)
    blocks, sizes = blocks_of_queries(query, clusters, topk, 0, config)
    dropout = {"HAS_DROPOUT": dropout_seed is not None, "KINDS": KINDS_OF_WEIGHTS}
    if B:
        with on_device_of(query):
            _improved_clustered_attention_fwd_rest_kernel[(B * H * clusters,)](
                found.values, found.lse, found.top, found.top_scores, value, dropout_seed, rest, mass, lse,
                *value.stride(), Hk, H // Hk * clusters, M, Dv, topk, found.lse.shape[1], dropout_p,
                KIND=CENTROID_WEIGHTS, BLOCK_T=max(8, 2048 // config["BLOCK_V"]), BLOCK_V=config["BLOCK_V"], **dropout,
            )  # fmt: skip
            _cluster_table_fwd_kernel[(B * H * blocks[0],)](
                query, key, value, dropout_seed, None, members.order, members.starts, found.top, mass,
                rest, *[None] * 5, output, top_lse, None, *query.stride(), *key.stride(), *value.stride(),
                *output.stride(), H, H // Hk, N, D, Dv, clusters, 0, *blocks, topk, scale, scale * LOG2_E, dropout_p,
                HAS_DROPOUT=dropout["HAS_DROPOUT"], **ONLY_TOP_KEYS, **sizes, **config,
            )  # fmt: skip
    top, top_scores = (table.view(B * H, clusters, topk) for table in (found.top, found.top_scores))
    saved = members.order, members.starts, members.tiles, centroids, top, top_scores, lse, rest, mass, top_lse
    return [output, *saved]


def _fake(x: Inputs) -> list[torch.Tensor]:
    B, H, N, D = x.query.shape

    def empty(*shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return x.query.new_empty(B * H, *shape, dtype=dtype)

    saved = Saved(
        *empty_sorted(x.labels, x.clusters, _tile(x.query, x.value)),
        centroids=empty(x.clusters, D),
        top=empty(x.clusters, x.topk, dtype=torch.int32),
        top_scores=empty(x.clusters, x.topk),
        lse=empty(x.clusters),
        rest=empty(x.clusters, x.value.shape[3]),
        mass=empty(x.clusters),
        top_lse=empty(N),
    )
    return [empty_output(x.query, x.value), *saved]


def gradients(
    grad_output: torch.Tensor, saved_tensors: list[torch.Tensor], x: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and sets `T_j` held fixed."""
    saved = Saved(*saved_tensors)
    query, key, value, _, clusters, topk, _, _, scale, dropout_p, dropout_seed = x
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    config = tile_config(query, D, Dv, backward=True)
    if saved.tiles.shape[1] != N // config["ROWS"] + clusters + 1:
        raise RuntimeError(f"the forward pass had tiles of {_tile(query, value)} rows, this one {config['ROWS']}")
    config |= {"HAS_DROPOUT": dropout_seed is not None, "KINDS": KINDS_OF_WEIGHTS}
    members = SortedRows(saved.order, saved.starts, saved.tiles, clusters, config["ROWS"])
    strides = *query.stride(), *key.stride(), *value.stride(), *grad_output.stride()
    grads = cluster_means(grad_output, members)
    row_dot, extra = torch.empty_like(saved.top_lse), torch.empty_like(saved.top_scores)
    delta, correction = torch.empty_like(saved.lse), torch.empty_like(saved.centroids)
    grad_query = torch.empty_like(query)
    if B == 0:
        return grad_query, torch.empty_like(key), torch.empty_like(value)
    tiles = (B * H * saved.tiles.shape[1],)
    block_d, block_v = block_width(D), block_width(Dv)
    with on_device_of(query):
        _improved_clustered_attention_bwd_dot_kernel[tiles](
            query, key, value, grad_output, dropout_seed, saved.order, saved.starts, saved.tiles, saved.top,
            saved.top_lse, row_dot, *strides,
            H, H // Hk, N, D, Dv, clusters, saved.tiles.shape[1], topk, scale * LOG2_E, dropout_p,
            KIND=TOPK_AND_SUMMARY_WEIGHTS, **config,
        )  # fmt: skip
        _improved_clustered_attention_bwd_cluster_kernel[(B * H * clusters,)](
            key, value, dropout_seed, saved.order, saved.starts, saved.top, saved.top_scores, saved.lse, saved.rest,
            saved.mass, grads, row_dot, delta, extra, correction, *key.stride(), *value.stride(),
            Hk, H // Hk * clusters, N, M, D, Dv, clusters, topk, scale, dropout_p,
            HAS_DROPOUT=config["HAS_DROPOUT"], KINDS=KINDS_OF_WEIGHTS, KIND=CENTROID_WEIGHTS,
            BLOCK_N=128, BLOCK_T=max(8, 2048 // max(block_d, block_v)), BLOCK_D=block_d, BLOCK_V=block_v,
        )  # fmt: skip
    grad_centroids, grad_key, grad_value = centroid_backward(x, saved.centroids, grads, saved.lse, delta, members)
    with on_device_of(query):
        _add_top_keys(x, saved, grad_output, grads, row_dot, extra, grad_key, grad_value)
        _cluster_table_bwd_query_kernel[tiles](
            query, key, value, grad_output, dropout_seed, None, saved.order, saved.starts, saved.tiles, saved.top,
            saved.top_lse, row_dot, saved.mass, correction, *[None] * 7, grad_centroids, grad_query, *strides,
            *grad_query.stride(), H, H // Hk, N, D, Dv, clusters, 0, saved.tiles.shape[1], topk,
            grad_centroids.shape[1], scale, scale * LOG2_E, dropout_p, HAS_DROPOUT=config["HAS_DROPOUT"], PART=16,
            **ONLY_TOP_KEYS, **tile_config(query, D, Dv, backward=True),
        )  # fmt: skip
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _add_top_keys(
    x: Inputs, saved: Saved, grad_output: torch.Tensor, grads: torch.Tensor, row_dot: torch.Tensor,
    extra: torch.Tensor, grad_key: torch.Tensor, grad_value: torch.Tensor,
) -> None:  # fmt: skip
    """Add to the float32 gradients of key and value what comes through the top keys of every cluster."""
    query, key, value, _, clusters, topk, _, _, scale, dropout_p, dropout_seed = x
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    ordered = torch.are_deterministic_algorithms_enabled()
    targets = grad_key, grad_value
    if ordered:
        targets = grad_key.new_empty(saved.top.numel(), D), grad_value.new_empty(saved.top.numel(), Dv)
    config = tile_config(query, D, Dv, backward=True, two_sums=True)
    blocks = triton.cdiv(topk, config["ROWS"])
    if blocks == 0:
        return
    splits = 1 if ordered else min(LARGEST_SPLIT, triton.cdiv(N, ROWS_OF_A_SPLIT))
    _improved_clustered_attention_bwd_key_kernel[(B * H * clusters * blocks * splits,)](
        query, key, value, grad_output, dropout_seed, saved.order, saved.starts, saved.top, saved.top_scores,
        saved.top_lse, row_dot, saved.lse, saved.mass, saved.centroids, grads, extra, *targets,
        *query.stride(), *key.stride(), *value.stride(), *grad_output.stride(),
        *grad_key.stride(), *grad_value.stride(),
        H, H // Hk, N, M, D, Dv, clusters, topk, blocks, splits, ROWS_OF_A_SPLIT, scale, scale * LOG2_E, dropout_p,
        HAS_DROPOUT=dropout_seed is not None, KINDS=KINDS_OF_WEIGHTS, CENTROID_KIND=CENTROID_WEIGHTS,
        TOPK_KIND=TOPK_AND_SUMMARY_WEIGHTS, ORDERED=ordered, **config,
    )  # fmt: skip
    if ordered:
        # Rows of a flat (B · Hk · M) table; places without a key hold 0 and may go anywhere.
        first = torch.arange(B * Hk, device=key.device).repeat_interleave(H // Hk * clusters * topk) * M
        rows = saved.top.flatten().clamp(min=0) + first
        for grad, target in zip((grad_key, grad_value), targets, strict=True):
            summed = grad.reshape(B * Hk * M, -1).index_add(0, rows, target)
            grad.copy_(summed.view(grad.shape))


improved_clustered_attention = register_op(
    "improved_clustered_attention_triton", Inputs, _forward, gradients, fake=_fake, keeps=slice(1, None)
)
