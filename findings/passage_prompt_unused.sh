#!/usr/bin/env bash
# sentence-transformers 6.2.0: encode_document leaves out a prompt named "passage" that was given to the model, as in the
# example of its own documentation. Every model has an empty prompt named "document" and takes that first.
#
# So documents of models such as E5 are embedded without their prefix, without a word. A prompt named "document" is used.
#
# Output seen (which prompt encode_document puts before a text, by the names of the prompts given):
#   query, passage: none
#   query, document: document
# Exits 1 when the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.3.5"
"$folder/venv/bin/pip" install --quiet "sentence-transformers==6.2.0" "transformers==5.24.0" "tokenizers==0.23.3"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ("[UNK]", "query", "passage", "document", "rain")


def used(second: str) -> str:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words = StaticEmbedding(tokenizer, embedding_weights=np.eye(len(WORDS), dtype=np.float32))
    model = SentenceTransformer(modules=[words], device="cpu", prompts={"query": "query ", second: f"{second} "})
    vector = model.encode_document("rain")
    return next((word for word in WORDS[1:4] if vector[WORDS.index(word)] > 0), "none")


found = {second: used(second) for second in ("passage", "document")}
print("\n".join(f"query, {second}: {prompt}" for second, prompt in found.items()))
sys.exit(0 if found == {"passage": "none", "document": "document"} else 1)
PYTHON
