"""Bi-clustered attention on a GPU: queries sorted by cluster, one softmax over top keys and means of key clusters.

Forward, from `make_plan` to `attend`:

| step | kernel | file |
| --- | --- | --- |
| sort queries and keys | `_count_by_cluster_kernel`, `_sort_by_cluster_kernel` | `shared/triton/sort.py` |
| means of both and of the values | `_cluster_means_kernel` | the same |
| scores of the centroids | `_centroid_attention_fwd_kernel` | `centroids.py` there |
| their `topk` keys | `_select_topk_kernel` | `topk.py` there |
| how many of those each key cluster has | `_bi_clustered_attention_fwd_count_kernel` | `forward.py` |
| one softmax per query, in tiles of sorted queries | `_bi_clustered_attention_fwd_kernel` | the same |

Backward, `attend_backward` in `backward.py`: gradients of queries, of the top keys, of the means, and of every
key from both. Labels in no cluster are legal here, for what a GPU cannot raise without waiting for it: such queries
get 0, such keys are in no mean.

Between the passes are kept, besides the inputs, the output, one number per query, the orders, the top keys and the
means. To `torch.compile` each pass is one op, and nothing in them waits for the GPU.
"""

from typing import NamedTuple

import torch

from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.centroids import centroid_topk
from ...shared.triton.sort import SortedRows, cluster_means, sort_by_cluster
from .backward import attend_backward
from .blocks import query_tile
from .forward import attend

KEY_TILE = 32  # keys of a cluster that one program of the backward pass writes


class Plan(NamedTuple):
    """What the passes share, as tensors: the fields of both `SortedRows`, the top keys and the means.

    Attributes:
        order, starts, tiles: of the queries.
        key_order, key_starts, key_tiles: of the keys.
        top: `(P, C, T)` int32, ascending, -1 where there are too few keys.
        mean_keys, mean_values: `(B · Hk, G, ·)` in the dtype of the inputs.
    """

    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    key_order: torch.Tensor
    key_starts: torch.Tensor
    key_tiles: torch.Tensor
    top: torch.Tensor
    mean_keys: torch.Tensor
    mean_values: torch.Tensor

    def for_kernels(self, tile: int) -> tuple[SortedRows, SortedRows, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sorted queries, in tiles of `tile` rows, sorted keys, top keys and means."""
        clusters, key_clusters = self.starts.shape[1] - 2, self.key_starts.shape[1] - 2
        queries = SortedRows(self.order, self.starts, self.tiles, clusters, tile)
        keys = SortedRows(self.key_order, self.key_starts, self.key_tiles, key_clusters, KEY_TILE)
        return queries, keys, self.top, self.mean_keys, self.mean_values


def make_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
) -> Plan:
    """Sort, take means and choose top keys."""
    queries = sort_by_cluster(labels, query_mask, clusters, query_tile(query, value.shape[3], clusters))
    keys = sort_by_cluster(key_labels, key_mask, key_clusters, KEY_TILE)
    top, _ = centroid_topk(cluster_means(query, queries), key, key_mask, scale, topk)
    mean_keys, mean_values = (cluster_means(rows, keys, rows.dtype) for rows in (key, value))
    of_queries = queries.order, queries.starts, queries.tiles
    return Plan(*of_queries, keys.order, keys.starts, keys.tiles, top, mean_keys, mean_values)


def empty_plan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, clusters: int, key_clusters: int, topk: int
) -> Plan:
    """A plan of the right sizes, without numbers."""
    B, H, N, D = query.shape
    Hk, M, Dv = value.shape[1:]

    def empty(*shape: int) -> torch.Tensor:
        return query.new_empty(*shape, dtype=torch.int32)

    return Plan(
        order=empty(B * H, N),
        starts=empty(B * H, clusters + 2),
        tiles=empty(B * H, N // query_tile(query, Dv, clusters) + clusters + 1),
        key_order=empty(B * Hk, M),
        key_starts=empty(B * Hk, key_clusters + 2),
        key_tiles=empty(B * Hk, M // KEY_TILE + key_clusters + 1),
        top=empty(B * H, clusters, topk),
        mean_keys=query.new_empty(B * Hk, key_clusters, D),
        mean_values=query.new_empty(B * Hk, key_clusters, Dv),
    )


@torch.library.custom_op("hf_effattn::bi_clustered_attention_triton", mutates_args=())
def bi_clustered_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The output, the base-2 log-sum-exp of the sorted queries `(P, N)`, and the `Plan`."""
    B, H, N, _ = query.shape
    lse = query.new_empty(B * H, N, dtype=torch.float32)
    if query.shape[:3].numel() == 0 or key.shape[2] == 0:
        return [empty_output(query, value), lse, *empty_plan(query, key, value, clusters, key_clusters, topk)]
    output = unwritten_output(query, value)
    plan = make_plan(query, key, value, labels, key_labels, clusters, key_clusters, topk, key_mask, query_mask, scale)
    tile = query_tile(query, value.shape[3], clusters)
    attend(output, lse, query, key, value, key_labels, *plan.for_kernels(tile), scale, dropout_p, dropout_seed)
    return [output, lse, *plan]


@bi_clustered_attention_triton.register_fake
def _(query, key, value, labels, key_labels, clusters, key_clusters, topk, *settings):
    lse = query.new_empty(query.shape[0] * query.shape[1], query.shape[2], dtype=torch.float32)
    return [empty_output(query, value), lse, *empty_plan(query, key, value, clusters, key_clusters, topk)]


@torch.library.custom_op("hf_effattn::bi_clustered_attention_triton_backward", mutates_args=())
def bi_clustered_attention_triton_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_labels: torch.Tensor,
    forward: list[torch.Tensor],
    clusters: int,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels and `T_j` held fixed; `forward` is what the forward op returned."""
    if query.shape[:3].numel() == 0 or key.shape[2] == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    output, lse = forward[:2]
    tile = query_tile(query, value.shape[3], clusters)
    queries, keys, top, mean_keys, mean_values = Plan(*forward[2:]).for_kernels(tile)
    rows = query, key, value, key_labels, queries, keys
    tables = top, mean_keys, mean_values
    return attend_backward(grad_output, output, lse, *rows, *tables, scale, dropout_p, dropout_seed)


@bi_clustered_attention_triton_backward.register_fake
def _(grad_output, query, key, value, *settings):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, _, key_labels, clusters, _, _, _, _, scale, dropout_p, dropout_seed = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, key_labels, dropout_seed, *output)
    ctx.settings = clusters, scale, dropout_p


def _backward(ctx, grads):
    if grads[0] is None:
        return (None,) * 13
    query, key, value, key_labels, dropout_seed, *forward = ctx.saved_tensors
    inputs = query, key, value, key_labels
    input_grads = bi_clustered_attention_triton_backward(grads[0], *inputs, forward, *ctx.settings, dropout_seed)
    return (*input_grads, *[None] * 10)


bi_clustered_attention_triton.register_autograd(_backward, setup_context=_setup_context)


def bi_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic V̄_c` with `T = T_j`, `j = l(i)`, `p_i` one softmax over both."""
    sizes = clusters, key_clusters, topk
    return bi_clustered_attention_triton(
        query, key, value, labels, key_labels, *sizes, key_mask, query_mask, scale, dropout_p, dropout_seed
    )[0]
