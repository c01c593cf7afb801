"""Which method a run uses: the fastest of a report's whose error on some of its own documents is small enough."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from ..measuring.candidates import make_candidates
from ..patching.methods.exact import Exact
from ..patching.model_types.stacks import causal_modules, find_stacks
from ..patching.stored import FIELD
from ..reporting import report


def exact_method(model: PreTrainedModel) -> dict[str, Any] | None:
    """What approximates nothing and takes less time than the model's own attention.

    None where it is patched, and on a GPU, where blocks have not been timed.
    """
    if model.device.type != "cpu" or getattr(model.config, FIELD, None) is not None:
        return None
    return {"method": Exact.method} if any(stack.exact.gains() for stack in find_stacks(model)) else None


def is_long_enough(length: int, model: PreTrainedModel) -> bool:
    """Whether any method of a report would gain on so many tokens."""
    if any(stack.exact.gains(length) for stack in find_stacks(model)):
        return True
    causal, device = any(causal_modules(model)), model.device.type
    candidates = make_candidates(None, kinds=[causal])
    return any(not candidate.settings.is_exact(length, device) for candidate in candidates)


def fastest_method(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    max_error: float,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any] | None:
    """The settings of the fastest default method of `report` within an error on every sequence.

    Args:
        model (`PreTrainedModel`): afterwards what it was.
        sequences (`Sequence[Sequence[int]]`): token ids of some documents.
        max_error (`float`): allowed relative L2 error of the last hidden state.
        progress (`Callable`, *optional*): as of `report`.

    Returns:
        `dict`, *optional*: the method, its settings and `hidden_error`, the largest measured; None where exact
        attention is faster than all that keep to the budget.

    Raises:
        ValueError: the model has no attention that a method serves, or the budget is no positive number.
    """
    inputs = [
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()} for ids in sequences
    ]
    findings = report(model, inputs, max_error=max_error, repeats=1, memory=False, progress=progress)
    if not findings.complete:
        raise KeyboardInterrupt
    label = findings.fastest_within(max_error)
    if label is None or fmean(findings.speedup(measurement) or 0.0 for measurement in findings.of(label)) <= 1:
        return None
    errors = [measurement.change.hidden_error or 0.0 for measurement in findings.of(label)]
    return {**findings.methods[label], "hidden_error": max(errors)}
