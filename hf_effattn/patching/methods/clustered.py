"""Clustered, improved clustered and bi-clustered attention, as methods of patching.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ...ops import (
    bi_clustered_attention,
    cluster_queries,
    clustered_attention,
    improved_clustered_attention,
    predicted_error,
    query_residuals,
)
from ...ops.bi_clustered_attention.labels import Inputs, cluster_both
from ...ops.cluster_queries import (
    DEFAULT_BITS,
    DEFAULT_FIT_QUERIES,
    DEFAULT_ITERATIONS,
    LARGEST_SEED,
    refuse_not_finite,
)
from .base import Groups, Method, Options

CLUSTERINGS = ("kmeans", "lsh")
DISTANCES = ("scores", "vectors")
# The most rounds of Lloyd's algorithm on keys. The time of a third round lowers the error more if spent elsewhere.
KEY_ITERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class Clustered(Method):
    """Clustered attention: a query gets the attention of its cluster's centroid (Source: Vyas 2020).

    Args:
        clusters (`int`): clusters of queries per head; more are more exact and slower.
        clustering (`str`): `"kmeans"` (smaller error for the same time) or `"lsh"` (the paper's).
        distance (`str`): of K-means: `"scores"`, between the scores that two queries give to the keys of the input, or
            `"vectors"`, between the queries themselves.
        iterations (`int`): rounds of Lloyd's algorithm.
        bits (`int`): length of the code of `"lsh"`.
        fit_queries (`int`, *optional*): queries per head that the clusters are fitted on, before all are assigned.
            Default: 2,048, for `"bi-clustered"` at least 64 per cluster of queries.
        seed (`int`): of the clustering; the same seed gives the same clusters.
        check_finite (`bool`): raise at the first attention whose queries are not finite, instead of going on.
    """

    method: ClassVar[str] = "clustered"
    causal: ClassVar[bool | None] = False
    summary: ClassVar[str] = "each query uses the attention of its cluster's mean query"
    price: ClassVar[tuple[str, ...]] = ("clusters",)
    fit_per_cluster: ClassVar[int] = 0  # queries at least
    purpose: ClassVar[dict[str, str]] = {
        **Method.purpose,
        "clusters": "the number of query clusters per head; more are more exact and slower",
        "clustering": "how queries are put into clusters, kmeans or lsh",
        "distance": 'of K-means: "scores" compares attention scores, "vectors" the queries',
        "iterations": "the rounds of Lloyd's algorithm",
        "bits": 'the length of the code of clustering="lsh"',
        "fit_queries": "the queries per head that clusters are fitted on; more are slower on long inputs",
        "seed": "the same seed gives the same clusters",
        "check_finite": "whether to raise where queries are not finite",
    }

    clusters: int = 100
    clustering: str = "kmeans"
    distance: str = "scores"
    iterations: int = DEFAULT_ITERATIONS
    bits: int = DEFAULT_BITS
    fit_queries: int | None = None
    seed: int = 0
    check_finite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("clusters", "bits")
        for name in counts if self.fit_queries is None else (*counts, "fit_queries"):
            self._check_int(name, minimum=1)
        self._check_int("iterations", minimum=0)
        self._check_int("seed", minimum=0, maximum=LARGEST_SEED)
        self._check_choice("clustering", CLUSTERINGS)
        self._check_choice("distance", DISTANCES)
        if not isinstance(self.check_finite, bool):
            raise TypeError(f"check_finite must be True or False, got {self.check_finite!r}")

    def graph_key(self, options: Options) -> Hashable | None:
        return None if self.check_finite else ()  # the check waits for the device

    @property
    def fitted_queries(self) -> int:
        """How many queries per head the clusters are fitted on."""
        return self.fit_queries or max(DEFAULT_FIT_QUERIES, self.fit_per_cluster * self.clusters)

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        """The op that attends once every query has its label."""
        return clustered_attention

    def group(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None = None
    ) -> Groups:
        in_metric_of_keys = self.clustering == "kmeans" and self.distance == "scores"
        labels = cluster_queries(
            query,
            self.clusters,
            method=self.clustering,
            key=key if in_metric_of_keys else None,
            key_mask=key_mask if in_metric_of_keys else None,
            iterations=self.iterations,
            bits=self.bits,
            fit_queries=self.fitted_queries,
            query_mask=key_mask,
            seed=self.seed,
            check_finite=self.check_finite,
        )
        return (labels,)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        groups: Groups = (),
    ) -> torch.Tensor:
        return self.op(
            query,
            key,
            value,
            *groups,
            clusters=self.clusters,
            key_mask=options.key_mask,
            query_mask=options.key_mask,
            scale=options.scale,
            dropout_p=options.dropout_p,
        )

    def attend_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        raise ValueError(f'these settings of "{self.method}" are an encoder\'s, and this attention masks the future')


@dataclass(frozen=True, kw_only=True)
class ImprovedClustered(Clustered):
    """Improved clustered attention: as clustered, with the centroid's top keys recomputed for every query.

    Source: Vyas 2020, improved clustered.

    Args:
        topk (`int`): keys recomputed exactly per cluster; more are more exact and slower.
    """

    method: ClassVar[str] = "i-clustered"
    summary: ClassVar[str] = "each query uses its cluster's attention, with the cluster's top keys recomputed exactly"
    price: ClassVar[tuple[str, ...]] = ("clusters", "topk")
    purpose: ClassVar[dict[str, str]] = {
        **Clustered.purpose,
        "topk": "the number of keys per cluster whose weights are recomputed for every query",
    }

    topk: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("topk", minimum=1)

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        return partial(improved_clustered_attention, topk=self.topk)


@dataclass(frozen=True, kw_only=True)
class BiClustered(ImprovedClustered):
    """Bi-clustered attention: a few exact keys per query cluster, all others by the first order of clusters of keys.

    Ours, beyond Vyas 2020; see `hf_effattn.ops.bi_clustered_attention`.

    Args:
        clusters (`int`): of queries, as in `Clustered`.
        topk (`int`): keys attended to exactly per query cluster; more are more exact and slower.
        key_clusters (`int`): clusters of keys per head, by K-means in the metric of the queries' residuals from their
            centroids; more are more exact and slower.
        max_predicted_error (`float`, *optional*): heads whose predicted error (`hf_effattn.ops.predicted_error`) is
            larger run exact attention; None: none does.
    """

    method: ClassVar[str] = "bi-clustered"
    summary: ClassVar[str] = (
        "each query uses a few keys exactly, and all other keys by the first order of clusters of keys"
    )
    # Its error falls with the square of a cluster's radius, which needs enough queries per cluster to be fitted.
    fit_per_cluster: ClassVar[int] = 64
    price: ClassVar[tuple[str, ...]] = ("clusters", "topk", "key_clusters")
    purpose: ClassVar[dict[str, str]] = {
        **ImprovedClustered.purpose,
        "topk": "the number of keys per cluster that its queries attend to exactly",
        "key_clusters": "the number of key clusters per head that stand for all other keys",
        "max_predicted_error": "heads with a larger predicted error run exact attention; None: none does",
    }

    # The least time for an error, on real queries and keys: scripts/benchmark/other_methods.py.
    clusters: int = 32
    topk: int = 64
    key_clusters: int = 32
    max_predicted_error: float | None = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("key_clusters", minimum=1)
        self._check_number("max_predicted_error")

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        return partial(_attend_bi_clustered, topk=self.topk, key_clusters=self.key_clusters)

    def group(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None = None
    ) -> Groups:
        on_cpu = query.device.type == "cpu" and not torch.compiler.is_compiling()
        find = self._group_on_cpu if on_cpu else self._group_heads
        labels, key_labels, predicted = find(query, key, key_mask, scale)
        if self.max_predicted_error is None:
            return labels, key_labels
        return labels, key_labels, predicted > self.max_predicted_error

    def _group_on_cpu(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same as `_group_heads`, in one walk over the heads."""
        if self.check_finite:
            refuse_not_finite(query)
        x = Inputs(
            *(query.detach(), key.detach(), key_mask),
            self.clusters,
            self.key_clusters,
            method=self.clustering,
            in_keys_metric=self.distance == "scores",
            iterations=self.iterations,
            key_iterations=min(self.iterations, KEY_ITERATIONS),
            bits=self.bits,
            fit_queries=self.fitted_queries,
            seed=self.seed,
            scale=query.shape[3] ** -0.5 if scale is None else scale,
            predict=self.max_predicted_error is not None,
        )
        return cluster_both(*x)

    def _group_heads(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Labels of queries and keys, and the error that is predicted of each key/value head, `(B, heads)`."""
        (labels,) = super().group(query, key, key_mask)
        residuals, residuals_mask = query_residuals(
            query, labels, self.clusters, key_heads=key.shape[1], query_mask=key_mask, rows=self.fitted_queries
        )
        key_labels = cluster_queries(
            key,
            self.key_clusters,
            key=residuals,
            key_mask=residuals_mask,
            iterations=min(self.iterations, KEY_ITERATIONS),
            fit_queries=self.fitted_queries,
            query_mask=key_mask,
            seed=self.seed,
        )
        if self.max_predicted_error is None:
            return labels, key_labels, key.new_zeros(key.shape[:2])
        group = query.shape[1] // key.shape[1]
        predicted = predicted_error(
            residuals, residuals_mask, key, key_labels, self.key_clusters, group=group, key_mask=key_mask, scale=scale
        )
        return labels, key_labels, predicted

    def exact_heads(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None = None
    ) -> list[int]:
        if self.max_predicted_error is None or self.is_exact(query.shape[2], query.device.type):
            return []
        exact = self.group(query, key, key_mask, scale)[2].any(dim=0)  # (key/value heads,)
        return exact.repeat_interleave(query.shape[1] // key.shape[1]).nonzero()[:, 0].tolist()


def _attend_bi_clustered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    exact_heads: torch.Tensor | None = None,
    **settings: Any,
) -> torch.Tensor:
    """The op, given what `BiClustered.group` returns in its order."""
    return bi_clustered_attention(query, key, value, labels, key_labels, exact_heads=exact_heads, **settings)
