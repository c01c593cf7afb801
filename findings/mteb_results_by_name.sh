#!/usr/bin/env bash
# mteb 2.26.24 keys its cache of results by the model's name alone.
#
# Ran: one local task of sentence pairs, evaluated with a result cache, which `mteb.evaluate` has by default.
# Seen, with sentence-transformers 6.2.0, transformers 5.24.0 and torch 2.13.0 on a CPU:
#   1. A model whose weights were changed in memory gets its earlier score. Nothing is encoded.
#   2. Models that sentence-transformers loaded from folders all have the name "no_model_name/available", so the second of two
#      different models gets the score of the first. Nothing is encoded.
# Expected before running: (1) the same; (2) models without a name are not cached, or are told apart by their folders.
# Exits non-zero if either changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0" "sentence-transformers==6.2.0" "mteb==2.26.24"
cat > "$place/run.py" <<'PYTHON'
import sys
from pathlib import Path

import mteb
import torch
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

place = Path(sys.argv[1])
words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(40))]


class Pairs(AbsTaskSTS):
    metadata = TaskMetadata(
        name="Pairs", description="Random words.", dataset={"path": "someone/pairs", "revision": "1"}, type="STS",
        category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_pearson",
    )

    def load_data(self, **options):
        torch.manual_seed(0)
        text = lambda: " ".join(words[int(i)] for i in torch.randint(2, 42, (12,)))
        rows = [{"sentence1": text(), "sentence2": text(), "score": number % 6} for number in range(16)]
        self.dataset, self.data_loaded = DatasetDict({"test": Dataset.from_list(rows)}), True


def encoder(seed):
    torch.manual_seed(seed)
    folder = place / f"encoder{seed}"
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(BertConfig(vocab_size=len(words), initializer_range=0.3, **sizes)).save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    SentenceTransformer(modules=[Transformer(str(folder)), Pooling(16)], device="cpu").save(str(folder / "whole"))
    return SentenceTransformer(str(folder / "whole"), device="cpu")


def evaluated(model):
    """The score, and how many texts the model encoded for it."""
    encoded = []
    model.register_forward_pre_hook(lambda module, given: encoded.append(len(given[0]["input_ids"])))
    result = mteb.evaluate(model, Pairs(), cache=mteb.ResultCache(place / "cache"), show_progress_bar=False)
    return round(float(result.task_results[0].get_score()), 4), sum(encoded)


named = encoder(0)
named.model_card_data.model_name, named.model_card_data.base_model_revision = "someone/model", "main"
before = evaluated(named)
with torch.no_grad():
    for parameter in named.parameters():
        parameter.normal_(std=0.5)
after = evaluated(named)
first, second = evaluated(encoder(1)), evaluated(encoder(2))
print("a named model (score, texts encoded):", before, "then, with other weights:", after)
print("two models from folders:", first, second)
assert before[1] > 0 and after == (before[0], 0), "a changed model is encoded anew"
assert first[1] > 0 and second == (first[0], 0), "models from folders are told apart"
PYTHON
HF_HUB_OFFLINE=1 "$place/venv/bin/python" "$place/run.py" "$place" 2> "$place/errors" || { tail -5 "$place/errors"; exit 1; }
