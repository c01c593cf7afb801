"""`transformers.pipeline` with a patched model and a small local tokenizer."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

import hf_effattn

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "a",
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "and",
    "then",
    "it",
    "was",
    "red",
    "blue",
    "big",
    "small",
    "very",
]
LONG = " ".join(WORDS * 2)
SETTINGS = {"clusters": 6, "topk": 8, "min_length": 0}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


@pytest.mark.compatibility("transformers", "`pipeline`", "runs")
def test_text_classification(tokenizer: Any, attended: list[str]) -> None:
    model = tiny_model("bert", AutoModelForSequenceClassification)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    exact = classify([LONG, "the cat sat"], batch_size=2)
    hf_effattn.patch_attention(model, "i-clustered", **SETTINGS)
    patched = classify([LONG, "the cat sat"], batch_size=2)
    assert attended == ["i-clustered"] * 3
    assert [set(answer) for answer in patched] == [{"label", "score"}] * 2
    assert patched[0]["score"] != exact[0]["score"]
    hf_effattn.unpatch_attention(model)
    assert classify([LONG, "the cat sat"], batch_size=2) == exact


def test_fill_mask(tokenizer: Any, attended: list[str]) -> None:
    model = hf_effattn.patch_attention(
        tiny_model("roberta", AutoModelForMaskedLM, pad_token_id=0), "clustered", clusters=6
    )
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")
    assert len(fill(f"{LONG} [MASK]", top_k=3, targets=WORDS)) == 3
    assert attended == []
    hf_effattn.patch_attention(model, "clustered", clusters=6, min_length=0)
    answers = fill(f"{LONG} [MASK]", top_k=3, targets=WORDS)
    assert len(answers) == 3
    assert attended == ["clustered"] * 3


def test_feature_extraction(tokenizer: Any, attended: list[str]) -> None:
    model = hf_effattn.patch_attention(tiny_model("distilbert", AutoModel), "i-clustered", **SETTINGS)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    extract = pipeline("feature-extraction", model=model, tokenizer=tokenizer, device="cpu")
    features = torch.tensor(extract(LONG))
    assert features.shape == (1, 40, 32)
    assert features.isfinite().all()
    assert attended == ["i-clustered"] * 3
