"""The errors of heads that the modules of a patched model measured in the last forward pass."""

import torch
from torch import nn

from .measurements import RECORD, MeasuredError, measurements_of
from .model_types.stacks import find_stacks


def measured_error(model: nn.Module) -> dict[int, MeasuredError]:
    """What the last forward pass of a model patched with a `tolerance` measured, by layer.

    Errors are estimates from 64 queries of each text and head. On a CPU, where heads above the tolerance have
    consequences and no future is masked, they are from 16 for heads well within the tolerance, and rougher.

    Args:
        model (`PreTrainedModel`): with one encoder or decoder that is patched; of several hand over the part.

    Returns:
        `dict[int, MeasuredError]`: by layer, from 0. Layers that ran exact attention, because they are not patched or
        the input was short, are missing. An attention module that serves several layers (ALBERT) has an entry for
        each; in compiled graphs for the last alone.

    Raises:
        ValueError: nothing in the model was patched with a tolerance, or several parts were.

    Example:
        >>> import hf_effattn
        >>> from transformers import AutoModel, AutoTokenizer
        >>> tokenizer, model = AutoTokenizer.from_pretrained("BAAI/bge-m3"), AutoModel.from_pretrained("BAAI/bge-m3")
        >>> model = hf_effattn.patch_attention(model, "bi-clustered", tolerance=0.2)
        >>> outputs = model(**tokenizer(open("long.txt").read(), return_tensors="pt"))
        >>> hf_effattn.measured_error(model)[0].error.shape == (1, model.config.num_attention_heads)
        True
    """
    stacks = [stack for stack in find_stacks(model) if any(measurements_of(module).calls for module in stack.modules)]
    patched = any(
        patch is not None and patch.method is not None and patch.method.tolerance is not None
        for patch in (vars(module).get(RECORD) for module in model.modules())
    )
    if len(stacks) > 1:
        names = ", ".join(type(stack.model).__name__ for stack in stacks)
        raise ValueError(f"several parts of {type(model).__name__} measure errors, {names}: hand over one of them")
    if not stacks:
        if patched:
            return {}
        raise ValueError(
            f"nothing in {type(model).__name__} measures its error: patch it with a tolerance, such as "
            'patch_attention(model, "bi-clustered", tolerance=0.1)'
        )
    by_layer: dict[int, MeasuredError] = {}
    for module, layers in zip(stacks[0].modules, stacks[0].layers, strict=True):
        kept = measurements_of(module).calls
        by_layer |= {layer: call for layer, call in zip(layers[-len(kept) :], kept, strict=False) if call is not None}
    return by_layer


def expect_measurement(module: nn.Module) -> None:
    """Forget what a module measured in an earlier pass, before a call that may run exact attention."""
    patch, measured = getattr(module, RECORD, None), measurements_of(module)
    kept: tuple[MeasuredError | None, ...] = (None,)
    if patch is not None and patch.calls > 1 and not torch.compiler.is_compiling():
        kept = (*measured.calls, None)[-patch.calls :]
    measured.calls = kept


def last_measured(module: nn.Module) -> MeasuredError | None:
    """What the last call of a module measured; None where it measured nothing."""
    return (measurements_of(module).calls or (None,))[-1]
