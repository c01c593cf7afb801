"""Improved clustered attention in the paper's words (Source: Vyas 2020, improved clustered). Plain PyTorch."""

from itertools import product
from typing import Any

import torch

from ..clustered_attention.reference import Inputs, centroid_attention, centroid_dropout, centroid_scores
from ..shared.dropout import TOPK_WEIGHTS, dropout_factor
from ..shared.masking import masked_softmax, unmasked


def improved_clustered_attention(*arguments: Any) -> torch.Tensor:
    """`V_i = m_j softmax(scale · Q_i K_T^T) V_T + Σ_{t∉T} A^c_jt V_t` with `j = l(i)`, `T = T_j`."""
    x = unmasked(Inputs(*arguments))
    query, key, value, labels, clusters, topk, key_mask, query_mask, scale, dropout_p, dropout_seed = x
    B, H, N, _ = query.shape
    scores = centroid_scores(x)
    attention = centroid_attention(scores, key_mask)  # A^c
    # By score, the first of equals: weights that underflow to 0 still have a largest among them.
    top = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]  # T_j: (B, H, C, T)
    mass = attention.gather(3, top).sum(dim=-1)  # m_j: (B, H, C)
    rest = attention.scatter(3, top, 0.0)  # A^c with the columns of T_j set to 0
    if dropout_seed is not None:
        rest = rest * centroid_dropout(attention, dropout_p, int(dropout_seed))
    rest_values = rest @ value  # V^b: (B, H, C, Dv)

    output = query.new_zeros(B, H, N, value.shape[3])
    for b, h in product(range(B), range(H)):
        if dropout_seed is not None:
            factor = dropout_factor((N, topk), query, dropout_p, int(dropout_seed), b * H + h, TOPK_WEIGHTS)
        for j in range(clusters):
            member = labels[b, h] == j
            if query_mask is not None:
                member = member & query_mask[b]
            chosen = top[b, h, j]
            scores = scale * query[b, h, member] @ key[b, h, chosen].T
            weights = mass[b, h, j] * masked_softmax(scores, None if key_mask is None else key_mask[b, chosen])
            if dropout_seed is not None:
                weights = weights * factor[member]
            output[b, h, member] = weights @ value[b, h, chosen] + rest_values[b, h, j]
    return output
