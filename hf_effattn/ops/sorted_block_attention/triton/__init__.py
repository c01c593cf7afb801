"""Attention within sorted blocks on a GPU: launchers, and what torch needs to know of the op.

Nothing is asked of the host between the inputs and the output, so that CUDA graphs can record it: the values of the
order and of the block lengths are not checked. Runs repeat bit for bit: every gradient has one writer.
"""

from typing import Any

import torch
import triton

from ...derivatives import refuse_second_derivatives
from ...shared.gradients import register_gradients
from ...shared.tables import empty_gradient, empty_output, unwritten_output
from ...shared.triton.chips import block_width, chip_of, on_device_of
from ...shared.triton.tiles import LOG2_E, PART
from ..reference import BLOCK_WEIGHTS
from .backward import (
    _sorted_block_attention_bwd_key_kernel,
    _sorted_block_attention_bwd_membership_kernel,
    _sorted_block_attention_bwd_query_kernel,
)
from .forward import _sorted_block_attention_fwd_kernel

CLUSTER_COLUMNS = 32  # columns of the memberships' gradient that one program sums
KINDS_OF_WEIGHTS = 1


def _texts(
    order: torch.Tensor, block_length: torch.Tensor, key_mask: torch.Tensor | None, labels: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Order, block lengths, words of every row and labels by rank, as the kernels read them."""
    N = order.shape[1]
    words = torch.full_like(block_length, N) if key_mask is None else key_mask.sum(dim=1)
    ranked = None if labels is None else labels.gather(1, order).to(torch.int32)
    # A block longer than its text is the text.
    lengths = block_length.clamp(max=max(1, N))
    return order.to(torch.int32).contiguous(), lengths.to(torch.int32), words.to(torch.int32), ranked


def _config(
    tensor: torch.Tensor, value_dim: int, rows: int, columns: int, *, by_parts: bool = False
) -> dict[str, Any]:
    """Block sizes, warps and stages: `rows` and `columns` of a tile in 16 bits, half of both in 32.

    Beside the tiles a kernel holds the places of both sides and who sees whom; larger ones spill registers.
    """
    block_d, block_v = block_width(tensor.shape[3]), block_width(value_dim)
    widest, itemsize = max(block_d, block_v), tensor.element_size()
    shrink = (itemsize == 4) + (widest > 128)
    chip = chip_of(tensor)
    return {
        "ROWS": max(16, rows >> shrink),
        "COLUMNS": max(16, columns >> shrink),
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BY_PARTS": by_parts or (itemsize == 4 and widest > PART.value),
        "PRECISION": chip.dot_precision(tensor.dtype),
        "num_warps": 8 if chip.name == "cuda" and widest * itemsize >= 256 else 4,
        "num_stages": 2 if widest * itemsize < 512 else 1,
        **chip.all_registers,
    }


def _options(
    causal: bool, labels: torch.Tensor | None, dropout_seed: torch.Tensor | None, config: dict[str, Any]
) -> dict[str, Any]:
    return config | {
        "CAUSAL": causal,
        "HAS_LABELS": labels is not None,
        "HAS_DROPOUT": dropout_seed is not None,
        "KINDS": KINDS_OF_WEIGHTS,
        "KIND": BLOCK_WEIGHTS,
    }


def _membership_strides(membership: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if membership is None else membership.stride()


@torch.library.custom_op("hf_effattn::sorted_block_attention_triton", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: torch.Tensor,
    block_length: torch.Tensor,
    window_blocks: int,
    causal: bool,
    labels: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    membership: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every word's attention to its window, and the base-2 log-sum-exp of its scores, `(B · H, N)`, by rank."""
    B, H, N, D = query.shape
    Dv = value.shape[3]
    output = unwritten_output(query, value)
    lse = query.new_empty(B * H, N, dtype=torch.float32)
    if output.numel() == 0:
        return output, lse
    options = _options(
        causal, labels, dropout_seed, _config(query, Dv, 64, 64 if membership is None and max(D, Dv) <= 64 else 32)
    )
    tiles = triton.cdiv(N, options["ROWS"])
    ranked_order, lengths, words, ranked_labels = _texts(order, block_length, key_mask, labels)
    with on_device_of(query):
        _sorted_block_attention_fwd_kernel[(B * H * tiles,)](
            query, key, value, ranked_order, ranked_labels, membership, lengths, words, dropout_seed, output, lse,
            *query.stride(), *key.stride(), *value.stride(), *output.stride(), *_membership_strides(membership),
            H, H // key.shape[1], N, D, Dv, 0 if membership is None else membership.shape[2], tiles,
            window_blocks, scale * LOG2_E, dropout_p, HAS_MEMBERSHIP=membership is not None, **options,
        )  # fmt: skip
    return output, lse


@_forward.register_fake
def _(query, key, value, *settings):
    B, H, N, _ = query.shape
    return empty_output(query, value), query.new_empty(B * H, N, dtype=torch.float32)


def gradients(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: torch.Tensor,
    block_length: torch.Tensor,
    window_blocks: int,
    causal: bool,
    labels: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    membership: torch.Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and, where there is one (else empty), membership."""
    B, H, N, D = query.shape
    heads, Dv = key.shape[1], value.shape[3]
    grad_query, grad_key, grad_value = (unwritten_output(tensor, tensor) for tensor in (query, key, value))
    clusters = 0 if membership is None else membership.shape[2]
    shape = () if membership is None else membership.shape
    dtype = (query if membership is None else membership).dtype
    grad_membership = query.new_empty(shape or (0,), dtype=torch.float32)
    if output.numel() == 0:
        return grad_query, grad_key, grad_value, grad_membership.to(dtype)
    rows, columns = (64, 32) if membership is None else (32, 16)
    config = _config(query, Dv, rows, columns, by_parts=membership is not None or max(query.shape[3], Dv) > 128)
    options = _options(causal, labels, dropout_seed, config)
    gated = {"HAS_MEMBERSHIP": membership is not None}
    tiles = triton.cdiv(N, options["ROWS"])
    ranked_order, lengths, words, ranked_labels = _texts(order, block_length, key_mask, labels)
    texts = ranked_order, ranked_labels, membership, lengths, words, dropout_seed
    delta = torch.empty_like(lse)
    qkv = *query.stride(), *key.stride(), *value.stride()
    gate = _membership_strides(membership)
    sizes = H, H // heads, N, D, Dv, clusters, tiles, window_blocks
    with on_device_of(query):
        _sorted_block_attention_bwd_query_kernel[(B * H * tiles,)](
            query, key, value, output, grad_output, *texts, lse, delta, grad_query,
            *qkv, *output.stride(), *grad_output.stride(), *grad_query.stride(), *gate,
            *sizes, scale, scale * LOG2_E, dropout_p, **gated, **options,
        )  # fmt: skip
        _sorted_block_attention_bwd_key_kernel[(B * heads * tiles,)](
            query, key, value, grad_output, *texts, lse, delta, grad_key, grad_value,
            *qkv, *grad_output.stride(), *grad_key.stride(), *grad_value.stride(), *gate,
            *sizes, scale, scale * LOG2_E, dropout_p, **gated, **options,
        )  # fmt: skip
        if membership is not None:
            options |= _config(query, Dv, 32, 16, by_parts=True)
            tiles = triton.cdiv(N, options["ROWS"])
            for as_key in (False, True):
                _sorted_block_attention_bwd_membership_kernel[(B * tiles, triton.cdiv(clusters, CLUSTER_COLUMNS))](
                    query, key, value, grad_output, *texts, lse, delta, grad_membership,
                    *qkv, *grad_output.stride(), *gate, *sizes[:6], tiles, window_blocks, scale * LOG2_E, dropout_p,
                    AS_KEY=as_key, BLOCK_C=CLUSTER_COLUMNS, **options,
                )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_membership.to(dtype)


register_gradients(
    "sorted_block_attention_triton", gradients, ("query", "key", "value", "membership"), outputs=1,
    keeps=slice(None), empty=empty_gradient,
)  # fmt: skip
refuse_second_derivatives("sorted_block_attention_triton")


def sorted_block_attention(*arguments: Any) -> torch.Tensor:
    """Every word attends to the words of its window, 0 elsewhere."""
    return _forward(*arguments)[0]
