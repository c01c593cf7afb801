"""Whether autograd follows a call; and what the fast forms cannot do, where torch would name an internal op."""

from typing import Any

import torch

from .shared.graphs import is_exported_to_onnx
from .shared.torch_internals import unbatched


def learns(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd follows any of the tensors, also within `vmap`, whose tensors do not say so themselves."""
    return torch.is_grad_enabled() and any(x is not None and unbatched(x).requires_grad for x in tensors)


def refuse_second_derivatives(*gradients: Any) -> Any:
    """The backward pass of a backward op: says what can be done instead."""
    raise NotImplementedError(
        "the fast forms of hf_effattn's ops have first derivatives only; for second ones (create_graph=True) call the "
        'op with backend="reference", or run the model with exact attention (unpatch_attention)'
    )


def check_no_onnx(instead: str) -> None:
    """Raise while `torch.onnx.export` captures, which would end in the name of an op that it cannot convert.

    Args:
        instead (`str`): what to do.
    """
    if is_exported_to_onnx():
        raise NotImplementedError(f"torch.onnx.export cannot convert the attention ops of hf_effattn: {instead}")
