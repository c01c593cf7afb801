"""Windows in blocks on a GPU: the values and gradients of dense masks, and of transformers' own code."""

import copy
from functools import partial

import pytest
import torch

from hf_effattn import patch_attention
from hf_effattn.patching.exact.windows import shortest_length
from scripts.benchmark.longformer import LENGTHS, PRIVACY_FILTER, encoder, run
from scripts.benchmark.windows import WINDOWS, by_blocks, by_dense_mask, mask_function

# Relative L2 of bfloat16: both ways round the same numbers otherwise.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@each_dtype
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


@each_dtype
@pytest.mark.parametrize("name", LENGTHS)
def test_own_attention_is_that_of_transformers(name, dtype, gpu):
    if name == PRIVACY_FILTER and dtype == torch.bfloat16:
        pytest.skip("it chooses other experts for hidden states that are rounded otherwise")
    length = 2048
    exact = encoder(name, length).to(gpu, dtype).eval()
    patched = patch_attention(copy.deepcopy(exact), "exact")
    tokens = torch.randint(3, 1000, (2, length), generator=torch.Generator().manual_seed(0)).to(gpu)
    found = []
    for model in (patched, exact):
        output = run(model, tokens)
        output.float().square().mean().backward()
        found.append((output, torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])))
    assert distance(found[0][0], found[1][0]) < TOLERANCE[dtype]
    assert distance(found[0][1], found[1][1]) < 5 * TOLERANCE[dtype]
