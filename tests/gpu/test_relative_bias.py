"""Biases of distances without a matrix of them on a GPU: the values and gradients of transformers' own code."""

import copy
from functools import partial

import pytest
import torch

from hf_effattn import patch_attention
from scripts.benchmark.relative_bias import CASES, encoder, run, seen_tokens, tokens_for

# Relative L2 of bfloat16: both ways round the same numbers otherwise.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("length", [509, 2048])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_transformers(name, length, learns, dtype, gpu):
    exact = encoder(name, length).to(gpu, dtype).eval()
    for path, weight in exact.named_parameters():
        weight.requires_grad_(learns or "relative_attention_bias" not in path)
    patched = patch_attention(copy.deepcopy(exact), "exact")
    once = partial(run, tokens=tokens_for(exact, 3, length).to(gpu), mask=seen_tokens(3, length).to(gpu))
    found = []
    for model in (patched, exact):
        output = once(model)
        output.float().square().mean().backward()
        found.append((output, torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])))
    assert distance(found[0][0], found[1][0]) < TOLERANCE[dtype]
    assert distance(found[0][1], found[1][1]) < 5 * TOLERANCE[dtype]
