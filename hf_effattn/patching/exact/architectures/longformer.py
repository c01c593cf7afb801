"""Longformer's attention in blocks: windows, and tokens of global attention that see and are seen by all others.

transformers computes it itself, in chunks of twice the keys that a query sees and with copies of all scores, so no
method is called there: a patch gives its modules the classes of this file instead, which hold the same weights and
compute the same attention (Beltagy, Peters and Cohan 2020, section 3.1). Outputs differ by rounding.

Sizes: `B` batch, `N` length, `E` hidden size, `H` heads, `D` head_dim, `G` tokens of global attention.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.led.modeling_led import LEDEncoderSelfAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from ....ops.shared.graphs import is_traced
from ...module_patch import ModuleMixin
from ...transformers_internals import has_hooks
from ..windows import KeysForAll, Window, attend_in_blocks, block_length, seen_in_blocks


class _InBlocks(ModuleMixin):
    """What a class of transformers' becomes when it stands behind this one."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    query_global: nn.Module
    key_global: nn.Module
    value_global: nn.Module
    num_heads: int
    head_dim: int
    dropout: float
    one_sided_attn_window_size: int
    config: Any

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        is_index_masked: torch.Tensor | None = None,
        is_index_global_attn: torch.Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Self-attention of one layer; where weights are asked for, or a trace is taken, by transformers' own code.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            attention_mask (`torch.Tensor`, *optional*): `(B, N)`, which the next two are made of.
            is_index_masked (`torch.BoolTensor`): `(B, N)`, padding.
            is_index_global_attn (`torch.BoolTensor`): `(B, N)`, tokens of global attention.
            is_global_attn (`bool`): whether there are any.
            output_attentions (`bool`): whether attention weights are asked for.

        Returns:
            `(torch.Tensor,)`: `(B, N, E)`, 0 in padding.
        """
        traced = is_traced() or getattr(self.config, "onnx_export", False)
        if output_attentions or traced or is_index_masked is None or is_index_global_attn is None:
            arguments = attention_mask, is_index_masked, is_index_global_attn, is_global_attn, output_attentions
            return super().forward(hidden_states, *arguments)
        B, N, _ = hidden_states.shape
        query, key, value = (self._heads(proj(hidden_states)) for proj in (self.query, self.key, self.value))
        reach = self.one_sided_attn_window_size
        window, in_windows = Window(reach, reach), ~(is_index_masked | is_index_global_attn)

        def sees(text: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            # All see themselves, for a softmax over nothing is NaN, in gradients too; where it is wrong nothing is
            # left of the row in the end.
            return ((query - key).abs() <= reach) & in_windows[text, key] | (query == key)

        blocks: dict[str, Any] = {"length": N, "device": query.device, "block": block_length(window)}
        seen = seen_in_blocks(window, sees, None, batch_size=B, **blocks)
        places = for_all = None
        if is_global_attn:
            places, present = _places(is_index_global_attn)
            for_all = KeysForAll(_rows(key, places[:, None]), _rows(value, places[:, None]), present)
        dropout = self.dropout if self.training else 0.0
        output = attend_in_blocks(
            query, key, value, seen, causal=False, dropout=dropout, scale=None, for_all=for_all
        ).flatten(2)
        output = output.masked_fill(is_index_masked[..., None], 0.0)
        if places is not None:
            global_output = self._of_global_tokens(hidden_states, places, is_index_masked).to(output.dtype)
            global_output = torch.where(present[..., None], global_output, _rows(output, places))
            output = output.scatter(1, places[..., None].expand_as(global_output), global_output)
        return (output,)

    def _of_global_tokens(
        self, hidden_states: torch.Tensor, places: torch.Tensor, is_index_masked: torch.Tensor
    ) -> torch.Tensor:
        """What the tokens at `places`, `(B, G)`, see of all tokens by their own weights, `(B, G, E)`."""
        query = self._heads(self.query_global(_rows(hidden_states, places))) * self.head_dim**-0.5
        few = places.shape[1] <= self.head_dim and hidden_states.dtype in (torch.float32, torch.float64)
        if few and _is_untouched(self.key_global, hidden_states) and _is_untouched(self.value_global, hidden_states):
            return self._of_few(query, hidden_states, is_index_masked)
        key, value = (self._heads(proj(hidden_states)) for proj in (self.key_global, self.value_global))
        weights = self._weights(query @ key.transpose(2, 3), is_index_masked)
        return (weights @ value).transpose(1, 2).flatten(2)

    def _of_few(self, query: torch.Tensor, hidden_states: torch.Tensor, is_index_masked: torch.Tensor) -> torch.Tensor:
        """The same without keys and values of all tokens, which would cost more than the few queries do.

        `q · (W x + b)` is `(Wᵀ q) · x + q · b`, and the values are made of the weighted hidden states.
        """

        def by_head(linear: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """Weight `(H, D, E)` and bias `(H, 1, D)`."""
            return linear.weight.unflatten(0, (self.num_heads, -1)), linear.bias.unflatten(0, (self.num_heads, 1, -1))

        weight, bias = by_head(self.key_global)
        scores = ((query @ weight).flatten(1, 2) @ hidden_states.transpose(1, 2)).unflatten(1, (self.num_heads, -1))
        weights = self._weights(scores + (query * bias).sum(dim=3, keepdim=True), is_index_masked)
        weight, bias = by_head(self.value_global)
        seen = (weights.flatten(1, 2) @ hidden_states).unflatten(1, (self.num_heads, -1))  # (B, H, G, E)
        # Dropout leaves weights that do not sum to 1.
        values = seen @ weight.transpose(1, 2) + weights.sum(dim=3, keepdim=True) * bias
        return values.transpose(1, 2).flatten(2)

    def _weights(self, scores: torch.Tensor, is_index_masked: torch.Tensor) -> torch.Tensor:
        """Attention weights `(B, H, G, N)` of scores, after dropout."""
        scores = scores.masked_fill(is_index_masked[:, None, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        return F.dropout(weights, self.dropout, self.training)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`(B, N, E)` as `(B, H, N, D)`."""
        return rows.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)


class LongformerInBlocks(_InBlocks, LongformerSelfAttention):
    """Longformer's self-attention, patched."""


class LEDEncoderInBlocks(_InBlocks, LEDEncoderSelfAttention):
    """Self-attention of LED's encoder, patched."""


def _places(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens are of which `chosen` `(B, N)` is true, `(B, G)`, and which of these are there, by text."""
    counts = chosen.sum(dim=1, keepdim=True)
    most = int(counts.max())
    places = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return places, torch.arange(most, device=chosen.device) < counts


def _rows(each: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows of `(..., N, D)` at `places` `(..., G)`."""
    return each.gather(-2, places[..., None].expand(*each.shape[:-2], -1, each.shape[-1]))


def _is_untouched(layer: nn.Module, inputs: torch.Tensor) -> bool:
    """Whether a linear layer is its weights alone: no adapter, hook or other precision takes part in a call of it."""
    plain = type(layer) is nn.Linear and "forward" not in vars(layer) and not has_hooks(layer)
    return plain and not torch.is_autocast_enabled(inputs.device.type)
