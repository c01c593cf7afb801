"""Attention within sorted blocks as one dense masked softmax (Source: Wang 2022, Eq. 8 to 10 and App. B)."""

from typing import Any, NamedTuple

import torch

from ..shared.dropout import dropout_factor
from ..shared.masking import masked_softmax, repeat_heads, zero_masked

# Gate of two words that share no cluster: its logarithm is finite, and the pair has a gradient.
MEMBERSHIP_FLOOR = 1e-4
BLOCK_WEIGHTS = 0
DIFFERENTIABLE = ("query", "key", "value", "membership")


class Inputs(NamedTuple):
    """The arguments of every form, see the public op; `block_length` is a tensor `(B,)`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    order: torch.Tensor
    block_length: torch.Tensor
    window_blocks: int
    causal: bool
    labels: torch.Tensor | None
    key_mask: torch.Tensor | None
    membership: torch.Tensor | None
    scale: float
    dropout_p: float
    dropout_seed: torch.Tensor | None


def check_values(x: Inputs) -> None:
    """Raise unless each row of `order` is a permutation, words that count first and by label; lengths are positive."""
    order, block_length, key_mask, labels = x.order, x.block_length, x.key_mask, x.labels
    B, N = order.shape
    if B and int(block_length.min()) < 1:
        raise ValueError(f"block_length must be at least 1, got {int(block_length.min())}")
    if order.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in order.aminmax())
    inside = smallest >= 0 and largest < N
    if not inside or not torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, True).all():
        raise ValueError(f"every row of order must be a permutation of 0 .. {N - 1}")
    if key_mask is not None:
        counts = key_mask.gather(1, order)
        if (counts[:, 1:] & ~counts[:, :-1]).any():
            raise ValueError("order must put the words that count first; cluster_order(labels, mask=key_mask) does")
    if labels is not None:
        ranked = labels.gather(1, order).long()
        same = ranked[:, 1:] == ranked[:, :-1]
        sorted_ = (ranked[:, 1:] > ranked[:, :-1]) | (same & (order[:, 1:] > order[:, :-1]))
        # The order of masked words among each other does not matter.
        if not (sorted_ if key_mask is None else sorted_ | ~counts[:, 1:]).all():
            raise ValueError("order must be stably sorted by labels; cluster_order(labels, mask=key_mask) is")


def visible_pairs(
    order: torch.Tensor,
    block_length: torch.Tensor,
    window_blocks: int,
    causal: bool,
    labels: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which key a query sees, `(B, N, N)`; the rank of every word `(B, N)`; by how many blocks a key is before."""
    B, N = order.shape
    index = torch.arange(N, device=order.device)
    rank = torch.empty_like(order).scatter_(1, order, index.expand(B, N))
    counts = torch.ones_like(order, dtype=torch.bool) if key_mask is None else key_mask
    length = block_length[:, None]
    used = -(-counts.sum(dim=1, keepdim=True) // length)
    block = rank // length
    before = (block[:, :, None] - block[:, None, :]) % used.clamp(min=1)[..., None]
    visible = (before < window_blocks) & counts[:, :, None] & counts[:, None, :]
    if causal:
        visible &= index[None, :, None] >= index
    if labels is not None:
        reach = (window_blocks - 1) * length[..., None]
        visible &= (labels[:, :, None] == labels[:, None, :]) & (rank[:, :, None] - rank[:, None, :] <= reach)
    return visible, rank, before


def dense_dropout(
    weights: torch.Tensor, visible: torch.Tensor, rank: torch.Tensor, before: torch.Tensor, x: Inputs, seed: int
) -> torch.Tensor:
    """Dropout factors `(B, H, N, N)`: one draw per block, for its words and those of each block of its window."""
    _, H, N, _ = weights.shape
    factor = torch.ones_like(weights)
    for b, length in enumerate(x.block_length.tolist()):
        words = int(visible[b].any(dim=1).sum())
        length = max(1, min(length, words))
        used = -(-words // length)
        block, place = rank[b] // length, rank[b] % length
        for i in range(used):
            shape = H, length, min(x.window_blocks, used) * length
            drawn = dropout_factor(shape, weights, x.dropout_p, seed, b * N + i, BLOCK_WEIGHTS)
            q, k = (visible[b] & (block == i)[:, None]).nonzero(as_tuple=True)
            factor[b, :, q, k] = drawn[:, place[q], before[b, q, k] * length + place[k]]
    return factor


def sorted_block_attention(*arguments: Any) -> torch.Tensor:
    """Every word attends to the words of its window, 0 elsewhere."""
    x = Inputs(*arguments)
    check_values(x)
    visible, rank, before = visible_pairs(x.order, x.block_length, x.window_blocks, x.causal, x.labels, x.key_mask)
    key, value = repeat_heads(x.key, x.query), repeat_heads(x.value, x.query)
    query, key, value = (zero_masked(rows, x.key_mask) for rows in (x.query, key, value))
    scores, membership = x.scale * query @ key.transpose(2, 3), x.membership
    if membership is not None:
        if x.key_mask is not None:
            membership = membership.masked_fill(~x.key_mask[..., None], 0.0)
        shared = membership @ membership.transpose(1, 2)
        scores = scores + (shared + MEMBERSHIP_FLOOR).log()[:, None]
    weights = masked_softmax(scores, visible[:, None])
    if x.dropout_seed is not None:
        weights = weights * dense_dropout(weights, visible, rank, before, x, int(x.dropout_seed))
    return weights @ value
