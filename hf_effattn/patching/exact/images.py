"""Images that a model reads as one sequence, each attended to by itself.

Sizes: `H` heads, `N` patches of all images, `D` head_dim.
"""

from collections.abc import Callable, Sequence

import torch

# The keyword by which a patched model tells its layers how many patches each image has.
IMAGES = "effattn_images"

AttentionOutput = tuple[torch.Tensor, torch.Tensor | None]


def attend_to_each(
    attend: Callable[..., AttentionOutput],
    images: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> AttentionOutput:
    """Attention of each image to itself.

    Args:
        attend (`Callable`): gives the output `(1, n, H, D)` and, or None, the weights `(1, H, n, n)` of one image.
        images (`Sequence[int]`): the patches of each, `N` together.
        query (`torch.Tensor`): `(1, H, N, D)`.
        key (`torch.Tensor`): `(1, H, N, D)`.
        value (`torch.Tensor`): `(1, H, N, D)`.

    Returns:
        `(torch.Tensor, torch.Tensor | None)`: `(1, N, H, D)` and, if given, the weights, `(1, H, N, N)`.
    """
    lengths = list(images)
    each = zip(*(rows.split(lengths, dim=2) for rows in (query, key, value)), strict=True)
    outputs, weights = zip(*(attend(*of_image) for of_image in each), strict=True)
    return torch.cat(outputs, dim=1), None if weights[0] is None else block_diagonal(weights)


def block_diagonal(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices `(1, H, n, n)` along the diagonal of one, `(1, H, N, N)`, of zeros elsewhere."""
    size = sum(block.shape[2] for block in blocks)
    whole = blocks[0].new_zeros(*blocks[0].shape[:2], size, size)
    start = 0
    for block in blocks:
        end = start + block.shape[2]
        whole[..., start:end, start:end] = block
        start = end
    return whole
