"""Rows sorted by cluster and cut into blocks, so that what a cluster's rows share is one batched product.

A block holds up to `length` rows of one cluster.
"""

from dataclasses import dataclass, replace

import torch

LARGEST_SHORT = 2**15 - 1  # largest 16-bit integer: numpy sorts those by their digits


@dataclass(frozen=True)
class ClusterBlocks:
    """Rows of `P` heads sorted by cluster and cut into blocks of one cluster each."""

    slots: torch.Tensor  # `(P · N,)` place of every row in the padded blocks
    sources: torch.Tensor  # `(blocks · length,)` row of every place, `P · N` where there is none
    clusters: torch.Tensor  # `(blocks,)` row of the `(P · C, ...)` tables that a block belongs to
    length: int  # rows a block can hold; places without a row hold zeros

    @staticmethod
    def of(
        index: torch.Tensor,
        sizes: torch.Tensor,
        *,
        aligned: bool = False,
        length: int | None = None,
        per_head: int | None = None,
    ) -> "ClusterBlocks":
        """Blocks for rows with table rows `index` `(P · N,)` and cluster sizes `(P, C)`.

        `aligned`: every head has as many blocks as the head with most, its last ones empty; or `per_head` of them,
        which must be enough. `length`: of a block; None: what fits the mean size.
        """
        length = length or block_length(index.numel() / max(1, sizes.numel()))
        blocks = (sizes + length - 1) // length
        if aligned:
            block_counts = blocks.sum(dim=1)
            blocks[:, -1] += (block_counts.amax() if per_head is None else per_head) - block_counts
        blocks, sizes = blocks.flatten(), sizes.flatten()
        order = stable_order(index, len(sizes))
        # A row's place: its cluster's first block, plus its rank in the cluster.
        first_place = (blocks.cumsum(0) - blocks) * length - (sizes.cumsum(0) - sizes)
        places = first_place.index_select(0, index.index_select(0, order))
        places += torch.arange(len(order), device=index.device)
        slots = torch.empty_like(places).index_copy_(0, order, places)
        table = torch.arange(len(sizes), device=index.device)
        clusters = table.repeat_interleave(blocks)
        sources = order.new_full((len(clusters) * length,), len(order))
        sources.index_copy_(0, places, order)
        return ClusterBlocks(slots, sources, clusters, length)

    @staticmethod
    def whole(blocks: int, length: int, device: torch.device) -> "ClusterBlocks":
        """Blocks of neighbouring rows, as many as there are clusters."""
        clusters = torch.arange(blocks, device=device)
        return WholeBlocks(clusters[:0], clusters[:0], clusters, length)  # nothing is looked up

    def pack(self, *columns: torch.Tensor) -> torch.Tensor:
        """Rows `(P, ..., D)`, of several tensors side by side, in their blocks: `(blocks, length, D)`; 0 elsewhere."""
        shape = columns[0].shape[:-1]
        rows, width = shape.numel(), sum(part.shape[-1] for part in columns)
        # Gathered instead of scattered, which is twice as slow; an empty place takes the last row.
        table = columns[0].new_empty(rows + 1, width)
        table[rows] = 0
        torch.cat(columns, dim=-1, out=table[:rows].view(*shape, width))
        return table.index_select(0, self.sources).view(len(self.clusters), self.length, width)

    def pack_with_ones(self, *columns: torch.Tensor) -> torch.Tensor:
        """The same with a last column of ones: where queries hold them, a table's keys hold biases."""
        rows = columns[0]
        return self.pack(*columns, rows.new_ones(1, 1, 1).expand(*rows.shape[:2], 1))

    def unpack(self, packed: torch.Tensor, problems: int) -> torch.Tensor:
        """Inverse of `pack`: `(P, N, D)`."""
        return packed.flatten(0, 1).index_select(0, self.slots).view(problems, -1, packed.shape[-1])

    def sum(self, values: torch.Tensor, tables: int) -> torch.Tensor:
        """Sum of `(blocks, ...)` over the blocks of each cluster, `(P · C, ...)`."""
        return values.new_zeros(tables, *values.shape[1:]).index_add_(0, self.clusters, values)

    def some(self, part: slice) -> "ClusterBlocks":
        """Some of the blocks, for what belongs to their clusters."""
        return replace(self, clusters=self.clusters[part])

    def of_cluster(self, tables: torch.Tensor) -> torch.Tensor:
        """What belongs to a block's cluster, of `(P · C, ...)`: `(blocks, ...)`."""
        return tables.index_select(0, self.clusters)


class WholeBlocks(ClusterBlocks):
    """Rows of `P` heads where every head, or equal part of one, is a cluster and a block: nothing is copied."""

    def pack(self, *columns: torch.Tensor) -> torch.Tensor:
        rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)
        return rows.reshape(-1, self.length, rows.shape[2])

    def unpack(self, packed: torch.Tensor, problems: int) -> torch.Tensor:
        return packed.view(problems, -1, packed.shape[2])

    def sum(self, values: torch.Tensor, tables: int) -> torch.Tensor:
        return values

    def of_cluster(self, tables: torch.Tensor) -> torch.Tensor:
        return tables


def stable_order(index: torch.Tensor, clusters: int) -> torch.Tensor:
    """`index.argsort(stable=True)` of numbers below `clusters`; on a CPU ten times as fast."""
    if index.device.type != "cpu" or clusters > LARGEST_SHORT:
        return index.argsort(stable=True)
    return torch.from_numpy(index.to(torch.int16).numpy().argsort(kind="stable"))


def block_length(mean_size: float) -> int:
    """Rows per block for clusters of `mean_size` rows: few half-empty blocks, few copies of what they share."""
    return next((length for length in (8, 16, 32) if mean_size <= length), 64)
