#!/usr/bin/env bash
# gliner 0.2.29: GLiNER.from_pretrained says nothing of weights that the checkpoint lacks, nor of those that it has too many.
#
# Ran: a tiny GLiNER, saved; then one weight of its encoder renamed in the file, as another version of a library or a
# replaced module renames weights, and loaded.
# Seen, with transformers 5.16.0 and torch 2.13.0 on a CPU:
#   1. Loaded as it was saved, it predicts what it predicted.
#   2. With the weight renamed it loads without an error or a warning, and its scores differ: that weight is random.
#   3. With strict=True, which is not the default, it is refused.
# Expected before running: (2) a warning, as transformers gives one, or an error, as load_state_dict does by default.
# Exits 1 when the behaviour changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" "transformers==5.16.0" "gliner==0.2.29"
cat > "$place/run.py" <<'PYTHON'
import logging
import sys
import warnings
from pathlib import Path

import torch
from gliner import GLiNER, GLiNERConfig
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

place = Path(sys.argv[1])
words = [f"w{number}" for number in range(40)]
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + words)}, "[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(place / "bert")
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
torch.manual_seed(0)
BertModel(BertConfig(vocab_size=44, initializer_range=0.3, **sizes)).save_pretrained(place / "bert")
config = GLiNERConfig(model_name=str(place / "bert"), hidden_size=16, dropout=0.0, max_width=2, has_rnn=False)
saved = GLiNER.from_config(config).eval()
saved.save_pretrained(str(place / "saved"))


def scores(model):
    found = model.eval().predict_entities(" ".join(words[:20]), ["w1", "w2"], threshold=0.0)
    return [(entity["start"], entity["label"], round(entity["score"], 4)) for entity in found]


records = []
handler = logging.Handler(logging.WARNING)
handler.emit = records.append
logging.getLogger().addHandler(handler)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    whole = GLiNER.from_pretrained(str(place / "saved"))
    expected = len(said) + len(records)
    file = place / "saved" / "pytorch_model.bin"
    weights = torch.load(file)
    name = next(name for name in weights if name.endswith("attention.output.dense.weight"))
    weights[name.replace("dense", "linear")] = weights.pop(name)
    torch.save(weights, file)
    renamed = GLiNER.from_pretrained(str(place / "saved"))
    told = len(said) + len(records) > 2 * expected
same = scores(whole) == scores(saved)
differs = scores(renamed) != scores(saved)
print(f"as it was saved: the same scores {same}")
print(f"with {name.rpartition('layer.')[2]} renamed: told {told}, other scores {differs}")
try:
    GLiNER.from_pretrained(str(place / "saved"), strict=True)
except RuntimeError as error:
    refused = "Missing key" in str(error)
    print(f"with strict=True: {str(error).splitlines()[0]}")
else:
    refused = False
sys.exit(0 if same and differs and not told and refused else 1)
PYTHON
HF_HUB_OFFLINE=1 "$place/venv/bin/python" "$place/run.py" "$place"
