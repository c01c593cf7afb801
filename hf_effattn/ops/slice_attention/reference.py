"""Slice attention in the paper's words (Source: Lee 2023, Eq. 8, 11, 12, 14). Plain PyTorch, any device."""

from typing import Any, NamedTuple

import torch

from ..shared.dropout import dropout_factor
from ..shared.precision import accumulation_dtype

LOCAL_WEIGHTS = 0
DIFFERENTIABLE = ("query", "key", "value", "query_positions", "key_positions")


class Inputs(NamedTuple):
    """The arguments of every form, see the public op; `extension`: keys of each neighbour that a slice sees."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slice_length: int
    extension: int
    causal: bool
    key_mask: torch.Tensor | None
    scale: float
    query_positions: torch.Tensor | None
    key_positions: torch.Tensor | None
    sink_mask: torch.Tensor | None
    dropout_p: float
    dropout_seed: torch.Tensor | None


def window_positions(
    slices: int, slice_length: int, extension: int, causal: bool, device: torch.device
) -> torch.Tensor:
    """Positions of the keys of each extended slice, `(slices, window)`; some lie outside the sequence."""
    last = slice_length + (0 if causal else extension)
    start = torch.arange(slices, device=device) * slice_length
    return start[:, None] + torch.arange(-extension, last, device=device)


def sink_rows(sink_mask: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the sinks, `(B, K)`, and which places hold one; `K` is the most that an item has."""
    if key_mask is not None:
        sink_mask = sink_mask & key_mask
    count = int(sink_mask.sum(dim=1).max()) if sink_mask.numel() else 0
    rows = (~sink_mask).to(torch.int8).argsort(dim=1, stable=True)[:, :count]
    return rows, sink_mask.gather(1, rows)


def sink_visible(
    rows: torch.Tensor, counts: torch.Tensor, slices: int, slice_length: int, extension: int, causal: bool
) -> torch.Tensor:
    """Whether a slice sees a sink beside its window, `(B, slices, K)`."""
    start = torch.arange(slices, device=rows.device)[:, None] * slice_length
    rows = rows[:, None]
    outside = rows < start - extension
    if not causal:
        outside = outside | (rows >= start + slice_length + extension)
    return outside & counts[:, None]


def slice_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Y_l = softmax((S W_q + P_l W_q)(S_ext W_k + P_ext W_k)^T) S_ext W_v` per slice, its means, its log-sum-exps."""
    query, key, value, slice_length, extension, causal, key_mask, scale, *_ = x = Inputs(*arguments)
    query_positions, key_positions, sink_mask, dropout_p, dropout_seed = x[8:]
    B, H, N, _ = query.shape
    dtype = accumulation_dtype(query.dtype)
    slices = -(-N // slice_length)
    group = H // key.shape[1]
    token = torch.ones(B, N, dtype=torch.bool, device=query.device) if key_mask is None else key_mask
    query, key, value = (rows.masked_fill(~token[:, None, :, None], 0.0) for rows in (query, key, value))
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)

    def take(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows `(B, H, N, ...)` at `(slices, length)` positions; those outside are any row and must be masked."""
        return rows[:, :, positions.clamp(0, max(0, N - 1))]

    inner = window_positions(slices, slice_length, 0, False, query.device)  # (slices, L)
    window = window_positions(slices, slice_length, extension, causal, query.device)  # (slices, W)
    is_token = take(token[:, None], inner)[:, 0] & (inner < N)  # (B, slices, L)
    visible = (take(token[:, None], window)[:, 0] & (window >= 0) & (window < N))[:, :, None]  # (B, slices, 1, W)
    if causal:
        visible = visible & (window[:, None, :] <= inner[:, :, None])

    queries, keys, values = take(query, inner), take(key, window), take(value, window)
    if query_positions is not None:
        queries = queries + query_positions[:, None]
    if key_positions is not None:
        keys = keys + key_positions.repeat_interleave(group, dim=0)[:, None, : window.shape[1]]
    scores = scale * queries @ keys.transpose(3, 4)
    visible = visible[:, None].expand_as(scores)
    if sink_mask is not None:
        rows, counts = sink_rows(sink_mask, key_mask)
        index = rows[:, None, :, None]
        sink_keys, sink_values = (
            x.gather(2, index.expand(-1, H, -1, x.shape[3]))[:, :, None].expand(-1, -1, slices, -1, -1)
            for x in (key, value)
        )
        sink_scores = scale * queries @ sink_keys.transpose(3, 4)
        seen = sink_visible(rows, counts, slices, slice_length, extension, causal)[:, None, :, None]
        scores = torch.cat([scores, sink_scores], dim=-1)
        visible = torch.cat([visible, seen.expand_as(sink_scores)], dim=-1)
        values = torch.cat([values, sink_values], dim=3)

    counted = is_token[:, None, :, :, None]
    # A finite fill: with -inf a row without any key would be NaN in the forward pass and in its gradient.
    scores = scores.to(dtype).masked_fill(~visible, torch.finfo(dtype).min)
    lse = scores.logsumexp(dim=-1).masked_fill(~counted[..., 0], torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    if dropout_seed is not None:
        shape = (slices * slice_length, weights.shape[-1])
        factors = [
            dropout_factor(shape, weights, dropout_p, int(dropout_seed), problem, LOCAL_WEIGHTS)
            for problem in range(B * H)
        ]
        weights = weights * torch.stack(factors).view_as(weights)
    output = (weights.to(value.dtype) @ values).masked_fill(~counted, 0.0)  # (B, H, slices, L, Dv)
    sizes = is_token.sum(dim=2).clamp(min=1)[:, None, :, None]
    pooled = output.sum(dim=3, dtype=dtype) / sizes
    return output.flatten(2, 3)[:, :, :N], pooled.to(query.dtype), lse.flatten(2, 3)[:, :, :N]
