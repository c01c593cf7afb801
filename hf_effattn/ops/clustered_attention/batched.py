"""Clustered attention for a CPU: heads in chunks, batched matrix products, a hand-written backward pass.

The attention of the centroids is computed again in the backward pass instead of being kept, so that between the two
passes only the inputs are alive. Registered with `torch.library`: to `torch.compile` it is one op.
"""

import torch

from ..shared.arguments import check_label_range
from ..shared.dropout import CENTROID_WEIGHTS, dropout_factor
from ..shared.precision import accumulation_dtype
from ..shared.row_chunks import RowChunk, row_chunks


def cluster_rows(labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """`(heads, N)` labels as row numbers of a `(heads · C, ...)` table, flat."""
    offsets = torch.arange(labels.shape[0], device=labels.device)[:, None] * clusters
    return (labels.long() + offsets).flatten()


def table_rows(chunk: RowChunk, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """The chunk's labels as row numbers of its tables, flat: every query head has `clusters` rows of its own."""
    return cluster_rows(chunk.queries(labels).view(chunk.query_heads, -1), clusters)


def cluster_sums(rows: torch.Tensor, index: torch.Tensor, problems: int, clusters: int) -> torch.Tensor:
    """Sum of the rows `(P, N, D)` of each cluster, `(P, C, D)`, in float32 or float64."""
    dtype = accumulation_dtype(rows.dtype)
    total = torch.zeros(problems * clusters, rows.shape[-1], dtype=dtype, device=rows.device)
    return total.index_add_(0, index, rows.flatten(0, 1).to(dtype)).view(problems, clusters, -1)


def cluster_sizes(index: torch.Tensor, problems: int, clusters: int) -> torch.Tensor:
    """Members of each cluster, `(P, C)`."""
    return torch.bincount(index, minlength=problems * clusters).view(problems, clusters)


def centroid_scores(centroids: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale · Qc K^T` `(P, C, M)`; the product in the dtype of `key`, the result in float32 or float64."""
    scores = (centroids * scale).to(key.dtype) @ key.transpose(1, 2)
    return scores.to(centroids.dtype)


def softmax_(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in place."""
    return torch.softmax(scores, dim=-1, out=scores)


def draw_dropout(
    chunk: RowChunk, shape: tuple[int, int], like: torch.Tensor, dropout_p: float, seed: torch.Tensor, weights: int
) -> torch.Tensor:
    """Dropout factors `(query heads, *shape)` of the chunk, drawn for the whole length: padding shifts nothing."""
    return torch.stack(
        [
            dropout_factor(shape, like, dropout_p, int(seed), problem, weights)
            for problem in range(chunk.first_problem, chunk.first_problem + chunk.query_heads)
        ]
    )


def centroid_dropout(
    chunk: RowChunk, attention: torch.Tensor, length: int, dropout_p: float, seed: torch.Tensor
) -> torch.Tensor:
    """Dropout factors for `A^c` `(P, C, keys)`: one draw for all the queries of a cluster."""
    shape = attention.shape[1] // chunk.group, length
    factor = draw_dropout(chunk, shape, attention, dropout_p, seed, CENTROID_WEIGHTS)
    factor = factor.view(attention.shape[0], attention.shape[1], length)
    return factor if chunk.key_rows is None else factor.index_select(2, chunk.key_rows)


def centroid_backward(
    attention: torch.Tensor, grad_attention: torch.Tensor, centroids: torch.Tensor, key: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the centroids `(P, C, D)` and keys `(P, M, D)` through `A^c`; `grad_attention` is overwritten."""
    mean = torch.linalg.vecdot(attention, grad_attention)[..., None]
    grad_scores = grad_attention.sub_(mean).mul_(attention).mul_(scale).to(key.dtype)
    grad_centroids = (grad_scores @ key).to(centroids.dtype)
    return grad_centroids, grad_scores.transpose(1, 2) @ centroids.to(key.dtype)


def empty_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Zeros `(B, H, N, Dv)` laid out as `(B, N, H, Dv)`, the order in which transformers wants the heads back."""
    B, H, N, _ = query.shape
    return query.new_zeros(B, N, H, value.shape[3]).transpose(1, 2)


def chunks_of(
    query: torch.Tensor,
    key: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    numbers_per_head: int,
) -> list[RowChunk]:
    """The chunks that have at least one key: without keys the output and every gradient are 0.

    `numbers_per_head` is the size of the largest buffer of one query head.
    """
    bytes_per_head = numbers_per_head * accumulation_dtype(query.dtype).itemsize
    chunks = row_chunks(query, key_mask, query_mask, bytes_per_head, group=query.shape[1] // key.shape[1])
    return [chunk for chunk in chunks if key.shape[2] and (chunk.key_rows is None or len(chunk.key_rows))]


@torch.library.custom_op("hf_effattn::clustered_attention", mutates_args=())
def clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """`V_i = A^c_{l(i)} V`: every query gets what its centroid gets."""
    check_label_range(labels, clusters)
    output = empty_output(query, value)
    with torch.autocast(query.device.type, enabled=False):
        for chunk in chunks_of(query, key, key_mask, query_mask, clusters * key.shape[2]):
            q, k, v = chunk.queries(query), chunk.keys(key), chunk.keys(value)
            P, N, _ = q.shape
            tables = chunk.group * clusters
            index = table_rows(chunk, labels, clusters)
            sizes = cluster_sizes(index, P, tables)
            centroids = cluster_sums(q, index, P, tables) / sizes.clamp(min=1)[..., None]
            attention = softmax_(centroid_scores(centroids, k, scale))
            if dropout_seed is not None:
                attention *= centroid_dropout(chunk, attention, key.shape[2], dropout_p, dropout_seed)
            values = attention.to(v.dtype) @ v
            chunk.store_queries(output, values.flatten(0, 1).index_select(0, index).view(P, N, -1))
    return output


@clustered_attention.register_fake
def _(query, key, value, labels, clusters, key_mask, query_mask, scale, dropout_p, dropout_seed):  # type: ignore[no-untyped-def]
    return empty_output(query, value)


@torch.library.custom_op("hf_effattn::clustered_attention_backward", mutates_args=())
def clustered_attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels held fixed."""
    grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        for chunk in chunks_of(query, key, key_mask, query_mask, clusters * key.shape[2]):
            q, k, v = chunk.queries(query), chunk.keys(key), chunk.keys(value)
            P, N, _ = q.shape
            tables = chunk.group * clusters
            index = table_rows(chunk, labels, clusters)
            sizes = cluster_sizes(index, P, tables).clamp(min=1)[..., None]
            centroids = cluster_sums(q, index, P, tables) / sizes
            attention = softmax_(centroid_scores(centroids, k, scale))
            grad_values = cluster_sums(chunk.queries(grad_output), index, P, tables).to(v.dtype)
            grad_attention = (grad_values @ v.transpose(1, 2)).to(attention.dtype)
            weights = attention
            if dropout_seed is not None:
                factor = centroid_dropout(chunk, attention, key.shape[2], dropout_p, dropout_seed)
                weights = attention * factor
                grad_attention *= factor
            chunk.store_keys(grad_value, weights.to(v.dtype).transpose(1, 2) @ grad_values)
            grad_centroids, grad_k = centroid_backward(attention, grad_attention, centroids, k, scale)
            chunk.store_keys(grad_key, grad_k)
            grad_centroids = (grad_centroids / sizes).to(q.dtype)
            chunk.store_queries(grad_query, grad_centroids.flatten(0, 1).index_select(0, index).view(P, N, -1))
    return grad_query, grad_key, grad_value


@clustered_attention_backward.register_fake
def _(grad_output, query, key, value, *settings):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, labels, clusters, key_mask, query_mask, scale, dropout_p, dropout_seed = inputs
    ctx.save_for_backward(query, key, value, labels, key_mask, query_mask, dropout_seed)
    ctx.settings = clusters, scale, dropout_p


def _backward(ctx, grad_output):  # type: ignore[no-untyped-def]
    query, key, value, labels, key_mask, query_mask, dropout_seed = ctx.saved_tensors
    clusters, scale, dropout_p = ctx.settings
    grads = clustered_attention_backward(
        grad_output, query, key, value, labels, clusters, key_mask, query_mask, scale, dropout_p, dropout_seed
    )
    return (*grads, *[None] * 7)


clustered_attention.register_autograd(_backward, setup_context=_setup_context)
