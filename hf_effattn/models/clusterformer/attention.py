"""The attentions of a ClusterFormer layer: within sorted blocks or, to compare with, to all words; to an encoder."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from ...ops import sorted_block_attention
from ...ops.sorted_block_attention.reference import MEMBERSHIP_FLOOR
from .cache import clustered_layer
from .configuration_clusterformer import WEIGHTED, ClusterFormerConfig
from .sorting import SortedWords


def cached_words(cache: Cache | None, layer_idx: int = 0) -> int:
    """How many words a cache holds.

    A static cache counts them in a tensor, which its next update changes: the number is read out of it.
    """
    words = 0 if cache is None else cache.get_seq_length(layer_idx)
    return int(words) if torch.is_tensor(words) else words


def remember(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, layer_idx: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Put keys and values `(B, H, N, ·)` behind those of the words before; all of them, and how many were before.

    A static cache returns as many rows as it can hold: those that no word has filled yet are cut off.
    """
    past = cached_words(cache, layer_idx)
    length = past + key.shape[2]
    key, value = cache.update(key, value, layer_idx)
    return key[:, :, :length], value[:, :, :length], past


class Projections(nn.Module):
    """Queries, keys, values and the output of one attention."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.dropout_p = config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """`(B, N, d)` as heads `(B, H, N, D)`."""
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """Heads `(B, H, N, D)` through the output projection, `(B, N, d)`."""
        return self.output(rows.transpose(1, 2).flatten(2))

    @property
    def dropout(self) -> float:
        """The rate of attention dropout now."""
        return self.dropout_p if self.training else 0.0


class CentroidWeight(nn.Module):
    """What each head takes of its attention to the centroids: nothing at first."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, attended: torch.Tensor) -> torch.Tensor:
        """`(B, H, N, D)` times the weight of its head."""
        return attended * self.weight.to(attended.dtype)[:, None, None]


class SortedBlockSelfAttention(Projections):
    """Attention of every word to the words of its window of sorted blocks (Source: Wang 2022, Eq. 7 to 10).

    With `config.attend_centroids` that to the updated centroids is added, `"weighted"` by a number per head.
    """

    def __init__(self, config: ClusterFormerConfig, layer_idx: int) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx
        self.window_blocks = config.window_blocks
        self.causal = config.is_decoder
        self.strict = config.is_decoder and config.causal == "strict"
        # Both are asked: a config can be made a decoder's after it was checked.
        self.attend_centroids = bool(config.attend_centroids) and not config.is_decoder
        weighted = self.attend_centroids and config.attend_centroids == WEIGHTED
        self.centroid_weight = CentroidWeight(config) if weighted else None

    def forward(
        self, words: torch.Tensor, clustered: SortedWords, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Attend from words `(B, N, d)`; with a cache (strict form only) also to the words before them."""
        query, key, value = (self.split(layer(words)) for layer in (self.query, self.key, self.value))
        if cache is not None:
            layer = clustered_layer(cache, self.layer_idx)
            key, value, past = remember(cache, key, value, self.layer_idx)
            labels, shares = layer.add_clusters(clustered.labels, clustered.membership, past)
            if past:
                return self.join(self.attend_to_cache(query, key, value, labels, shares, clustered, mask))
        attended = sorted_block_attention(
            query,
            key,
            value,
            clustered.order,
            block_length=clustered.block_length,
            window_blocks=self.window_blocks,
            causal=self.causal,
            labels=clustered.labels if self.strict else None,
            key_mask=mask,
            membership=None if clustered.membership is None else clustered.membership.to(query.dtype),
            dropout_p=self.dropout,
        )
        if self.attend_centroids and clustered.updated is not None:
            added = self.attend_to_centroids(query, clustered.updated.to(words.dtype))
            attended = attended + (added if self.centroid_weight is None else self.centroid_weight(added))
        return self.join(attended)

    def attend_to_centroids(self, query: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
        """Attention of all words to the centroids `(B, k, d)`, weighted means of them, as if they were words."""
        key, value = (self.split(layer(centroids)) for layer in (self.key, self.value))
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)

    def attend_to_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        labels: torch.Tensor,
        shares: torch.Tensor | None,
        clustered: SortedWords,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the block form gives the last words of a text: as many earlier words of the own label as it reaches.

        `labels` `(B, M)` and memberships `shares` `(B, M, k)` are those of all words, in `clustered` of the last.
        """
        N, M = query.shape[2], key.shape[2]
        same = clustered.labels[:, :, None] == labels[:, None, :]
        if mask is not None:
            same = same & mask[:, None, :M]
        same = same & torch.ones(N, M, dtype=torch.bool, device=query.device).tril(M - N)
        later = same.flip(-1).cumsum(dim=-1).flip(-1) - same.long()
        reach = (self.window_blocks - 1) * torch.as_tensor(clustered.block_length, device=later.device)
        visible = (same & (later <= reach.view(-1, 1, 1)))[:, None]
        bias = query.new_zeros(visible.shape)
        if clustered.membership is not None and shares is not None:
            bias = (clustered.membership @ shares.transpose(1, 2) + MEMBERSHIP_FLOOR).log()[:, None].to(query.dtype)
        # Finite: a padded query sees nothing, and its row must not become NaN.
        bias = bias.masked_fill(~visible, torch.finfo(query.dtype).min)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=self.dropout)


class FullSelfAttention(Projections):
    """Attention of every word to all words, in a decoder to itself and those before it: the Transformer's."""

    def __init__(self, config: ClusterFormerConfig, layer_idx: int) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx
        self.causal = config.is_decoder

    def forward(
        self, words: torch.Tensor, clustered: None, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Attend from words `(B, N, d)`; with a cache also to the words before them."""
        query, key, value = (self.split(layer(words)) for layer in (self.query, self.key, self.value))
        if cache is not None:
            key, value, _ = remember(cache, key, value, self.layer_idx)
        N, M = query.shape[2], key.shape[2]
        seen = None if mask is None else mask[:, None, None, :M]
        plain = self.causal and seen is None and N == M
        if self.causal and not plain:
            earlier = torch.ones(N, M, dtype=torch.bool, device=query.device).tril(M - N)
            seen = earlier if seen is None else seen & earlier
        return self.join(
            F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=self.dropout, is_causal=plain)
        )


class CrossAttention(Projections):
    """Exact attention of a decoder's words to the encoder's."""

    def __init__(self, config: ClusterFormerConfig, layer_idx: int) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx

    def forward(
        self,
        words: torch.Tensor,
        encoded: torch.Tensor,
        mask: torch.Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> torch.Tensor:
        """Attend from `(B, N, d)` to `encoded` `(B, M, d)`, of which `mask` `(B, M)` says what counts."""
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer, M = cache.cross_attention_cache.layers[self.layer_idx], encoded.shape[1]
            key, value = layer.keys[:, :, :M], layer.values[:, :, :M]  # a static one may hold more
        else:
            key, value = self.split(self.key(encoded)), self.split(self.value(encoded))
            if cache is not None:
                key, value, _ = remember(cache.cross_attention_cache, key, value, self.layer_idx)
                cache.is_updated[self.layer_idx] = True
        seen = None if mask is None else mask[:, None, None, :]
        query = self.split(self.query(words))
        return self.join(F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=self.dropout))
