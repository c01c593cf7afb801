"""What approximate attention does to sentence embeddings: how far they move, and whether they still find their like.

Sizes: `P` pairs of passages, `d` hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from ..measuring.errors import mean_pool, run_model

TEXTS_AT_ONCE = 6


@dataclass
class Embedded:
    """Passages as a model sees them.

    Args:
        hidden (`torch.Tensor`): last hidden states `(2P, N, d)`, first passages before second ones.
        embeddings (`torch.Tensor`): their means over the tokens, of length 1, `(2P, d)` in float64.
    """

    hidden: torch.Tensor
    embeddings: torch.Tensor


def embed(model: PreTrainedModel, passages: torch.Tensor, advance: Callable[[], None]) -> Embedded:
    """Run the model on passages `(2P, N)` of token ids, a few at a time; `advance` is told after each."""
    hidden = []
    for ids in passages.to(model.device).split(TEXTS_AT_ONCE):
        output = run_model(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).hidden
        if output is None:
            raise ValueError(f"{type(model).__name__} returns no last hidden state; the demo needs a text encoder")
        hidden.append(output)
        advance()
    states = torch.cat(hidden)
    rows = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return Embedded(states, normalize(mean_pool(states, rows), dim=-1))


@dataclass
class EmbeddingChange:
    """Approximate against exact embeddings.

    Args:
        cosine_mean (`float`): over the passages.
        cosine_min (`float`): of the worst passage.
        same_first (`float`): part of the approximate embeddings whose nearest exact embedding is their own passage's.
        nearest_kept (`float`): part of the passages whose nearest other passage stays the same.
        next_found (`float`): part of the first passages whose nearest second passage is the one that follows them in
            the book.
        hidden_error (`float`): relative L2 error of the last hidden states.
    """

    cosine_mean: float
    cosine_min: float
    same_first: float
    nearest_kept: float
    next_found: float
    hidden_error: float


def compare_embeddings(exact: Embedded, other: Embedded) -> EmbeddingChange:
    """Compare embeddings of the same passages, by the exact and by an approximate model."""
    cosines = (exact.embeddings * other.embeddings).sum(dim=1).clamp(-1, 1)
    own = torch.arange(len(cosines), device=cosines.device)
    difference = torch.linalg.vector_norm(other.hidden - exact.hidden, dtype=torch.float64)
    return EmbeddingChange(
        cosine_mean=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        same_first=_share((other.embeddings @ exact.embeddings.T).argmax(dim=1) == own),
        nearest_kept=_share(_nearest_other(other.embeddings) == _nearest_other(exact.embeddings)),
        next_found=next_found(other.embeddings),
        hidden_error=float(difference / torch.linalg.vector_norm(exact.hidden, dtype=torch.float64)),
    )


def next_found(embeddings: torch.Tensor) -> float:
    """Part of the first passages that find the one that follows them among all second ones, from `(2P, d)`."""
    first, second = embeddings.chunk(2)
    return _share((first @ second.T).argmax(dim=1) == torch.arange(len(first), device=first.device))


def _nearest_other(embeddings: torch.Tensor) -> torch.Tensor:
    return (embeddings @ embeddings.T).fill_diagonal_(-2).argmax(dim=1)


def _share(same: torch.Tensor) -> float:
    return float(same.double().mean())
