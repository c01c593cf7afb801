"""Inputs of neural clustering, for the forms that run on a CPU and for the kernels."""

import torch

from hf_effattn.ops import neural_clustering


def make_inputs(B=2, N=23, k=5, d=12, masks="none", dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(B, N, d, generator=generator, dtype=torch.float64)
    centroids = torch.randn(B, k, d, generator=generator, dtype=torch.float64)
    mask = None
    if masks != "none":
        mask = torch.ones(B, N, dtype=torch.bool)
        if masks == "right":
            mask[-1, (N + 1) // 2 :] = False
        elif masks == "left":
            mask[-1, : N // 3] = False
        elif masks == "holes":
            mask = torch.rand(B, N, generator=generator) > 0.4
        elif masks == "row":
            mask[-1] = False
    return words.to(dtype), centroids.to(dtype), mask


def with_gradients(words, centroids, **options):
    leaves = words.detach().requires_grad_(), centroids.detach().requires_grad_()
    updated, labels = neural_clustering(*leaves, **options)
    weights = torch.randn(updated.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(updated, leaves, weights.to(updated.dtype))
    return dict(zip(("updated", "words", "centroids"), (updated.detach(), *gradients), strict=True)), labels
