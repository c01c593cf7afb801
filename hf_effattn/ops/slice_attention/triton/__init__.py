"""Slice attention on a GPU: several slices to a tile, the means of the slices with the output."""

import torch

from ...shared.gradients import register_op
from ...shared.tables import empty_gradient
from ..batched import empty_outputs
from ..reference import DIFFERENTIABLE, Inputs
from .backward import gradients
from .forward import forward


def _fake(x: Inputs) -> tuple[torch.Tensor, ...]:
    output, pooled, lse = empty_outputs(x)
    return output, x.query.new_empty(pooled.shape), lse


slice_attention = register_op(
    "slice_attention_triton", Inputs, forward, gradients, DIFFERENTIABLE,
    fake=_fake, outputs=3, keeps=slice(0, None, 2), empty=empty_gradient,
)  # fmt: skip
