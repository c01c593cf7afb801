"""How the CPU form lays slices out: one after the other in a table, so that a neighbour is the table moved by one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..shared.precision import product_dtype


@dataclass(frozen=True)
class Layout:
    """Sizes of one call. With an extension every head gets one empty slice more, which parts it from the next head."""

    slice_length: int
    extension: int
    causal: bool
    length: int
    group: int

    @property
    def slices(self) -> int:
        return -(-self.length // self.slice_length)

    @property
    def places(self) -> int:
        """Slices per head in the table."""
        return self.slices + (1 if self.extension else 0)

    @property
    def parts(self) -> tuple[tuple[int, slice, slice], ...]:
        """Where the window's keys stand: the neighbour (-1, 0, 1), its rows, and their columns in the window."""
        L, e = self.slice_length, self.extension
        middle = (0, slice(0, L), slice(e, e + L))
        if not e:
            return (middle,)
        left = (-1, slice(L - e, L), slice(0, e))
        return (left, middle) if self.causal else (left, middle, (1, slice(0, e), slice(e + L, e + L + e)))

    @property
    def window(self) -> int:
        return self.slice_length + self.extension * (1 if self.causal else 2)

    def pack(self, rows: torch.Tensor, token: torch.Tensor | None, group: int) -> torch.Tensor:
        """Rows `(b, h · group, N, D)` as `(b, h, places, group · L, D)`, masked and missing ones 0.

        In the dtype that products are taken in.
        """
        b, heads, _, D = rows.shape
        sizes = b, heads // group, self.places, group, self.slice_length, D
        table = rows.new_zeros(sizes, dtype=product_dtype(rows))
        missing = self.slices * self.slice_length - self.length
        if missing:
            rows = F.pad(rows, (0, 0, 0, missing))
        source = rows.unflatten(1, (-1, group)).unflatten(3, (self.slices, self.slice_length))
        target = table[:, :, : self.slices]
        target.copy_(source.transpose(2, 3))
        if token is not None:
            target.masked_fill_(~token[:, None, :, None, :, None], 0.0)
        return table.flatten(3, 4)

    def pack_neighbours(self, rows: torch.Tensor, token: torch.Tensor | None) -> torch.Tensor:
        """Rows `(b, h, N, D)` as a flat table of slices `(1 + b · h · places + 1, L, D)`, an empty one at each end."""
        table = self.pack(rows, token, 1).flatten(0, 2)
        return F.pad(table, (0, 0, 0, 0, 1, 1)) if self.extension else table

    def part(self, table: torch.Tensor, neighbour: int, rows: slice) -> torch.Tensor:
        """The rows that each slice sees of a neighbour, out of a table with neighbours: `(T, rows, D)`, a view."""
        if not self.extension:
            return table
        return table[1 + neighbour : len(table) - 1 + neighbour, rows]

    def unpack(self, table: torch.Tensor, b: int) -> torch.Tensor:
        """Inverse of `pack`: `(T, group · L, D)` to `(b, heads, N, D)`."""
        group = table.shape[1] // self.slice_length
        table = table.view(b, -1, self.places, group, self.slice_length, table.shape[-1])[:, :, : self.slices]
        return table.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, : self.length]
