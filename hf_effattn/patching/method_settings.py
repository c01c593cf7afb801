"""The settings of the attention methods: one frozen dataclass each, validated once.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.

A method is a subclass of `MethodSettings` with its line in `methods.METHODS`: its fields are what a user may set,
`group` makes everything that carries no gradient (labels), `attend` runs the op. A method that adds parameters to a
model says so in `added_to`.
"""

import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from typing import Any, ClassVar

import torch
from torch import nn

from ..ops import (
    bi_clustered_attention,
    causal_clustered_attention,
    cluster_queries,
    clustered_attention,
    improved_clustered_attention,
)
from ..ops.causal_clustered_attention import DEFAULT_KEYS_PER_CLUSTER, DEFAULT_SEGMENT_LENGTH, DEFAULT_WINDOW
from ..ops.cluster_queries import DEFAULT_BITS, DEFAULT_FIT_QUERIES, DEFAULT_ITERATIONS, LARGEST_SEED
from .model_types import Encoder, model_type_of

_MEASURED = json.loads(files(__package__).joinpath("crossover.json").read_text())
CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["min_length"]
CAUSAL_CROSSOVER: dict[str, list[dict[str, Any]]] = _MEASURED["causal_min_length"]
# Of the lengths measured elsewhere, for a device that has none of its own: an accelerator multiplies so much faster
# than it starts the many short steps of a clustering, and of the causal forms, that exact attention wins for longer.
# Cautious estimates from the steps and bytes on an H200.
UNMEASURED, CAUSAL_UNMEASURED = 4, 8
CLUSTERINGS = ("kmeans", "lsh")
METRICS = ("keys", "queries")
CAUSAL = ("strict", "prefill")
RECORD = "_effattn"


@dataclass(frozen=True, kw_only=True)
class MethodSettings(ABC):
    """What every method can be told.

    Args:
        min_length (`int`, *optional*): inputs shorter than this many tokens run exact attention. Default: the length
            from which the method is faster with these settings, from what was measured on this kind of device
            (`crossover.json`; where nothing was, 4 times the length measured on others, 8 times where the future is
            masked); 0 forces the method.
    """

    method: ClassVar[str]
    summary: ClassVar[str]  # half a sentence, for a reader who has to choose
    needs_fine_tuning: ClassVar[bool] = False  # it changes what the model computes, and is trained into it
    price: ClassVar[tuple[str, ...]] = ()  # the settings that the method's time grows with, at most in proportion
    purpose: ClassVar[dict[str, str]] = {
        "min_length": "inputs with fewer tokens run exact attention; None: the measured length, 0: force the method"
    }

    min_length: int | None = None

    def __post_init__(self) -> None:
        if self.min_length is not None:
            self._check_int("min_length", minimum=0)

    def is_exact(self, query_length: int, key_length: int, device_type: str, *, causal: bool = False) -> bool:
        """Whether exact attention runs instead: the input is short, so the method would save nothing."""
        return query_length < self.shortest_length(device_type, causal=causal)

    def shortest_length(self, device_type: str, *, causal: bool = False) -> int:
        """The number of tokens from which the method runs on this kind of device ("cpu", "cuda", ...)."""
        if self.min_length is not None:
            return self.min_length
        crossover = CAUSAL_CROSSOVER if causal else CROSSOVER
        if device_type in crossover:
            return self._crossover(crossover[device_type])
        longest = max(self._crossover(measured) for measured in crossover.values())
        return longest * (CAUSAL_UNMEASURED if causal else UNMEASURED)

    def _crossover(self, measured: list[dict[str, Any]]) -> int:
        """The least of what the measured settings promise for these: each as it is, or grown with its price."""
        promised = []
        for row in measured:
            if row["method"] == self.method:
                dearer = max((getattr(self, name) / row[name] for name in self.price), default=1.0)
                promised.append(math.ceil(row["min_length"] * max(1.0, dearer)))
        return min(promised)

    @property
    def clusters_prompts(self) -> bool:
        """Whether the last token of a prompt alone is to be read, as its clusters have seen all tokens."""
        return False

    def check_encoder(self, encoder: Encoder) -> None:  # noqa: B027
        """Raise where the method cannot serve an encoder that others can."""

    def added_to(self, encoder: Encoder) -> nn.Module | None:
        """The module with the parameters that the method adds to an encoder; None where it adds none."""
        return None

    @abstractmethod
    def group(self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """What the method decides about the input before it attends, without gradient."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: tuple[torch.Tensor, ...],
        *,
        key_mask: torch.Tensor | None,
        scale: float | None,
        dropout_p: float,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        """Attention with the groups that `group` returned, `(B, H, N, Dv)`; `module`: the attention module."""

    def check_causal(self, module: nn.Module | None) -> None:  # noqa: B027
        """Raise where the settings ask for something that the causal form of an attention module has not."""

    def check_weights(self) -> None:  # noqa: B027
        """Raise where what the method computes is no matrix of weights on the values."""

    @abstractmethod
    def attend_causal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        key_mask: torch.Tensor | None,
        scale: float | None,
        dropout_p: float = 0.0,
        prompt: bool = False,
        training: bool = False,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        """Causal self-attention, `(B, H, N, Dv)`; `prompt`: only what follows the last token will be read."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return asdict(self)

    def _check_int(self, name: str, *, minimum: int, maximum: int | None = None) -> None:
        """Store the field as a plain int (a numpy int is no JSON value), or raise."""
        value = getattr(self, name)
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}: {self.purpose[name]}")
        if number < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {number}: {self.purpose[name]}")
        if maximum is not None and number > maximum:
            raise ValueError(f"{name} must be at most {maximum}, got {number}: {self.purpose[name]}")
        object.__setattr__(self, name, number)

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(
                f"{name} must be one of {quoted(choices)}, got {value!r}{closest(value, choices)}: "
                f"{self.purpose[name]}"
            )


@dataclass(frozen=True, kw_only=True)
class MethodOverCache(MethodSettings):
    """A method with a form for what a causal model writes after its prompt; any other attends exactly then."""

    @abstractmethod
    def attend_over_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        scale: float | None,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        """Causal attention of the last tokens over a cache, `(B, H, N, Dv)`.

        `mask` `(B, 1, N, M)`: which keys a query sees; None where its one query sees all of them.
        """


@dataclass(frozen=True)
class ModulePatch:
    """What `patch_attention` leaves on an attention module, as the plain attribute `RECORD`.

    Args:
        settings (`MethodSettings`, *optional*): None where the module stays exact.
        previous (`str`): the attention implementation before the first patch.
        owner (`nn.Module`, *optional*): the model without its head, which holds the parameters that the method added.
            They are looked up there at every call, for adapters (PEFT's `modules_to_save`) put copies in their place.
    """

    settings: MethodSettings | None
    previous: str
    owner: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModulePatch":
        """In the copy of a model its copy is the owner; the copy of a layer alone keeps the owner that it had."""
        return replace(self, owner=memo.get(id(self.owner), self.owner))


@dataclass(frozen=True, kw_only=True)
class ClusteredSettings(MethodSettings):
    """Clustered attention: a query gets the attention of its cluster's centroid (Source: Vyas 2020).

    Args:
        clusters (`int`): clusters of queries per head; more are more exact and slower.
        clustering (`str`): `"kmeans"` (smaller error for the same time) or `"lsh"` (the paper's).
        metric (`str`): what K-means calls alike: `"keys"`, queries with like scores against the keys of the input, or
            `"queries"`, queries near to each other. Without meaning for `"lsh"`.
        iterations (`int`): rounds of Lloyd's algorithm.
        bits (`int`): length of the code of `"lsh"`.
        fit_queries (`int`): queries per head that the clusters are fitted on, before all are assigned.
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
    summary: ClassVar[str] = "every query gets the attention of the mean query of its cluster"
    price: ClassVar[tuple[str, ...]] = ("clusters",)
    purpose: ClassVar[dict[str, str]] = {
        **MethodSettings.purpose,
        "clusters": "the number of query clusters per head; more are more exact and slower",
        "clustering": "how queries are put into clusters, kmeans or lsh",
        "metric": "what K-means calls alike: keys, queries with like scores against the keys; queries, those near",
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
    fit_queries: int = DEFAULT_FIT_QUERIES
    seed: int = 0
    check_finite: bool = False
    causal: str = "strict"
    segment_length: int = DEFAULT_SEGMENT_LENGTH
    window: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("window", minimum=0)
        self._check_choice("causal", CAUSAL)
        for name in ("clusters", "bits", "fit_queries", "segment_length"):
            self._check_int(name, minimum=1)
        self._check_int("iterations", minimum=0)
        self._check_int("seed", minimum=0, maximum=LARGEST_SEED)
        self._check_choice("clustering", CLUSTERINGS)
        self._check_choice("metric", METRICS)
        if not isinstance(self.check_finite, bool):
            raise TypeError(f"check_finite must be True or False, got {self.check_finite!r}")

    def is_exact(self, query_length: int, key_length: int, device_type: str, *, causal: bool = False) -> bool:
        all_local = causal and query_length <= self.window + self.segment_length
        return (
            all_local
            or self.clusters >= query_length
            or super().is_exact(query_length, key_length, device_type, causal=causal)
        )

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        """The op that attends once every query has its label."""
        return clustered_attention

    def group(self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        in_metric_of_keys = self.clustering == "kmeans" and self.metric == "keys"
        labels = cluster_queries(
            query,
            self.clusters,
            method=self.clustering,
            key=key if in_metric_of_keys else None,
            key_mask=key_mask if in_metric_of_keys else None,
            iterations=self.iterations,
            bits=self.bits,
            fit_queries=self.fit_queries,
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
        groups: tuple[torch.Tensor, ...],
        *,
        key_mask: torch.Tensor | None,
        scale: float | None,
        dropout_p: float,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        return self.op(
            query,
            key,
            value,
            *groups,
            clusters=self.clusters,
            key_mask=key_mask,
            query_mask=key_mask,
            scale=scale,
            dropout_p=dropout_p,
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
    def causal_options(self) -> dict[str, Any]:
        """What this method tells the causal op beyond what all methods do."""
        return {}

    @property
    def clusters_prompts(self) -> bool:
        return self.causal == "prefill"

    def attend_causal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        key_mask: torch.Tensor | None,
        scale: float | None,
        dropout_p: float = 0.0,
        prompt: bool = False,
        training: bool = False,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        if training and self.clusters_prompts:
            raise ValueError(
                'causal="prefill" puts later queries into the clusters that earlier tokens read, so training would '
                'learn from the future; patch the model with causal="strict" to train it'
            )
        self.check_causal(module)
        if self.check_finite and not query.isfinite().all():
            raise ValueError("query has values that are not finite: look for an overflow or a bad weight before it")
        return causal_clustered_attention(
            query,
            key,
            value,
            method=self.method,
            clusters=self.clusters,
            **self.causal_options,
            segment_length=self.segment_length,
            window=self.window,
            iterations=self.iterations,
            fit_queries=self.fit_queries,
            seed=self.seed,
            prefill=self.clusters_prompts and prompt,
            key_mask=key_mask,
            scale=scale,
            dropout_p=dropout_p,
        )


@dataclass(frozen=True, kw_only=True)
class ImprovedClusteredSettings(ClusteredSettings):
    """Improved clustered attention: as clustered, with the centroid's top keys recomputed for every query.

    Source: Vyas 2020, improved clustered.

    Args:
        topk (`int`): keys recomputed exactly per cluster; more are more exact and slower.
    """

    method: ClassVar[str] = "i-clustered"
    summary: ClassVar[str] = (
        "every query gets the attention of its cluster's mean query, the keys that weigh most there recomputed for it"
    )
    price: ClassVar[tuple[str, ...]] = ("clusters", "topk")
    purpose: ClassVar[dict[str, str]] = {
        **ClusteredSettings.purpose,
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

    @property
    def causal_options(self) -> dict[str, Any]:
        return {"topk": self.topk}


@dataclass(frozen=True, kw_only=True)
class BiClusteredSettings(ImprovedClusteredSettings):
    """Bi-clustered attention: the top keys of the query's cluster exactly, all others through clusters of keys.

    Ours, beyond Vyas 2020; see `hf_effattn.ops.bi_clustered_attention`.

    Args:
        topk (`int`): keys attended to exactly per query cluster; more are more exact and slower.
        key_clusters (`int`): clusters of keys per head, by K-means on the keys; more are more exact and slower. In
            models that mask the future: the most of one block of older keys, whose lengths are powers of two.
        keys_per_cluster (`int`): mean size of the key clusters of short blocks in models that mask the future.
    """

    method: ClassVar[str] = "bi-clustered"
    summary: ClassVar[str] = (
        "the most attended keys of each cluster exactly for every query, all other keys through clusters of keys"
    )
    price: ClassVar[tuple[str, ...]] = ("clusters", "topk", "key_clusters")
    purpose: ClassVar[dict[str, str]] = {
        **ImprovedClusteredSettings.purpose,
        "topk": "the number of keys per cluster that its queries attend to exactly",
        "key_clusters": "the number of key clusters per head that stand for all other keys",
        "keys_per_cluster": "in causal models, the mean size of the key clusters of short blocks",
    }

    # By error against time on real queries and keys: a second 32 keys save more error than twice the key clusters.
    topk: int = 64
    key_clusters: int = 100
    keys_per_cluster: int = DEFAULT_KEYS_PER_CLUSTER

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("key_clusters", minimum=1)
        self._check_int("keys_per_cluster", minimum=1)

    def is_exact(self, query_length: int, key_length: int, device_type: str, *, causal: bool = False) -> bool:
        own_clusters = not causal and self.key_clusters >= key_length
        return own_clusters or super().is_exact(query_length, key_length, device_type, causal=causal)

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        return partial(bi_clustered_attention, topk=self.topk, key_clusters=self.key_clusters)

    @property
    def causal_options(self) -> dict[str, Any]:
        return {"topk": self.topk, "key_clusters": self.key_clusters, "keys_per_cluster": self.keys_per_cluster}

    def group(self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        key_labels = cluster_queries(
            key,
            self.key_clusters,
            iterations=self.iterations,
            fit_queries=self.fit_queries,
            query_mask=key_mask,
            seed=self.seed,
        )
        return (*super().group(query, key, key_mask), key_labels)


def quoted(names: Sequence[str] | dict[str, Any]) -> str:
    """The names in quotes, for a message."""
    return ", ".join(f'"{name}"' for name in names)


def closest(name: object, names: Sequence[str] | dict[str, Any]) -> str:
    """The name that was probably meant, for a message; empty where none is near."""
    matches = get_close_matches(str(name), list(names), n=1)
    return f' (did you mean "{matches[0]}"?)' if matches else ""
