"""Exact attention of layers with a sliding window, in blocks: what no query of a block may see is not computed.

transformers' SDPA path takes all `N * N` scores of such a layer and masks those beyond the window, which costs it as
much as full attention. Here a block of queries meets only the keys that its window reaches, with the same softmax over
the same keys: outputs differ from that path's by rounding.

Sizes: `B` batch, `H` heads, `N` length, `D` head_dim, `w` keys that a query sees on each side of its own, `n` blocks
of `L` queries, `S = w + L + w` keys of a block. A mask of blocks is `(B, 1, n, L, S)`: its five dimensions tell it
from a dense one.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import and_masks, bidirectional_mask_function, sliding_window_bidirectional_overlay

# The dimensions of a mask of blocks.
IN_BLOCKS = 5
SHORTEST_BLOCK = 64
# Fewer tokens than so many spans of a block stay with transformers' path, bit for bit.
LEAST_SPANS = 2


def window_of(mask_function: Callable) -> int | None:
    """The keys `w` that a query sees on each side by one of transformers' mask functions; None if none tells a window.

    An intersection with further masks sees no more than its window. A union might, and so might any other function;
    within a compiled graph nothing is known of a function.
    """
    if torch.compiler.is_compiling():
        return None
    code = getattr(mask_function, "__code__", None)
    if code not in (_OVERLAY, _INTERSECTION):
        return None
    (cell,) = mask_function.__closure__ or ()
    if code is _OVERLAY:
        return int(cell.cell_contents)
    windows = [window for one in cell.cell_contents if (window := window_of(one)) is not None]
    return min(windows, default=None)


# transformers makes such functions anew for each window; of those that one factory makes, the code is the same object.
_OVERLAY = sliding_window_bidirectional_overlay(1).__code__
_INTERSECTION = and_masks(bidirectional_mask_function).__code__


def block_length(length: int, window: int) -> int | None:
    """The queries `L` of a block, a power of 2 of at most half a window; None where blocks gain nothing."""
    block = max(SHORTEST_BLOCK, 1 << max(window.bit_length() - 2, 0))
    return block if length >= LEAST_SPANS * (block + 2 * window) else None


def mask_of_blocks(
    mask_function: Callable,
    key_mask: torch.Tensor | None,
    *,
    batch_size: int,
    length: int,
    window: int,
    block: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Which keys the queries of each block see, bool `(B, 1, n, L, S)`, by transformers' own mask function.

    Args:
        mask_function (`Callable`): transformers' rule for who sees whom, before padding.
        key_mask (`torch.Tensor`, *optional*): `(B, N)`, true = attend.
        batch_size (`int`): `B`.
        length (`int`): `N`.
        window (`int`): `w`.
        block (`int`): `L`.
        device (`torch.device`): of the mask.
    """
    # Texts of a batch lie one behind the other, with blocks of zeros between them: no span reaches into another text.
    gap = -(-window // block) if batch_size > 1 else 0
    starts = torch.arange(-(-length // block) + gap, device=device)[:, None, None] * block
    queries = starts + torch.arange(block, device=device)[:, None]
    keys = starts - window + torch.arange(block + 2 * window, device=device)
    inside = (keys >= 0) & (keys < length)
    queries, keys = queries.clamp(max=length - 1), keys.clamp(0, length - 1)
    rows = torch.arange(batch_size if key_mask is not None else 1, device=device)[:, None, None, None, None]
    seen = mask_function(rows, rows.new_zeros(()), queries, keys) & inside
    if key_mask is not None:
        seen = seen & key_mask.bool()[rows, keys]
    return seen.expand(batch_size, 1, len(starts), block, -1)


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Attention within a window, `(B, N, H, Dv)`, each block by torch's SDPA.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, Hk, N, D)`.
        value (`torch.Tensor`): `(B, Hk, N, Dv)`.
        mask (`torch.BoolTensor`): from `mask_of_blocks`.
        dropout (`float`): dropout on the attention weights.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
    """
    B, _, n, L, S = mask.shape
    heads, length = query.shape[1:3]

    def in_blocks(each: torch.Tensor, reach: int) -> torch.Tensor:
        """Blocks as texts of a batch, `(B * n, H, L or S, width)`: views, as spans have most keys in common."""
        each = repeat_kv(each, heads // each.shape[1]).transpose(1, 2)
        texts = F.pad(each, (0, 0, 0, 0, 0, n * L - length)).flatten(0, 1)
        return F.pad(texts, (0, 0, 0, 0, reach, reach)).unfold(0, L + 2 * reach, L).movedim(-1, 2)

    reach = (S - L) // 2
    output = F.scaled_dot_product_attention(
        in_blocks(query, 0),
        in_blocks(key, reach),
        in_blocks(value, reach),
        attn_mask=mask.transpose(1, 2).flatten(0, 1),
        dropout_p=dropout,
        scale=scale,
    )
    return output.transpose(1, 2).unflatten(0, (B, n)).flatten(1, 2)[:, :length].contiguous()


def dense_mask(mask: torch.Tensor, length: int) -> torch.Tensor:
    """The same keys as a mask of `mask_of_blocks`, bool `(B, 1, N, N)`."""
    B, _, n, L, S = mask.shape
    window = (S - L) // 2
    dense = mask.new_zeros(B, 1, n, L, n * L + 2 * window)
    columns = torch.arange(n, device=mask.device)[:, None, None] * L + torch.arange(S, device=mask.device)
    dense.scatter_(4, columns.expand(mask.shape), mask)
    return dense.flatten(2, 3)[:, :, :length, window : window + length]
