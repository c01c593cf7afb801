"""Queries, keys and values that a trained causal language model makes of held-out books, and the books themselves."""

import gzip
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_effattn.data.gutenberg import GUTENBERG

from ..kept.data import dataset_path

HELD_OUT = ("books/pg1661-the-adventures-of-sherlock-holmes.txt.gz", "books/pg98-a-tale-of-two-cities.txt.gz")
RECORDING = "causal-inputs"

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_kept: list[Inputs] = []


def held_out_tokens(tokenizer: PreTrainedTokenizerBase, files: tuple[str, ...] = HELD_OUT) -> list[torch.Tensor]:
    """The tokens of every file of the data sets, without what Project Gutenberg puts around a book."""
    tokens = []
    for name in files:
        text = gzip.decompress(dataset_path(name).read_bytes()).decode("utf-8")
        found = GUTENBERG.search(text)
        text = re.sub(r"\r\n", "\n", found[1] if found else text).strip()
        tokens.append(torch.tensor(tokenizer(text, verbose=False)["input_ids"]))
    return tokens


def load_causal_model(folder: Path) -> tuple[Any, Any]:
    """The model in float32 and evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    _kept.append((query.clone(), key.clone(), value.clone()))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0], None


def causal_attention_inputs(model: PreTrainedModel, tokens: torch.Tensor) -> list[Inputs]:
    """Query, key and value `(B, H, N, D)` of every layer on tokens `(B, N)`, the attention being exact."""
    AttentionInterface.register(RECORDING, _record)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDING)
    try:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        return list(_kept)
    finally:
        _kept.clear()
        model.set_attn_implementation(before)
