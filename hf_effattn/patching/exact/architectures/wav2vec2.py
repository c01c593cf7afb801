"""The attention of Wav2Vec2-BERT and Wav2Vec2-Conformer by SDPA, some queries at a time.

Both can add to the score of a query and a key the product of the query and a vector of their distance. Wav2Vec2-BERT
has one for each distance up to a number of frames, which farther keys share ("relative_key": Shaw et al. 2018, section
3.2); transformers makes a tensor of `N * N * D` of them. Else vectors of sinusoids serve ("relative"), as in Parakeet.
Nothing is approximated; outputs differ by rounding.

Sizes: `B` batch, `N` frames, `E` hidden size, `H` heads, `D` head_dim.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerSelfAttention

from ....ops.shared.graphs import in_a_graph
from ...module_patch import ModuleMixin
from ...transformers_internals import matrices_are_collected
from ..query_chunks import added_mask
from .parakeet import attend_by_distance_vectors


class _ByDistanceVectors(ModuleMixin):
    """What a class of transformers' becomes when it stands behind this one."""

    linear_q: nn.Linear
    linear_k: nn.Linear
    linear_v: nn.Linear
    linear_out: nn.Linear
    linear_pos: nn.Linear
    pos_bias_u: torch.Tensor
    pos_bias_v: torch.Tensor
    distance_embedding: nn.Embedding
    left_max_position_embeddings: int
    right_max_position_embeddings: int
    dropout: nn.Dropout
    position_embeddings_type: str | None
    head_size: int

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        relative_position_embeddings: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Self-attention of one layer.

        By transformers' own code where weights are asked for, a graph is made, or positions are no distances.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            attention_mask (`torch.Tensor`, *optional*): `(B, N)`, true = attend, or `(B, 1, N, N)` with equal rows.
            relative_position_embeddings (`torch.Tensor`, *optional*): `(1, 2 N - 1, E)`, of the distances `N - 1` to
                `1 - N`, for "relative".
            kwargs: what else transformers passes on; `output_attentions` asks for the weights.

        Returns:
            `(torch.Tensor, torch.Tensor | None)`: `(B, N, E)`, and the weights if asked for.
        """
        if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):  # flex_attention's, once set
            return super().forward(hidden_states, attention_mask, relative_position_embeddings, **kwargs)
        wants_weights = bool(kwargs.get("output_attentions")) or matrices_are_collected(self)
        shares = self.position_embeddings_type == "relative_key"
        # Without the vectors of "relative" transformers' code says what is missing.
        known = shares or (self.position_embeddings_type == "relative" and relative_position_embeddings is not None)
        if wants_weights or in_a_graph() or not known:
            # What transformers' code of any version adds to the scores.
            added = added_mask(_seen(attention_mask), hidden_states.dtype)
            return super().forward(hidden_states, added, relative_position_embeddings, **kwargs)
        query, key, value = (self._heads(lin(hidden_states)) for lin in (self.linear_q, self.linear_k, self.linear_v))
        if shares or relative_position_embeddings is None:
            vectors, of_key, of_distance = self._shared(query), query, query
        else:
            vectors = self._heads(self.linear_pos(relative_position_embeddings))
            of_key, of_distance = query + self.pos_bias_u[:, None], query + self.pos_bias_v[:, None]
        output = attend_by_distance_vectors(
            of_key,
            of_distance,
            key,
            value,
            vectors,
            _seen(attention_mask),
            scale=self.head_size**-0.5,
            dropout=self.dropout.p if self.training else 0.0,
        )
        return self.linear_out(output.transpose(1, 2).flatten(2)), None

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`(B, N, H * D)` as `(B, H, N, D)`."""
        return rows.unflatten(2, (-1, self.head_size)).transpose(1, 2)

    def _shared(self, query: torch.Tensor) -> torch.Tensor:
        """The vectors of all distances, `(1, 1, 2 N - 1, D)`, from that of the last query and the first key on."""
        N, left = query.shape[2], self.left_max_position_embeddings
        distances = torch.arange(1 - N, N, device=query.device).clamp(-left, self.right_max_position_embeddings)
        return self.distance_embedding(distances + left).to(query.dtype)[None, None]


def _seen(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The keys that are no padding, `(B, 1, 1, N)`."""
    if mask is None:
        return None
    mask = mask[:, None, None] if mask.ndim == 2 else mask[:, :, -1:]
    return mask if mask.dtype == torch.bool else mask == 0  # those to be added


class Wav2Vec2BertByRows(_ByDistanceVectors, Wav2Vec2BertSelfAttention):
    """Self-attention of Wav2Vec2-BERT, patched."""


class Wav2Vec2ConformerByRows(_ByDistanceVectors, Wav2Vec2ConformerSelfAttention):
    """Self-attention of Wav2Vec2-Conformer, patched."""
