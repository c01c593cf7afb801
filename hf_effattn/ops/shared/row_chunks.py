"""How the fast CPU forms go through a batch: only rows that count, a few heads at a time.

A padded row would cost as much as a real one, so masked rows are taken out before any arithmetic: inside a chunk no
mask exists, and a padded batch gives exactly what its texts give one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

# Bytes of one attention-shaped buffer of a chunk. Small enough that a chunk's buffers together stay within what the
# allocator keeps for a thread from chunk to chunk (64 MiB; more is mapped and faulted in anew each time).
CHUNK_BYTES = 4 * 2**20

EVERY_ROW = slice(None)
Selection = slice | torch.Tensor  # of rows


@dataclass(frozen=True)
class RowChunk:
    """Some key/value heads of one batch item, with the indices of the rows that count (None = all).

    `group` query heads share a key/value head (grouped-query attention; else 1): the rows of those heads stand one
    after the other as rows of that one head, so that keys and values are never copied per query head.
    """

    batch: int  # index of the item
    # The next two: key/value heads `first_head .. last_head - 1`.
    first_head: int
    last_head: int
    group: int  # query heads per key/value head
    first_problem: int  # `batch · H + head` of the first query head
    # The next two: the rows that count
    query_rows: torch.Tensor | None
    key_rows: torch.Tensor | None

    @property
    def query_heads(self) -> int:
        """How many query heads the chunk has."""
        return (self.last_head - self.first_head) * self.group

    def queries(self, tensor: torch.Tensor, selection: Selection = EVERY_ROW) -> torch.Tensor:
        """The chunk's query rows of `(B, H, N, ...)`, or a selection: `(heads, group · rows, ...)`, contiguous."""
        rows = _taken(self.of_query_heads(tensor), self.query_rows, selection)
        return rows.unflatten(0, (-1, self.group)).flatten(1, 2)

    def keys(self, tensor: torch.Tensor, selection: Selection = EVERY_ROW) -> torch.Tensor:
        """The chunk's key rows of `(B, H, M, ...)`, or a selection of them: `(heads, rows, ...)`, contiguous."""
        return _taken(self.of_heads(tensor), self.key_rows, selection)

    def of_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chunk's key/value heads of `(B, H, ...)`: `(heads, ...)`, a view."""
        return tensor[self.batch, self.first_head : self.last_head]

    def of_query_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chunk's query heads of `(B, H, ...)`: `(heads · group, ...)`, a view."""
        return tensor[self.batch, self.first_head * self.group : self.last_head * self.group]

    def store_queries(self, target: torch.Tensor, values: torch.Tensor, selection: Selection = EVERY_ROW) -> None:
        """Write `(heads, group · rows, D)` to the chunk's query rows of `(B, H, N, D)`, or to a selection of them."""
        values = values.unflatten(1, (self.group, -1)).flatten(0, 1)
        _store(self.of_query_heads(target), values, self.query_rows, selection)

    def store_keys(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Write `(heads, rows, D)` to the chunk's key rows of `target` `(B, H, M, D)`."""
        _store(self.of_heads(target), values, self.key_rows, EVERY_ROW)


def _taken(tensor: torch.Tensor, rows: torch.Tensor | None, selection: Selection) -> torch.Tensor:
    chosen = selection if rows is None else rows[selection]
    taken = tensor[:, chosen] if isinstance(chosen, slice) else tensor.index_select(1, chosen)
    return taken.contiguous()


def _store(target: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None, selection: Selection) -> None:
    chosen = selection if rows is None else rows[selection]
    if isinstance(chosen, slice):
        target[:, chosen].copy_(values)
    else:
        target.index_copy_(1, chosen, values.to(target.dtype))


def valid_rows(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Indices of the True entries of `mask[batch]`, or None where all are."""
    if mask is None:
        return None
    rows = mask[batch].nonzero()[:, 0]
    return None if len(rows) == mask.shape[1] else rows


def row_chunks(
    query: torch.Tensor,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    bytes_per_head: int,
    group: int = 1,
    skip: torch.Tensor | None = None,
) -> Iterator[RowChunk]:
    """Chunks of equally many heads whose largest buffer is `CHUNK_BYTES` or one head's; items without a valid query
    are left out.

    `bytes_per_head` counts one query head, `group` of which share a key/value head and stay together; key/value heads
    where `skip` `(B, H / group)` is True are left out.
    """
    B, H = query.shape[0], query.shape[1] // group
    parts = min(H, -(-H * group * bytes_per_head // CHUNK_BYTES))
    if query.device.type == "cpu":
        threads = torch.get_num_threads()
        parts = max(parts, min(H, -(-threads // max(1, B))))  # every thread gets one
        if B == 1:  # and as many as the others
            parts = min(H, -(-parts // threads) * threads)
    heads = -(-H // max(1, parts))
    for batch in range(B):
        query_rows, key_rows = valid_rows(query_mask, batch), valid_rows(key_mask, batch)
        if query.shape[2] == 0 or (query_rows is not None and len(query_rows) == 0):
            continue
        for start, stop in _runs(H, None if skip is None else skip[batch]):
            for first in range(start, stop, heads):
                last, problem = min(first + heads, stop), (batch * H + first) * group
                yield RowChunk(batch, first, last, group, problem, query_rows, key_rows)


def _runs(heads: int, skip: torch.Tensor | None) -> list[tuple[int, int]]:
    """First and last + 1 of the neighbouring heads that are not left out."""
    edges = [-1, *([] if skip is None else skip.nonzero()[:, 0].tolist()), heads]
    return [(left + 1, right) for left, right in pairwise(edges) if right > left + 1]
