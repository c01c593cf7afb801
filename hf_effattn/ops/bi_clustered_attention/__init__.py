"""Bi-clustered attention: each query cluster's exact keys, and all other keys by the first order of key clusters."""

from collections.abc import Sequence
from typing import Any

import torch

from ..shared.arguments import check_attention, check_count, check_labels, check_mask, choose_backend
from ..shared.dropout import draw_seed
from . import batched, reference
from .offsets import predicted_error as predicted_error
from .offsets import query_offsets as query_offsets


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
    """Attention to a few exact keys, and to all others by what their clusters are to first order in the query.

    Queries are close to the centroid `Q̄_j` of their cluster `j = l(i)`: what depends on a query is expanded in its
    offset `η = Q_i - Q̄_j` (queries scaled). `Σ_η` is the covariance of a head's offsets, `K̄_c` the mean of key
    cluster `c`.

    1. Exact keys `T_j`: the `topk` largest `Q̄_j·K_t + 2 log d_t`, `d_t² = (K_t - K̄_g(t))^T Σ_η (K_t - K̄_g(t))`: what
       its cluster represents badly, not what weighs most.
    2. Tilted summaries of the keys of `c` outside `T_j`, with `w_jt = exp(Q̄_j·K_t + b_t)`: `S_jc = Σ w`, `K̃_jc = Σ w K
       / S`, `Ṽ_jc = Σ w V / S`. The lift `b_t = min(d_t² / 2, 1/2)` turns the mass at the centroid into the mean mass
       over the cluster's queries, of normally distributed offsets.
    3. One softmax `p_i` over `[Q_i·K_t, t in T_j | log S_jc + η·K̃_jc]`: the log-mass of every cluster to first order.
    4. `V_i = Σ_{t∈T_j} p_it V_t + Σ_c p_ic Ṽ_jc + r_i η^T M_j`, the dipole `M_j = Σ_c p̄_jc Cov_c(K, V)` with `p̄_j` =
       step 3 at the centroid and `r_i` the query's weight on clusters over the centroid's.

    Ours, beyond Vyas 2020. Kin: MuSe (arXiv 2509.10406: tilted summaries and dipoles), SVG-EAR (arXiv 2603.08982: key
    and value centroids for skipped blocks), Multipole Attention (arXiv 2506.13059). New as far as known: the exact
    keys' rule, tangents and one dipole in one softmax, the offsets' metric for keys (`query_offsets`), gradients.

    Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
    Memory is O(N·(D + topk + key_clusters) + C·(M + key_clusters·D + D·Dv)) per head; nothing of size N×M exists in
    either pass. Gradients are exact for fixed labels, sets `T_j` and lifts, through which none flows. The result is
    exact attention with `topk >= M`, with every query, or every key, in a cluster of its own; equal values come back.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, H, M, D)`, any strides; or with fewer heads that divide `H` (grouped-query layout:
            query head `h` reads key/value head `h // (H / heads)`), which are not expanded.
        value (`torch.Tensor`): `(B, H, M, Dv)`, with the heads of `key`, any strides.
        labels (`torch.Tensor`): integers `(B, H, N)` in `0 .. clusters - 1`, from `cluster_queries`.
        key_labels (`torch.Tensor`): integers `(B, heads of key, M)` in `0 .. key_clusters - 1`, from `cluster_queries`
            on the keys.
        clusters (`int` or `Sequence[int]`): number of query clusters `C`; empty ones are legal. Of each of the three
            counts also a list: one number for every head of key.
        key_clusters (`int` or `Sequence[int]`): number of key clusters; empty ones are legal.
        topk (`int` or `Sequence[int]`): keys attended to exactly per query cluster; more than `M` means all.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend; other keys are in no mean.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other rows are in no mean and get 0.
        exact_heads (`torch.BoolTensor`, *optional*): `(B, heads of key)`, True = exact attention of all its queries,
            for heads that no summary serves (`predicted_error`).
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights, of exact keys and key clusters alike.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.
            Only the reference has second and forward-mode derivatives.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`; 0 in rows that are masked or see no key.

    Raises:
        ValueError: sizes, devices or dtypes that do not fit together, labels outside `0 .. clusters - 1` or key labels
            outside `0 .. key_clusters - 1` (the kernels, which would have to wait for the GPU to know, give such
            queries 0 and leave such keys to exact heads), `clusters`, `key_clusters` or `topk` below 1, or as a list
            not as long as key has heads, a `dropout_p` outside [0, 1), an unknown backend.
        TypeError: a mask that is not boolean, labels that are not integers.
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
