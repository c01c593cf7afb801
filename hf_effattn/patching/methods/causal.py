"""Clustered, improved clustered and bi-clustered attention in decoders: settings of their own for the causal op.

Sizes: `B` batch, `H` heads, `N` length, `D` head_dim of query and key, `Dv` of value.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...ops import causal_clustered_attention
from ...ops.causal_clustered_attention import DEFAULT_SEGMENT_LENGTH, DEFAULT_WINDOW
from ...ops.cluster_queries import LARGEST_SEED
from .base import Groups, Method, Options

# The most rounds of Lloyd's algorithm that the op runs.
MOST_ITERATIONS = 1


@dataclass(frozen=True, kw_only=True)
class CausalMethod(Method):
    """What the forms for decoders share: exact attention nearby, clusters of past queries for all older keys.

    A text is cut into segments. A query attends exactly to its own segment and to a window before it; for the keys
    before those see `hf_effattn.ops.causal_clustered_attention`.

    Args:
        segment_length (`int`): tokens of a segment.
        window (`int`): keys before the segment that it attends to exactly.
        iterations (`int`): rounds of Lloyd's algorithm, 0 or 1.
        fit_queries (`int`, *optional*): queries, and keys, of a segment that clusters are fitted on, at most.
            Default: 32 per cluster.
        seed (`int`): of the clustering; the same seed gives the same clusters.
        check_finite (`bool`): raise at the first attention whose queries are not finite, instead of going on.
    """

    causal: ClassVar[bool | None] = True
    most: ClassVar[dict[str, int]] = {"iterations": MOST_ITERATIONS}
    purpose: ClassVar[dict[str, str]] = {
        **Method.purpose,
        "segment_length": "the tokens of a segment, which attends to itself exactly",
        "window": "the keys before a segment that it attends to exactly",
        "iterations": "the rounds of Lloyd's algorithm, 0 or 1",
        "fit_queries": "the queries of a segment that clusters are fitted on; None: 32 per cluster",
        "seed": "the same seed gives the same clusters",
        "check_finite": "whether to raise where queries are not finite",
    }

    segment_length: int = DEFAULT_SEGMENT_LENGTH
    window: int = DEFAULT_WINDOW
    iterations: int = MOST_ITERATIONS
    fit_queries: int | None = None
    seed: int = 0
    check_finite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*self.price, "segment_length", *([] if self.fit_queries is None else ["fit_queries"])):
            self._check_int(name, minimum=1)
        for name in ("window", "iterations"):
            self._check_int(name, minimum=0)
        self._check_int("seed", minimum=0, maximum=LARGEST_SEED)
        if not isinstance(self.check_finite, bool):
            raise TypeError(f"check_finite must be True or False, got {self.check_finite!r}")

    def graph_key(self, options: Options) -> Hashable | None:
        return None if self.check_finite else ()  # the check waits for the device

    def counts_reach(self, length: int) -> bool:
        last_segment = (length - 1) // self.segment_length * self.segment_length
        return last_segment <= self.window or super().counts_reach(length)

    @property
    def of_older_keys(self) -> dict[str, Any]:
        """The op's arguments for the keys before the window."""
        raise NotImplementedError

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, groups: Groups = ()
    ) -> torch.Tensor:
        raise ValueError(f'these settings of "{self.method}" are a decoder\'s, and this attention sees both ways')

    def attend_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        if self.check_finite and not query.isfinite().all():
            raise ValueError("query has values that are not finite: look for an overflow or a bad weight before it")
        return causal_clustered_attention(
            query,
            key,
            value,
            method=self.method,
            **self.of_older_keys,
            segment_length=self.segment_length,
            window=self.window,
            iterations=self.iterations,
            fit_queries=self.fit_queries,
            seed=self.seed,
            key_mask=options.key_mask,
            attention_sinks=options.attention_sinks,
            scale=options.scale,
            dropout_p=options.dropout_p,
        )


@dataclass(frozen=True, kw_only=True)
class CausalClustered(CausalMethod):
    """Clustered attention in a decoder: to older keys as the nearest centroid of past queries (Source: Vyas 2020).

    Args:
        clusters (`int`): clusters of a segment's past queries per head; more are more exact and slower.
    """

    method: ClassVar[str] = "clustered"
    summary: ClassVar[str] = "each query attends to nearby keys exactly, and to older ones as its cluster's mean query"
    price: ClassVar[tuple[str, ...]] = ("clusters",)
    decoder_loss: ClassVar[float | None] = 0.417
    purpose: ClassVar[dict[str, str]] = {
        **CausalMethod.purpose,
        "clusters": "the clusters of past queries per head and segment; more are more exact and slower",
    }

    clusters: int = 100

    @property
    def of_older_keys(self) -> dict[str, Any]:
        return {"clusters": self.clusters}


@dataclass(frozen=True, kw_only=True)
class CausalImprovedClustered(CausalClustered):
    """Improved clustered attention in a decoder: as clustered, with a few older keys exactly.

    Args:
        exact_keys (`int`): older keys that a head attends to exactly, the same for a whole segment; more are more
            exact and slower.
    """

    method: ClassVar[str] = "i-clustered"
    summary: ClassVar[str] = "as clustered, with a few of the older keys exactly"
    price: ClassVar[tuple[str, ...]] = ("clusters", "exact_keys")
    decoder_loss: ClassVar[float | None] = 0.138
    purpose: ClassVar[dict[str, str]] = {
        **CausalClustered.purpose,
        "exact_keys": "the older keys of a head and segment that are attended to exactly; more are slower",
    }

    exact_keys: int = 192

    @property
    def of_older_keys(self) -> dict[str, Any]:
        return {"clusters": self.clusters, "topk": self.exact_keys}


@dataclass(frozen=True, kw_only=True)
class CausalBiClustered(CausalMethod):
    """Bi-clustered attention in a decoder: a few older keys exactly, all others by the first order of key clusters.

    The expansion is at one centroid of a segment's past queries: what more of them save is saved in less time by more
    clusters of keys.

    Args:
        exact_keys (`int`): older keys that a head attends to exactly, the same for a whole segment; more are more
            exact and slower.
        key_clusters (`int`): clusters of each segment's keys; more are more exact and slower.
        max_predicted_error (`float`, *optional*): heads whose predicted error of the older keys
            (`hf_effattn.ops.predicted_error`) is larger attend exactly, decided for each segment from earlier tokens;
            None: none does. Older keys have a part of the weight only.
    """

    method: ClassVar[str] = "bi-clustered"
    summary: ClassVar[str] = (
        "each query attends to nearby keys and a few older ones exactly, to others by clusters of keys"
    )
    price: ClassVar[tuple[str, ...]] = ("exact_keys", "key_clusters")
    decoder_loss: ClassVar[float | None] = 0.011
    purpose: ClassVar[dict[str, str]] = {
        **CausalImprovedClustered.purpose,
        "key_clusters": "the clusters of each segment's keys that stand for all other older keys",
        "max_predicted_error": "heads with a larger predicted error of the older keys attend exactly; None: none does",
    }

    # The least loss of perplexity for the scores: scripts/benchmark/language_model.py.
    exact_keys: int = 384
    key_clusters: int = 16
    max_predicted_error: float | None = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("max_predicted_error")

    @property
    def of_older_keys(self) -> dict[str, Any]:
        return {
            "clusters": 1,
            "topk": self.exact_keys,
            "key_clusters": self.key_clusters,
            "max_predicted_error": self.max_predicted_error,
        }
