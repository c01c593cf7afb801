"""Clustered attention for a CPU: heads in chunks, batched matrix products, a hand-written backward pass.

The attention of the centroids is computed again in the backward pass instead of being kept, so that between the two
passes only the inputs are alive. Registered with `torch.library`: to `torch.compile` it is one op.
"""

import torch

from ..shared.centroids import centroid_backward, centroid_dropout, centroid_scores
from ..shared.gradients import register_attention
from ..shared.head_threads import for_every_chunk
from ..shared.precision import in_products, product_dtype
from ..shared.row_chunks import RowChunk
from ..shared.tables import (
    chunks_of,
    cluster_sizes,
    cluster_sums,
    gradients_of_chunks,
    output_of_chunks,
    softmax_,
    table_rows,
)


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
    output, dtype = output_of_chunks(query, key, value, key_mask, query_mask), product_dtype(query.dtype)

    def attend_chunk(chunk: RowChunk) -> None:
        q, v = (rows.to(dtype) for rows in (chunk.queries(query), chunk.keys(value)))
        k = in_products(chunk.keys(key))
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

    chunks = chunks_of(query, key, key_mask, query_mask, clusters * key.shape[2])
    for_every_chunk(attend_chunk, chunks, query.device)
    return output


def gradients(
    grad_output, query, key, value, labels, clusters, key_mask, query_mask, scale, dropout_p, dropout_seed
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, labels held fixed."""
    grad_query, grad_key, grad_value = gradients_of_chunks(query, key, value, key_mask, query_mask)
    dtype = product_dtype(query.dtype)

    def attend_chunk(chunk: RowChunk) -> None:
        q, v = (rows.to(dtype) for rows in (chunk.queries(query), chunk.keys(value)))
        k = in_products(chunk.keys(key))
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

    chunks = chunks_of(query, key, key_mask, query_mask, clusters * key.shape[2])
    for_every_chunk(attend_chunk, chunks, query.device)
    return grad_query, grad_key, grad_value


register_attention("clustered_attention", gradients)
