"""The inputs of a report: checked and moved to the model's device before anything runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..patching.model_types.stacks import longest_input


def check_inputs(model: PreTrainedModel, inputs: Any) -> list[dict[str, Any]]:
    """The inputs as a list of keyword arguments for the model, on its device.

    Args:
        model (`PreTrainedModel`): the model that will take them.
        inputs (`Mapping` or `Sequence[Mapping]`): what a tokenizer or feature extractor returned with
            `return_tensors="pt"`, each a batch of any size and length.

    Returns:
        `list[dict]`: one dict per batch.

    Raises:
        ValueError: nothing to measure, a mask that is not `(B, N)`, token ids that the model does not know, more
            tokens than the model has positions; a model or tensors on the device "meta".
        TypeError: text instead of tensors, lists instead of tensors.
    """
    if model.device.type == "meta":
        raise ValueError(
            f'the weights of {type(model).__name__} are on the device "meta", where they have no values, so nothing '
            "can be measured: load it with from_pretrained, without offloading"
        )
    if isinstance(inputs, Mapping):
        inputs = [inputs]
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise TypeError(
            "inputs must be a dict of tensors, as the tokenizer returns it, or a list of them, got "
            f'{type(inputs).__name__}; for text call tokenizer(text, return_tensors="pt")'
        )
    if not inputs:
        raise ValueError("inputs is empty: give at least one batch to measure on")
    return [_checked(model, batch, index) for index, batch in enumerate(inputs)]


def _checked(model: PreTrainedModel, batch: Any, index: int) -> dict[str, Any]:
    where = f"inputs[{index}]"
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"{where} must be a dict of tensors such as a tokenizer returns, got {type(batch).__name__}; for text "
            'call tokenizer(text, return_tensors="pt")'
        )
    values = dict(batch)
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    lists = [name for name, value in values.items() if isinstance(value, list | tuple)]
    if lists or not tensors:
        raise TypeError(
            f"{where} must hold tensors, but {', '.join(lists) or 'it'} does not; call the tokenizer with "
            'return_tensors="pt" (and padding=True for a batch)'
        )
    for name, value in tensors.items():
        if value.numel() == 0:
            raise ValueError(f"{where}[{name!r}] is empty, shape {tuple(value.shape)}")
        if value.is_meta:
            raise ValueError(f"{where}[{name!r}] is on the device 'meta', where it has no values: give real ones")
    _check_mask(tensors, where)
    _check_tokens(model, tensors, where)
    return {name: value.to(model.device) if name in tensors else value for name, value in values.items()}


def _check_mask(tensors: dict[str, torch.Tensor], where: str) -> None:
    mask = tensors.get("attention_mask")
    if mask is None:
        return
    if mask.ndim != 2:
        raise ValueError(
            f"{where}['attention_mask'] must be a padding mask (B, N), got shape {tuple(mask.shape)}; with any other "
            "mask the methods stay exact, so there is nothing to compare"
        )
    ids = tensors.get("input_ids")
    if ids is not None and mask.shape != ids.shape:
        raise ValueError(
            f"{where}['attention_mask'] {tuple(mask.shape)} must have the shape of input_ids {tuple(ids.shape)}"
        )
    if not mask.bool().any():
        raise ValueError(f"{where}['attention_mask'] masks every token, so there is nothing to measure")


def _check_tokens(model: PreTrainedModel, tensors: dict[str, torch.Tensor], where: str) -> None:
    ids = tensors.get("input_ids")
    if ids is None:
        return
    if ids.ndim != 2:
        raise ValueError(
            f"{where}['input_ids'] must be (B, N), got shape {tuple(ids.shape)}; a single text needs ids[None]"
        )
    vocabulary = getattr(model.config, "vocab_size", None)
    if vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"{where}['input_ids'] holds ids from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to "
            f"{vocabulary - 1}; was it encoded by another model's tokenizer?"
        )
    longest = longest_input(model)
    if longest is not None and ids.shape[1] > longest:
        raise ValueError(
            f"{where} has {ids.shape[1]} tokens, but {type(model).__name__} has positions for {longest} only; call "
            f"hf_effattn.extend_positions(model, {ids.shape[1]}) first, or truncate the input"
        )
