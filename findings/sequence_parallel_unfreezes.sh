#!/usr/bin/env bash
# torch 2.13.0 (CPU build): parallelize_module with SequenceParallel makes frozen parameters learn. ColwiseParallel and
# RowwiseParallel keep requires_grad.
#
# So a model whose norms were frozen before it was divided trains them afterwards, without a word.
#
# Output seen (requires_grad after parallelize_module, of parameters that were frozen before):
#   ColwiseParallel: False, RowwiseParallel: False, SequenceParallel: True
# Exits 1 when the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.3.5"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
learns = {}
for style, layer in (ColwiseParallel, nn.Linear(4, 4)), (RowwiseParallel, nn.Linear(4, 4)), (SequenceParallel, nn.LayerNorm(4)):
    layer.requires_grad_(False)
    parallelize_module(layer, mesh, style())
    learns[style.__name__] = layer.weight.requires_grad
dist.destroy_process_group()

print(", ".join(f"{name}: {grad}" for name, grad in learns.items()))
sys.exit(0 if learns == {"ColwiseParallel": False, "RowwiseParallel": False, "SequenceParallel": True} else 1)
PYTHON
