"""A tiny encoder with a tokenizer of words, and documents, in folders: for tests of `effattn embed`."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = tuple(f"{a}{b}" for a in "bdfgklmn" for b in ("a", "e", "i", "o", "u"))
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
POSITIONS = 64


def save_encoder(folder: Path, positions: int = POSITIONS) -> Path:
    """Write a random BERT of 2 layers and its tokenizer."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(
        vocab_size=len(vocabulary), max_position_embeddings=positions, initializer_range=0.25, pad_token_id=0, **sizes
    )
    BertModel(config).save_pretrained(folder)
    return folder


def save_pooling(folder: Path, *, mode: str = "cls", normalize: bool = True, prompt: str = "") -> None:
    """Write what sentence-transformers writes beside a model, in the form of its older versions."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    switches = {"pooling_mode_cls_token": mode == "cls", "pooling_mode_mean_tokens": mode == "mean"}
    switches |= {"pooling_mode_max_tokens": mode == "max", "pooling_mode_lasttoken": mode == "last"}
    config = {"word_embedding_dimension": 16, **switches}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    prompts = {"prompts": {"document": prompt}} if prompt else {}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def text(words: int, seed: int = 0) -> str:
    """Words that the tokenizer knows."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def save_documents(folder: Path, lengths: list[int]) -> Path:
    """Write texts of so many words, in two folders."""
    for number, words in enumerate(lengths):
        path = folder / ("late" if number % 2 else "early") / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(words, number), encoding="utf-8")
    return folder
