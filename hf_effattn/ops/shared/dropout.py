"""Attention dropout that a later pass can draw again.

The fast form recomputes its attention weights in the backward pass and gradient checkpointing runs the forward pass
twice, so a dropout mask is a function of a seed that is drawn once, from torch's global state, by the public op.
"""

from collections.abc import Iterator

import torch

from .arguments import check_number

CENTROID_WEIGHTS = 0
TOPK_WEIGHTS = 1
TOPK_AND_SUMMARY_WEIGHTS = 2
KINDS_OF_WEIGHTS = 3
# Queries whose dropout factors of exact weights are drawn at once.
EXACT_ROWS = 512


def draw_seed(dropout_p: float, device: torch.device) -> torch.Tensor | None:
    """A seed from torch's global random state (which checkpointing restores), or None without dropout.

    Kernels want it on their GPU: no copy from the host, and a CUDA graph draws a new one at each replay.
    """
    check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    return torch.randint(2**48, (1,), device=device) if dropout_p > 0.0 else None


def dropout_factor(
    shape: tuple[int, ...], like: torch.Tensor, dropout_p: float, seed: int, problem: int, weights: int
) -> torch.Tensor:
    """0 or `1 / (1 - dropout_p)` for the attention weights of one head (`problem` = batch index · H + head)."""
    number = seed * 1_000_003 + KINDS_OF_WEIGHTS * problem + weights
    generator = torch.Generator(like.device).manual_seed(number % 2**63)
    kept = torch.rand(shape, generator=generator, device=like.device) >= dropout_p
    return kept.to(like.dtype) / (1.0 - dropout_p)


def exact_dropout_rows(
    query_length: int,
    key_length: int,
    query_rows: torch.Tensor | None,
    key_rows: torch.Tensor | None,
    like: torch.Tensor,
    dropout_p: float,
    seed: torch.Tensor | None,
    problem: int,
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Dropout factors of exact weights, `EXACT_ROWS` queries at a time, drawn for the whole lengths.

    Yields which of the queries that count, and the factors `(queries, keys that count)`, None without a seed.
    """
    step = EXACT_ROWS
    if seed is None:
        count = query_length if query_rows is None else len(query_rows)
        yield from ((slice(start, min(start + step, count)), None) for start in range(0, count, step))
        return
    # Exact heads have no summaries, so they take the number of those.
    number = int(seed) * 1_000_003 + KINDS_OF_WEIGHTS * problem + TOPK_AND_SUMMARY_WEIGHTS
    generator = torch.Generator(like.device).manual_seed(number % 2**63)
    done = 0
    for start in range(0, query_length, step):
        shape = min(step, query_length - start), key_length
        kept = torch.rand(shape, generator=generator, device=like.device) >= dropout_p
        if query_rows is not None:
            kept = kept[query_rows[(query_rows >= start) & (query_rows < start + shape[0])] - start]
        if key_rows is not None:
            kept = kept[:, key_rows]
        yield slice(done, done + len(kept)), kept.to(like.dtype) / (1.0 - dropout_p)
        done += len(kept)
