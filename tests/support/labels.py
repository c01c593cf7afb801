"""Labels in the form that a model's head takes."""

from typing import Any

import torch


def labels_for(model_class: Any, words: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass, made of the words; a model without a head takes none."""
    hidden = torch.zeros_like(words).bool() if mask is None else mask == 0
    name, classes = model_class.__name__, torch.arange(len(words)) % 2
    if name.endswith("ForQuestionAnswering"):
        return {"start_positions": words[:, 0] % 9, "end_positions": words[:, 1] % 9 + 5}
    if name.endswith("ForSequenceClassification"):
        return {"labels": classes}
    if name.endswith("ForTokenClassification"):
        return {"labels": (words % 2).masked_fill(hidden, -100)}
    if name.endswith("Model"):
        return {}
    labels = {"labels": words.masked_fill(hidden, -100)}
    return labels | {"next_sentence_label": classes} if name.endswith("ForPreTraining") else labels
