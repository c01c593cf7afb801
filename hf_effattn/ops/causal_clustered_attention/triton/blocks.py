"""Block sizes of the kernels of causal attention over clusters: what compiles without a spill on every chip.

`tile_config` is what a tile of queries and the few rows that it attends to have room for; the kernels that keep a
little more in registers change it where it does not fit.
"""

from typing import Any, Literal

import torch

from ...shared.triton.chips import KIB, block_width, chip_of

GROUP_BLOCK = 64  # labels that are looked at together
FEW_ROWS = 16  # the fewest that tensor cores multiply


def query_tile(query: torch.Tensor, value_dim: int, clusters: int) -> int:
    """Rows of a tile of queries `(B, H, N, D)`, or few, where those of a cluster of mean size would not fill half."""
    widest = max(block_width(query.shape[3]), block_width(value_dim))
    tile = 64 if query.element_size() == 2 else 32
    if widest > 128 and (chip_of(query).name == "hip" or query.element_size() == 4):
        tile = FEW_ROWS
    return FEW_ROWS if query.shape[2] // clusters < tile // 2 else tile


def tile_config(
    query: torch.Tensor, value_dim: int, tile: int, dropout: bool, computes: Literal["output", "query", "key"]
) -> dict:
    """Block sizes, warps and stages of a kernel that computes the output, or gradients of queries, or of keys."""
    itemsize = query.element_size()
    block_d, block_v = block_width(query.shape[3]), block_width(value_dim)
    widest = max(block_d, block_v)
    chip = chip_of(query)
    wide = widest > 128
    # For keys the sums are two rows wide, for queries one; but then the tile itself stays in registers.
    columns = 32
    if itemsize == 4:
        columns = 16 if wide or computes == "key" else 32
    elif computes == "key" and dropout and widest <= 32:
        columns = 16
    elif wide:
        columns = 32 if chip.name == "cuda" and (computes == "key" or tile == FEW_ROWS) else 16
    elif chip.shared_memory > 200 * KIB and tile > FEW_ROWS and widest <= 64 and computes == "output" and not dropout:
        columns = 64
    by_parts = (widest > 32 or computes != "key") if itemsize == 4 else (wide and dropout and computes == "query")
    # The gradients of large 16-bit tiles are better off with what the assembler chooses.
    large = tile > FEW_ROWS and itemsize == 2 and widest > 16 and computes != "output"
    registers = {} if large else chip.all_registers
    return registers | {
        "HAS_DROPOUT": dropout,
        "ROWS": tile,
        "COLUMNS": columns,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BY_PARTS": by_parts,
        "PRECISION": chip.dot_precision(query.dtype),
        # A program of few warps has more registers on AMD; on NVIDIA a warp has too few for much at once.
        "num_warps": 8 if chip.name == "cuda" and (wide or itemsize == 4 or (dropout and tile > FEW_ROWS)) else 4,
        "num_stages": 2 if chip.name == "cuda" and itemsize == 2 and widest > 32 and not dropout else 1,
    }


def segment_config(
    query: torch.Tensor, value_dim: int, tile: int, dropout: bool, computes: Literal["output", "query", "key"]
) -> dict[str, Any]:
    """For a kernel that walks the local keys and the means of key clusters, `tile` queries at a time."""
    config = tile_config(query, value_dim, tile, dropout, computes)
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
    config = tile_config(query, value_dim, FEW_ROWS, dropout, "key" if backward else "output")
    if backward:
        config["COLUMNS"] = 16
    return config | {"BLOCK_S": min(GROUP_BLOCK, block_width(segment_length))}
