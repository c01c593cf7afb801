"""Time and memory of a training step of several models, interleaved: other work on the machine slows all alike."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio, peak_memory_added


def step_costs(
    models: Mapping[str, Any], exact: str, words: torch.Tensor, labels: torch.Tensor, low_precision: bool, repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure forward and backward of each model on the same batch.

    Args:
        models (`Mapping[str, PreTrainedModel]`): in training mode, on the device of `words`.
        exact (`str`): the name of the model that the others are compared with.
        words (`torch.Tensor`): token ids `(batch, length)`.
        labels (`torch.Tensor`): of the models' heads.
        low_precision (`bool`): autocast to bfloat16.
        repeats (`int`): rounds.

    Returns:
        `dict[str, dict]`: by name `step_ms`, `rounds`, `step_peak_bytes` (None where the device does not say) and
        `speedup` against `exact` (None where it is not among the models).
    """
    device = words.device

    def step(model: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low_precision):
            loss = model(words, labels=labels).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    calls = {name: partial(step, model) for name, model in models.items()}
    peaks = {name: peak_memory_added(call, device)[1] for name, call in calls.items()}  # the warm-up too
    seconds = interleaved_rounds(calls, device, repeats)
    return {
        name: {
            "step_ms": 1e3 * (median(times) or 0.0),
            "rounds": len(times),
            "step_peak_bytes": peaks[name],
            "speedup": median_ratio(seconds.get(exact, []), times),
        }
        for name, times in seconds.items()
    }
