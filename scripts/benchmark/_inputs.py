"""Real queries, keys and values to measure errors on: those that a pretrained BERT and a causal model make of books.

    python -m scripts.benchmark._inputs        # writes .cache/real-attention

It keeps the BERT and its text, 27 MB, for a machine where the BERT is not installed, at the same place of its clone.
"""

import gzip
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_effattn import extend_positions
from hf_effattn.data.gutenberg import GUTENBERG
from hf_effattn.measuring.recording import Measured, SeenAttention, recording
from hf_effattn.samples.model import default_model_folder, load_model
from hf_effattn.samples.texts import Book, Passages, bundled_books

from ..shared.command_line import run_with_help
from ..shared.data import dataset_path

# The BERT's layers that count, and where `main` keeps it.
LAYERS = (0, 2, 5)
RECORDED = Path(__file__).resolve().parents[2] / ".cache" / "real-attention"
RECORDED_LENGTH = 65_536
HEADS, HEAD_DIM = 12, 32
# The books that the causal model was not trained on.
HELD_OUT = ("books/pg1661-the-adventures-of-sherlock-holmes.txt.gz", "books/pg98-a-tale-of-two-cities.txt.gz")
SKIPPED = 5_000  # of their tokens at the beginning: titles and contents

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
    return layer_inputs(model, tokens, LAYERS, device, dtype)


def held_out_inputs(
    length: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    files: tuple[str, ...] = HELD_OUT,
    model_folder: Path | None = None,
) -> list[Inputs]:
    """The same of all six layers on the held-out books, one after the other, on which no setting was chosen.

    `model_folder`: of another model, whose layers and heads count as they are.

    Raises:
        FileNotFoundError: the model is not installed, or the data sets are not there.
        ValueError: the books are shorter.
    """
    model, tokenizer, _ = load_model(None if model_folder is None else str(model_folder))
    books = held_out_tokens(tokenizer, files)
    tokens = torch.cat([books[0][:1], *(book[1:-1] for book in books), books[0][-1:]])
    if length > len(tokens):
        raise ValueError(f"the held-out books have {len(tokens):,} tokens, {length:,} are asked for")
    tokens = torch.cat([tokens[: length - 1], tokens[-1:]])[None]
    return layer_inputs(model, tokens, range(model.config.num_hidden_layers), device, dtype)


def layer_inputs(
    model: Any, tokens: torch.Tensor, layers: Collection[int], device: torch.device | None, dtype: torch.dtype
) -> list[Inputs]:
    """Query, key and value of some layers on tokens `(1, length)`, positions repeated where the model has fewer."""
    if tokens.shape[1] > model.config.max_position_embeddings:
        extend_positions(model, tokens.shape[1])
    kept: list[Inputs] = []

    def keep(seen: SeenAttention) -> torch.Tensor:
        if seen.layer in layers:
            query, key, value = (tensor.to(device, dtype, copy=True) for tensor in (seen.query, seen.key, seen.value))
            kept.append((query, key, value))
        return seen.exact()

    with torch.no_grad(), recording(Measured.of(model.to(device)), keep):
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


def held_out_tokens(tokenizer: PreTrainedTokenizerBase, files: tuple[str, ...] = HELD_OUT) -> list[torch.Tensor]:
    """The tokens of every file of the data sets, without what Project Gutenberg puts around a book."""
    tokens = []
    for name in files:
        tokens.append(torch.tensor(tokenizer(book_text(name), verbose=False)["input_ids"]))
    return tokens


def book_text(name: str) -> str:
    """A file of the data sets without what Project Gutenberg puts around a book."""
    text = gzip.decompress(dataset_path(name).read_bytes()).decode("utf-8")
    body = GUTENBERG.search(text)
    return re.sub(r"\r\n", "\n", body[1] if body else text).strip()


def load_causal_model(folder: Path) -> tuple[Any, Any]:
    """The model in float32 and evaluation mode, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def causal_attention_inputs(model: PreTrainedModel, tokens: torch.Tensor) -> list[Inputs]:
    """Query, key and value `(B, H, N, D)` of every layer on tokens `(B, N)`, the attention being exact."""
    return layer_inputs(model, tokens, range(model.config.num_hidden_layers), tokens.device, torch.float32)


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
