"""How a layer sorts its words by cluster, and what it says about the clusters (Source: Wang 2022, section 3)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...ops import cluster_order, cluster_queries, neural_clustering
from ...ops.cluster_queries.reference import hash_planes
from ...ops.shared.precision import accumulation_dtype
from .configuration_clusterformer import ClusterFormerConfig

# Below it a word has no direction: its cosine with everything is 0.
SMALLEST_NORM = 1e-8


@dataclass
class SortedWords:
    """What a sorting step hands to attention.

    Attributes:
        order: `(B, N)`, the original index of each sorted rank.
        labels: `(B, N)`, by which the order is sorted.
        block_length: one number, or `(B,)`.
        membership: `(B, N, k)`, the gate, or None.
        updated: `(B, k, d)`, the centroids for the next layer, or None where nothing is learned.
    """

    order: torch.Tensor
    labels: torch.Tensor
    block_length: int | torch.Tensor
    membership: torch.Tensor | None
    updated: torch.Tensor | None


def valid_words(words: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`(B, N)` 1 for words that count, else 0, in the dtype of the words."""
    return words.new_ones(words.shape[:2]) if mask is None else mask.to(words.dtype)


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32: what is summed or normalised over many words."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def norms(rows: torch.Tensor) -> torch.Tensor:
    """`|x|` of rows `(..., d)` in full precision, what cosines are divided by."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=accumulation_dtype(rows.dtype)).clamp(min=SMALLEST_NORM)


def similarity(a: torch.Tensor, b: torch.Tensor, cosine: bool) -> torch.Tensor:
    """`φ` of rows `(..., d)`: the inner product, or the cosine."""
    a, b = full_precision(a), full_precision(b)
    return F.cosine_similarity(a, b, dim=-1) if cosine else (a * b).sum(dim=-1)


def cluster_loss(
    words: torch.Tensor, updated: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None, cosine: bool
) -> torch.Tensor:
    """`L1 = -(1/n) Σ_j φ(X_j, Ĉ_{I_j})` of each row, over its words that count, averaged over rows (Eq. 6)."""
    counts = full_precision(valid_words(words, mask))
    words, updated = full_precision(words), full_precision(updated)
    if cosine:  # the few centroids are normalised, not the many words: fewer passes over memory
        updated = F.normalize(updated, dim=-1, eps=SMALLEST_NORM)
    # Unlike that of a gather, the gradient of an embedding is summed in a fixed order on a GPU too.
    firsts = updated.shape[1] * torch.arange(len(updated), device=labels.device)
    word_centroids = F.embedding(labels + firsts[:, None], updated.flatten(0, 1))
    similar = (words * word_centroids).sum(dim=-1)  # autocast leaves a sum alone, not a dot product
    if cosine:
        similar = similar / norms(words)
    total = (similar * counts).sum(dim=1)
    n = counts.sum(dim=1)
    return -over_rows(total / n.clamp(min=1), n)


def sorting_loss(updated: torch.Tensor, cosine: bool, mask: torch.Tensor | None = None) -> torch.Tensor:
    """`L2 = -(1/k) (Σ_{i≥2} φ(Ĉ_i, Ĉ_{i-1}) + φ(Ĉ_1, Ĉ_k))`, averaged over rows with words (Eq. 11)."""
    similar = similarity(updated, updated.roll(1, dims=1), cosine).mean(dim=1)
    return -(similar.mean() if mask is None else over_rows(similar, mask.sum(dim=1)))


def over_rows(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Mean of a value per row `(B,)` over the rows that have words; `words` are their numbers."""
    some = (words > 0).to(values.dtype)
    return (values * some).sum() / some.sum().clamp(min=1)


@torch.no_grad()
def cluster_statistics(
    words: torch.Tensor, labels: torch.Tensor, clusters: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What shows a collapse: the share of the largest cluster, of empty clusters, and the mean cosine of two words."""
    counts = full_precision(valid_words(words, mask))
    n = counts.sum(dim=1)
    sizes = counts.new_zeros(len(words), clusters).scatter_add_(1, labels, counts)
    # Σ_ij cos(X_i, X_j) = |Σ_i X_i/|X_i||²; the pairs of a word with itself, n of them, are left out. The product of
    # words in 16 bits with numbers in full precision is one in full precision: no copy of the words is made first.
    total = (words * (counts / norms(words))[..., None]).sum(dim=1)
    pairs = (total.square().sum(dim=-1) - n) / (n * (n - 1)).clamp(min=1)
    empty = (sizes == 0).to(sizes.dtype).mean(dim=1)
    return over_rows(sizes.amax(dim=1) / n.clamp(min=1), n), over_rows(empty, n), over_rows(pairs, n)


class CentroidProjection(nn.Linear):
    """The paper's `W^C`; a class of its own because it starts as the identity."""


class Centroids(nn.Module):
    """The centroids that the first layer starts from; a module, because a bare parameter cannot be offloaded."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.clusters, config.hidden_size))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The centroids `(B, k, d)` for words `(B, N, d)`."""
        return self.weight.expand(len(words), -1, -1)


class WordSorting(nn.Module):
    """The sorting step of one layer; every other part of ClusterFormer is the same whatever sorts the words."""

    def __init__(self, config: ClusterFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.seed = config.assignment_seed + layer_idx
        self.cosine = config.similarity == "cosine"
        self.strict = config.is_decoder and config.causal == "strict"
        if config.assignment == "neural":
            self.centroid_projection = CentroidProjection(config.hidden_size, config.hidden_size, bias=False)
        if config.assignment in ("lsh", "random"):
            # Drawn once: torch.compile traces no generator. In no file: the seed says it.
            self.drawn: torch.Tensor
            drawn = self.draw()
            if drawn.is_floating_point():
                drawn = drawn.to(torch.get_default_dtype())  # drawn in float64, which not every device has
            self.register_buffer("drawn", drawn, persistent=False)

    def draw(self) -> torch.Tensor:
        """What the seed gives, on the CPU: planes `(d, ⌈k/2⌉)` of `"lsh"`, the permutation of `"random"`."""
        if self.config.assignment == "lsh":
            return hash_planes(self.config.hidden_size, -(-self.config.clusters // 2), self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.config.max_position_embeddings, generator=generator, device="cpu")

    def _apply(self, *args: Any, **kwargs: Any) -> "WordSorting":
        """Move and cast; what was drawn is drawn again, so that planes are never a rounding of rounded ones."""
        super()._apply(*args, **kwargs)
        if "drawn" in self._buffers:
            self.drawn = self.draw().to(self.drawn)
        return self

    def forward(
        self, words: torch.Tensor, centroids: torch.Tensor | None, mask: torch.Tensor | None, with_updated: bool
    ) -> SortedWords:
        """Sort the words `(B, N, d)`; `centroids` `(B, k, d)` come from the layer before (None: nothing is learned).

        `with_updated` says whether someone needs the updated centroids, where the labels do not.
        """
        membership = updated = None
        if self.config.assignment != "neural":
            labels = self.fixed_labels(words, mask)
        elif centroids is None:
            raise ValueError('assignment="neural" sorts words by centroids, got None; pass those of the layer before')
        else:
            projected = self.centroid_projection(words)
            centroids = centroids.to(projected.dtype)
            sharpness = self.config.sharpness if self.cosine else 1.0
            if with_updated or not self.strict:
                updated, labels = neural_clustering(
                    projected, centroids, mask=mask, similarity=self.config.similarity, sharpness=sharpness
                )
            if self.strict or self.config.gated:
                log_shares = self.memberships(projected, centroids, mask)
                labels = log_shares.argmax(dim=-1) if self.strict else labels
                membership = log_shares.softmax(dim=-1).to(projected.dtype) if self.config.gated else None
        return SortedWords(
            cluster_order(labels, mask=mask), labels, self.block_length(words, mask), membership, updated
        )

    def memberships(self, projected: torch.Tensor, centroids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Logarithm, up to a constant, of each word's own share in every centroid: `φ(C_i, Z_j)`, `(B, N, k)`.

        Unlike `U` it is normalised over centroids, not over words: it depends on no other word.
        """
        if mask is not None:
            projected = projected.masked_fill(~mask[..., None], 0.0)
        if self.cosine:
            projected, centroids = full_precision(projected), F.normalize(full_precision(centroids), dim=-1)
            with torch.autocast(projected.device.type, enabled=False):  # it would multiply in 16 bits all the same
                product = projected @ centroids.transpose(1, 2)
            return product * (self.config.sharpness / norms(projected))[..., None]
        return projected @ centroids.transpose(1, 2)

    def block_length(self, words: torch.Tensor, mask: torch.Tensor | None) -> int | torch.Tensor:
        """`⌈n / k⌉` with `n` the row's own words, so that padding changes nothing; a constant in the strict form."""
        if self.strict:
            return self.config.block_length
        if mask is None:
            return max(1, -(-words.shape[1] // self.config.clusters))
        return (-(-mask.sum(dim=1) // self.config.clusters)).clamp(min=1)

    @torch.no_grad()
    def fixed_labels(self, words: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Labels of the rivals and controls `(B, N)`; ranks where there are no clusters."""
        B, N, _ = words.shape
        k = self.config.clusters
        if self.config.assignment == "kmeans":
            return cluster_queries(words[:, None], k, query_mask=mask, seed=self.seed)[:, 0]
        if self.config.assignment == "lsh":
            words = full_precision(words)
            with torch.autocast(words.device.type, enabled=False):  # the labels of training are those of inference
                rotated = words @ self.drawn.to(words)
            return torch.cat([rotated, -rotated], dim=-1)[..., :k].argmax(dim=-1)
        # Counted among the words that count: padding on the left moves no word to another place.
        place = torch.arange(N, device=words.device).expand(B, N) if mask is None else mask.long().cumsum(dim=1) - 1
        if self.config.assignment == "identity":
            return place.clamp(min=0)
        return self.drawn[place.clamp(min=0)]

    @property
    def has_clusters(self) -> bool:
        """Whether labels are clusters; random and identity order have none."""
        return self.config.assignment in ("neural", "kmeans", "lsh")
