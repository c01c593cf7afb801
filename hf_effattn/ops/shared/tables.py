"""What the forms for a CPU share: chunks of heads, tables with a row per cluster, dropout, memory for the output."""

from collections.abc import Callable
from typing import Any

import torch

from .arguments import check_label_range
from .dropout import CENTROID_WEIGHTS, dropout_factor
from .head_threads import for_every_chunk
from .precision import accumulation_dtype
from .row_chunks import RowChunk, row_chunks


def chunks_of(
    query: torch.Tensor,
    key: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    numbers_per_head: int,
    skip: torch.Tensor | None = None,
) -> list[RowChunk]:
    """The chunks that have at least one key: without keys the output and every gradient are 0.

    `numbers_per_head` is the size of the largest buffer of one query head; key/value heads that are True in `skip`
    `(B, heads)` are left out.
    """
    bytes_per_head = numbers_per_head * accumulation_dtype(query.dtype).itemsize
    chunks = row_chunks(query, key_mask, query_mask, bytes_per_head, query.shape[1] // key.shape[1], skip)
    return [chunk for chunk in chunks if key.shape[2] and (chunk.key_rows is None or len(chunk.key_rows))]


def attend_by_chunks(x: Any, numbers_per_head: int, attend: Callable[[RowChunk], torch.Tensor]) -> torch.Tensor:
    """The output for an op's inputs, of what `attend` gives the queries of each chunk, `(heads, group · rows, Dv)`."""
    output = output_of_chunks(x.query, x.key, x.value, x.key_mask, x.query_mask)
    chunks = chunks_of(x.query, x.key, x.key_mask, x.query_mask, numbers_per_head)
    for_every_chunk(lambda chunk: chunk.store_queries(output, attend(chunk)), chunks, x.query.device)
    return output


def gradients_by_chunks(
    x: Any, numbers_per_head: int, backward: Callable[[RowChunk], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value for an op's inputs, of what `backward` gives the rows of each chunk."""
    grad_query, grad_key, grad_value = gradients_of_chunks(x.query, x.key, x.value, x.key_mask, x.query_mask)

    def run(chunk: RowChunk) -> None:
        of_query, of_key, of_value = backward(chunk)
        chunk.store_queries(grad_query, of_query)
        chunk.store_keys(grad_key, of_key)
        chunk.store_keys(grad_value, of_value)

    for_every_chunk(run, chunks_of(x.query, x.key, x.key_mask, x.query_mask, numbers_per_head), x.query.device)
    return grad_query, grad_key, grad_value


def cluster_rows(labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """`(heads, N)` labels as row numbers of a `(heads · C, ...)` table, flat."""
    offsets = torch.arange(labels.shape[0], device=labels.device)[:, None] * clusters
    return (labels.long() + offsets).flatten()


def table_rows(chunk: RowChunk, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """The chunk's labels as row numbers of its tables, flat: every query head has `clusters` rows of its own.

    Raises:
        ValueError: a label outside `0 .. clusters - 1`.
    """
    head_labels = chunk.queries(labels).view(chunk.query_heads, -1)
    check_label_range(head_labels, clusters)
    return cluster_rows(head_labels, clusters)


def cluster_sums(rows: torch.Tensor, index: torch.Tensor, problems: int, clusters: int) -> torch.Tensor:
    """Sum of the rows `(P, N, D)` of each cluster, `(P, C, D)`, in float32 or float64."""
    dtype = accumulation_dtype(rows.dtype)
    total = torch.zeros(problems * clusters, rows.shape[-1], dtype=dtype, device=rows.device)
    return total.index_add_(0, index, rows.flatten(0, 1).to(dtype)).view(problems, clusters, rows.shape[-1])


def cluster_sizes(index: torch.Tensor, problems: int, clusters: int) -> torch.Tensor:
    """Members of each cluster, `(P, C)`."""
    return torch.bincount(index, minlength=problems * clusters).view(problems, clusters)


def softmax_(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in place."""
    return torch.softmax(scores, dim=-1, out=scores)


def draw_dropout(
    chunk: RowChunk, shape: tuple[int, int], like: torch.Tensor, dropout_p: float, seed: torch.Tensor, weights: int
) -> torch.Tensor:
    """Dropout factors `(query heads, *shape)` of the chunk, drawn for the whole length: padding shifts nothing.

    Of `CENTROID_WEIGHTS` the rows are clusters, of others the queries, of which those that count are returned.
    """
    problems = range(chunk.first_problem, chunk.first_problem + chunk.query_heads)
    factor = torch.stack([dropout_factor(shape, like, dropout_p, int(seed), problem, weights) for problem in problems])
    rows = None if weights == CENTROID_WEIGHTS else chunk.query_rows
    return factor if rows is None else factor.index_select(1, rows)


def empty_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Zeros `(B, H, N, Dv)` laid out as `(B, N, H, Dv)`, the order in which transformers wants the heads back."""
    B, H, N, _ = query.shape
    return query.new_zeros(B, N, H, value.shape[3]).transpose(1, 2)


def empty_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a gradient: of queries, keys and values laid out as `empty_output` does."""
    return unwritten_output(tensor, tensor) if tensor.ndim == 4 else tensor.new_empty(tensor.shape)


def output_of_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor | None
) -> torch.Tensor:
    """Memory for the output that chunks write: zeros where they may leave rows out."""
    return unwritten_output(query, value) if _every_row(key, *masks) else empty_output(query, value)


def gradients_of_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor | None
) -> list[torch.Tensor]:
    """Memory for the gradients that chunks write: zeros where they may leave rows out."""
    like = torch.empty_like if query.shape[2] and _every_row(key, *masks) else torch.zeros_like
    return [like(tensor) for tensor in (query, key, value)]


def _every_row(key: torch.Tensor, *masks: torch.Tensor | None) -> bool:
    """Whether chunks write every row, so that no large operator has to write zeros first."""
    return key.shape[2] > 0 and all(mask is None for mask in masks)


def unwritten_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Memory for the output, laid out as `empty_output` does."""
    B, H, N, _ = query.shape
    return query.new_empty(B, N, H, value.shape[3]).transpose(1, 2)
