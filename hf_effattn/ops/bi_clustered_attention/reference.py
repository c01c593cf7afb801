"""Bi-clustered attention as its definition reads. Plain PyTorch, any device."""

from itertools import product

import torch
import torch.nn.functional as F

from ..shared.arguments import check_label_range
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, dropout_factor
from ..shared.masking import cluster_centroids, for_every_head, masked_softmax, zero_masked


def top_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """`T_j`: the unmasked keys with the largest `scale · Qc_j·K_t`, `(B, H, C, T)`; masked ones fill up the rest."""
    scores = scale * cluster_centroids(query, labels, clusters, query_mask) @ key.transpose(2, 3)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    return scores.topk(topk, dim=-1).indices


def bi_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    labels: torch.Tensor,
    key_labels: torch.Tensor,
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: torch.Tensor | None,
    query_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """`V_i = Σ_{t∈T} p_it V_t + Σ_c p_ic V̄_c` with `T = T_j`, `j = l(i)`, `p_i` one softmax over both."""
    check_label_range(labels, clusters)
    check_label_range(key_labels, key_clusters, of="key")
    key, value, key_labels = (for_every_head(tensor, query) for tensor in (key, value, key_labels))
    query, key, value = zero_masked(query, query_mask), zero_masked(key, key_mask), zero_masked(value, key_mask)
    mean_keys = cluster_centroids(key, key_labels, key_clusters, key_mask)  # K̄_c: (B, H, G, D)
    mean_values = cluster_centroids(value, key_labels, key_clusters, key_mask)  # V̄_c: (B, H, G, Dv)
    member = F.one_hot(key_labels.long(), key_clusters)  # (B, H, M, G); a masked key is in no cluster
    if key_mask is not None:
        member = member * key_mask[:, None, :, None]
    sizes = member.sum(dim=2)  # n_c: (B, H, G)
    top = top_keys(query.detach(), key.detach(), labels, clusters, topk, key_mask, query_mask, scale)  # T_j

    B, H, N, _ = query.shape
    output = query.new_zeros(B, H, N, value.shape[3])
    for b, h in product(range(B), range(H)):
        if dropout_seed is not None:
            shape = N, topk + key_clusters
            factor = dropout_factor(shape, query, dropout_p, int(dropout_seed), b * H + h, TOPK_AND_SUMMARY_WEIGHTS)
        for j in range(clusters):
            chosen = top[b, h, j]
            rest = sizes[b, h] - member[b, h, chosen].sum(dim=0)  # n_jc: (G,)
            counted = labels[b, h] == j
            if query_mask is not None:
                counted = counted & query_mask[b]
            scaled = scale * query[b, h, counted]
            summary_scores = scaled @ mean_keys[b, h].T + rest.clamp(min=1).double().log().to(query.dtype)
            scores = torch.cat([scaled @ key[b, h, chosen].T, summary_scores], dim=1)
            seen = rest.new_ones(topk, dtype=torch.bool) if key_mask is None else key_mask[b, chosen]
            weights = masked_softmax(scores, torch.cat([seen, rest > 0]))
            if dropout_seed is not None:
                weights = weights * factor[counted]
            output[b, h, counted] = weights @ torch.cat([value[b, h, chosen], mean_values[b, h]])
    return output
