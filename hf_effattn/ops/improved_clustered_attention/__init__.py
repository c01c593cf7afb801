"""Improved clustered attention: the centroid's attention, with its `topk` keys recomputed for every query."""

from typing import Any

import torch

from ..shared.arguments import check_attention, check_counts, choose_backend
from ..shared.dropout import draw_seed
from . import batched, reference


def _triton(*arguments: Any) -> torch.Tensor:
    from . import triton

    return triton.improved_clustered_attention(*arguments)


def improved_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    *,
    clusters: int,
    topk: int,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Clustered attention with exact attention on the centroid's top keys (Source: Vyas 2020, improved clustered).

    With `j` the cluster of query `i`, `T_j` the `topk` keys with the largest centroid attention `A^c_j` and `m_j` the
    mass of `A^c_j` on them: `V_i = m_j softmax(scale · Q_i K_T^T) V_T + Σ_{t∉T_j} A^c_jt V_t`.

    Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
    Memory is O(N·(D + topk) + C·M) per head. Gradients are exact for fixed labels and sets `T_j`. With `topk >= M` the
    result is exact attention.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, heads, M, D)`, any strides; `heads` is `H` or divides it (grouped-query layout).
        value (`torch.Tensor`): `(B, heads, M, Dv)`, any strides.
        labels (`torch.Tensor`): integers `(B, H, N)` in `0 .. clusters - 1`, from `cluster_queries`.
        clusters (`int`): number of clusters `C`; empty ones are legal.
        topk (`int`): keys recomputed exactly per cluster; more than `M` means all.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other rows are in no mean and get 0.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights (the recomputed ones per query, the rest per cluster).
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`; 0 in rows that are masked or see no key.

    Raises:
        ValueError: sizes, devices or dtypes that do not fit together, labels out of range (the kernels give such
            queries 0 instead), `clusters` or `topk` below 1, a `dropout_p` outside [0, 1), an unknown backend.
        TypeError: a mask that is not boolean, labels that are not integers.

    Example:
        >>> import torch
        >>> from hf_effattn.ops import cluster_queries, improved_clustered_attention
        >>> query, key, value = torch.randn(3, 1, 12, 4096, 64)
        >>> labels = cluster_queries(query, 100)
        >>> improved_clustered_attention(query, key, value, labels, clusters=100, topk=32).shape
        torch.Size([1, 12, 4096, 64])
    """
    check_counts(topk=topk, clusters=clusters)
    check_attention(query, key, value, labels, key_mask, query_mask)
    forms = reference.improved_clustered_attention, batched.improved_clustered_attention, _triton
    run = choose_backend(backend, forms, query, key, value)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    topk = min(topk, key.shape[2])
    seed = draw_seed(dropout_p, query.device)
    return run(query, key, value, labels, clusters, topk, key_mask, query_mask, scale, dropout_p, seed)
