"""Neural clustering for a CPU: a few rows at a time, memberships computed again in the backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..shared.gradients import register_op
from ..shared.precision import accumulation_dtype, product_dtype
from ..shared.row_chunks import CHUNK_BYTES
from .reference import Inputs


@dataclass(frozen=True)
class Rows:
    """Words of some rows of the batch, masked ones 0."""

    part: slice  # the rows' indices
    words: torch.Tensor  # `(rows, N, d)`, in the dtype of products
    inverse: torch.Tensor | None  # `1 / |Z_j|`, `(rows, N)`, where the similarity is the cosine
    hidden: torch.Tensor | None  # `(rows, N)`, True = masked

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of `(B, k, d)`, to be multiplied with the words."""
        return tensor[self.part].to(self.words.dtype)

    def scores(self, directions: torch.Tensor) -> torch.Tensor:
        """`φ(C_i, Z_j)`, `(rows, N, k)`: words first, so that the argmax of a word reads one stretch of memory."""
        scores = self.words @ self.of(directions).transpose(1, 2)
        scores = scores.to(accumulation_dtype(self.words.dtype))
        if self.inverse is not None:
            scores = scores * self.inverse[..., None]
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden[..., None], torch.finfo(scores.dtype).min)
        return scores


def rows_of(words: torch.Tensor, clusters: int, cosine: bool, mask: torch.Tensor | None) -> Iterator[Rows]:
    """The batch in parts whose scores stay within `CHUNK_BYTES`, or of one row."""
    dtype = accumulation_dtype(words.dtype)
    step = max(1, CHUNK_BYTES // max(1, words.shape[1] * clusters * dtype.itemsize))
    for start in range(0, words.shape[0] if words.shape[1] else 0, step):
        part = slice(start, start + step)
        hidden = None if mask is None else ~mask[part]
        some = words[part].to(product_dtype(words))
        some = some if hidden is None else some.masked_fill(hidden[..., None], 0.0)
        inverse = None
        if cosine:
            length = torch.linalg.vector_norm(some, dim=2, dtype=dtype)
            inverse = length.masked_fill(length == 0, torch.inf).reciprocal()
        yield Rows(part, some, inverse, hidden)


def memberships(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`U` `(rows, N, k)`; 0 for masked words."""
    weights = scores.softmax(dim=1)
    if rows.hidden is not None:
        # Also where every word of a row is masked: all scores are equal there and would share the weight.
        weights = weights.masked_fill_(rows.hidden[..., None], 0.0)
    return weights


def _forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ĉ` `(B, k, d)` and labels `(B, N)`."""
    words, directions, cosine, mask = x
    B, N, _ = words.shape
    clusters = directions.shape[1]
    updated = torch.zeros_like(directions)
    labels = torch.zeros(B, N, dtype=torch.int64, device=words.device)
    with torch.autocast(words.device.type, enabled=False):
        for rows in rows_of(words, clusters, cosine, mask):
            scores = rows.scores(directions)
            weights = memberships(scores, rows).to(rows.words.dtype)
            updated[rows.part] = weights.transpose(1, 2) @ rows.words
            # In logs: memberships that underflow to 0 still have a largest among them.
            best = scores.sub_(scores.logsumexp(dim=1, keepdim=True)).argmax(dim=2)
            labels[rows.part] = best if rows.hidden is None else best.masked_fill_(rows.hidden, 0)
    return updated, labels


def _fake(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x.directions), x.words.new_empty(x.words.shape[:2], dtype=torch.int64)


def gradients(grad_updated: torch.Tensor, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of words and directions, labels held fixed."""
    words, directions, cosine, mask = x
    grad_words, grad_directions = torch.empty_like(words), torch.zeros_like(directions)
    dtype = accumulation_dtype(words.dtype)
    with torch.autocast(words.device.type, enabled=False):
        for rows in rows_of(words, directions.shape[1], cosine, mask):
            scores = rows.scores(directions)
            weights = memberships(scores, rows)
            grad_scores = (rows.words @ rows.of(grad_updated).transpose(1, 2)).to(dtype)
            grad_scores = grad_scores.sub_((grad_scores * weights).sum(dim=1, keepdim=True)).mul_(weights)
            grad = weights.to(rows.words.dtype) @ rows.of(grad_updated)
            pull = None
            if rows.inverse is not None:
                # The cosine does not change along the word: what the product with it gives there is taken out.
                pull = torch.linalg.vecdot(grad_scores, scores) * rows.inverse.square()
                grad_scores = grad_scores.mul_(rows.inverse[..., None])
            grad_scores = grad_scores.to(rows.words.dtype)
            grad += grad_scores @ rows.of(directions)
            if pull is not None:
                grad -= (pull[..., None] * rows.words).to(grad.dtype)
            grad_words[rows.part] = grad
            grad_directions[rows.part] = grad_scores.transpose(1, 2) @ rows.words
    return grad_words, grad_directions


neural_clustering = register_op(
    "neural_clustering", Inputs, _forward, gradients, ("words", "directions"), fake=_fake, shown=2
)
