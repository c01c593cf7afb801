"""Time and memory of a training step of several models, interleaved: other work on the machine slows all alike."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio, peak_memory_added


def step_costs(
    settings: Mapping[str, dict[str, Any]],
    exact: str,
    auto_class: Any,
    shape: tuple[int, int],
    device: torch.device,
    low_precision: bool,
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """Measure forward and backward of models with random weights on the same batch.

    Args:
        settings (`Mapping[str, dict]`): of the configuration of each model, `model_type` and `vocab_size` among them.
        exact (`str`): the name of the model that the others are compared with.
        auto_class: makes the models.
        shape (`tuple[int, int]`): texts and tokens of the batch.
        device (`torch.device`): where they run.
        low_precision (`bool`): autocast to bfloat16.
        repeats (`int`): rounds.

    Returns:
        `dict[str, dict]`: by name `step_ms`, `rounds`, `step_peak_bytes` (None where the device does not say) and
        `speedup` against `exact` (None where it is not among the models).
    """
    words = torch.randint(1, next(iter(settings.values()))["vocab_size"], shape, device=device)
    labels = words if auto_class is AutoModelForCausalLM else torch.zeros(shape[0], dtype=torch.long, device=device)

    def step(model: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low_precision):
            loss = model(words, labels=labels).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    calls = {
        name: partial(step, auto_class.from_config(AutoConfig.for_model(**chosen)).to(device).train())
        for name, chosen in settings.items()
    }
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
