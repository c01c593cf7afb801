"""Block sizes of the kernels of causal attention over clusters: what compiles without a spill on every chip.

They follow those of bi-clustered attention. These kernels keep a little more in registers, which some configurations
have no room for.
"""

from typing import Any, Literal

import torch

from ...bi_clustered_attention.triton.blocks import FEW_ROWS, bi_clustered_config
from ...shared.triton.chips import block_width, chip_of

GROUP_BLOCK = 64  # labels that are looked at together


def segment_config(
    query: torch.Tensor, value_dim: int, tile: int, dropout: bool, computes: Literal["output", "query", "key"]
) -> dict[str, Any]:
    """For a kernel that walks the local keys and the means of key clusters, `tile` queries at a time."""
    config = bi_clustered_config(query, value_dim, tile, dropout, computes)
    chip, widest = chip_of(query), max(block_width(query.shape[3]), block_width(value_dim))
    if chip.name == "hip":
        return config
    if query.element_size() == 4:
        if computes == "output" and dropout:
            config["COLUMNS"] = 16
    elif computes == "key" and widest == 128:
        config["num_warps"] = 8
    elif computes == "key" and widest > 128:
        config["COLUMNS"] = 16
    elif computes == "query" and widest == 32:
        config |= chip.all_registers
    elif computes == "output" and widest > 128 and dropout:
        config["BY_PARTS"] = True
    return config


def group_config(
    query: torch.Tensor, value_dim: int, segment_length: int, dropout: bool, *, backward: bool
) -> dict[str, Any]:
    """For a kernel that takes the few queries of a segment that share a cluster.

    The backward one computes the gradients of queries and of keys at once.
    """
    config = bi_clustered_config(query, value_dim, FEW_ROWS, dropout, "key" if backward else "output")
    if backward:
        config["COLUMNS"] = 16
    return config | {"BLOCK_S": min(GROUP_BLOCK, block_width(segment_length))}
