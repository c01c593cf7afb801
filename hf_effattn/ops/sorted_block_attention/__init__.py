"""Attention within blocks of words that a clustering put next to each other."""

from typing import Any

import torch

from ..shared.arguments import (
    check_alike,
    check_count,
    check_integers,
    check_mask,
    check_query_key_value,
    choose_backend,
)
from ..shared.dropout import draw_seed
from . import batched, reference


def _triton(*arguments: Any) -> torch.Tensor:
    from . import triton

    return triton.sorted_block_attention(*arguments)


def cluster_order(labels: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The original index of each sorted rank, `(B, N)`: stable, by cluster, masked words last (Wang 2022, Eq. 5).

    Args:
        labels (`torch.Tensor`): integers `(B, N)`.
        mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts.
    Returns: int64 `(B, N)`, what `sorted_block_attention` takes as `order`.
    Raises: `ValueError` for other sizes, `TypeError` for labels that are no integers, a mask that is not boolean.
    """
    if labels.ndim != 2:
        raise ValueError(f"labels must have 2 dimensions (B, N), got {tuple(labels.shape)}")
    check_integers("labels", labels, tuple(labels.shape), labels)
    check_mask("mask", mask, labels[:, None, :, None])
    if mask is not None:
        # In 64 bits: the largest of a smaller type may be a label.
        labels = labels.long().masked_fill(~mask, torch.iinfo(torch.int64).max)
    return labels.sort(dim=1, stable=True).indices


def sorted_block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: torch.Tensor,
    *,
    block_length: int | torch.Tensor,
    window_blocks: int = 2,
    causal: bool = False,
    labels: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    membership: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Softmax attention of every sorted block of words to itself and the blocks before it (Wang 2022, Eq. 8 to 10).

    The `n` words of a row that count make `⌈n / block_length⌉` blocks of sorted ranks, the last of which may be short.
    Block `b` sees the blocks `b, b-1, …, b-window_blocks+1`, counted around the end of the row, none of them twice.

    Sizes: `B` batch, `H` heads, `N` words, `D` head_dim of query and key, `Dv` of value. The cost is
    `O(N · window_blocks · block_length)`.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, heads, N, D)`, any strides; `heads` is `H` or divides it (grouped-query layout).
        value (`torch.Tensor`): `(B, heads, N, Dv)`, any strides.
        order (`torch.Tensor`): int64 `(B, N)`, the original index of each sorted rank, words that count first.
        block_length (`int` or `torch.Tensor`): words of a block, one number or integers `(B,)`, one per row.
        window_blocks (`int`): blocks that a query sees; the paper's is 2.
        causal (`bool`): a query sees only keys of its own or a smaller original index (Wang 2022, App. B).
        labels (`torch.Tensor`, *optional*): integers `(B, N)` below 2³¹ that `order` sorts; with `causal` only. A
            query then sees keys of its own label: itself and at most `(window_blocks - 1) · block_length` before it,
            so that later words do not change what it sees.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)` in original order, True = counts, as query and as key.
        membership (`torch.Tensor`, *optional*): `(B, N, k)`, non-negative. Adds `log(P_q · P_k + 1e-4)` to the scores.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query` and in original order; 0 in masked rows.

    Raises:
        ValueError: sizes, devices or dtypes that do not fit together, an order that is none, puts masked words before
            others or does not sort the labels (seen by the two PyTorch forms only), `block_length` or `window_blocks`
            below 1, labels without `causal`, a `dropout_p` outside [0, 1), an unknown backend.
        TypeError: a mask that is not boolean, an order, labels or lengths that are not integers.
    """
    check_query_key_value(query, key, value)
    check_count("window_blocks", window_blocks)
    B, _, N, D = query.shape
    if key.shape[2] != N:
        raise ValueError(
            f"key {tuple(key.shape)} must be as long as query {tuple(query.shape)}: the words are the same"
        )
    check_mask("key_mask", key_mask, key)
    check_integers("order", order, (B, N), query)
    if isinstance(block_length, torch.Tensor):
        check_integers("block_length", block_length, (B,), query)
        lengths = block_length.long()
    else:
        check_count("block_length", block_length)
        lengths = torch.full((B,), block_length, dtype=torch.int64, device=query.device)
    if labels is not None:
        if not causal:
            raise ValueError("labels restrict what a causal query sees: they need causal=True")
        check_integers("labels", labels, (B, N), query)
    if membership is not None:
        if membership.ndim != 3 or membership.shape[:2] != (B, N) or membership.shape[2] == 0:
            raise ValueError(f"membership must be (B, N, k) = ({B}, {N}, k), got {tuple(membership.shape)}")
        check_alike("membership", membership, "query", query)
    differentiable = (query, key, value) if membership is None else (query, key, value, membership)
    forms = reference.sorted_block_attention, batched.sorted_block_attention, _triton
    run = choose_backend(backend, forms, query, key, value)
    if run is not reference.sorted_block_attention and membership is not None:
        choose_backend("batched", forms, *differentiable)  # a tangent of the membership has no fast form either
    scale = D**-0.5 if scale is None else float(scale)
    return run(
        *(query, key, value, order.long(), lengths, window_blocks, causal, labels, key_mask, membership),
        *(scale, dropout_p, draw_seed(dropout_p, query.device)),
    )
