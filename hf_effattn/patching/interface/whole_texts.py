"""A hook that tells a decoder within a graph that each row without a mask is one text."""

from typing import Any

import torch
from torch import nn

from ...ops.shared.graphs import in_a_graph

_HANDLE = "_effattn_whole_text_hook"
# With one of these the caller says more about the tokens, and the hook adds nothing.
SAY_MORE = ("attention_mask", "position_ids", "past_key_values", "cache")  # versions before 5.24 say past_key_values


def _mask_nothing(
    model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook that adds a mask which hides nothing, in a graph, where no mask is given.

    transformers reads from the positions whether a row holds several texts. A graph cannot read them, and would get
    the mask of several texts, under which attention is exact.
    """
    if not in_a_graph() or len(args) > 1 or any(options.get(name) is not None for name in SAY_MORE):
        return None
    tokens = options.get("input_ids", args[0] if args else None)
    tokens = options.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None
    nothing = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return args, options | {"attention_mask": nothing}


def tell_whole_texts(model: nn.Module, tell: bool) -> None:
    """Add the hook to a model, or take it away."""
    tells = _HANDLE in vars(model)
    if tell and not tells:
        setattr(model, _HANDLE, model.register_forward_pre_hook(_mask_nothing, with_kwargs=True))
    elif tells and not tell:
        vars(model).pop(_HANDLE).remove()
