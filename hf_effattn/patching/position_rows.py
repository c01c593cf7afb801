"""Rows that a layer projects in one call with its tokens: the positions that a conversion adds to queries and keys.

Whatever projects (adapters, quantised layers, hooks that hold or cast weights) is called as often as by exact
attention, and treats these rows as it treats hidden states. Sizes: `B` batch, `H` heads, `N` length, `D` head_dim,
`R` rows, `r` of them in front of each text.
"""

from typing import Any

import torch
import torch.nn.functional as F

# The keyword by which an attention function hears of rows in front of a call's tokens.
POSITION_ROWS = "effattn_position_rows"
# The attention implementations whose functions read them.
READ_BY: set[str] = set()

PositionTerms = tuple[torch.Tensor, torch.Tensor]


class PositionRows:
    """What a layer's projections make of the rows, apart from its tokens.

    The rows are a row of zeros, by which the biases of the projections are known, and scaled positions.

    Args:
        of_positions (`int`): how many positions there are, `R - 1`.
        in_front (`int`): `r`, how many rows stand in front of each text.
        scale (`torch.Tensor`): `(R - 1, 1)`, what each position was multiplied by.
        shared (`bool`): whether what is made of a row is the same in each text, which may have some of them.
        cache (*optional*): where the layer keeps keys and values of tokens, of which the rows are none.
    """

    def __init__(self, of_positions: int, in_front: int, scale: torch.Tensor, *, shared: bool, cache: Any) -> None:
        self.of_positions, self.in_front, self.scale, self.shared = of_positions, in_front, scale, shared
        self._cache = cache
        self._key: torch.Tensor | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place of the cache: put the tokens into it, and return what it returns."""
        self._key, key = self._split(key)
        cache = getattr(self._cache, "self_attention_cache", self._cache)  # beside that of a cross-attention
        return cache.update(key, self._split(value)[1], *args, **kwargs)

    def split(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PositionTerms]:
        """Queries, keys and values of the tokens, and what the positions add to queries and keys.

        Args:
            query (`torch.Tensor`): `(B, H, r + N, D)`.
            key (`torch.Tensor`): the same; or keys of tokens, where `update` was called.
            value (`torch.Tensor`): of as many rows as `key`.

        Returns: those of the tokens, and two terms of `(H, R - 1, D)`, or `(B, H, R - 1, D)`.
        """
        of_query, query = self._split(query)
        of_key = self._key
        if of_key is None:
            (of_key, key), (_, value) = self._split(key), self._split(value)
        return query, key, value, (self._terms(of_query), self._terms(of_key))

    def put_in_front(self, output: torch.Tensor) -> torch.Tensor:
        """An output `(B, N, H, D)` with rows of 0 in front, `(B, r + N, H, D)`, as the layer expects."""
        return F.pad(output, (0, 0, 0, 0, self.in_front, 0))

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[:, :, : self.in_front], rows[:, :, self.in_front :]

    def _terms(self, projected: torch.Tensor) -> torch.Tensor:
        """What `(B, H, r, D)` adds to queries or keys: the projected positions without bias."""
        if self.shared and self.in_front > self.of_positions:
            projected = projected[0]
        elif self.shared:
            projected = projected.transpose(1, 2).flatten(0, 1).transpose(0, 1)  # (H, B · r, D)
        terms = projected[..., 1 : 1 + self.of_positions, :] - projected[..., :1, :]
        return terms / self.scale.to(terms)
