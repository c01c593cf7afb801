"""Clustered attention: every query gets the attention of its cluster's centroid."""

from typing import Any

import torch

from ..shared.arguments import check_attention, check_count, choose_backend
from ..shared.dropout import draw_seed
from . import batched, reference


def _triton(*arguments: Any) -> torch.Tensor:
    from . import triton

    return triton.clustered_attention(*arguments)


def clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    *,
    clusters: int,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of the cluster centroids, handed to every member (Source: Vyas 2020, clustered attention).

    Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
    Memory is O(N·D + C·M) per head. Gradients are exact for fixed labels.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, heads, M, D)`, any strides; `heads` is `H` or divides it (grouped-query layout).
        value (`torch.Tensor`): `(B, heads, M, Dv)`, any strides.
        labels (`torch.Tensor`): integers `(B, H, N)` in `0 .. clusters - 1`, from `cluster_queries`.
        clusters (`int`): number of clusters `C`; empty ones are legal.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other rows are in no mean and get 0.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the centroids' attention weights, drawn from torch's global state.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`; 0 in rows that are masked or see no key.

    Raises:
        ValueError: sizes, devices or dtypes that do not fit together, labels out of range (the kernels give such
            queries 0 instead), `clusters` below 1, a `dropout_p` outside [0, 1), an unknown backend.
        TypeError: a mask that is not boolean, labels that are not integers.
    """
    check_count("clusters", clusters)
    check_attention(query, key, value, labels, key_mask, query_mask)
    forms = reference.clustered_attention, batched.clustered_attention, _triton
    run = choose_backend(backend, forms, query, key, value)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    seed = draw_seed(dropout_p, query.device)
    return run(query, key, value, labels, clusters, 0, key_mask, query_mask, scale, dropout_p, seed)
