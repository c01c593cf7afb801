"""Attention with a bias for each distance, of T5's kind and MPNet, by SDPA and without a matrix of the biases.

transformers makes a matrix of them, `N * N` for each head, and copies it where there is padding. The matrix's rows are
pieces of one row of `2 N - 1` distances, each shifted by one, so that a view of that row stands for all of it. Nothing
is approximated (Raffel et al. 2020, section 2.1; Song et al. 2020); outputs differ by rounding.

Sizes: `B` batch, `N` length, `E` hidden size, `H` heads, `D` head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from ....ops.derivatives import learns
from ....ops.shared.graphs import in_a_graph
from ...module_patch import ModuleMixin
from ...transformers_internals import matrices_are_collected
from ..query_chunks import added_mask, floor, in_query_chunks


def attend_by_distance(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """Exact attention to whose scores the bias of their distance is added; memory is linear in the length.

    Args:
        query, key, value (`torch.Tensor`): `(B, H, N, D)`.
        bias (`torch.Tensor`): `(H, 2 N - 1)`, of key `j` for query `i` at `j - i + N - 1`.
        mask (`torch.Tensor`, *optional*): `(B, 1, 1, N)`, added to the scores, no less than `floor`.
        scale (`float`): factor on the products of queries and keys.
        dropout (`float`): dropout on the attention weights.

    Returns:
        `torch.Tensor`: `(B, H, N, D)`.
    """
    bias = bias.to(query.dtype).contiguous()
    query = query.flip(2)  # so that each row of the matrix begins one to the right of that above, as a view can
    if query.device.type == "cpu" and not dropout and not learns(bias):
        return _by_view(query, key, value, bias, mask, scale=scale).flip(2)
    return _in_query_chunks(query, key, value, bias, mask, scale=scale, dropout=dropout).flip(2)


def _by_view(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
) -> torch.Tensor:
    """All rows by one call of SDPA, which reads the biases where they are."""
    D = query.shape[3]
    if mask is not None:
        # One more feature of the keys, for which every query has 1: no sum of biases and mask, `N * N`, is made.
        query = torch.cat([query, query.new_ones(1).expand(*query.shape[:3], 1)], dim=3)
        column = (mask / scale).clamp(min=torch.finfo(mask.dtype).min).transpose(2, 3)
        key = torch.cat([key, column.expand(*key.shape[:3], 1)], dim=3)
        value = F.pad(value, (0, 1))
    rows = bias.unfold(1, key.shape[2], 1)[None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=rows, scale=scale)[..., :D]


def _in_query_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """Some rows at a time, whose biases are copied.

    On a CPU SDPA holds all scores where biases learn or weights are dropped; on a GPU it takes no such view.
    """
    N = key.shape[2]

    def attend(query: torch.Tensor, first: int) -> torch.Tensor:
        rows = bias[:, first : first + query.shape[2] + N - 1].unfold(1, N, 1)[None]
        rows = rows.contiguous() if mask is None else rows + mask
        return F.scaled_dot_product_attention(query, key, value, attn_mask=rows, dropout_p=dropout, scale=scale)

    return in_query_chunks(attend, query, N)


def shifted(products: torch.Tensor) -> torch.Tensor:
    """Of rows that all begin at the last one's first distance, `(B, H, rows, W)`, each from its own on, as a view."""
    rows, width = products.shape[2:]
    if rows == 1:
        return products
    flat = products.flatten(2)[..., rows - 1 :][..., : rows * (width - 1)]
    return flat.unflatten(2, (rows, width - 1))[..., : width - rows + 1]


def of_pairs(row: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """What stands of key `j` for query `i` at `j - i + n - 1` in `(..., n + m - 1)`, as matrices `(..., n, m)`.

    No view: torch makes none of a length that a graph leaves open.
    """
    places, first = (torch.arange(count, device=row.device) for count in (keys, queries))
    return row[..., places - first[:, None] + queries - 1]


def _as_matrix(bias: torch.Tensor, mask: torch.Tensor | None, length: int) -> torch.Tensor:
    """The biases `(1, H, N, N)` as transformers has them, with a mask that is to be added."""
    matrix = of_pairs(bias, length, length)[None]
    return matrix if mask is None else matrix + mask


class _ByDistance(ModuleMixin):
    """What a class of transformers' becomes when it stands behind this one."""

    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module

    def _by_transformers(self, mask: torch.Tensor | None, output_attentions: bool = False) -> bool:
        """Whether its own code is to run: weights are asked for, a graph is made, or rows of the mask differ.

        A graph is for texts of many lengths, of which no view as `_by_view` takes it can be made.
        """
        dense = mask is not None and mask.shape[2] > 1
        return output_attentions or dense or in_a_graph() or matrices_are_collected(self)

    def _attend(
        self,
        hidden_states: torch.Tensor,
        bias: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float = 1.0,
        dropout: float,
    ) -> torch.Tensor:
        """Self-attention of one layer, `(B, N, E)`."""
        query, key, value = (
            proj(hidden_states).unflatten(2, (len(bias), -1)).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        dropout = dropout if self.training else 0.0
        mask = None if mask is None else mask.clamp(min=floor(query.dtype)).to(query.dtype)
        output = attend_by_distance(query, key, value, bias, mask, scale=scale, dropout=dropout)
        return self.o(output.transpose(1, 2).flatten(2))


class _T5ByDistance(_ByDistance):
    """T5's kind: layers have biases of their own, or take the first one's."""

    compute_bias: Callable[..., torch.Tensor]
    dropout: float

    def _biases(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Of all distances, `(H, 2 N - 1)`: those of the first key, and those of the first query."""
        length, device = hidden_states.shape[1], hidden_states.device
        before = self.compute_bias(length, 1, device=device)[0, :, :, 0]
        after = self.compute_bias(1, length, device=device)[0, :, 0]
        return torch.cat([before.flip(1), after[:, 1:]], dim=1)


class _SharedBias(_T5ByDistance):
    """T5 and mT5."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Self-attention of one layer.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            mask (`torch.Tensor`, *optional*): `(B, N)`, or of four dimensions.
            key_value_states: None in an encoder.
            position_bias (`torch.Tensor`, *optional*): of the first layer, `(H, 2 N - 1)`, or as transformers has it.
            kwargs: what else transformers passes on; `output_attentions` asks for the weights.

        Returns:
            `(torch.Tensor, torch.Tensor, torch.Tensor | None)`: `(B, N, E)`, the biases, the weights if asked for.
        """
        added = added_mask(mask, hidden_states.dtype)
        by_transformers = self._by_transformers(added, bool(kwargs.get("output_attentions")))
        if position_bias is not None and position_bias.ndim == 2 and by_transformers:
            matrix = _as_matrix(position_bias, added, hidden_states.shape[1])
            outputs = super().forward(hidden_states, position_bias=matrix, **kwargs)
            return outputs[0], position_bias, *outputs[2:]
        if by_transformers or (position_bias is not None and position_bias.ndim > 2):
            return super().forward(hidden_states, mask=added, position_bias=position_bias, **kwargs)
        bias = self._biases(hidden_states) if position_bias is None else position_bias
        return self._attend(hidden_states, bias, added, dropout=self.dropout), bias, None


class T5ByDistance(_SharedBias, T5Attention):
    """Self-attention of T5's encoder, patched."""


class MT5ByDistance(_SharedBias, MT5Attention):
    """Self-attention of mT5's encoder, patched."""


class UMT5ByDistance(_T5ByDistance, UMT5Attention):
    """Self-attention of UMT5's encoder, patched."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Self-attention of one layer.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            args: what else transformers has in its place, None in an encoder.
            attention_mask (`torch.Tensor`, *optional*): `(B, N)`, or of four dimensions.
            kwargs: what else transformers passes on.

        Returns:
            `(torch.Tensor, torch.Tensor | None)`: `(B, N, E)`, and the weights if asked for.
        """
        added = added_mask(attention_mask, hidden_states.dtype)
        if self._by_transformers(added):
            return super().forward(hidden_states, *args, attention_mask=added, **kwargs)
        return self._attend(hidden_states, self._biases(hidden_states), added, dropout=self.dropout), None


class MPNetByDistance(_ByDistance, MPNetSelfAttention):
    """MPNet's self-attention, patched."""

    attention_head_size: int
    dropout: nn.Dropout

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Self-attention of one layer.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            attention_mask (`torch.Tensor`, *optional*): `(B, N)`, or of four dimensions.
            position_bias (`torch.Tensor`, *optional*): of `MPNetEncoderByDistance`.
            output_attentions (`bool`): whether attention weights are asked for.
            kwargs: what else transformers passes on.

        Returns:
            `(torch.Tensor,)`: `(B, N, E)`, and the weights if asked for.
        """
        added = added_mask(attention_mask, hidden_states.dtype)
        if position_bias is None or position_bias.ndim > 2:
            return super().forward(hidden_states, added, position_bias, output_attentions=output_attentions, **kwargs)
        if self._by_transformers(added, output_attentions):
            matrix = _as_matrix(position_bias, added, hidden_states.shape[1])
            return super().forward(hidden_states, None, matrix, output_attentions=output_attentions, **kwargs)
        scale = self.attention_head_size**-0.5
        return (self._attend(hidden_states, position_bias, added, scale=scale, dropout=self.dropout.p),)


class MPNetEncoderByDistance(MPNetEncoder):
    """MPNet's layers, patched: they get the biases of all distances."""

    def compute_position_bias(self, x: torch.Tensor, position_ids: None = None, num_buckets: int = 32) -> torch.Tensor:
        """The biases `(H, 2 N - 1)` of hidden states `(B, N, E)`, in a graph transformers' own.

        It never gives `position_ids`.
        """
        if in_a_graph():
            return super().compute_position_bias(x, position_ids, num_buckets)
        length = x.shape[1]
        distances = torch.arange(1 - length, length, device=x.device)
        return self.relative_attention_bias(self.relative_position_bucket(distances, num_buckets=num_buckets)).T
