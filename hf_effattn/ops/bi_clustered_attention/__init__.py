"""Bi-clustered attention: each query cluster's exact keys, and all others by linear summaries of key clusters."""

from collections.abc import Sequence
from typing import Any

import torch

from ..shared.arguments import check_attention, check_count, check_labels, check_mask, choose_backend
from ..shared.dropout import draw_seed
from . import batched, reference
from .residuals import predicted_error as predicted_error
from .residuals import query_residuals as query_residuals


def _triton(*arguments: Any) -> torch.Tensor:
    from . import triton

    return triton.bi_clustered_attention(*arguments)


def bi_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    *,
    clusters: int | Sequence[int],
    key_clusters: int | Sequence[int],
    topk: int | Sequence[int],
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    exact_heads: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention to a few exact keys, and to all others by linear summaries of their clusters.

    A query cluster attends exactly to the `topk` keys that their own clusters represent worst. The other keys of every
    cluster are summarised at the query cluster's centroid: the logarithm of their mass, and their mean value, follow a
    query's residual from the centroid linearly. One softmax runs over both. `ops/DERIVATIONS.md` has the formulas.

    Ours, beyond Vyas 2020. Related: MuSe (arXiv 2509.10406), SVG-EAR (arXiv 2603.08982), Multipole Attention (arXiv
    2506.13059).

    Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
    Memory is O(N·(D + topk + key_clusters) + C·(M + key_clusters·D + D·Dv)) per head. Gradients are exact for fixed
    labels, exact keys and variance corrections. The result is exact attention with `topk >= M`, and with every query,
    or every key, in a cluster of its own.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, heads, M, D)`, any strides; `heads` is `H` or divides it (grouped-query layout).
        value (`torch.Tensor`): `(B, heads, M, Dv)`, any strides.
        labels (`torch.Tensor`): integers `(B, H, N)` in `0 .. clusters - 1`, from `cluster_queries`.
        key_labels (`torch.Tensor`): integers `(B, heads, M)` in `0 .. key_clusters - 1`, from `cluster_queries`.
        clusters (`int` or `Sequence[int]`): number of query clusters `C`; empty ones are legal. Of each of the three
            counts also a list: one number for every head of key.
        key_clusters (`int` or `Sequence[int]`): number of key clusters; empty ones are legal.
        topk (`int` or `Sequence[int]`): keys attended to exactly per query cluster; more than `M` means all.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend; other keys are in no mean.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other rows are in no mean and get 0.
        exact_heads (`torch.BoolTensor`, *optional*): `(B, heads)`, True = exact attention of all its queries, for
            heads that no summary serves (`predicted_error`).
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights, of exact keys and key clusters alike.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`; 0 in rows that are masked or see no key.

    Raises:
        ValueError: sizes, devices or dtypes that do not fit together, labels out of range (the kernels give such
            queries 0 and leave such keys to exact heads), counts below 1 or lists that are not as long as key has
            heads, a `dropout_p` outside [0, 1), an unknown backend.
        TypeError: a mask that is not boolean, labels that are not integers.

    Example:
        >>> import torch
        >>> from hf_effattn.ops import bi_clustered_attention, cluster_queries
        >>> query, key, value = torch.randn(3, 1, 12, 4096, 64)
        >>> labels, key_labels = cluster_queries(query, 64, key=key), cluster_queries(key, 32)
        >>> counts = {"clusters": 64, "key_clusters": 32, "topk": 64}
        >>> bi_clustered_attention(query, key, value, labels, key_labels, **counts).shape
        torch.Size([1, 12, 4096, 64])
    """
    counts = {"clusters": clusters, "key_clusters": key_clusters, "topk": topk}
    for name, values in counts.items():
        for count in values if isinstance(values, Sequence) else [values]:
            check_count(name, count)
    check_attention(query, key, value, labels, key_mask, query_mask)
    check_labels(key_labels, key, of="key")
    check_mask("exact_heads", exact_heads, key, of=1)
    forms = reference.bi_clustered_attention, batched.bi_clustered_attention, _triton
    run = choose_backend(backend, forms, query, key, value)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    sizes = [_of_heads(name, values, key.shape[1]) for name, values in counts.items()]
    sizes[2] = [min(count, key.shape[2]) for count in sizes[2]]
    masks = key_mask, query_mask, exact_heads
    seed = draw_seed(dropout_p, query.device)
    return run(query, key, value, labels, key_labels, *sizes, *masks, scale, dropout_p, seed)


def _of_heads(name: str, counts: int | Sequence[int], heads: int) -> list[int]:
    """A count for every key/value head."""
    if not isinstance(counts, Sequence):
        return [counts] * heads
    if len(counts) != heads:
        raise ValueError(f"{name} must be one number, or one for each of the {heads} heads of key, got {len(counts)}")
    return list(counts)
