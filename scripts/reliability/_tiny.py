"""Tiny random models of every kind that the reliability scripts try, patched, and a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerFast

import hf_effattn

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
CLUSTERED: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 32},
    "i-clustered": {"clusters": 32, "topk": 32},
    "bi-clustered": {"clusters": 32, "topk": 32, "key_clusters": 32},
}
OF_DECODERS: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 32},
    "i-clustered": {"clusters": 32, "exact_keys": 192},
    "bi-clustered": {"exact_keys": 192, "key_clusters": 16},
}
SHORT = {"segment_length": 16, "window": 16}
FEW_POSITIONS = 1024  # of a model whose causal attention would be exact in default segments
# What is made and how it is patched; None is a model of ours, which is trained as it is.
KINDS: dict[str, tuple[str, str | None]] = {
    **{f"BERT, {method}": ("bert", method) for method in CLUSTERED},
    **{f"GPT-2, {method}": ("gpt2", method) for method in CLUSTERED},
    "CST": ("cst", None),
    "ClusterFormer": ("clusterformer", None),
}
OWN: dict[str, dict[str, Any]] = {"cst": {"slice_length": 16}, "clusterformer": {"clusters": 32}}


def tiny(kind: str, length: int, *, patched: bool = True) -> PreTrainedModel:
    """The model of a kind in `KINDS`, for texts of up to `length` tokens."""
    model_type, method = KINDS[kind]
    settings = {**SIZES, "vocab_size": 100, "max_position_embeddings": length, **OWN.get(model_type, {})}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    if method is not None and patched:
        patch(model, method)
    return model


def patch(model: PreTrainedModel, method: str) -> None:
    """Patch it so that every length runs by the method; with short segments where all texts are short."""
    settings = CLUSTERED[method]
    if model.config.model_type == "gpt2":
        settings = OF_DECODERS[method]
        if model.config.max_position_embeddings < FEW_POSITIONS:
            # Fewer than the keys of such a text, and of a segment.
            few = {"exact_keys": 12, "key_clusters": 4}
            settings = {name: few.get(name, count) for name, count in settings.items()} | SHORT
    hf_effattn.patch_attention(model, method, min_length=0, **settings)


def ids_of(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Random tokens `(batch, length)`."""
    return torch.randint(5, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def save_tokenizer(folder: Path) -> list[str]:
    """Write a tokenizer without special tokens around a text; its words, the token of each being its place plus 2."""
    words = [f"{a}{b}" for a in "bdfgklmn" for b in "aeiou"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("[PAD]", "[UNK]", *words))}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    return words
