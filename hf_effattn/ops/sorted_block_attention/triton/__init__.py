"""Attention within sorted blocks on a GPU: launchers, and what torch needs to know of the op.

Nothing is asked of the host between the inputs and the output, so that CUDA graphs can record it: the values of the
order and of the block lengths are not checked. Runs repeat bit for bit: every gradient has one writer.
"""

from typing import Any

import torch

from ...shared.gradients import register_op
from ...shared.tables import empty_gradient, empty_output, unwritten_output
from ...shared.triton.chips import block_width, chip_of
from ...shared.triton.recorded import recorded
from ...shared.triton.tiles import LOG2_E, PART
from ..reference import BLOCK_WEIGHTS, DIFFERENTIABLE, Inputs
from .kernels import (
    _sorted_block_attention_bwd_key_kernel,
    _sorted_block_attention_bwd_membership_kernel,
    _sorted_block_attention_bwd_query_kernel,
    _sorted_block_attention_fwd_kernel,
)

# Columns of the memberships' gradient that one program sums. A second program would compute all scores again.
CLUSTER_COLUMNS = 256
KINDS_OF_WEIGHTS = 1


def _texts(x: Inputs) -> tuple[torch.Tensor | None, ...]:
    """What the kernels read of every text: its order, labels by rank, membership, block length, words; the seed."""
    order, block_length, labels = x.order, x.block_length, x.labels
    N = order.shape[1]
    words = torch.full_like(block_length, N) if x.key_mask is None else x.key_mask.sum(dim=1)
    ranked = None if labels is None else labels.gather(1, order).to(torch.int32)
    # A block is at most as long as its text.
    lengths = block_length.clamp(max=max(1, N)).to(torch.int32)
    return order.to(torch.int32).contiguous(), ranked, x.membership, lengths, words.to(torch.int32), x.dropout_seed


def _config(x: Inputs, rows: int, columns: int, *, by_parts: bool = False) -> dict[str, Any]:
    """Block sizes, warps and stages: `rows` and `columns` of a tile in 16 bits, half of both in 32; what there is.

    Beside the tiles a kernel holds the places of both sides and who sees whom; larger ones spill registers.
    """
    block_d, block_v = block_width(x.query.shape[3]), block_width(x.value.shape[3])
    widest, itemsize = max(block_d, block_v), x.query.element_size()
    shrink = (itemsize == 4) + (widest > 128)
    chip = chip_of(x.query)
    return {
        "ROWS": max(16, rows >> shrink),
        "COLUMNS": max(16, columns >> shrink),
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BY_PARTS": by_parts or (itemsize == 4 and widest > PART.value),
        "PRECISION": chip.dot_precision(x.query.dtype),
        "num_warps": 8 if chip.name == "cuda" and widest * itemsize >= 256 else 4,
        "num_stages": 2 if widest * itemsize < 512 else 1,
        **chip.all_registers,
        "CAUSAL": x.causal,
        "KINDS": KINDS_OF_WEIGHTS,
        "KIND": BLOCK_WEIGHTS,
    }


@recorded
def _forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Every word's attention to its window, and the base-2 log-sum-exp of its scores, `(B · H, N)`, by rank."""
    (query, key, value), membership = x[:3], x.membership
    B, H, N, D = query.shape
    Dv = value.shape[3]
    output = unwritten_output(query, value)
    lse = query.new_empty(B * H, N, dtype=torch.float32)
    if output.numel() == 0:
        return output, lse
    options = _config(x, 64, 64 if membership is None and max(D, Dv) <= 64 else 32)
    tiles = -(-N // options["ROWS"])
    gate = (0, 0, 0) if membership is None else membership.stride()
    _sorted_block_attention_fwd_kernel[(B * H * tiles,)](
        query, key, value, *_texts(x), output, lse,
        *query.stride(), *key.stride(), *value.stride(), *output.stride(), *gate,
        H, H // key.shape[1], N, D, Dv, 0 if membership is None else membership.shape[2], tiles,
        x.window_blocks, x.scale * LOG2_E, x.dropout_p, **options,
    )  # fmt: skip
    return output, lse


def _fake(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, N, _ = x.query.shape
    return empty_output(x.query, x.value), x.query.new_empty(B * H, N, dtype=torch.float32)


@recorded
def gradients(
    grad_output: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, x: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and, where there is one (else empty), membership."""
    (query, key, value), membership, scale, dropout_p = x[:3], x.membership, x.scale, x.dropout_p
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
    options = _config(x, rows, columns, by_parts=membership is not None or max(D, Dv) > 128)
    tiles = -(-N // options["ROWS"])
    texts = _texts(x)
    delta = torch.empty_like(lse)
    qkv = *query.stride(), *key.stride(), *value.stride()
    gate = (0, 0, 0) if membership is None else membership.stride()
    sizes = H, H // heads, N, D, Dv, clusters, tiles, x.window_blocks
    _sorted_block_attention_bwd_query_kernel[(B * H * tiles,)](
        query, key, value, output, grad_output, *texts, lse, delta, grad_query,
        *qkv, *output.stride(), *grad_output.stride(), *grad_query.stride(), *gate,
        *sizes, scale, scale * LOG2_E, dropout_p, **options,
    )  # fmt: skip
    _sorted_block_attention_bwd_key_kernel[(B * heads * tiles,)](
        query, key, value, grad_output, *texts, lse, delta, grad_key, grad_value,
        *qkv, *grad_output.stride(), *grad_key.stride(), *grad_value.stride(), *gate,
        *sizes, scale, scale * LOG2_E, dropout_p, **options,
    )  # fmt: skip
    if membership is not None:
        options = _config(x, 32, 16, by_parts=True)
        if chip_of(query).name == "cuda" and query.element_size() == 2 and max(D, Dv) <= 128:
            options |= {"ROWS": 64, "COLUMNS": 32, "num_warps": 8}
        columns = min(CLUSTER_COLUMNS, block_width(clusters))
        tiles = -(-N // options["ROWS"])
        for as_key in (False, True):
            _sorted_block_attention_bwd_membership_kernel[(B * tiles, -(-clusters // columns))](
                query, key, value, grad_output, *texts, lse, delta, grad_membership,
                *qkv, *grad_output.stride(), *gate, *sizes[:6], tiles, x.window_blocks, scale * LOG2_E, dropout_p,
                AS_KEY=as_key, BLOCK_C=columns, **options,
            )  # fmt: skip
    return grad_query, grad_key, grad_value, grad_membership.to(dtype)


sorted_block_attention = register_op(
    "sorted_block_attention_triton", Inputs, _forward, gradients, DIFFERENTIABLE,
    fake=_fake, keeps=slice(None), empty=empty_gradient,
)  # fmt: skip
