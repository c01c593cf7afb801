"""Queries, keys and values that a pretrained BERT makes of real text: what errors are measured on."""

import torch

from hf_effattn import extend_positions
from hf_effattn.demo.models import load_model
from hf_effattn.demo.texts import Book, Passages, bundled_books
from hf_effattn.reporting.recording import SeenAttention, recording

LAYERS = (0, 2, 5)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention_inputs(
    length: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> list[Inputs]:
    """Query, key and value `(1, 12, length, 32)` of the first, a middle and the last layer of all-MiniLM-L6-v2.

    The text is the bundled novels, one after the other; positions beyond 512 tokens are repeated, which the model
    has not been trained for.
    """
    model, tokenizer, _ = load_model(None)
    joined = Book("novels", "\n".join(book.text for book in bundled_books()))
    tokens = Passages(tokenizer, [joined]).longest(length)
    if length > model.config.max_position_embeddings:
        extend_positions(model, length)
    kept: list[Inputs] = []

    def keep(seen: SeenAttention) -> torch.Tensor:
        if seen.layer in LAYERS:
            query, key, value = (tensor.to(device, dtype, copy=True) for tensor in (seen.query, seen.key, seen.value))
            kept.append((query, key, value))
        return seen.exact()

    with torch.no_grad(), recording(model, keep):
        model(input_ids=tokens)
    return kept
