"""Attention sinks: a score for each query head that takes its weight in the softmax of every query, and has no value.

Source: gpt-oss (arXiv 2508.10925).
"""

import torch

HAVE_GRADIENTS = ("query", "key", "value", "sinks")


def check_sinks(sinks: object, query: torch.Tensor) -> None:
    """Raise unless they are None, or numbers for every head of a query `(B, H, N, D)`."""
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point():
        kind = sinks.dtype if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise TypeError(f"attention_sinks must be a floating-point tensor or None, got {kind}")
    if sinks.shape != query.shape[1:2] or sinks.device != query.device:
        raise ValueError(
            f"attention_sinks must have a number for each of the {query.shape[1]} heads of query, on {query.device}; "
            f"got shape {tuple(sinks.shape)} on {sinks.device}"
        )


def add_sinks_(output: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> None:
    """Take sinks into a softmax with outputs `(..., Dv)`, in place; its log-sum-exp and the sinks are `(..., 1)`."""
    output *= torch.sigmoid(log_sum - sinks)
    torch.logaddexp(log_sum, sinks, out=log_sum)


def gradient_of_sinks(sinks: torch.Tensor, log_sum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient `(H,)` of sinks, for the log-sum-exp `(B, H, n)` of all scores, the sinks among them.

    `delta` `(B, H, n)` holds the product of every row's output with the gradient of that output.
    """
    weights = (sinks.to(log_sum.dtype)[:, None] - log_sum).exp()
    return -(weights * delta).sum(dim=(0, 2)).to(sinks.dtype)
