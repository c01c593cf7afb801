"""Clustering of the queries of every head."""

from typing import Any

import torch

from ..kmeans import LARGEST_SEED as LARGEST_SEED
from ..kmeans import check_seed
from ..shared.arguments import LARGEST_KERNEL_DIM, check_counts, check_floats, check_heads, check_mask, choose_backend
from . import batched, reference


def _triton(*arguments: Any) -> torch.Tensor:
    from . import triton

    return triton.cluster_queries(*arguments)


METHODS = ("kmeans", "lsh")
# Chosen by attention error against time on real queries and keys: scripts/benchmark/clustering.py.
DEFAULT_ITERATIONS = 3
DEFAULT_FIT_QUERIES = 2048
DEFAULT_BITS = 32


def refuse_not_finite(query: torch.Tensor) -> None:
    """Raise if a query is not finite."""
    if not query.isfinite().all():
        raise ValueError("query has values that are not finite: look for an overflow or a bad weight before attention")


def cluster_queries(
    query: torch.Tensor,
    clusters: int,
    *,
    method: str = "kmeans",
    key: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    iterations: int = DEFAULT_ITERATIONS,
    bits: int = DEFAULT_BITS,
    fit_queries: int = DEFAULT_FIT_QUERIES,
    query_mask: torch.Tensor | None = None,
    seed: int = 0,
    check_finite: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Put every query of every head into one of `clusters` clusters, so that alike queries share one.

    `"kmeans"` is `ops.kmeans` on the queries; with `key` it runs in the keys' metric: the distance of two queries is
    the variance over the keys of the difference of their scores (ours; the paper bounds the error by the Euclidean
    distance). `"lsh"` is the paper's: sign bits of random projections, then Lloyd's algorithm under Hamming distance
    (Source: Vyas 2020, clustered attention; its setting is `bits=32, iterations=10` on all queries). The result
    depends on nothing but the arguments, and on no padded row; no gradient flows through it.

    Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        clusters (`int`): number of clusters; with `clusters` or fewer valid queries, each gets its own.
        method (`str`): `"kmeans"` or `"lsh"`.
        key (`torch.Tensor`, *optional*): `(B, H or a divisor of it, M, D)`; K-means then runs in the keys' metric.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = the key counts in the metric.
        iterations (`int`): rounds of Lloyd's algorithm; 0 takes the seeds as they are.
        bits (`int`): bits of the LSH code.
        fit_queries (`int`): evenly spread queries, and keys, that centroids and metric are fitted on; at least 4 per
            cluster are taken.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other queries get label 0.
        seed (`int`): seed of the first K-means seed or of the LSH planes, which are other ones on a GPU.
        check_finite (`bool`): raise if a query is not finite (costs a pass over them).
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        Integer labels `(B, H, N)` in `0 .. clusters - 1`; clusters may be empty.

    Raises:
        ValueError: an unknown method or backend, counts that are too small, sizes that do not fit together, queries
            that are not finite where `check_finite` asks for the check.
        TypeError: a mask that is not boolean, a count that is not an int, queries that are not floating-point.

    Example:
        >>> import torch
        >>> from hf_effattn.ops import cluster_queries
        >>> query, key, _ = torch.randn(3, 1, 12, 4096, 64)
        >>> cluster_queries(query, 100, key=key).shape
        torch.Size([1, 12, 4096])
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    check_counts(clusters=clusters, bits=bits, fit_queries=fit_queries)
    check_counts(minimum=0, iterations=iterations)
    check_seed(seed)
    check_floats("query", query, "(B, H, N, head_dim)")
    if key is not None:
        check_floats("key", key, "(B, heads, M, head_dim)")
        if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
            raise ValueError(f"key {tuple(key.shape)} must agree with query {tuple(query.shape)} in B and head_dim")
        if key.device != query.device:
            raise ValueError(f"key must be on {query.device} like query, got {key.device}")
        check_heads(query, key)
        check_mask("key_mask", key_mask, key)
    check_mask("query_mask", query_mask, query)
    if check_finite:
        refuse_not_finite(query)
    forms = reference.cluster_queries, batched.cluster_queries, _triton
    query, key = query.detach(), None if key is None or method == "lsh" else key.detach()
    run = choose_backend(backend, forms, query)
    if run is _triton and method == "lsh" and bits > LARGEST_KERNEL_DIM:
        if backend == "triton":
            raise ValueError(f'the kernels take up to {LARGEST_KERNEL_DIM} bits, got {bits}; use backend="batched"')
        run = batched.cluster_queries
    key_mask = None if key is None else key_mask
    return run(query, key, key_mask, query_mask, clusters, method, iterations, bits, fit_queries, seed)
