"""Exact attention of layers with a sliding window, in blocks: what no query of a block may see is not computed.

transformers' SDPA path takes all `N * N` scores of such a layer and masks those beyond the window, which costs it as
much as full attention. Here a block of queries meets only the keys that its window reaches, with the same softmax over
the same keys: outputs differ from that path's by rounding.

Sizes: `B` batch, `H` heads, `N` length, `D` head_dim, `n` blocks of `L` queries, `S = before + L + after` keys of a
block. A mask of blocks is `(B, 1, n, L, S)`: its five dimensions tell it from a dense one.
"""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.masking_utils import bidirectional_mask_function

from ...ops.shared.graphs import in_a_graph
from ..transformers_internals import reach_of
from .sinks import with_sinks

# The dimensions of a mask of blocks.
IN_BLOCKS = 5
SHORTEST_BLOCK = 64
# Below this many spans of a block transformers' own path is faster on a CPU: for one text, and for a batch, in which
# empty blocks stand between the texts. Measured by scripts/benchmark/windows.py.
LEAST_SPANS, LEAST_SPANS_OF_BATCH = 2, 3


class Window(NamedTuple):
    """How many keys a query sees at most, beside the one at its own place."""

    before: int
    after: int


def hides_keys(window: int | None, length: int, config: Any) -> bool:
    """Whether the keyword `sliding_window` of a call stands for a window, of so many keys."""
    return window is not None and not (window >= length and is_longer_than_inputs(window, config))


def is_longer_than_inputs(window: float, config: Any) -> bool:
    """Whether a window reaches over all tokens that a model is made for: Phi-3's of 128K are 262,144 wide."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest is not None and window >= longest


def window_of(mask_function: Callable) -> Window | None:
    """The window that one of transformers' mask functions leaves to a query; None if it tells none.

    It tells one where it is a window or chunks, or their intersection with the masks of full attention: of any other
    function, and of all within a graph, nothing is known.
    """
    reach = None if in_a_graph() else reach_of(mask_function)
    return None if reach is None or inf in reach else Window(*map(int, reach))


def sees_all(mask_function: Callable) -> bool:
    """Whether one of transformers' mask functions hides nothing, as far as it tells."""
    if mask_function is bidirectional_mask_function:
        return True
    return not in_a_graph() and reach_of(mask_function) == (inf, inf)


def block_length(window: Window) -> int:
    """The queries `L` of a block, a power of 2 of at most a quarter of a window, but no less than the shortest."""
    return max(SHORTEST_BLOCK, 1 << max(sum(window).bit_length() - 3, 0))


def shortest_length(window: Window, batch_size: int) -> int:
    """The tokens from which blocks gain, `N`, where every text of a batch has so many, padding included."""
    spans = LEAST_SPANS if batch_size == 1 else LEAST_SPANS_OF_BATCH
    return spans * (block_length(window) + sum(window))


def mask_of_blocks(
    mask_function: Callable,
    key_mask: torch.Tensor | None,
    *,
    causal: bool,
    batch_size: int,
    length: int,
    device: torch.device | str,
    block: int | None = None,
) -> torch.Tensor | None:
    """Which keys the queries of each block see, bool `(B, 1, n, L, S)`; None where blocks are not for this function.

    Args:
        mask_function (`Callable`): transformers' rule for who sees whom, before padding.
        key_mask (`torch.Tensor`, *optional*): `(B, N)`, true = attend.
        causal (`bool`): whether the model masks the future: its windows reach backwards only, others to both sides
            alike.
        batch_size (`int`): `B`.
        length (`int`): `N`.
        device (`torch.device`): of the mask.
        block (`int`, *optional*): `L`, at any length. Default: `block_length`, from `shortest_length` on.
    """
    window = window_of(mask_function)
    if window is None or window.after != (0 if causal else window.before):
        return None
    if (block is None and length < shortest_length(window, batch_size)) or (
        key_mask is not None and key_mask.shape[1] != length
    ):
        return None
    block = block or block_length(window)
    return seen_in_blocks(
        window, mask_function, key_mask, batch_size=batch_size, length=length, device=device, block=block
    )


def seen_in_blocks(
    window: Window,
    sees: Callable,
    key_mask: torch.Tensor | None,
    *,
    batch_size: int,
    length: int,
    device: torch.device | str,
    block: int,
) -> torch.Tensor:
    """What `mask_of_blocks` gives, of a window that is known and a rule, in transformers' form, within it."""
    # Texts of a batch lie one behind the other, with blocks of zeros between them: no span reaches into another text.
    gap = -(-max(window) // block) if batch_size > 1 else 0
    starts = torch.arange(-(-length // block) + gap, device=device)[:, None, None] * block
    queries = starts + torch.arange(block, device=device)[:, None]
    keys = starts - window.before + torch.arange(block + sum(window), device=device)
    inside = (keys >= 0) & (keys < length)
    queries, keys = queries.clamp(max=length - 1), keys.clamp(0, length - 1)
    texts, any_head = torch.arange(batch_size, device=device)[:, None, None, None], keys.new_zeros(())
    seen = sees(texts, any_head, queries, keys) & inside  # of chunks by text, as they begin behind padding
    seen = seen[:, None] if seen.ndim == texts.ndim else seen[None, None]
    if key_mask is not None:
        seen = seen & key_mask.bool()[:, None, keys]
    return seen.expand(batch_size, 1, len(starts), block, -1)


class KeysForAll(NamedTuple):
    """Keys that every query of their text sees beside its window: Longformer's tokens with global attention.

    Args:
        key (`torch.Tensor`): `(B, Hk, G, D)`.
        value (`torch.Tensor`): `(B, Hk, G, Dv)`.
        mask (`torch.BoolTensor`): `(B, G)`, true = attend, as texts have more of them and fewer.
    """

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
    attention_sinks: torch.Tensor | None = None,
    for_all: KeysForAll | None = None,
) -> torch.Tensor:
    """Attention within a window, `(B, N, H, Dv)`, each block by torch's SDPA.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, Hk, N, D)`.
        value (`torch.Tensor`): `(B, Hk, N, Dv)`.
        mask (`torch.BoolTensor`): from `mask_of_blocks`.
        causal (`bool`): whether its window reaches backwards only, or to both sides alike.
        dropout (`float`): dropout on the attention weights.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        attention_sinks (`torch.Tensor`, *optional*): `(H,)`, of a score that has no value.
        for_all (`KeysForAll`, *optional*): keys beside those of the window.
    """
    B, _, n, L, _ = mask.shape
    heads, length = query.shape[1:3]

    def in_blocks(each: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
        """Blocks as texts of a batch, `(B * n, heads, L or S, width)`: views, as spans have most keys in common."""
        texts = F.pad(each.transpose(1, 2), (0, 0, 0, 0, 0, n * L - length)).flatten(0, 1)
        return F.pad(texts, (0, 0, 0, 0, *sides)).unfold(0, L + sum(sides), L).movedim(-1, 2)

    sides, width = keys_beside_block(mask, causal), value.shape[3]
    query, key, value = in_blocks(query, (0, 0)), in_blocks(key, sides), in_blocks(value, sides)
    seen: Any = mask.transpose(1, 2).flatten(0, 1)
    if for_all is not None:

        def with_those(each: torch.Tensor, shared: torch.Tensor, dim: int) -> torch.Tensor:
            of_blocks = shared[:, None].expand(-1, n, *shared.shape[1:]).flatten(0, 1)
            return torch.cat([of_blocks, each], dim=dim)

        key, value = with_those(key, for_all.key, 2), with_those(value, for_all.value, 2)
        seen = with_those(seen, for_all.mask[:, None, None].expand(-1, 1, L, -1), 3)
    if attention_sinks is not None:
        query, key, value, seen, scale = with_sinks(query, key, value, seen, attention_sinks, scale)
    group = heads // key.shape[1]
    if group > 1:  # heads that share keys stand one after the other, as rows of one
        query, seen = query.unflatten(1, (-1, group)).flatten(2, 3), seen.repeat(1, 1, group, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, scale=scale)
    output = output.unflatten(2, (group, L)).flatten(1, 2)
    return output[..., :width].transpose(1, 2).unflatten(0, (B, n)).flatten(1, 2)[:, :length].contiguous()


def dense_mask(mask: torch.Tensor, length: int, *, causal: bool) -> torch.Tensor:
    """The same keys as a mask of `mask_of_blocks`, bool `(B, 1, N, N)`."""
    B, _, n, L, S = mask.shape
    before, _ = keys_beside_block(mask, causal)
    dense = mask.new_zeros(B, 1, n, L, n * L + S - L)
    columns = torch.arange(n, device=mask.device)[:, None, None] * L + torch.arange(S, device=mask.device)
    dense.scatter_(4, columns.expand(mask.shape), mask)
    return dense.flatten(2, 3)[:, :, :length, before : before + length]


def keys_beside_block(mask: torch.Tensor, causal: bool) -> tuple[int, int]:
    """The keys of a span before and after its block."""
    both = mask.shape[4] - mask.shape[3]
    return (both, 0) if causal else (both // 2, both // 2)
