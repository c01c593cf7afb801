"""A gate whose weight each head learns from 0, for a row of `translation`: an attempt, and no option of the models."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

from hf_effattn.models.clusterformer import modeling_clusterformer
from hf_effattn.models.clusterformer.attention import CentroidWeight, SortedBlockSelfAttention
from hf_effattn.models.clusterformer.configuration_clusterformer import ClusterFormerConfig
from hf_effattn.models.clusterformer.sorting import SortedWords
from hf_effattn.ops.sorted_block_attention.reference import MEMBERSHIP_FLOOR, visible_pairs


class HeadGatedSelfAttention(SortedBlockSelfAttention):
    """Attention within sorted blocks whose gate is multiplied by a number per head, 0 at first: of an encoder alone.

    Scores of all pairs are formed, which sentences of a translation afford.
    """

    def __init__(self, config: ClusterFormerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate_weight = CentroidWeight(config)

    def forward(
        self, words: torch.Tensor, clustered: SortedWords, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Attend from words `(B, N, d)`."""
        if cache is not None or self.causal or clustered.membership is None:
            raise ValueError("a gate per head needs an encoder with gated=True, got a decoder or no memberships")
        query, key, value = (self.split(layer(words)) for layer in (self.query, self.key, self.value))
        lengths = torch.as_tensor(clustered.block_length, device=words.device).expand(len(words))
        visible, _, _ = visible_pairs(clustered.order.long(), lengths, self.window_blocks, False, None, mask)
        shared = clustered.membership @ clustered.membership.transpose(1, 2)
        bias = self.gate_weight((shared + MEMBERSHIP_FLOOR).log().to(query.dtype)[:, None])
        # Finite: a padded query sees nothing, and its row must not become NaN.
        bias = bias.masked_fill(~visible[:, None], torch.finfo(query.dtype).min)
        return self.join(F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=self.dropout))


@contextmanager
def head_gates() -> Iterator[None]:
    """ClusterFormers that are built inside have a gate per head."""
    with patch.object(modeling_clusterformer, "SortedBlockSelfAttention", HeadGatedSelfAttention):
        yield
