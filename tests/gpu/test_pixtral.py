"""Several images seen by Pixtral on a GPU: the values and gradients of transformers' mask of pairs."""

import copy

import pytest
import torch
from transformers import PixtralVisionConfig, PixtralVisionModel

from hf_effattn import patch_attention

# Relative L2 of bfloat16: both ways round the same numbers otherwise.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SIZES = [(1024, 1024), (512, 768), (256, 256), (1024, 640)]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_images_apart_are_those_under_a_mask(dtype, gpu):
    torch.manual_seed(0)
    exact = PixtralVisionModel(PixtralVisionConfig(num_hidden_layers=2)).to(gpu, dtype).eval()
    patched = patch_attention(copy.deepcopy(exact), "exact")
    images = torch.randn(len(SIZES), 3, 1024, 1024, device=gpu, dtype=dtype)
    found = []
    for model in (patched, exact):
        output = model(images, image_sizes=torch.tensor(SIZES)).last_hidden_state
        output.float().square().mean().backward()
        found.append((output, torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])))
    assert distance(found[0][0], found[1][0]) < TOLERANCE[dtype]
    assert distance(found[0][1], found[1][1]) < 5 * TOLERANCE[dtype]
