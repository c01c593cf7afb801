"""What a ClusterFormer decoder keeps beside keys and values: by what each word was sorted.

Sizes: `B` batch, `M` words, `k` clusters.

transformers makes the caches. Their layers are exchanged for layers of the same kind, with keys and values of the
usual shapes, that keep the clusters of the words too, through everything that changes the rows of a batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer


class _WithClusters(CacheLayerMixin):
    """A cache layer that keeps the clusters of its words; those of words that it lost are cut off when more come."""

    labels: torch.Tensor | None = None
    shares: torch.Tensor | None = None

    def add_clusters(
        self, labels: torch.Tensor, shares: torch.Tensor | None, past: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Put the clusters of new words behind those of the `past` words before.

        Args:
            labels (`torch.LongTensor`): `(B, N)`.
            shares (`torch.Tensor`, *optional*): `(B, N, k)`, the memberships of a gated model.
            past (`int`): words before.

        Returns: both of all words, `(B, past + N, ...)`.
        """
        self.labels = _behind(self.labels, labels, past)
        self.shares = None if shares is None else _behind(self.shares, shares, past)
        return self.labels, self.shares

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows in the order of the beams that go on."""
        super().reorder_cache(beam_idx)
        self._change_clusters(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def _change_clusters(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.labels = None if self.labels is None else change(self.labels)
        self.shares = None if self.shares is None else change(self.shares)


class ClusteredDynamicLayer(_WithClusters, DynamicLayer):
    """A `DynamicLayer` with the clusters of its words."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._change_clusters(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the named rows."""
        super().batch_select_indices(indices)
        self._change_clusters(lambda rows: rows[indices])


class ClusteredStaticLayer(_WithClusters, StaticLayer):
    """A `StaticLayer` with the clusters of its words."""


CLUSTERED: dict[type, type[_WithClusters]] = {DynamicLayer: ClusteredDynamicLayer, StaticLayer: ClusteredStaticLayer}


def clustered_layer(cache: Cache, layer_idx: int) -> Any:
    """The layer of a cache, exchanged for one that keeps clusters.

    Raises:
        ValueError: a kind of layer that cannot, or one with words whose clusters nobody kept.
    """
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:  # made when the first words come
        cache.layers.extend(ClusteredDynamicLayer() for _ in range(len(cache.layers), layer_idx + 1))
    layer = cache.layers[layer_idx]
    if isinstance(layer, _WithClusters):
        return layer
    kind = type(layer).__name__
    if type(layer) not in CLUSTERED:
        raise ValueError(
            f"past_key_values has layers of type {kind}, which keep no clusters; use a DynamicCache or a StaticCache"
        )
    if words := int(layer.get_seq_length()):
        raise ValueError(
            f"past_key_values has {words} words of another model, without their clusters; pass an empty one, or None"
        )
    clustered: Any = object.__new__(CLUSTERED[type(layer)])
    clustered.__dict__.update(layer.__dict__)
    cache.layers[layer_idx] = clustered
    return clustered


def _behind(before: torch.Tensor | None, rows: torch.Tensor, past: int) -> torch.Tensor:
    return rows if before is None or not past else torch.cat([before[:, :past].to(rows), rows], dim=1)
