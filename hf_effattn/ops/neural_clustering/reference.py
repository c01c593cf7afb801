"""Neural clustering in the paper's words (Source: Wang 2022, Eq. 2 to 4). Plain PyTorch, any device."""

from typing import NamedTuple

import torch

from ..shared.masking import masked_softmax


class Inputs(NamedTuple):
    """The arguments of every form: words `(B, N, d)`, directions `(B, k, d)` of the centroids, a mask `(B, N)`."""

    words: torch.Tensor
    directions: torch.Tensor
    cosine: bool
    mask: torch.Tensor | None


def unit(rows: torch.Tensor) -> torch.Tensor:
    """Rows scaled to length 1; a row of length 0 stays 0, with gradient 0."""
    length = rows.norm(dim=-1, keepdim=True)
    return rows / length.masked_fill(length == 0, torch.inf)


def neural_clustering(
    words: torch.Tensor, directions: torch.Tensor, cosine: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ĉ` `(B, k, d)` and labels `(B, N)`."""
    if mask is not None:
        words = words.masked_fill(~mask[..., None], 0.0)
    scores = directions @ (unit(words) if cosine else words).transpose(1, 2)  # (B, k, N)
    seen = None if mask is None else mask[:, None, :].expand(scores.shape)
    membership = masked_softmax(scores, seen)
    # In logs: memberships that underflow to 0 still have a largest among them.
    finite = scores if seen is None else scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    total = finite.logsumexp(dim=2)
    labels = (scores - total[..., None]).argmax(dim=1)
    labels = labels if mask is None else labels * mask
    return membership @ words, labels
