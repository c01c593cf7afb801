#!/usr/bin/env bash
# torch 2.13.0 (CPU build): scaled_dot_product_attention with a learned additive mask, as T5's biases of distances are,
# trains by itself and raises under torch.func.vmap.
#
# A tensor within vmap says requires_grad=False although autograd follows what it stands for. By that word
# scaled_dot_product_attention chooses the fused CPU kernel, which has no gradient of the mask; by itself it takes the
# math path, which has one. The same word misleads any code that asks requires_grad to decide what its backward pass
# will need.
#
# Output seen:
#   by itself: gradient of the bias has norm 16.1
#   within vmap: requires_grad False, result requires_grad True
#   under vmap: RuntimeError: The function '_scaled_dot_product_flash_attention_for_cpu' is not differentiable with
#               respect to argument 'attn_mask'. This input cannot have requires_grad True.
# Exits 1 when the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.3.5"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import torch
from torch.func import vmap
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
query, key, value = (torch.randn(2, 1, 4, 16, 8) for _ in range(3))  # of two models
bias = torch.randn(2, 1, 4, 16, 16, requires_grad=True)

alone = torch.stack([scaled_dot_product_attention(*one[:3], attn_mask=one[3]) for one in zip(query, key, value, bias)])
(gradient,) = torch.autograd.grad(alone.square().sum(), bias)
print(f"by itself: gradient of the bias has norm {gradient.norm():.1f}")

said = []
result = vmap(lambda one: said.append(one.requires_grad) or one * 2)(bias)
print(f"within vmap: requires_grad {said[0]}, result requires_grad {result.requires_grad}")

try:
    vmap(lambda q, k, v, b: scaled_dot_product_attention(q, k, v, attn_mask=b))(query, key, value, bias)
except RuntimeError as error:
    print(f"under vmap: RuntimeError: {error}")
    same = "not differentiable with respect to argument 'attn_mask'" in str(error)
else:
    print("under vmap: no error")
    same = False
sys.exit(0 if same and said == [False] and result.requires_grad else 1)
PYTHON
