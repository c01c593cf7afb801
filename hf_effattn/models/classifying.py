"""What the classifiers of both model families share."""

import torch
from torch import nn
from transformers import PretrainedConfig

from ..ops.shared.precision import accumulation_dtype


def masked_mean(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean of the words that count.

    Args:
        hidden (`torch.Tensor`): `(B, N, d)`.
        mask (`torch.Tensor`, *optional*): `(B, N)`, 1 or True = counts.

    Returns: `(B, d)` in the dtype of `hidden`; 0 for a row without words.
    """
    dtype = accumulation_dtype(hidden.dtype)
    if mask is None:
        return hidden.mean(dim=1, dtype=dtype).to(hidden.dtype)
    counted = mask.bool()[..., None].to(hidden.device)  # a model's last layers may lie on another GPU
    total = hidden.masked_fill(~counted, 0.0).sum(dim=1, dtype=dtype)
    return (total / counted.sum(dim=1).clamp(min=1)).to(hidden.dtype)


def classifier_dropout(config: PretrainedConfig) -> nn.Dropout:
    """Dropout before a classifier: its own rate, else that of the hidden states."""
    rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return nn.Dropout(rate)
