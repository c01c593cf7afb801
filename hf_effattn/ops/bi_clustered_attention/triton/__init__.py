"""Bi-clustered attention on a GPU: launchers, and what torch needs to know of the op."""

from typing import Any, cast

import torch

from ...shared.gradients import register_op
from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.cluster_table_forward import _cluster_table_fwd_kernel, blocks_of_queries
from ...shared.triton.recorded import recorded
from ...shared.triton.sort import SortedRows, empty_sorted, sort_both_by_cluster
from ...shared.triton.tiles import LOG2_E, tile_config
from ..reference import Inputs
from .backward import attend_backward
from .exact_heads import attend_exactly, exact_backward
from .forward import Saved, choose_keys, make_tables
from .products import cluster_products


def _tiles(query: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """Rows of a tile of sorted queries, and of sorted keys."""
    dims = query.shape[3], value.shape[3]
    key_config = tile_config(query, *dims, backward=True, two_sums=True)
    return tile_config(query, *dims)["ROWS"], key_config["ROWS"]


@recorded
def _forward(x: Inputs) -> list[torch.Tensor]:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic Ṽ_jc + s_i η_i^T M_j`, and the tensors of `Saved`."""
    (query, key, value, labels, key_labels), key_mask, query_mask = x[:5], x.key_mask, x.query_mask
    scale, dropout_p, dropout_seed = x.scale, x.dropout_p, x.dropout_seed
    clusters, key_clusters, topk = x.counts()[0]
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    if B * N * M == 0:
        return _fake(x)
    tile, key_tile = _tiles(query, value)
    exact_heads = None if x.exact_heads is None else x.exact_heads.contiguous()
    output = unwritten_output(query, value)
    queries, keys = sort_both_by_cluster(
        (labels, query_mask, clusters, tile), (key_labels, key_mask, key_clusters, key_tile)
    )
    mean_keys, mean_values = (query.new_empty(B * Hk, key_clusters, d, dtype=torch.float32) for d in (D, Dv))
    covariances, _ = cluster_products(key, value, keys, mean_keys, mean_values)
    centroids, log_squares, taken, top = choose_keys(x, exact_heads, queries, keys, mean_keys)
    tables = make_tables(x, exact_heads, keys, centroids, log_squares, taken, covariances)
    table_keys, table_values, log_mass, bias, at_centroid, dipoles = tables
    lse, share = (query.new_empty(B * H, N, dtype=torch.float32) for _ in range(2))
    config = tile_config(query, D, Dv, three=dropout_seed is None)
    blocks, sizes = blocks_of_queries(query, clusters, topk, key_clusters, config)
    _cluster_table_fwd_kernel[(B * H * blocks[0],)](
        query, key, value, dropout_seed, exact_heads, queries.order, queries.starts, top,
        None, None, table_keys, table_values, bias, centroids, dipoles, output, lse, share,
        *query.stride(), *key.stride(), *value.stride(), *output.stride(),
        H, H // Hk, N, D, Dv, clusters, key_clusters, *blocks, topk, scale, scale * LOG2_E, dropout_p,
        HAS_SUMMARIES=True, HAS_REST=False, **sizes, **config,
    )  # fmt: skip
    if exact_heads is not None:
        attend_exactly(output, lse, x, exact_heads)
    saved = Saved(
        queries.order, queries.starts, queries.tiles, keys.order, keys.starts, keys.tiles, centroids, mean_keys,
        mean_values, log_squares, top, taken, table_keys, table_values, log_mass, bias, at_centroid, covariances,
        dipoles, lse, share,
    )  # fmt: skip
    return [output, *saved]


@recorded
def gradients(
    grad_output: torch.Tensor, forward: list[torch.Tensor], x: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and sets `T_j` held fixed; `forward` is what the forward op gave."""
    output, saved = forward[0], Saved(*forward[1:])
    query, key, value = x[:3]
    B, N, M = query.shape[0], query.shape[2], key.shape[2]
    if B * N * M == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    tile, key_tile = _tiles(query, value)
    clusters, key_clusters, _ = x.counts()[0]
    queries = SortedRows(saved.order, saved.starts, saved.tiles, clusters, tile)
    keys = SortedRows(saved.key_order, saved.key_starts, saved.key_tiles, key_clusters, key_tile)
    tile_tables, expected = (saved.tiles, saved.key_tiles), (N // tile + clusters, M // key_tile + key_clusters)
    if any(tiles.shape[1] != count + 1 for tiles, count in zip(tile_tables, expected, strict=True)):
        raise RuntimeError(f"the forward pass had tiles of other sizes than {tile} queries and {key_tile} keys")
    exact_heads = None if x.exact_heads is None else x.exact_heads.contiguous()
    *grads, delta = attend_backward(x, exact_heads, grad_output, output, saved, queries, keys)
    if exact_heads is not None:
        exact_backward(grads, grad_output, x, exact_heads, saved.lse, delta)
    return grads[0], grads[1], grads[2]


def _fake(x: Inputs) -> list[torch.Tensor]:
    """The output, 0, and tensors of the right sizes for the rest, without numbers."""
    query, value, (C, G, topk) = x.query, x.value, x.counts()[0]
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    tile, key_tile = _tiles(query, value)
    P, R = B * Hk, H // Hk * C

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query.new_empty(*shape, dtype=dtype)

    saved = Saved(
        *empty_sorted(x.labels, C, tile),
        *empty_sorted(x.key_labels, G, key_tile),
        centroids=empty(B * H, C, D, dtype=query.dtype),
        mean_keys=empty(P, G, D),
        mean_values=empty(P, G, Dv),
        log_squares=empty(P, M),
        top=empty(B * H, C, topk, dtype=torch.int32),
        taken=empty(P, M, (R + 31) // 32, dtype=torch.int32),
        table_keys=empty(P * R, G, D, dtype=query.dtype),
        table_values=empty(P * R, G, Dv, dtype=query.dtype),
        log_mass=empty(P * R, G),
        bias=empty(P * R, G),
        at_centroid=empty(P * R, G),
        covariances=empty(P * G, D, Dv),
        dipoles=empty(P * R, D, Dv, dtype=query.dtype),
        lse=empty(B * H, N),
        share=empty(B * H, N),
    )
    return [empty_output(query, value), *saved]


_op = register_op("bi_clustered_attention_triton", Inputs, _forward, gradients, fake=_fake, keeps=slice(None))


def bi_clustered_attention(*arguments: Any) -> torch.Tensor:
    """The op, called once for all heads that have the same counts."""
    x = Inputs(*arguments)
    counts = x.counts()
    if len(set(counts)) == 1:
        return cast("torch.Tensor", _op(*x))
    group, order, outputs = x.query.shape[1] // len(counts), [], []
    for place, head_counts in enumerate(sorted(set(counts))):
        heads = [head for head, of_head in enumerate(counts) if of_head == head_counts]
        of_queries = [head * group + member for head in heads for member in range(group)]
        of_heads = x._replace(
            clusters=[head_counts[0]] * len(heads),
            key_clusters=[head_counts[1]] * len(heads),
            topk=[head_counts[2]] * len(heads),
            query=x.query[:, of_queries],
            key=x.key[:, heads],
            value=x.value[:, heads],
            labels=x.labels[:, of_queries],
            key_labels=x.key_labels[:, heads],
            exact_heads=None if x.exact_heads is None else x.exact_heads[:, heads],
            dropout_seed=None if x.dropout_seed is None else x.dropout_seed + place,
        )
        outputs.append(_op(*of_heads))
        order += of_queries
    return torch.cat(outputs, dim=1)[:, sorted(range(len(order)), key=order.__getitem__)]
