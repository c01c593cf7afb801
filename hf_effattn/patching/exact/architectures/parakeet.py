"""Parakeet's attention by SDPA, some queries at a time, and without matrices of distances.

To the score of a query and a key is added the product of the query and a vector of their distance, each query with a
bias of its own for either product (Dai et al. 2019, section 3.3). transformers multiplies every query with the vectors
of all `2 N - 1` distances, shifts the rows and keeps several matrices of `N * N` for each head. Here the rows of some
queries are made of the vectors that they need, and given to SDPA as a shifted view. Nothing is approximated; outputs
differ by rounding.

Sizes: `B` batch, `N` frames, `E` hidden size, `H` heads, `D` head_dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention, ParakeetEncoderConvolutionModule

from ....ops.derivatives import learns
from ....ops.shared.graphs import in_a_graph
from ...transformers_internals import matrices_are_collected
from ..query_chunks import ROWS, added_mask, in_query_chunks
from .t5_and_mpnet import shifted


def attend_by_distance_vectors(
    query: torch.Tensor,
    distance_query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distance_key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """Exact attention to whose scores the product of a query and a vector of the distance is added.

    Memory is linear in the length.

    Args:
        query, distance_query (`torch.Tensor`): `(B, H, N, D)`, the queries of keys and those of distances.
        key, value (`torch.Tensor`): `(B, H, N, D)`.
        distance_key (`torch.Tensor`): `(1 or B, 1 or H, 2 N - 1, D)`, of query `i` and key `j` at `N - 1 - i + j`.
        mask (`torch.Tensor`, *optional*): `(B, 1, 1, N)`, whether keys are seen.
        scale (`float`): factor on both products.
        dropout (`float`): dropout on the attention weights.

    Returns:
        `torch.Tensor`: `(B, H, N, D)`.
    """
    N, D = key.shape[2:]
    hidden = added_mask(mask, query.dtype)

    def attend(queries: torch.Tensor, first: int) -> torch.Tensor:
        of_key, of_distance = queries.split(D, dim=3)
        rows = queries.shape[2]
        start = N - first - rows  # of the last of the rows and the first key
        near = distance_key[:, :, start : start + N + rows - 1]
        added = shifted(of_distance @ near.transpose(2, 3))
        if hidden is not None:
            added = added + hidden
        return F.scaled_dot_product_attention(of_key, key, value, attn_mask=added, dropout_p=dropout, scale=scale)

    both = query, distance_query
    queries = torch.cat([query, distance_query * scale], dim=3)
    in_short_parts = query.device.type == "cpu" and not learns(*both, key, value, distance_key)
    return in_query_chunks(attend, queries, N, ROWS if in_short_parts else None)


class ParakeetByRows(ParakeetEncoderAttention):
    """Self-attention of Parakeet's encoder, patched."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Self-attention of one layer; where weights are asked for, or a graph is made, by transformers' own code.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            position_embeddings (`torch.Tensor`): `(B, 2 N - 1, E)`, of the distances `N - 1` to `1 - N`.
            attention_mask (`torch.Tensor`, *optional*): `(B, 1, N, N)`, whether query and key are both no padding.
            kwargs: what else transformers passes on.

        Returns:
            `(torch.Tensor, torch.Tensor | None)`: `(B, N, E)`, and the weights if asked for.
        """
        wants_weights = bool(kwargs.get("output_attentions")) or matrices_are_collected(self)
        if wants_weights or in_a_graph():
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        query, key, value = (self._heads(proj(hidden_states)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if not (self.training and self.config.dropout_positions):
            position_embeddings = position_embeddings[:1]  # those of all texts
        output = attend_by_distance_vectors(
            query + self.bias_u[:, None],
            query + self.bias_v[:, None],
            key,
            value,
            self._heads(self.relative_k_proj(position_embeddings)),
            _seen(attention_mask),
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(output.transpose(1, 2).flatten(2)), None

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`(B, N, H * D)` as `(B, H, N, D)`."""
        return rows.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class ParakeetConvolution(ParakeetEncoderConvolutionModule):
    """The convolution of a layer, patched: it needs no matrix to know the padding."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """What transformers gives, `(B, N, E)`, of hidden states `(B, N, E)` and a mask `(B, 1, N, N)`."""
        return super().forward(hidden_states, attention_mask if in_a_graph() else _seen(attention_mask))


def _seen(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The keys that are no padding, `(B, 1, 1, N)`, of a mask of pairs that both are none, `(B, 1, N, N)`."""
    return None if mask is None else mask.bool().diagonal(dim1=2, dim2=3)[:, :, None]
