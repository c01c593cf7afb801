"""Queries, keys and values that a pretrained BERT makes of real text: what errors are measured on.

    python -m scripts.benchmark.real_attention        # writes .cache/real-attention

What that writes, 27 MB, serves a machine where the BERT is not installed, at the same place of its clone.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from hf_effattn import extend_positions
from hf_effattn.measuring.recording import SeenAttention, recording
from hf_effattn.samples.model import default_model_folder, load_model
from hf_effattn.samples.texts import Book, Passages, bundled_books

from ..kept.command_line import run_with_help

LAYERS = (0, 2, 5)
RECORDED = Path(__file__).resolve().parents[2] / ".cache" / "real-attention"
RECORDED_LENGTH = 65_536
HEADS, HEAD_DIM = 12, 32

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention_inputs(
    length: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> list[Inputs]:
    """Query, key and value `(1, 12, length, 32)` of the first, a middle and the last layer of all-MiniLM-L6-v2.

    The text is the bundled novels, one after the other; positions beyond 512 tokens are repeated, which the model
    has not been trained for. Empty where neither the model is installed nor what `main` keeps of it is there.
    """
    if default_model_folder() is not None:
        model, tokens = installed(length)
    elif RECORDED.is_dir():
        model, tokens = recorded(length)
    else:
        return []
    if length > model.config.max_position_embeddings:
        extend_positions(model, length)
    kept: list[Inputs] = []

    def keep(seen: SeenAttention) -> torch.Tensor:
        if seen.layer in LAYERS:
            query, key, value = (tensor.to(device, dtype, copy=True) for tensor in (seen.query, seen.key, seen.value))
            kept.append((query, key, value))
        return seen.exact()

    with torch.no_grad(), recording(model.to(device), keep):
        model(input_ids=tokens.to(device))
    return kept


def installed(length: int) -> tuple[Any, torch.Tensor]:
    """The model of the demo, and the beginning of the novels in its tokens, `(1, length)`."""
    model, tokenizer, _ = load_model(None)
    joined = Book("novels", "\n".join(book.text for book in bundled_books()))
    return model, Passages(tokenizer, [joined]).longest(length)


def recorded(length: int) -> tuple[Any, torch.Tensor]:
    """The same of what `main` kept.

    Raises:
        ValueError: it kept a shorter text.
    """
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "add_pooling_layer": False}
    model = AutoModel.from_pretrained(RECORDED, **options).eval()
    tokens = torch.load(RECORDED / "tokens.pt").long()
    if length > tokens.shape[1]:
        raise ValueError(f"{RECORDED} holds {tokens.shape[1]:,} tokens, {length:,} are asked for")
    return model, torch.cat([tokens[:, : length - 1], tokens[:, -1:]], dim=1)  # the last one ends a text


def main() -> None:
    """Keep the model in bfloat16, without the words that the text has not, and the text's tokens."""
    model, tokens = installed(RECORDED_LENGTH)
    words, numbers = tokens.unique(return_inverse=True)
    table = model.get_input_embeddings().weight.detach()
    model.set_input_embeddings(nn.Embedding.from_pretrained(table[words]))
    model.config.vocab_size, model.config.pad_token_id = len(words), None
    model.pooler = None
    model.bfloat16().save_pretrained(RECORDED)
    torch.save(numbers.to(torch.int32), RECORDED / "tokens.pt")
    print(f"written: {RECORDED}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
