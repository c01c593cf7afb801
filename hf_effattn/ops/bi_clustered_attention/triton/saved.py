"""What the forward pass of bi-clustered attention on a GPU keeps for the backward pass."""

from typing import NamedTuple

import torch


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs and its output.

    Sizes: `P` key heads, `R` query clusters of the query heads that share one, `G` key clusters, `T` exact keys.

    Attributes:
        order, starts, tiles: the queries sorted by cluster, see `SortedRows`.
        key_order, key_starts, key_tiles: the keys sorted by cluster.
        centroids: `(B · H, C, D)` in the dtype of the query: the points at which it is expanded.
        mean_keys, mean_values: `(P, G, ·)` float32.
        log_squares: `log2 d_t²` `(P, M)`, of which the lifts `b_t` are made.
        top: `(B · H, C, T)` int32, the sets `T_j`.
        taken: `(P, M, R / 32)` int32, a bit for every query cluster that has the key in its `T_j`.
        table_keys, table_values: `K̃` and `Ṽ`, `(P · R, G, ·)` in the dtype of the query.
        log_mass, bias: `log S_jc` and `log S_jc - Q̄_j·K̃_jc` as exponents of 2, `(P · R, G)`; `-inf` for no key.
        at_centroid: `p̄_jc`, `(P · R, G)`, the softmax of `log S_j`.
        covariances: `Cov_c(K, V)`, `(P · G, D, Dv)` float32.
        dipoles: `M_j`, `(P · R, D, Dv)` in the dtype of the query.
        lse: base-2 log-sum-exp of each query's scores, `(B · H, N)`.
        share: `s_i`, each query's weight on key clusters, `(B · H, N)`.
    """

    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    key_order: torch.Tensor
    key_starts: torch.Tensor
    key_tiles: torch.Tensor
    centroids: torch.Tensor
    mean_keys: torch.Tensor
    mean_values: torch.Tensor
    log_squares: torch.Tensor
    top: torch.Tensor
    taken: torch.Tensor
    table_keys: torch.Tensor
    table_values: torch.Tensor
    log_mass: torch.Tensor
    bias: torch.Tensor
    at_centroid: torch.Tensor
    covariances: torch.Tensor
    dipoles: torch.Tensor
    lse: torch.Tensor
    share: torch.Tensor
