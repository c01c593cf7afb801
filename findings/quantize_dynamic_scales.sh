#!/usr/bin/env bash
# torch 2.13.0 (CPU build): quantize_dynamic to int8 gives the weights of a linear layer one scale for the whole matrix,
# whatever its rows' sizes, and the inputs one scale for all texts of a call.
#
# So one large row of the weights spoils the others, unless per_channel_dynamic_qconfig is asked for; and what a text
# gets depends on the others in its batch.
#
# Output seen (relative errors of the outputs of ordinary rows, and of one text's outputs):
#   one row 100 times as large: default 0.36, a scale per row 0.02
#   beside a text 50 times as loud: alone 0.02, in its batch 0.86
# Exits 1 when the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.3.5"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import torch
from torch import nn
from torch.ao.quantization import default_dynamic_qconfig, per_channel_dynamic_qconfig, quantize_dynamic

torch.manual_seed(0)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


with torch.no_grad():
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    text = torch.randn(40, 256)
    per_row = quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, dtype=torch.qint8)
    loud = torch.cat([text, 50 * torch.randn(40, 256)])
    alone, beside = error(per_row(text), model(text)), error(per_row(loud)[:40], model(text))
    model[0].weight[0] *= 100
    by_matrix = quantize_dynamic(model, {nn.Linear: default_dynamic_qconfig}, dtype=torch.qint8)
    by_default = quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert torch.equal(by_matrix(text), by_default(text))
    per_row = quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, dtype=torch.qint8)
    default, rows = (error(kind(text)[:, 1:], model(text)[:, 1:]) for kind in (by_default, per_row))

print(f"one row 100 times as large: default {default:.2f}, a scale per row {rows:.2f}")
print(f"beside a text 50 times as loud: alone {alone:.2f}, in its batch {beside:.2f}")
sys.exit(0 if default > 10 * rows and beside > 10 * alone else 1)
PYTHON
