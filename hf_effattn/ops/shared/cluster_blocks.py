"""Queries sorted by cluster and cut into blocks, so that what a cluster's queries share is one batched product.

A block holds up to `length` queries of one cluster.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ClusterBlocks:
    """Queries of `P` heads sorted by cluster and cut into blocks of one cluster each.

    Attributes:
        slots: `(P · N,)` place of every query in the padded blocks.
        clusters: `(blocks,)` row of the `(P · C, ...)` tables that a block belongs to.
        length: queries a block can hold; places without a query hold zeros.
    """

    slots: torch.Tensor
    clusters: torch.Tensor
    length: int

    @staticmethod
    def of(index: torch.Tensor, sizes: torch.Tensor) -> "ClusterBlocks":
        """Blocks for queries with table rows `index` `(P · N,)` and cluster sizes `(P, C)`."""
        length = block_length(index.numel() / max(1, sizes.numel()))
        sizes = sizes.flatten()
        blocks = (sizes + length - 1) // length
        order = index.argsort(stable=True)
        # A query's place: its cluster's first block, plus its rank in the cluster.
        first_place = (blocks.cumsum(0) - blocks) * length - (sizes.cumsum(0) - sizes)
        places = first_place.index_select(0, index.index_select(0, order))
        places += torch.arange(len(order), device=index.device)
        slots = torch.empty_like(places).index_copy_(0, order, places)
        table = torch.arange(len(sizes), device=index.device)
        return ClusterBlocks(slots, table.repeat_interleave(blocks), length)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(P, N, D)` in their blocks, `(blocks, length, D)`, zeros where a block is not full."""
        packed = rows.new_zeros(len(self.clusters) * self.length, rows.shape[-1])
        return packed.index_copy_(0, self.slots, rows.flatten(0, 1)).view(len(self.clusters), self.length, -1)

    def unpack(self, packed: torch.Tensor, problems: int) -> torch.Tensor:
        """Inverse of `pack`: `(P, N, D)`."""
        return packed.flatten(0, 1).index_select(0, self.slots).view(problems, -1, packed.shape[-1])

    def sum(self, values: torch.Tensor, tables: int) -> torch.Tensor:
        """Sum of `(blocks, ...)` over the blocks of each cluster, `(P · C, ...)`."""
        return values.new_zeros(tables, *values.shape[1:]).index_add_(0, self.clusters, values)


def block_length(mean_size: float) -> int:
    """Queries per block for clusters of `mean_size` queries: few half-empty blocks, few copies of the top keys."""
    return next((length for length in (8, 16, 32) if mean_size <= length), 64)
