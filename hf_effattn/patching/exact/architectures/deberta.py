"""The disentangled attention of DeBERTa v2 and v3 by SDPA, some queries at a time, and without matrices of distances.

To the score of a query and a key are added the query's product with a vector of their distance, and the key's product
with another (He et al. 2021, equations 2 to 4). transformers gathers both for all pairs, by a matrix of distances, and
keeps several matrices of `N * N` for each head. Here the rows of some queries are made and given to SDPA; keys so far
away that their distances have one vector need no gathering. Nothing is approximated; outputs differ by rounding.

Sizes: `B` batch, `N` length, `E` hidden size, `H` heads, `D` head_dim, `T` vectors of distances.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from ....ops.derivatives import learns
from ....ops.shared.graphs import is_traced
from ..query_chunks import ROWS, added_mask, in_query_chunks
from .t5_and_mpnet import of_pairs, shifted


def attend_disentangled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distance_key: torch.Tensor | None,
    distance_query: torch.Tensor | None,
    index: torch.Tensor | None,
    mask: torch.Tensor | None,
    *,
    scale: float,
    reach: int | None,
    dropout: float,
) -> torch.Tensor:
    """Exact disentangled attention; memory is linear in the length.

    Args:
        query, key, value (`torch.Tensor`): `(B, H, N, D)`.
        distance_key (`torch.Tensor`, *optional*): `(H, T, D)`, the vectors that queries are multiplied with.
        distance_query (`torch.Tensor`, *optional*): `(H, T, D)`, the vectors that keys are multiplied with.
        index (`torch.Tensor`, *optional*): `(2 N - 1,)`, which vectors stand for the distance `i - j` of query `i` and
            key `j`, at `i - j + N - 1`.
        mask (`torch.Tensor`, *optional*): `(B, 1, 1, N)`, whether keys are seen.
        scale (`float`): factor on all three products.
        reach (`int`, *optional*): from this distance on all have the last vector, and from minus this the first.
        dropout (`float`): dropout on the attention weights.

    Returns:
        `torch.Tensor`: `(B, H, N, D)`.
    """
    N = key.shape[2]
    hidden = added_mask(mask, query.dtype)
    if index is None or (distance_key is None and distance_query is None):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=hidden, dropout_p=dropout, scale=scale)
    of_key = None
    if distance_query is None and distance_key is not None and hidden is not None:
        of_key = hidden.expand(-1, -1, distance_key.shape[1], -1)
    elif distance_query is not None:
        scaled, multiplied = distance_query * scale, key
        if hidden is not None:  # one more feature, for which every vector has 1: a sum would be a copy
            scaled = F.pad(scaled, (0, 1), value=1.0)
            multiplied = torch.cat([key, hidden.transpose(2, 3).expand(*key.shape[:3], 1)], dim=3)
        of_key = scaled @ multiplied.transpose(2, 3)  # (B, H, T, N)
    falling = index.flip(0)  # of query i and key j at N - 1 - i + j
    reach = N if reach is None else reach
    vectors = None if distance_key is None else distance_key * scale

    def attend(query: torch.Tensor, first: int) -> torch.Tensor:
        rows = query.shape[2]
        low, high = max(0, first - reach + 1), min(N, first + rows - 1 + reach)
        start = N - first - rows
        near = falling[start + low : start + high + rows - 1]  # of the last of the rows and key `low` on
        terms = []  # each of the keys long before, those near, and those long after
        if vectors is not None:
            near_products = shifted(query @ vectors[:, near].transpose(1, 2))
            terms.append((query @ vectors[:, -1, :, None], near_products, query @ vectors[:, 0, :, None]))
        if of_key is not None:
            index = of_pairs(near, rows, high - low).expand(*of_key.shape[:2], -1, -1)
            gathered = of_key[..., low:high].gather(2, index)
            terms.append((of_key[:, :, -1:, :low], gathered, of_key[:, :, :1, high:]))
        before, within, after = (sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True))
        added = within.contiguous()
        if low or high < N:
            sides = before.expand(-1, -1, rows, low), added, after.expand(-1, -1, rows, N - high)
            added = torch.cat(sides, dim=3)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=dropout, scale=scale)

    in_short_parts = query.device.type == "cpu" and not learns(query, key, value)
    return in_query_chunks(attend, query, N, ROWS if in_short_parts else None)


def _matrix(row: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Distances as transformers has them, `(1, N, N)`, of a row `(2 N - 1,)`."""
    return row if row is None or row.ndim > 1 else of_pairs(row.flip(0), length, length)[None]


class DebertaV2ByRows(DisentangledSelfAttention):
    """The self-attention of DeBERTa v2 and v3, patched."""

    query_proj: nn.Module
    key_proj: nn.Module
    value_proj: nn.Module
    num_attention_heads: int
    relative_attention: bool
    max_relative_positions: int
    dropout: nn.Dropout
    pos_dropout: nn.Dropout
    pos_att_type: list[str]
    position_buckets: int

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Self-attention of one layer.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            attention_mask (`torch.Tensor`): `(B, 1, 1, N)`, or `(B, 1, N, N)`.
            output_attentions (`bool`): whether attention weights are asked for.
            query_states (`torch.Tensor`, *optional*): `(B, N, E)`, of queries that are other tokens.
            relative_pos (`torch.Tensor`, *optional*): `(2 N - 1,)`, the distances; or a matrix of them.
            rel_embeddings (`torch.Tensor`, *optional*): `(2 S, E)`, of distances from `-S` on.

        Returns:
            `(torch.Tensor, torch.Tensor | None)`: `(B, N, E)`, and the weights if asked for.
        """
        by_row = relative_pos is not None and relative_pos.ndim == 1 and rel_embeddings is not None
        alike = attention_mask.shape[2] == 1 and (by_row or not self.relative_attention)
        if output_attentions or not alike or is_traced():
            if attention_mask.shape[2] == 1:  # as transformers' own, whose padding sees nothing
                attention_mask = attention_mask * attention_mask.transpose(2, 3)
            distances = _matrix(relative_pos, hidden_states.shape[1])
            arguments = hidden_states, attention_mask, output_attentions, query_states, distances
            return super().forward(*arguments, rel_embeddings)
        query, key, value = self._projected(hidden_states, query_states)
        distance_key = distance_query = None
        if relative_pos is not None and rel_embeddings is not None:
            # A bucket's number can exceed its distance.
            in_buckets = self.position_buckets > 0
            largest = self.position_buckets if in_buckets else self.max_relative_positions
            span = largest if in_buckets else min(largest, hidden_states.shape[1])
            relative_pos = (relative_pos + span).clamp(0, 2 * span - 1)
            used = self.pos_dropout(rel_embeddings)[largest - span : largest + span]
            distance_key, distance_query = (
                None if made is None else made.unflatten(1, (query.shape[1], -1)).transpose(0, 1)
                for made in self._of_distances(used)
            )
        products = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        output = attend_disentangled(
            query,
            key,
            value,
            distance_key,
            distance_query,
            relative_pos,
            attention_mask.bool(),
            scale=(query.shape[3] * products) ** -0.5,
            reach=self._reach(),
            dropout=self.dropout.p if self.training else 0.0,
        )
        return output.transpose(1, 2).flatten(2), None

    def _reach(self) -> int | None:
        """The distance from which on all are one to the model: its buckets grow up to the largest that it knows.

        None where there is none: the largest distance does not get the last of an odd number of buckets.
        """
        if not self.relative_attention:
            return None
        exact = self.position_buckets // 2  # distances with a bucket of their own
        grow = 1 < exact < self.max_relative_positions - 1 and self.position_buckets % 2 == 0
        return self.max_relative_positions + 1 if grow or self.position_buckets <= 0 else None

    def _projected(self, hidden_states: torch.Tensor, query_states: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values `(B, H, N, D)` of the states of keys and, if others ask, of queries."""
        asking = hidden_states if query_states is None else query_states
        made = self.query_proj(asking), self.key_proj(hidden_states), self.value_proj(hidden_states)
        return tuple(states.unflatten(2, (self.num_attention_heads, -1)).transpose(1, 2) for states in made)

    def _of_distances(self, embeddings: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The keys and the queries of distances `(T, H * D)`, where the model has them, of `(T, E)`."""
        shared = "key_proj", "query_proj"
        of_key, of_query = shared if self.share_att_key else ("pos_key_proj", "pos_query_proj")
        key = getattr(self, of_key)(embeddings) if "c2p" in self.pos_att_type else None
        return key, getattr(self, of_query)(embeddings) if "p2c" in self.pos_att_type else None


class DebertaV2EncoderByRows(DebertaV2Encoder):
    """The layers of DeBERTa v2 and v3, patched: they are given a row of distances, and padding as it comes."""

    relative_attention: bool
    position_buckets: int
    max_relative_positions: int

    def get_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Padding `(B, N)` as `(B, 1, 1, N)`; a mask whose rows differ as transformers has it."""
        if attention_mask.ndim > 2 or is_traced():
            return super().get_attention_mask(attention_mask)
        return attention_mask[:, None, None]

    def get_rel_pos(
        self, hidden_states: torch.Tensor, query_states: torch.Tensor | None = None, relative_pos: Any = None
    ) -> torch.Tensor | None:
        """The distances `(2 N - 1,)` of hidden states `(B, N, E)`, in buckets if the model has them."""
        if not self.relative_attention or relative_pos is not None or is_traced():
            return super().get_rel_pos(hidden_states, query_states, relative_pos)
        length = hidden_states.shape[1]
        distances = torch.arange(1 - length, length, device=hidden_states.device)
        if self.position_buckets <= 0:
            return distances
        return make_log_bucket_position(distances, self.position_buckets, self.max_relative_positions).long()
