"""Windows in blocks on a GPU: the values and gradients of dense masks."""

from functools import partial

import pytest
import torch

from hf_effattn.patching.exact.windows import shortest_length
from scripts.benchmark.windows import WINDOWS, by_blocks, by_dense_mask, mask_function

# Relative L2 of bfloat16: both ways round the same numbers otherwise.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [None, 4096])
@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_are_a_dense_mask(window, length, dtype, gpu):
    length = length or shortest_length(window, 2)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, length, 64, device=gpu, dtype=dtype) for heads in (8, 4, 4)]
    found = []
    for way in (by_blocks, by_dense_mask):
        leaves = [one.clone().requires_grad_() for one in inputs]
        output = partial(way, mask_function(window))(*leaves)
        found.append([output, *torch.autograd.grad(output, leaves, torch.ones_like(output))])
    for blocks, dense in zip(*found, strict=True):
        assert distance(blocks, dense) < TOLERANCE[dtype]
