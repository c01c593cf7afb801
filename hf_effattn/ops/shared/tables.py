"""What the forms for a CPU share: chunks of heads, tables with a row per cluster, dropout, memory for the output."""

import torch

from .arguments import check_label_range
from .dropout import dropout_factor
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


def cluster_rows(labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """`(heads, N)` labels as row numbers of a `(heads · C, ...)` table, flat."""
    offsets = torch.arange(labels.shape[0], device=labels.device)[:, None] * clusters
    return (labels.long() + offsets).flatten()


def table_rows(chunk: RowChunk, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """The chunk's labels as row numbers of its tables, flat: every query head has `clusters` rows of its own.

    Raises:
        ValueError: a label outside `0 .. clusters - 1`.
    """
    own = chunk.queries(labels).view(chunk.query_heads, -1)
    check_label_range(own, clusters)
    return cluster_rows(own, clusters)


def cluster_sums(rows: torch.Tensor, index: torch.Tensor, problems: int, clusters: int) -> torch.Tensor:
    """Sum of the rows `(P, N, D)` of each cluster, `(P, C, D)`, in float32 or float64."""
    dtype = accumulation_dtype(rows.dtype)
    total = torch.zeros(problems * clusters, rows.shape[-1], dtype=dtype, device=rows.device)
    return total.index_add_(0, index, rows.flatten(0, 1).to(dtype)).view(problems, clusters, -1)


def cluster_sizes(index: torch.Tensor, problems: int, clusters: int) -> torch.Tensor:
    """Members of each cluster, `(P, C)`."""
    return torch.bincount(index, minlength=problems * clusters).view(problems, clusters)


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
