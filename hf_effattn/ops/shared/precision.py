"""In which precision sums are taken."""

import torch

# Of a squared distance whose logarithm is taken: a key that its cluster's mean represents perfectly.
SMALLEST = 1e-30


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and sums run in float32 below float64: float16 ends at 65,504, which a sum of many rows reaches."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the forms for a CPU multiply matrices in: in float16 scores overflow, and small gradients become 0."""
    return torch.float32 if dtype == torch.float16 else dtype


def in_products(keys: torch.Tensor) -> torch.Tensor:
    """Keys `(P, M, D)` in `product_dtype`; in bfloat16, where a score is rounded to a part in 256, less their mean.

    It adds the same to all scores of a query, which softmax takes away, and what scores share is often large.
    """
    if keys.dtype != torch.bfloat16:
        return keys.to(product_dtype(keys.dtype))
    return (keys - keys.mean(dim=1, keepdim=True, dtype=torch.float32)).to(keys.dtype)
