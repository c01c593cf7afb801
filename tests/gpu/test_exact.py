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
from scripts.benchmark.exact_models import MODELS, inputs_for, random_model, run
from scripts.benchmark.windows import WINDOWS, by_blocks, by_dense_mask, mask_function

# Relative L2 of bfloat16: both ways round the same numbers otherwise.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
LONG = 2048
RELATIVE = [name for name, measured in MODELS.items() if measured.file == "relative_bias"]
IMAGES = [(1024, 1024), (512, 768), (256, 256), (1024, 640)]
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def assert_patched_is_exact(exact: Any, run: Callable[[Any], torch.Tensor], dtype: torch.dtype) -> None:
    """Outputs and gradients of a model are the same when it is patched."""
    passes = []
    for model in (patch_attention(copy.deepcopy(exact), "exact"), exact):
        output = run(model)
        output.float().square().mean().backward()
        passes.append((output, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    assert distance(passes[0][0], passes[1][0]) < TOLERANCE[dtype]
    assert distance(passes[0][1], passes[1][1]) < 5 * TOLERANCE[dtype]


@each_dtype
@pytest.mark.parametrize("length", [None, 4096])
@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_are_a_dense_mask(window, length, dtype, gpu):
    length = length or shortest_length(window, 2)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, length, 64, device=gpu, dtype=dtype) for heads in (8, 4, 4)]
    passes = []
    for way in (by_blocks, by_dense_mask):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output = partial(way, mask_function(window))(*leaves)
        passes.append([output, *torch.autograd.grad(output, leaves, torch.ones_like(output))])
    for blocks, dense in zip(*passes, strict=True):
        assert distance(blocks, dense) < TOLERANCE[dtype]


@each_dtype
@pytest.mark.parametrize(
    ("name", "length", "learns"),
    [
        *((name, LONG, True) for name, measured in MODELS.items() if measured.file == "longformer"),
        *((name, length, learns) for name in RELATIVE for length in (509, LONG) for learns in (False, True)),
    ],
)
def test_windows_and_biases_of_distances(name, length, learns, dtype, gpu):
    if name == "privacy-filter" and dtype == torch.bfloat16:
        pytest.skip("it chooses other experts for hidden states that are rounded otherwise")
    sizes = {"max_position_embeddings": LONG + 2} if name == "MPNet-base" else {}
    exact = random_model(name, **sizes).to(gpu, dtype).eval()
    for path, weight in exact.named_parameters():
        weight.requires_grad_(learns or "relative_attention_bias" not in path)
    assert_patched_is_exact(exact, partial(run, inputs=inputs_for(exact, 3, length)), dtype)


@each_dtype
def test_images_apart_are_those_under_a_mask(dtype, gpu):
    torch.manual_seed(0)
    exact = PixtralVisionModel(PixtralVisionConfig(num_hidden_layers=2)).to(gpu, dtype).eval()
    images, sizes = torch.randn(len(IMAGES), 3, 1024, 1024, device=gpu, dtype=dtype), torch.tensor(IMAGES)
    assert_patched_is_exact(exact, lambda model: model(images, image_sizes=sizes).last_hidden_state, dtype)
