"""First-order bi-clustered attention on a GPU: launchers, and what torch needs to know of the op.

Nothing is asked of the host between the inputs and the output, so that CUDA graphs can record it. Labels are not
checked: a query whose label is outside `0 .. clusters - 1` is in no cluster and gets 0, such a key is attended to by
exact heads alone.
"""

import torch

from ...derivatives import refuse_second_derivatives
from ...shared.gradients import register_gradients
from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.chips import on_device_of
from ...shared.triton.cluster_table_forward import _cluster_table_fwd_kernel, blocks_of_queries
from ...shared.triton.sort import SortedRows, sort_both_by_cluster
from ...shared.triton.tiles import LOG2_E, tile_config
from .backward import attend_backward
from .exact_heads import attend_exactly, exact_backward
from .forward import choose_keys, make_tables
from .products import cluster_products
from .saved import Saved


def _tiles(query: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """Rows of a tile of sorted queries, and of sorted keys."""
    dims = query.shape[3], value.shape[3]
    key_config = tile_config(query, *dims, backward=True, two_sums=True)
    return tile_config(query, *dims)["ROWS"], key_config["ROWS"]


@torch.library.custom_op("hf_effattn::bi_clustered_attention_triton", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, labels: torch.Tensor, key_labels: torch.Tensor,
    clusters: int, key_clusters: int, topk: int, key_mask: torch.Tensor | None, query_mask: torch.Tensor | None,
    exact_heads: torch.Tensor | None, scale: float, dropout_p: float, dropout_seed: torch.Tensor | None,
) -> list[torch.Tensor]:  # fmt: skip
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic Ṽ_jc + s_i η_i^T M_j`, and the tensors of `Saved`."""
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    if B * N * M == 0:
        return [empty_output(query, value), *_empty(query, key, value, clusters, key_clusters, topk)]
    tile, key_tile = _tiles(query, value)
    exact_heads = None if exact_heads is None else exact_heads.contiguous()
    output = unwritten_output(query, value)
    queries, keys = sort_both_by_cluster(
        (labels, query_mask, clusters, tile), (key_labels, key_mask, key_clusters, key_tile)
    )
    mean_keys, mean_values = (query.new_empty(B * Hk, key_clusters, d, dtype=torch.float32) for d in (D, Dv))
    covariances, _ = cluster_products(key, value, keys, mean_keys, mean_values)
    centroids, log_squares, taken, top = choose_keys(
        query, key, key_mask, exact_heads, queries, keys, mean_keys, topk, scale
    )  # fmt: skip
    tables = make_tables(key, value, exact_heads, keys, centroids, log_squares, taken, covariances, scale)
    table_keys, table_values, log_mass, bias, at_centroid, dipoles = tables
    lse, share = (query.new_empty(B * H, N, dtype=torch.float32) for _ in range(2))
    config = tile_config(query, D, Dv, three=dropout_seed is None)
    blocks, sizes = blocks_of_queries(query, clusters, topk, key_clusters, config)
    with on_device_of(query):
        _cluster_table_fwd_kernel[(B * H * blocks[0],)](
            query, key, value, dropout_seed, exact_heads, queries.order, queries.starts, top,
            None, None, table_keys, table_values, bias, centroids, dipoles, output, lse, share,
            *query.stride(), *key.stride(), *value.stride(), *output.stride(),
            H, H // Hk, N, D, Dv, clusters, key_clusters, *blocks, topk, scale, scale * LOG2_E, dropout_p,
            HAS_SUMMARIES=True, HAS_REST=False, HAS_EXACT=exact_heads is not None,
            HAS_DROPOUT=dropout_seed is not None, **sizes, **config,
        )  # fmt: skip
    if exact_heads is not None:
        masks = key_mask, query_mask
        attend_exactly(output, lse, query, key, value, *masks, exact_heads, scale, dropout_p, dropout_seed)
    saved = Saved(
        queries.order, queries.starts, queries.tiles, keys.order, keys.starts, keys.tiles, centroids, mean_keys,
        mean_values, log_squares, top, taken, table_keys, table_values, log_mass, bias, at_centroid, covariances,
        dipoles, lse, share,
    )  # fmt: skip
    return [output, *saved]


def gradients(
    grad_output: torch.Tensor, forward: list[torch.Tensor], query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, labels: torch.Tensor, key_labels: torch.Tensor, clusters: int, key_clusters: int, topk: int,
    key_mask: torch.Tensor | None, query_mask: torch.Tensor | None, exact_heads: torch.Tensor | None,
    scale: float, dropout_p: float, dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value, labels and sets `T_j` held fixed; `forward` is what the forward op gave."""
    output, saved = forward[0], Saved(*forward[1:])
    B, N, M = query.shape[0], query.shape[2], key.shape[2]
    if B * N * M == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    tile, key_tile = _tiles(query, value)
    queries = SortedRows(saved.order, saved.starts, saved.tiles, clusters, tile)
    keys = SortedRows(saved.key_order, saved.key_starts, saved.key_tiles, key_clusters, key_tile)
    found, expected = (saved.tiles, saved.key_tiles), (N // tile + clusters, M // key_tile + key_clusters)
    if any(tiles.shape[1] != count + 1 for tiles, count in zip(found, expected, strict=True)):
        raise RuntimeError(f"the forward pass had tiles of other sizes than {tile} queries and {key_tile} keys")
    exact_heads = None if exact_heads is None else exact_heads.contiguous()
    inputs = grad_output, query, key, value
    grad_query, grad_key, grad_value, delta = attend_backward(
        *inputs, exact_heads, dropout_seed, output, saved, queries, keys, scale, dropout_p
    )  # fmt: skip
    if exact_heads is not None:
        exact_backward(
            grad_query, grad_key, grad_value, *inputs, key_mask, query_mask, exact_heads, saved.lse, delta, scale,
            dropout_p, dropout_seed,
        )  # fmt: skip
    return grad_query, grad_key, grad_value


def _empty(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, clusters: int, key_clusters: int, topk: int
) -> Saved:
    """Tensors of the right sizes, without numbers."""
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]
    tile, key_tile = _tiles(query, value)
    P, R, G = B * Hk, H // Hk * clusters, key_clusters

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query.new_empty(*shape, dtype=dtype)

    return Saved(
        order=empty(B * H, N, dtype=torch.int32),
        starts=empty(B * H, clusters + 2, dtype=torch.int32),
        tiles=empty(B * H, N // tile + clusters + 1, dtype=torch.int32),
        key_order=empty(P, M, dtype=torch.int32),
        key_starts=empty(P, G + 2, dtype=torch.int32),
        key_tiles=empty(P, M // key_tile + G + 1, dtype=torch.int32),
        centroids=empty(B * H, clusters, D, dtype=query.dtype),
        mean_keys=empty(P, G, D),
        mean_values=empty(P, G, Dv),
        log_squares=empty(P, M),
        top=empty(B * H, clusters, topk, dtype=torch.int32),
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


@_forward.register_fake
def _(query, key, value, labels, key_labels, clusters, key_clusters, topk, *settings):
    return [empty_output(query, value), *_empty(query, key, value, clusters, key_clusters, topk)]


register_gradients("bi_clustered_attention_triton", gradients, ("query", "key", "value"), keeps=slice(None))


def bi_clustered_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, labels: torch.Tensor, key_labels: torch.Tensor,
    clusters: list[int], key_clusters: list[int], topk: list[int], key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None, exact_heads: torch.Tensor | None, scale: float, dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic Ṽ_jc + r_i η^T M_j` with `T = T_{l(i)}`; arguments as of `_forward`.

    Counts are lists, one for every key/value head: heads with the same run together.
    """
    counts = list(zip(clusters, key_clusters, topk, strict=True))
    if len(set(counts)) == 1:
        rest = key_mask, query_mask, exact_heads, scale, dropout_p, dropout_seed
        return _forward(query, key, value, labels, key_labels, *counts[0], *rest)[0]
    group, order, outputs = query.shape[1] // len(counts), [], []
    for place, one in enumerate(sorted(set(counts))):
        own = [head for head, of_head in enumerate(counts) if of_head == one]
        of_queries = [head * group + member for head in own for member in range(group)]
        tensors = query[:, of_queries], key[:, own], value[:, own], labels[:, of_queries], key_labels[:, own]
        exact = None if exact_heads is None else exact_heads[:, own]
        seed = None if dropout_seed is None else dropout_seed + place
        outputs.append(_forward(*tensors, *one, key_mask, query_mask, exact, scale, dropout_p, seed)[0])
        order += of_queries
    return torch.cat(outputs, dim=1)[:, sorted(range(len(order)), key=order.__getitem__)]


refuse_second_derivatives("bi_clustered_attention_triton")
