"""Clustered, improved clustered and bi-clustered attention, as methods of patching.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ...ops import (
    bi_clustered_attention,
    causal_clustered_attention,
    cluster_queries,
    clustered_attention,
    improved_clustered_attention,
    predicted_error,
    query_offsets,
)
from ...ops.bi_clustered_attention.labels import Inputs, cluster_both
from ...ops.causal_clustered_attention import DEFAULT_SEGMENT_LENGTH, DEFAULT_WINDOW
from ...ops.cluster_queries import (
    DEFAULT_BITS,
    DEFAULT_FIT_QUERIES,
    DEFAULT_ITERATIONS,
    LARGEST_SEED,
    refuse_not_finite,
)
from ..model_types.stacks import model_type_of
from .base import Groups, Method, Options

CLUSTERINGS = ("kmeans", "lsh")
METRICS = ("keys", "queries")
SCHEMES = ("strict", "prefill")
# Of Lloyd's algorithm on the keys, at most: a third round saves no error that its time would not save elsewhere.
KEY_ITERATIONS = 2
# In models that mask the future, measured by scripts/benchmark/language_model.py: exact keys are those of a head, not
# of a cluster, so there are more of them and fewer clusters; key clusters are those of a segment; older keys get a
# part of the weight only, so an error of theirs may be so many times as large.
OLDER_TOPK, OLDER_ERROR = 6, 4
OLDER_KEY_CLUSTERS = 2


@dataclass(frozen=True, kw_only=True)
class Clustered(Method):
    """Clustered attention: a query gets the attention of its cluster's centroid (Source: Vyas 2020).

    Args:
        clusters (`int`): clusters of queries per head; more are more exact and slower.
        clustering (`str`): `"kmeans"` (smaller error for the same time) or `"lsh"` (the paper's).
        metric (`str`): what K-means calls alike: `"keys"`, queries with like scores against the keys of the input, or
            `"queries"`, queries near to each other. Without meaning for `"lsh"`.
        iterations (`int`): rounds of Lloyd's algorithm.
        bits (`int`): length of the code of `"lsh"`.
        fit_queries (`int`, *optional*): queries per head that the clusters are fitted on, before all are assigned.
            Default: 2,048, for `"bi-clustered"` at least 64 per cluster of queries; in models that mask the future 32
            per cluster of a segment.
        seed (`int`): of the clustering; the same seed gives the same clusters.
        check_finite (`bool`): raise at the first attention whose queries are not finite, instead of going on.
        causal (`str`): in models that mask the future (which always cluster by K-means in the keys' metric):
            `"strict"`, clusters of past queries only, so that no token changes what comes before it; or `"prefill"`,
            clusters of all queries of a prompt, faster, for generation only: the model's outputs before the last
            token must not be read then (set `use_cache=False` to measure a loss), and training refuses it. Where a
            forward asks for more of them by `logits_to_keep`, as assisted generation does, a model that
            `patch_attention` or `hf_effattn.from_pretrained` gave runs `"strict"`.
        segment_length (`int`): tokens of a segment in models that mask the future.
        window (`int`): keys before the segment that those attend to exactly.
    """

    method: ClassVar[str] = "clustered"
    summary: ClassVar[str] = "each query uses the attention of its cluster's mean query"
    price: ClassVar[tuple[str, ...]] = ("clusters",)
    fit_per_cluster: ClassVar[int] = 0  # queries at least
    decoder_loss: ClassVar[tuple[float, float] | None] = (0.417, 0.251)
    purpose: ClassVar[dict[str, str]] = {
        **Method.purpose,
        "clusters": "the number of query clusters per head; more are more exact and slower",
        "clustering": "how queries are put into clusters, kmeans or lsh",
        "metric": 'K-means distance: "keys" compares attention scores, "queries" the vectors',
        "iterations": "the rounds of Lloyd's algorithm",
        "bits": 'the length of the code of clustering="lsh"',
        "fit_queries": "the queries per head that clusters are fitted on; more are slower on long inputs",
        "seed": "the same seed gives the same clusters",
        "check_finite": "whether to raise where queries are not finite",
        "causal": "in causal models, clusters of past queries only, strict, or of all queries of a prompt, prefill",
        "segment_length": "in causal models, the tokens of a segment, which attends to itself exactly",
        "window": "in causal models, the keys before a segment that it attends to exactly",
    }

    clusters: int = 100
    clustering: str = "kmeans"
    metric: str = "keys"
    iterations: int = DEFAULT_ITERATIONS
    bits: int = DEFAULT_BITS
    fit_queries: int | None = None
    seed: int = 0
    check_finite: bool = False
    causal: str = "strict"
    segment_length: int = DEFAULT_SEGMENT_LENGTH
    window: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("window", minimum=0)
        self._check_choice("causal", SCHEMES)
        counts = ("clusters", "bits", "segment_length")
        for name in counts if self.fit_queries is None else (*counts, "fit_queries"):
            self._check_int(name, minimum=1)
        self._check_int("iterations", minimum=0)
        self._check_int("seed", minimum=0, maximum=LARGEST_SEED)
        self._check_choice("clustering", CLUSTERINGS)
        self._check_choice("metric", METRICS)
        if not isinstance(self.check_finite, bool):
            raise TypeError(f"check_finite must be True or False, got {self.check_finite!r}")

    def is_exact(self, query_length: int, key_length: int, device_type: str, *, causal: bool = False) -> bool:
        last_segment = (query_length - 1) // self.segment_length * self.segment_length
        all_local = causal and last_segment <= self.window
        clusters = self.causal_options().get("clusters", self.clusters) if causal else self.clusters
        return (
            all_local
            or clusters >= query_length
            or super().is_exact(query_length, key_length, device_type, causal=causal)
        )

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
        in_metric_of_keys = self.clustering == "kmeans" and self.metric == "keys"
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

    def check_causal(self, module: nn.Module | None) -> None:
        """Raise where the settings ask for something that the causal form of an attention module has not."""
        entry = None if module is None else model_type_of(module)
        if self.clusters_prompts and entry is not None and not entry.says_use_cache:
            raise ValueError(
                f'causal="prefill" is for prompts, and {type(module).__name__} is not told by transformers whether it '
                'attends to one (use_cache); leave it out, for causal="strict"'
            )
        if self.clustering != "kmeans" or self.metric != "keys":
            raise ValueError(
                f'causal attention clusters by clustering="kmeans" with metric="keys" only, got {self.clustering!r} '
                f"with {self.metric!r}; leave both out"
            )

    @property
    def clusters_prompts(self) -> bool:
        return self.causal == "prefill"

    def attend_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        if options.training and self.clusters_prompts:
            raise ValueError(
                'causal="prefill" puts later queries into the clusters that earlier tokens read, so training would '
                'learn from the future; patch the model with causal="strict" to train it'
            )
        self.check_causal(options.module)
        if self.check_finite and not query.isfinite().all():
            raise ValueError("query has values that are not finite: look for an overflow or a bad weight before it")
        return causal_clustered_attention(
            query,
            key,
            value,
            method=self.method,
            **{"clusters": self.clusters} | self.causal_options(),
            segment_length=self.segment_length,
            window=self.window,
            iterations=self.iterations,
            fit_queries=self.fit_queries,
            seed=self.seed,
            prefill=self.clusters_prompts and options.prompt,
            key_mask=options.key_mask,
            sinks=options.sinks,
            scale=options.scale,
            dropout_p=options.dropout_p,
        )


@dataclass(frozen=True, kw_only=True)
class ImprovedClustered(Clustered):
    """Improved clustered attention: as clustered, with the centroid's top keys recomputed for every query.

    Source: Vyas 2020, improved clustered.

    Args:
        topk (`int`): keys recomputed exactly per cluster; more are more exact and slower. In models that mask the
            future six times as many per head, the same for all clusters of a segment.
    """

    method: ClassVar[str] = "i-clustered"
    summary: ClassVar[str] = "each query uses its cluster's attention, with the cluster's top keys recomputed exactly"
    decoder_loss: ClassVar[tuple[float, float] | None] = (0.138, 0.156)
    price: ClassVar[tuple[str, ...]] = ("clusters", "topk")
    purpose: ClassVar[dict[str, str]] = {
        **Clustered.purpose,
        "topk": "the number of keys per cluster whose weights are recomputed for every query",
    }

    topk: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("topk", minimum=1)

    def is_exact(self, query_length: int, key_length: int, device_type: str, *, causal: bool = False) -> bool:
        return self.topk >= key_length or super().is_exact(query_length, key_length, device_type, causal=causal)

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        return partial(improved_clustered_attention, topk=self.topk)

    def causal_options(self) -> dict[str, Any]:
        return {"topk": OLDER_TOPK * self.topk}


@dataclass(frozen=True, kw_only=True)
class BiClustered(ImprovedClustered):
    """Bi-clustered attention: a few exact keys per query cluster, all others by the first order of clusters of keys.

    Ours, beyond Vyas 2020; see `hf_effattn.ops.bi_clustered_attention`.

    Args:
        clusters (`int`): of queries, as in `Clustered`. In models that mask the future one per segment, whatever this.
        topk (`int`): keys attended to exactly per query cluster; more are more exact and slower. In models that mask
            the future six times as many per head.
        key_clusters (`int`): clusters of keys per head, by K-means in the metric of the queries' offsets from their
            centroids; more are more exact and slower. In models that mask the future half of them per segment.
        max_predicted_error (`float`, *optional*): heads whose predicted error (`hf_effattn.ops.predicted_error`) is
            larger run exact attention; None: none does. In models that mask the future decided segment by segment,
            from earlier tokens, and for an error of the older keys four times as large.
    """

    method: ClassVar[str] = "bi-clustered"
    summary: ClassVar[str] = (
        "each query uses a few keys exactly, and all other keys by the first order of clusters of keys"
    )
    decoder_loss: ClassVar[tuple[float, float] | None] = (0.011, 0.05)
    # Its error falls with the square of a cluster's radius, which a fit on few queries of each does not find.
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

    def is_exact(self, query_length: int, key_length: int, device_type: str, *, causal: bool = False) -> bool:
        own_clusters = not causal and self.key_clusters >= key_length
        return own_clusters or super().is_exact(query_length, key_length, device_type, causal=causal)

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        return partial(_attend_bi_clustered, topk=self.topk, key_clusters=self.key_clusters)

    def causal_options(self) -> dict[str, Any]:
        return super().causal_options() | {
            "clusters": 1,  # what more of them save is saved in less time by more clusters of keys
            "key_clusters": -(-self.key_clusters // OLDER_KEY_CLUSTERS),
            "max_predicted_error": None
            if self.max_predicted_error is None
            else OLDER_ERROR * self.max_predicted_error,
        }

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
            in_keys_metric=self.metric == "keys",
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
        offsets, offsets_mask = query_offsets(
            query, labels, self.clusters, key_heads=key.shape[1], query_mask=key_mask, rows=self.fitted_queries
        )
        key_labels = cluster_queries(
            key,
            self.key_clusters,
            key=offsets,
            key_mask=offsets_mask,
            iterations=min(self.iterations, KEY_ITERATIONS),
            fit_queries=self.fitted_queries,
            query_mask=key_mask,
            seed=self.seed,
        )
        if self.max_predicted_error is None:
            return labels, key_labels, key.new_zeros(key.shape[:2])
        group = query.shape[1] // key.shape[1]
        predicted = predicted_error(
            offsets, offsets_mask, key, key_labels, self.key_clusters, group=group, key_mask=key_mask, scale=scale
        )
        return labels, key_labels, predicted

    def exact_heads(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None = None
    ) -> list[int]:
        if self.max_predicted_error is None or self.is_exact(query.shape[2], key.shape[2], query.device.type):
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
