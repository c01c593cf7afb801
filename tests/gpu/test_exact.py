"""Exact attention that is cheaper than transformers', on a GPU: the values and gradients of transformers' own code."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PixtralVisionConfig, PixtralVisionModel

from hf_effattn import patch_attention
from hf_effattn.patching.exact.windows import shortest_length
from scripts.benchmark import longformer, relative_bias
from scripts.benchmark.windows import WINDOWS, by_blocks, by_dense_mask, mask_function

# Relative L2 of bfloat16: both ways round the same numbers otherwise.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
IMAGES = [(1024, 1024), (512, 768), (256, 256), (1024, 640)]
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def assert_patched_is_exact(exact: Any, run: Callable[[Any], torch.Tensor], dtype: torch.dtype) -> None:
    """Outputs and gradients of a model are the same when it is patched."""
    found = []
    for model in (patch_attention(copy.deepcopy(exact), "exact"), exact):
        output = run(model)
        output.float().square().mean().backward()
        found.append((output, torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])))
    assert distance(found[0][0], found[1][0]) < TOLERANCE[dtype]
    assert distance(found[0][1], found[1][1]) < 5 * TOLERANCE[dtype]


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
@pytest.mark.parametrize("name", longformer.LENGTHS)
def test_attention_in_windows(name, dtype, gpu):
    if name == longformer.PRIVACY_FILTER and dtype == torch.bfloat16:
        pytest.skip("it chooses other experts for hidden states that are rounded otherwise")
    exact = longformer.encoder(name, 2048).to(gpu, dtype).eval()
    tokens = torch.randint(3, 1000, (2, 2048), generator=torch.Generator().manual_seed(0)).to(gpu)
    assert_patched_is_exact(exact, lambda model: longformer.run(model, tokens), dtype)


@each_dtype
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("length", [509, 2048])
@pytest.mark.parametrize("name", relative_bias.CASES)
def test_biases_of_distances_without_a_matrix_of_them(name, length, learns, dtype, gpu):
    exact = relative_bias.encoder(name, length).to(gpu, dtype).eval()
    for path, weight in exact.named_parameters():
        weight.requires_grad_(learns or "relative_attention_bias" not in path)
    tokens, mask = (
        x.to(gpu) for x in (relative_bias.tokens_for(exact, 3, length), relative_bias.seen_tokens(3, length))
    )
    assert_patched_is_exact(exact, partial(relative_bias.run, tokens=tokens, mask=mask), dtype)


@each_dtype
def test_images_apart_are_those_under_a_mask(dtype, gpu):
    torch.manual_seed(0)
    exact = PixtralVisionModel(PixtralVisionConfig(num_hidden_layers=2)).to(gpu, dtype).eval()
    images, sizes = torch.randn(len(IMAGES), 3, 1024, 1024, device=gpu, dtype=dtype), torch.tensor(IMAGES)
    assert_patched_is_exact(exact, lambda model: model(images, image_sizes=sizes).last_hidden_state, dtype)
