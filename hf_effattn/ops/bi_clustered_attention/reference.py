"""Bi-clustered attention as its definition reads. Plain PyTorch, any device.

Sizes: `C` query clusters, `G` key clusters, `T` exact keys per query cluster.
"""

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..shared.arguments import check_label_range
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, dropout_factor, exact_dropout_rows
from ..shared.masking import repeat_heads, unmasked
from ..shared.precision import SMALLEST as SMALLEST

# Largest logarithm by which a key's mean mass over a cluster's queries exceeds that at the centroid. Where it would be
# more, residuals are large, and to count the key more heavily would be wrong for most of the queries.
LARGEST_VARIANCE_CORRECTION = 0.5


class Inputs(NamedTuple):
    """The arguments of every form, with counts for every key/value head."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    labels: torch.Tensor
    key_labels: torch.Tensor
    clusters: list[int]
    key_clusters: list[int]
    topk: list[int]
    key_mask: torch.Tensor | None
    query_mask: torch.Tensor | None
    exact_heads: torch.Tensor | None
    scale: float
    dropout_p: float
    dropout_seed: torch.Tensor | None
    keep: bool = False  # whether the backward pass may be left tables

    def counts(self) -> list[tuple[int, int, int]]:
        """Query clusters, key clusters and exact keys of every key/value head."""
        return list(zip(self.clusters, self.key_clusters, self.topk, strict=True))


def residuals(query: torch.Tensor, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """`η = Q_i - Q̄_l(i)` of the rows `(N, D)` of a head, from the means of those with each label."""
    return query - means(query, labels, clusters)[labels]


def means(rows: torch.Tensor, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """Mean of the rows `(N, D)` with each label, `(clusters, D)`; 0 where there is none."""
    member = F.one_hot(labels, clusters).to(rows.dtype)  # (N, clusters)
    return member.T @ rows / member.sum(dim=0).clamp(min=1)[:, None]


def squared_distances(key: torch.Tensor, mean_keys: torch.Tensor, eta: torch.Tensor) -> torch.Tensor:
    """`d_t² = (K_t - K̄_g(t))^T Σ_η (K_t - K̄_g(t))` `(M,)`, `Σ_η` the covariance of the residuals `(N, D)`.

    It is the variance, over the queries' residuals, of what key `t` scores beyond the mean of its cluster.
    """
    covariance = eta.T @ eta / max(1, len(eta))
    difference = key - mean_keys
    return (difference @ covariance * difference).sum(dim=1)


def attend_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    eta: torch.Tensor,
    topk: int,
    clusters: int,
    key_clusters: int,
    factor: torch.Tensor | None,
) -> torch.Tensor:
    """One head: scaled queries `(N, D)`, keys `(M, D)` and values `(M, Dv)` that count, at least one key.

    `eta` are the residuals that make `Σ_η`, of all query heads that share the keys. `factor` `(N, T + G)`: dropout.
    """
    centroids = means(query, labels, clusters)  # Q̄: (C, D)
    mean_keys, mean_values = (means(rows, key_labels, key_clusters) for rows in (key, value))
    spread_keys, spread_values = key - mean_keys[key_labels], value - mean_values[key_labels]
    distances = squared_distances(key.detach(), mean_keys.detach()[key_labels], eta.detach())
    # exp(d²/2) is the mean of exp(η·(K_t - K̄_g(t))) over normally distributed residuals.
    variance_correction = (distances / 2).clamp(max=LARGEST_VARIANCE_CORRECTION)  # b_t
    output = query.new_zeros(len(query), value.shape[1])
    for j in range(clusters):
        in_cluster = labels == j
        centroid = centroids[j]
        scores = key @ centroid  # (M,)
        # Exact keys T_j: those that the mean of their cluster represents badly, not those that weigh most.
        chosen = (scores.detach() + distances.clamp(min=SMALLEST).log()).topk(topk).indices
        rest = torch.ones_like(key_labels, dtype=torch.bool).index_fill(0, chosen, False)

        # Tilted summaries at the centroid, of the keys of every cluster outside T_j.
        corrected = scores + variance_correction
        seen, log_mass, tilted_keys, tilted_values, covariances = [], [], [], [], []
        for c in range(key_clusters):
            members = (key_labels == c) & rest
            if not members.any():
                continue
            seen.append(c)
            log_mass.append(corrected[members].logsumexp(dim=0))  # log S_jc
            share = corrected[members].softmax(dim=0)  # w_jt / S_jc
            tilted_keys.append(share @ key[members])
            tilted_values.append(share @ value[members])
            everyone = key_labels == c
            covariances.append(spread_keys[everyone].T @ spread_values[everyone] / everyone.sum())
        rows, columns = query[in_cluster], [*range(topk), *(topk + c for c in seen)]
        values = torch.cat([value[chosen], torch.stack(tilted_values)]) if seen else value[chosen]

        # One softmax over the exact keys and the clusters' tangents.
        eta_j = rows - centroid
        tangents = [mass + eta_j @ tilted for mass, tilted in zip(log_mass, tilted_keys, strict=True)]
        weights = torch.cat([rows @ key[chosen].T, *(tangent[:, None] for tangent in tangents)], dim=1).softmax(dim=1)
        if factor is not None:
            weights = weights * factor[in_cluster][:, columns]
        output[in_cluster] = weights @ values
        if seen:
            # Dipole: how the mean value of a cluster turns with the query. r_i M_j is the query's weight on clusters
            # times Σ_c p̄_jc Cov_c / Σ_c p̄_jc, which no centroid without weight on clusters divides by 0.
            at_centroid = torch.stack(log_mass).softmax(dim=0)
            dipole = sum(p * covariance for p, covariance in zip(at_centroid, covariances, strict=True))
            output[in_cluster] += weights[:, topk:].sum(dim=1, keepdim=True) * (eta_j @ dipole)
    return output


def bi_clustered_attention(*arguments: Any) -> torch.Tensor:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic Ṽ_jc + r_i η^T M_j` with `T = T_j`, `j = l(i)`, head by head."""
    inputs = Inputs(*arguments)
    query, key, value, labels, key_labels, *_, scale, dropout_p, dropout_seed, _ = unmasked(inputs)
    key_mask, query_mask, exact_heads = inputs.key_mask, inputs.query_mask, inputs.exact_heads
    query = scale * query
    group = query.shape[1] // inputs.key.shape[1]
    labels, key_labels = labels.long(), repeat_heads(key_labels, query).long()

    B, H, N, _ = query.shape
    output = query.new_zeros(B, H, N, value.shape[3])
    for b, h in product(range(B), range(H)):
        rows = torch.arange(N, device=query.device) if query_mask is None else query_mask[b].nonzero()[:, 0]
        kept = slice(None) if key_mask is None else key_mask[b]
        head_inputs = key[b, h, kept], value[b, h, kept], labels[b, h, rows], key_labels[b, h, kept]
        clusters, key_clusters, topk = inputs.counts()[h // group]
        check_label_range(labels[b, h], clusters)
        check_label_range(key_labels[b, h], key_clusters, of="key")
        if len(head_inputs[0]) == 0:
            continue
        if exact_heads is not None and exact_heads[b, h // group]:
            weights = (query[b, h, rows] @ head_inputs[0].T).softmax(dim=1)
            if dropout_seed is not None:
                columns = None if key_mask is None else key_mask[b].nonzero()[:, 0]
                lengths = N, key.shape[2]
                drawn = exact_dropout_rows(*lengths, rows, columns, query, dropout_p, dropout_seed, b * H + h)
                weights = weights * torch.cat([of_rows for _, of_rows in drawn if of_rows is not None])
            output[b, h, rows] = weights @ head_inputs[1]
            continue
        sharing = range(h // group * group, h // group * group + group)
        eta = [residuals(query[b, g, rows], labels[b, g, rows], clusters) for g in sharing]
        exact, factor = min(topk, len(head_inputs[0])), None
        if dropout_seed is not None:
            shape = N, topk + key_clusters
            factor = dropout_factor(shape, query, dropout_p, int(dropout_seed), b * H + h, TOPK_AND_SUMMARY_WEIGHTS)
            factor = torch.cat([factor[rows, :exact], factor[rows, topk:]], dim=1)
        output[b, h, rows] = attend_head(
            query[b, h, rows], *head_inputs, torch.cat(eta), exact, clusters, key_clusters, factor
        )
    return output
