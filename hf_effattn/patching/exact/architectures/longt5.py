"""LongT5's attention in blocks, by torch's SDPA: three blocks of neighbours and, where it has them, means of all.

transformers computes it itself and holds the scores several times, so no method is called there: a patch gives its
modules the classes of this file instead, as it does with `longformer.py`'s (Guo et al. 2022, section 3). The first
layer, which makes the biases of all, runs transformers' own code. Outputs differ by rounding.

Sizes: `B` batch, `N` length, `E` hidden size, `H` heads, `D` head_dim, `L` length of a block, `n` blocks, `G` means.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.longt5 import modeling_longt5

from ....ops.shared.graphs import is_traced
from ...module_patch import ModuleMixin
from ...transformers_internals import longt5_means


class _InBlocks(ModuleMixin):
    """What a class of transformers' becomes when it stands behind this one."""

    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    n_heads: int
    block_len: int
    dropout: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Self-attention of one layer; by transformers' own code where biases are to be made or weights asked for.

        Args:
            hidden_states (`torch.Tensor`): `(B, N, E)`.
            mask (`torch.Tensor`, *optional*): of the keys, in the form that transformers gives to each class.
            position_bias (`torch.Tensor`, *optional*): of the first layer, to be added to the scores: positions and
                mask, `(B or 1, n or 1, H, L, 3 L + G)`.
            output_attentions (`bool`): whether attention weights are asked for.

        Returns:
            `(torch.Tensor, torch.Tensor)`: `(B, N, E)`, and the biases.
        """
        if position_bias is None or output_attentions or is_traced():
            return super().forward(hidden_states, mask, position_bias, output_attentions)
        B, N, _ = hidden_states.shape
        L = self.block_len
        n = -(-N // L)

        def in_blocks(rows: torch.Tensor, sides: int) -> torch.Tensor:
            """`(B, N, H * D)` as blocks with so many neighbours to each side, `(B * n, H, L + 2 * sides, D)`."""
            texts = F.pad(rows.unflatten(2, (self.n_heads, -1)), (0, 0, 0, 0, sides, n * L - N + sides))
            return texts.unfold(1, L + 2 * sides, L).movedim(-1, 3).flatten(0, 1)

        def of_all_blocks(rows: torch.Tensor) -> torch.Tensor:
            """`(B, G, H * D)` for each block, `(B * n, H, G, D)`."""
            heads = rows.unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            return heads[:, None].expand(-1, n, -1, -1, -1).flatten(0, 1)

        query = in_blocks(self.q(hidden_states), 0)
        key, value = (in_blocks(proj(hidden_states), L) for proj in (self.k, self.v))
        means = self._means(hidden_states, mask)
        if means is not None:
            key, value = (
                torch.cat([each, of_all_blocks(proj(means))], dim=2) for each, proj in ((key, self.k), (value, self.v))
            )
        bias = position_bias.expand(B, n, -1, -1, -1).flatten(0, 1).to(query.dtype)
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
        output = output.transpose(1, 2).unflatten(0, (B, n)).flatten(1, 2)[:, :N].flatten(2)
        return self.o(output), position_bias

    def _means(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """What all tokens see beside their neighbours, `(B, G, E)`; None: nothing."""
        return None


class LongT5LocalInBlocks(_InBlocks, modeling_longt5.LongT5LocalAttention):
    """LongT5's local self-attention, patched."""


class LongT5TransientGlobalInBlocks(_InBlocks, modeling_longt5.LongT5TransientGlobalAttention):
    """LongT5's transient-global self-attention, patched."""

    global_block_size: int
    global_input_layer_norm: nn.Module

    def _means(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        seen = hidden_states.new_ones(hidden_states.shape[:2]) if mask is None else mask
        return self.global_input_layer_norm(longt5_means(hidden_states, seen, self.global_block_size))
