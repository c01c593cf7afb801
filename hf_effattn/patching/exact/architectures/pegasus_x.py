"""Pegasus-X's attention in blocks, by torch's SDPA: tokens see their block and global tokens, which see all.

transformers computes it itself and holds the scores several times, so no method is called there: a patch gives its
modules the class of this file instead, as it does with `longformer.py`'s (Phang, Zhao and Liu 2022, section 3).
Outputs differ by rounding.

Sizes: `B` batch, `N` length, of whole blocks, `H` heads, `D` head_dim, `L` length of a block, `n` blocks, `G` global
tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.pegasus_x.modeling_pegasus_x import DimensionInfo, PegasusXGlobalLocalAttention

from ...transformers_internals import matrices_are_collected


class PegasusXInBlocks(PegasusXGlobalLocalAttention):
    """Self-attention of Pegasus-X's encoder, patched; where weights are asked for, transformers' own code runs."""

    def compute_global_attention_representations(
        self, global_q: Any, global_k: Any, global_v: Any, local_k: Any, local_v: Any, mask: Any, dim: DimensionInfo
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the global tokens see: themselves and all others.

        Args:
            global_q, global_k, global_v (`torch.Tensor`): `(B, H, G, D)`, the queries already scaled.
            local_k, local_v (`torch.Tensor`): `(B, H, N, D)`.
            mask (`torch.Tensor`): `(B, N)`, added to the scores.
            dim (`DimensionInfo`): sizes, as transformers' method takes them.

        Returns:
            `(torch.Tensor, None)`: `(B, H, G, D)`, and no weights.
        """
        if matrices_are_collected(self):
            return super().compute_global_attention_representations(
                global_q, global_k, global_v, local_k, local_v, mask, dim
            )
        key, value = torch.cat([global_k, local_k], dim=2), torch.cat([global_v, local_v], dim=2)
        return self._attend(global_q, key, value, mask, dim), None

    def compute_local_attention_representations(
        self, global_k: Any, global_v: Any, local_q: Any, local_k: Any, local_v: Any, mask: Any, dim: DimensionInfo
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the other tokens see: their block and the global tokens.

        Args:
            global_k, global_v (`torch.Tensor`): `(B, H, G, D)`.
            local_q, local_k, local_v (`torch.Tensor`): `(B, H, N, D)`, the queries already scaled.
            mask (`torch.Tensor`): `(B, N)`, added to the scores.
            dim (`DimensionInfo`): sizes, as transformers' method takes them.

        Returns:
            `(torch.Tensor, None)`: `(B, H, n, L, D)`, and no weights.
        """
        if matrices_are_collected(self):
            return super().compute_local_attention_representations(
                global_k, global_v, local_q, local_k, local_v, mask, dim
            )

        def in_blocks(rows: torch.Tensor) -> torch.Tensor:
            """`(B, H, N, D)` as `(B * n, H, L, D)`."""
            return rows.unflatten(2, (dim.num_blocks, dim.block_size)).transpose(1, 2).flatten(0, 1)

        def beside_global(rows: torch.Tensor, of_all: torch.Tensor) -> torch.Tensor:
            """The blocks, each after the global tokens, `(B * n, H, G + L, D)`."""
            return torch.cat([of_all.repeat_interleave(dim.num_blocks, dim=0), in_blocks(rows)], dim=2)

        key, value = beside_global(local_k, global_k), beside_global(local_v, global_v)
        blocks = mask.unflatten(1, (dim.num_blocks, dim.block_size)).flatten(0, 1)
        output = self._attend(in_blocks(local_q), key, value, blocks, dim)
        return output.unflatten(0, (dim.batch_size, dim.num_blocks)).transpose(1, 2), None

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, dim: DimensionInfo
    ) -> torch.Tensor:
        """Attention to keys of which the first are global, by a mask of the others."""
        seen = F.pad(mask, (dim.global_len, 0)).to(query.dtype)[:, None, None]
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, scale=1.0)
