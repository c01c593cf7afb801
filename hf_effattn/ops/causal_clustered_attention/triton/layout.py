"""Rows as the kernels of the causal form take them: tokens that count first, whole segments, blocks of completed keys.

Sizes: `B` batch, `H` query heads, `Hk` key/value heads, `N` tokens, `n` tokens of a segment, `L` segments with distant
keys. Each of these is the first to see `n` keys over clusters, its block; the first block may begin with places
without a key, as many as `shift`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..reference import Settings


@dataclass(frozen=True)
class Layout:
    """Where segments and blocks lie, for an op's settings; it depends on sizes alone."""

    settings: Settings
    length: int  # `N`
    segments: int  # of `n` tokens, the last may be short
    first_late: int  # the first segment with distant keys

    @classmethod
    def of(cls, settings: Settings) -> "Layout":
        """The layout of an op's arguments."""
        N, n = settings.query.shape[2], settings.segment_length
        return cls(settings, N, -(-N // n), settings.window // n + 1)

    @property
    def late(self) -> int:
        """`L`."""
        return max(0, self.segments - self.first_late)

    @property
    def padded(self) -> int:
        """Tokens of whole segments."""
        return self.segments * self.settings.segment_length

    @property
    def shift(self) -> int:
        """Places before the first key."""
        return self.settings.window % self.settings.segment_length

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(B, H, N, D)`, contiguous, with zeros up to whole segments."""
        return _padded(rows, 0, self.padded - self.length)

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(B, Hk, N, D)`, contiguous, with `shift` zeros before them, as many as all blocks and more."""
        return _padded(rows, self.shift, self.padded - self.length)

    def of_segments(self, rows: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Of contiguous rows `(B, H, .., D)`, `count` segments from `first` on: a view `(count, B · H, n, D)`."""
        n = self.settings.segment_length
        segments = rows.flatten(0, 1)[:, first * n : (first + count) * n]
        return segments.unflatten(1, (count, n)).transpose(0, 1)

    @property
    def first_previous(self) -> int:
        """The first segment whose queries' clusters are read; a late segment reads those of the one before it."""
        return self.first_late - 1

    def key_mask(self) -> torch.Tensor | None:
        """Places of the blocks that hold a key, `(L, n)`; None: all do."""
        if not self.shift:
            return None
        n = self.settings.segment_length
        return (torch.arange(self.late * n, device=self.settings.query.device) >= self.shift).view(self.late, n)


def _padded(rows: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    """Rows `(B, H, N, D)`, contiguous, with zeros around them; `pad` copies, even where nothing is to be added."""
    return (pad(rows, (0, 0, before, behind)) if before or behind else rows).contiguous()


class Rows(NamedTuple):
    """The op's rows, laid out."""

    query: torch.Tensor  # `(B, H, tokens of whole segments, D)`
    key: torch.Tensor  # `(B, Hk, shift + tokens, D)`
    value: torch.Tensor

    @property
    def heads(self) -> int:
        """`B · H`."""
        return self.query.shape[0] * self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a key head, `g`."""
        return self.query.shape[1] // self.key.shape[1]


@dataclass(frozen=True)
class Compaction:
    """Masked tokens taken out: those that count stand first, in their order."""

    order: torch.Tensor  # `(B, N)`, the token at each place
    places: torch.Tensor  # `(B, N)`, the place of each token
    counts: torch.Tensor  # `(B,)`, how many count

    @classmethod
    def of(cls, key_mask: torch.Tensor) -> "Compaction":
        """By a mask `(B, N)`, True = counts."""
        order = (~key_mask).to(torch.uint8).argsort(dim=1, stable=True)
        places = torch.empty_like(order)
        tokens = torch.arange(order.shape[1], device=order.device).expand_as(order)
        return cls(order, places.scatter_(1, order, tokens), key_mask.sum(dim=1))

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(B, H, N, D)` in this order, 0 behind those that count."""
        B, H, N, D = rows.shape
        ordered = rows.gather(2, self.order[:, None, :, None].expand(B, H, N, D))
        behind = torch.arange(N, device=rows.device) >= self.counts[:, None]
        return ordered.masked_fill_(behind[:, None, :, None], 0.0)

    def put(self, output: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        """Outputs `(B, H, N, Dv)` where their tokens stood, 0 for masked ones; laid out as they are."""
        places = self.places[:, None, :, None].expand_as(output)
        placed = torch.gather(output, 2, places, out=torch.empty_like(output))
        return placed.masked_fill_(~key_mask[:, None, :, None], 0.0)
