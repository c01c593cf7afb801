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
        raise TypeError(f"sinks must be a floating-point tensor or None, got {kind}")
    if sinks.shape != query.shape[1:2] or sinks.device != query.device:
        raise ValueError(
            f"sinks must have a number for each of the {query.shape[1]} heads of query, on {query.device}; got shape "
            f"{tuple(sinks.shape)} on {sinks.device}"
        )


def add_sinks_(output: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> None:
    """Take sinks into a softmax, in place.

    Args:
        output (`torch.Tensor`): `(..., Dv)`.
        log_sum (`torch.Tensor`): of the scores, `(..., 1)`.
        sinks (`torch.Tensor`): of the same dimensions as `log_sum`.
    """
    output *= torch.sigmoid(log_sum - sinks)
    torch.logaddexp(log_sum, sinks, out=log_sum)


def gradient_of_sinks(sinks: torch.Tensor, log_sum: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The softmax's gradient `(H,)` for a column whose value is 0.

    Args:
        sinks (`torch.Tensor`): `(H,)`.
        log_sum (`torch.Tensor`): of the scores, the sinks among them, `(B, H, n)`.
        delta (`torch.Tensor`): of every row the product of its output and the gradient of it, `(B, H, n)`.
    """
    weights = (sinks.to(log_sum.dtype)[:, None] - log_sum).exp()
    return -(weights * delta).sum(dim=(0, 2)).to(sinks.dtype)
