"""Bi-clustered attention: exact attention on the centroid's `topk` keys, the rest through clusters of keys."""

from typing import Any

import torch

from ..shared.arguments import check_attention, check_count, check_labels, choose_backend
from ..shared.dropout import draw_seed
from . import batched, reference


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
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention to the top keys of the query's cluster and, for all other keys, to the means of the key clusters.

    Query clusters choose the keys that are attended to exactly, as in improved clustered attention: with `j` the
    cluster of query `i`, `T_j` are the `topk` keys with the largest product with the centroid `Qc_j`. The remainder,
    there the centroid's, is here weighed by every query itself: with `K̄_c`, `V̄_c` the mean key and value of key
    cluster `c` and `n_jc` the number of its keys outside `T_j`, `V_i = Σ_{t∈T_j} p_it V_t + Σ_c p_ic V̄_c`, where
    `p_i` is the softmax over `scale · Q_i·K_t` for `t` in `T_j` and `scale · Q_i·K̄_c + log n_jc` for every `c` with
    `n_jc > 0`.

    Ours, beyond Vyas 2020. Kin: Multipole Attention (arXiv 2506.13059) attends to centroids of unimportant keys while
    decoding, MuSe (arXiv 2509.10406) clusters queries and keys separately.

    Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
    Memory is O(N·(D + topk + key_clusters) + C·M) per head; nothing of size N×M exists in either pass. Gradients are
    exact for fixed labels and fixed sets `T_j`, through which none flows. With `topk >= M`, and with every key in a
    cluster of its own, the result is exact attention.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, H, M, D)`, any strides; or with fewer heads that divide `H` (grouped-query layout:
            query head `h` reads key/value head `h // (H / heads)`), which are not expanded.
        value (`torch.Tensor`): `(B, H, M, Dv)`, with the heads of `key`, any strides.
        labels (`torch.Tensor`): integers `(B, H, N)` in `0 .. clusters - 1`, from `cluster_queries`.
        key_labels (`torch.Tensor`): integers `(B, heads of key, M)` in `0 .. key_clusters - 1`, from `cluster_queries`
            on the keys.
        clusters (`int`): number of query clusters `C`; empty ones are legal.
        key_clusters (`int`): number of key clusters; empty ones are legal.
        topk (`int`): keys attended to exactly per query cluster; more than `M` means all.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend; other keys are in no mean.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other rows are in no mean and get 0.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights, of top keys and key clusters alike.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.
            Only the reference has second and forward-mode derivatives.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`; 0 in rows that are masked or see no key.

    Raises:
        ValueError: sizes, devices or dtypes that do not fit together, labels outside `0 .. clusters - 1` or key labels
            outside `0 .. key_clusters - 1` (the kernels, which would have to wait for the GPU to know, give such
            queries 0 and leave such keys out of all means instead), `clusters`, `key_clusters` or `topk` below 1, a
            `dropout_p` outside [0, 1), an unknown backend.
        TypeError: a mask that is not boolean, labels that are not integers.
    """
    check_count("topk", topk)
    check_count("key_clusters", key_clusters)
    check_attention(query, key, value, labels, clusters, key_mask, query_mask)
    check_labels(key_labels, key, of="key")
    forms = reference.bi_clustered_attention, batched.bi_clustered_attention, _triton
    run = choose_backend(backend, forms, query, key, value)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    topk = min(topk, key.shape[2])
    seed = draw_seed(dropout_p, query.device)
    return run(
        query,
        key,
        value,
        labels,
        key_labels,
        clusters,
        key_clusters,
        topk,
        key_mask,
        query_mask,
        skip,
        scale,
        dropout_p,
        seed,
    )
