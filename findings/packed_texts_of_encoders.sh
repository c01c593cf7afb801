#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU build): texts packed by DataCollatorWithFlattening stay apart in a decoder and
# see each other in an encoder, by the default attention ("sdpa"), without a warning.
#
# Of position_ids that begin anew create_causal_mask makes a mask; create_bidirectional_mask makes none. The keywords
# for FlashAttention (cu_seq_lens_q, ...) change nothing for SDPA either, and are dropped without a word.
#
# Output seen (relative difference from each text read alone):
#   llama       packed: 0.0000  with cu_seq_lens: 0.0000
#   bert        packed: 0.2010  with cu_seq_lens: 0.2010
#   modernbert  packed: 0.1616  with cu_seq_lens: 0.1616
# Exits 1 when the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0" "numpy==2.3.5"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys
import warnings

import torch
from transformers import AutoConfig, AutoModel, DataCollatorWithFlattening

sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
sizes |= {"intermediate_size": 48, "initializer_range": 0.2, "max_position_embeddings": 128}
ends = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
texts = [torch.randint(5, 100, (length,), generator=torch.Generator().manual_seed(length)) for length in (30, 20, 40)]


def difference(model_type: str, **asked: bool) -> float:
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes, **ends)).eval()
    assert model.config._attn_implementation == "sdpa"
    batch = DataCollatorWithFlattening(**asked)([{"input_ids": text.tolist()} for text in texts])
    batch.pop("labels")
    options = {"use_cache": False} if model_type == "llama" else {}
    with torch.no_grad():
        packed = model(**batch, **options).last_hidden_state[0]
        alone = torch.cat([model(input_ids=text[None], **options).last_hidden_state[0] for text in texts])
    return ((packed - alone).norm() / alone.norm()).item()


same = True
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for model_type, apart in (("llama", True), ("bert", False), ("modernbert", False)):
        plain, flash = difference(model_type), difference(model_type, return_flash_attn_kwargs=True)
        print(f"{model_type:<11} packed: {plain:.4f}  with cu_seq_lens: {flash:.4f}")
        same &= max(plain, flash) < 1e-4 if apart else min(plain, flash) > 0.05
sys.exit(0 if same else 1)
PYTHON
