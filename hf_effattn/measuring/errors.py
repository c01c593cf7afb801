"""How far an approximation is from the exact result: in one attention layer, and at the model's output.

Sizes: `B` batch, `H` heads, `N` length, `D` head_dim, `d` hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

ROWS_AT_ONCE = 1024
OVER_TOKENS = ("start_logits", "end_logits")


def head_errors(exact: torch.Tensor, other: torch.Tensor, rows: torch.Tensor | None) -> list[float]:
    """Relative L2 error of the attention output of every head, over the valid rows of the batch together.

    Args:
        exact (`torch.Tensor`): `(B, N, H, D)`.
        other (`torch.Tensor`): `(B, N, H, D)`.
        rows (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts. Default: all.

    Returns:
        `list[float]`: `H` values, each `|other - exact| / |exact|`.
    """
    return ratio(*head_squares(exact, other, rows)).sqrt().tolist()


def head_squares(
    exact: torch.Tensor, other: torch.Tensor, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`|other - exact|²` and `|exact|²` of every head, `(H,)` in float64; the arguments of `head_errors`."""
    if rows is not None:
        exact, other = exact[rows], other[rows]  # (valid rows, H, D)
    else:
        exact, other = exact.flatten(0, 1), other.flatten(0, 1)
    reference = exact.double()
    return (other.double() - reference).square().sum(dim=(0, 2)), reference.square().sum(dim=(0, 2))


def relative_error(exact: torch.Tensor, other: torch.Tensor) -> float:
    """`|other - exact| / |exact|` over all elements; infinite where only the exact one is 0."""
    sums = torch.zeros(2, dtype=torch.float64, device=exact.device)
    # In pieces: logits over a vocabulary are large, and float64 doubles them.
    pieces = (tensor.reshape(-1, tensor.shape[-1]).split(ROWS_AT_ONCE) for tensor in (exact, other))
    for exact_rows, other_rows in zip(*pieces, strict=True):
        reference = exact_rows.double()
        sums[0] += (other_rows.double() - reference).square().sum()
        sums[1] += reference.square().sum()
    return float(ratio(sums[0], sums[1]).sqrt())


def ratio(difference: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """One by the other; 0 without a difference, whatever the reference."""
    divided = difference / reference
    return torch.where(difference == 0, torch.zeros_like(divided), divided)


@dataclass
class ModelOutput:
    """What of a model's output is compared.

    Args:
        hidden (`torch.Tensor`, *optional*): last hidden state `(B, N, d)`, where the model has one.
        logits (`dict[str, torch.Tensor]`): by the name of the field; all that end in `logits`.
        of_texts (`set[str]`): those of them that are `(B, labels)`, whatever the number of tokens.
    """

    hidden: torch.Tensor | None = None
    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    of_texts: set[str] = field(default_factory=set)


@torch.no_grad()
def run_model(model: PreTrainedModel, batch: Mapping[str, Any]) -> ModelOutput:
    """One forward pass; the last hidden state is taken where the model without its head returns it.

    Args:
        model (`PreTrainedModel`): in the mode it shall run in.
        batch (`Mapping`): its keyword arguments.
    """
    kept = ModelOutput()

    def keep_hidden(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output.get("last_hidden_state") if isinstance(output, Mapping) else output[0]
        kept.hidden = hidden if isinstance(hidden, torch.Tensor) and hidden.ndim == 3 else None

    hook = model.base_model.register_forward_hook(keep_hidden)
    try:
        output = model(**batch)
    finally:
        hook.remove()
    if isinstance(output, Mapping):
        kept.logits = {
            name: value
            for name, value in output.items()
            if name.endswith("logits") and isinstance(value, torch.Tensor) and value.ndim >= 2
        }
    labels = getattr(model.config, "num_labels", None)
    kept.of_texts = {
        name
        for name, value in kept.logits.items()
        if value.ndim == 2 and value.shape[1] == labels and name not in OVER_TOKENS
    }
    return kept


@dataclass
class OutputChange:
    """How far the model's output moved; None where the model has no such output.

    Args:
        hidden_error (`float`, *optional*): relative L2 error of the last hidden state, valid rows only.
        embedding_cosines (`list[float]`, *optional*): for each text of the batch, the cosine between its mean-pooled
            last hidden states.
        logits_error (`dict[str, float]`): relative L2 error of each of the logits.
        argmax_agreement (`dict[str, float]`): part of the decisions (texts, or valid tokens) that stay the same.
    """

    hidden_error: float | None = None
    embedding_cosines: list[float] | None = None
    logits_error: dict[str, float] = field(default_factory=dict)
    argmax_agreement: dict[str, float] = field(default_factory=dict)


def output_change(exact: ModelOutput, other: ModelOutput, key_mask: torch.Tensor | None) -> OutputChange:
    """Compare two outputs of a model for the same batch.

    Args:
        exact (`ModelOutput`): with exact attention.
        other (`ModelOutput`): with a method.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = a token that counts. Default: all.
    """
    change = OutputChange()
    if exact.hidden is not None and other.hidden is not None:
        rows = _rows(exact.hidden, key_mask)
        change.hidden_error = relative_error(exact.hidden[rows], other.hidden[rows])
        cosines = nn.functional.cosine_similarity(mean_pool(exact.hidden, rows), mean_pool(other.hidden, rows), dim=-1)
        change.embedding_cosines = cosines.clamp(-1, 1).tolist()
    for name, logits in exact.logits.items():
        rows = _rows(logits, key_mask)
        per_token = key_mask is not None and logits.shape[:2] == key_mask.shape and name not in exact.of_texts
        change.logits_error[name] = relative_error(
            logits[rows] if per_token else logits, other.logits[name][rows] if per_token else other.logits[name]
        )
        if logits.shape[-1] > 1:  # one number is a regression: nothing to choose
            change.argmax_agreement[name] = _agreement(logits, other.logits[name], rows, per_token)
    return change


def _agreement(exact: torch.Tensor, other: torch.Tensor, rows: torch.Tensor, per_token: bool) -> float:
    """Part of the equal choices: among positions for `(B, N)` logits over tokens, else in the last dimension."""
    if per_token and exact.ndim == 2:
        masked = torch.finfo(exact.dtype).min
        exact, other = exact.masked_fill(~rows, masked), other.masked_fill(~rows, masked)
    same = exact.argmax(dim=-1) == other.argmax(dim=-1)
    if per_token and exact.ndim == 3:
        same = same[rows]
    return float(same.double().mean())


def mean_pool(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mean of the valid rows of each text, `(B, d)` in float64; 0 for a text without any."""
    weights = rows.to(torch.float64)
    return torch.einsum("bnd,bn->bd", hidden.double(), weights) / weights.sum(dim=1, keepdim=True).clamp(min=1)


def _rows(tensor: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
    if key_mask is None or tensor.shape[:2] != key_mask.shape:
        return torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
    return key_mask
