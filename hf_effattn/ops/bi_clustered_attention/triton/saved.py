"""What the forward pass of bi-clustered attention on a GPU keeps for the backward pass."""

from typing import NamedTuple

import torch


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs and its output.

    Sizes: `P` key heads, `R` query clusters of the query heads that share one, `G` key clusters, `T` exact keys.
    """

    # The next three: the queries sorted by cluster, see `SortedRows`
    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    # The next three: the keys sorted by cluster
    key_order: torch.Tensor
    key_starts: torch.Tensor
    key_tiles: torch.Tensor
    centroids: torch.Tensor  # `(B · H, C, D)` in the dtype of the query: the points at which it is expanded
    # The next two: `(P, G, ·)` float32
    mean_keys: torch.Tensor
    mean_values: torch.Tensor
    log_squares: torch.Tensor  # `log2 d_t²` `(P, M)`, of which the lifts `b_t` are made
    top: torch.Tensor  # `(B · H, C, T)` int32, the sets `T_j`
    taken: torch.Tensor  # `(P, M, R / 32)` int32, a bit for every query cluster that has the key in its `T_j`
    # The next two: `K̃` and `Ṽ`, `(P · R, G, ·)` in the dtype of the query
    table_keys: torch.Tensor
    table_values: torch.Tensor
    # The next two: `log S_jc` and `log S_jc - Q̄_j·K̃_jc` as exponents of 2, `(P · R, G)`; `-inf` for no key
    log_mass: torch.Tensor
    bias: torch.Tensor
    at_centroid: torch.Tensor  # `p̄_jc`, `(P · R, G)`, the softmax of `log S_j`
    covariances: torch.Tensor  # `Cov_c(K, V)`, `(P · G, D, Dv)` float32
    dipoles: torch.Tensor  # `M_j`, `(P · R, D, Dv)` in the dtype of the query
    lse: torch.Tensor  # base-2 log-sum-exp of each query's scores, `(B · H, N)`
    share: torch.Tensor  # `s_i`, each query's weight on key clusters, `(B · H, N)`
