"""What the fast forms cannot do, said where torch would name an internal op: second derivatives, ONNX."""

from typing import Any

import torch


def refuse_second_derivatives(*gradients: Any) -> Any:
    """The backward pass of a backward op: says what can be done instead."""
    raise NotImplementedError(
        "the fast forms of hf_effattn's ops have first derivatives only; for second ones (create_graph=True) call the "
        'op with backend="reference", or run the model with exact attention (unpatch_attention)'
    )


def check_no_onnx(instead: str) -> None:
    """Raise while `torch.onnx.export` traces, which would end in the name of an op that it cannot convert.

    Args:
        instead (`str`): what to do.
    """
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(f"torch.onnx.export cannot convert the attention ops of hf_effattn: {instead}")
