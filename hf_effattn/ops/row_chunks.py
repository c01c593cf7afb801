"""How the fast CPU forms walk over a batch: only rows that count, a few heads at a time.

A padded row would cost as much as a real one, so masked rows are taken out before any arithmetic: inside a chunk no
mask exists, and a padded batch gives exactly what its texts give one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Bytes of one attention-shaped buffer of a chunk. Small enough to be reused by the allocator from chunk to chunk
# (larger buffers are mapped and faulted in anew each time), large enough to keep both cores busy.
CHUNK_BYTES = 8 * 2**20

EVERY_ROW = slice(None)


@dataclass(frozen=True)
class RowChunk:
    """Heads `first_head .. last_head - 1` of one batch item, with the indices of the rows that count (None = all).

    A head is problem `batch · H + head` of its batch, `first_problem` the chunk's first.
    """

    batch: int
    first_head: int
    last_head: int
    first_problem: int
    query_rows: torch.Tensor | None
    key_rows: torch.Tensor | None

    def queries(self, tensor: torch.Tensor, selection: slice | torch.Tensor = EVERY_ROW) -> torch.Tensor:
        """The chunk's query rows of `(B, H, N, ...)`, or a selection of them: `(heads, rows, ...)`, contiguous."""
        return self._rows(tensor, self.query_rows, selection)

    def keys(self, tensor: torch.Tensor, selection: slice | torch.Tensor = EVERY_ROW) -> torch.Tensor:
        """The chunk's key rows of `(B, H, M, ...)`, or a selection of them: `(heads, rows, ...)`, contiguous."""
        return self._rows(tensor, self.key_rows, selection)

    def _rows(self, tensor: torch.Tensor, rows: torch.Tensor | None, selection: slice | torch.Tensor) -> torch.Tensor:
        tensor = tensor[self.batch, self.first_head : self.last_head]
        chosen = selection if rows is None else rows[selection]
        if isinstance(chosen, slice):
            return tensor[:, chosen].contiguous()
        return tensor.index_select(1, chosen).contiguous()

    def store_queries(
        self, target: torch.Tensor, values: torch.Tensor, selection: slice | torch.Tensor = EVERY_ROW
    ) -> None:
        """Write `(heads, rows, D)` to the chunk's query rows of `target` `(B, H, N, D)`, or to a selection of them."""
        self._store(target, values, self.query_rows, selection)

    def store_keys(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Write `(heads, rows, D)` to the chunk's key rows of `target` `(B, H, M, D)`."""
        self._store(target, values, self.key_rows, EVERY_ROW)

    def _store(
        self,
        target: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor | None,
        selection: slice | torch.Tensor,
    ) -> None:
        target = target[self.batch, self.first_head : self.last_head]
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
) -> Iterator[RowChunk]:
    """Chunks of equally many heads whose largest buffer is `CHUNK_BYTES` or one head's; items without a valid query
    are left out."""
    B, H = query.shape[:2]
    parts = min(H, -(-H * bytes_per_head // CHUNK_BYTES))
    heads = -(-H // max(1, parts))
    for batch in range(B):
        query_rows, key_rows = valid_rows(query_mask, batch), valid_rows(key_mask, batch)
        if query.shape[2] == 0 or (query_rows is not None and len(query_rows) == 0):
            continue
        for first in range(0, H, heads):
            yield RowChunk(batch, first, min(first + heads, H), batch * H + first, query_rows, key_rows)
