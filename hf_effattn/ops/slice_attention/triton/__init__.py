"""Slice attention on a GPU: several slices to a tile, the means of the slices with the output.

Nothing is asked of the host between the inputs and the output, so that CUDA graphs can record it.
"""

import torch

from ...derivatives import refuse_second_derivatives
from ..batched import empty_outputs
from .backward import backward
from .forward import Call, forward


@torch.library.custom_op("hf_effattn::slice_attention_triton", mutates_args=())
def slice_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slice_length: int,
    extension: int,
    causal: bool,
    key_mask: torch.Tensor | None,
    scale: float,
    query_positions: torch.Tensor | None,
    key_positions: torch.Tensor | None,
    sink_mask: torch.Tensor | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Y_l = softmax((S W_q + P_l W_q)(S_ext W_k + P_ext W_k)^T) S_ext W_v` per slice, its means, its log-sum-exps."""
    positions = query_positions, key_positions
    call = Call.of(
        query, key, slice_length, extension, causal, key_mask, *positions, sink_mask, dropout_p, dropout_seed
    )
    return forward(query, key, value, scale, call)


@slice_attention.register_fake
def _(query, key, value, slice_length, *settings):
    output, pooled, lse = empty_outputs(query, value, slice_length)
    return output, query.new_empty(pooled.shape), lse


@torch.library.custom_op("hf_effattn::slice_attention_triton_backward", mutates_args=())
def slice_attention_backward(
    grad_output: torch.Tensor,
    grad_pooled: torch.Tensor,
    grad_lse: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slice_length: int,
    extension: int,
    causal: bool,
    key_mask: torch.Tensor | None,
    scale: float,
    query_positions: torch.Tensor | None,
    key_positions: torch.Tensor | None,
    sink_mask: torch.Tensor | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and of both position terms (empty where there are none)."""
    positions = query_positions, key_positions
    call = Call.of(
        query, key, slice_length, extension, causal, key_mask, *positions, sink_mask, dropout_p, dropout_seed
    )
    grad_lse = grad_lse.contiguous()
    grad_query, grad_key, grad_value, of_queries, of_keys = backward(
        grad_output, grad_pooled, grad_lse, output, lse, query, key, value, scale, call
    )
    first, second = (
        query.new_empty(0) if grad is None else grad.to(query.dtype).contiguous() for grad in (of_queries, of_keys)
    )
    return grad_query, grad_key, grad_value, first, second


@slice_attention_backward.register_fake
def _(grad_output, grad_pooled, grad_lse, output, lse, query, key, value, *settings):
    grads = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (key, value))
    positions = (query.new_empty(0 if tensor is None else tensor.shape) for tensor in settings[5:7])
    return (torch.empty_like(query), *grads, *positions)


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, slice_length, extension, causal, key_mask, scale, *optional = inputs
    query_positions, key_positions, sink_mask, dropout_p, dropout_seed = optional
    tensors = query, key, value, key_mask, query_positions, key_positions, sink_mask, dropout_seed
    ctx.save_for_backward(output[0], output[2], *tensors)
    ctx.settings = slice_length, extension, causal, scale, dropout_p


def _backward(ctx, grad_output, grad_pooled, grad_lse):
    output, lse, query, key, value, key_mask, *optional, dropout_seed = ctx.saved_tensors
    slice_length, extension, causal, scale, dropout_p = ctx.settings
    grads = slice_attention_backward(
        grad_output, grad_pooled, grad_lse, output, lse, query, key, value, slice_length, extension, causal, key_mask,
        scale, *optional, dropout_p, dropout_seed,
    )  # fmt: skip
    of_positions = (None if given is None else grad for given, grad in zip(optional[:2], grads[3:], strict=True))
    return (*grads[:3], *[None] * 5, *of_positions, *[None] * 3)


slice_attention.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivatives("slice_attention_triton")
