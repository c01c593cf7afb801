"""In which precision sums are taken."""

import math

import torch

from .torch_internals import cpu_multiplies_bfloat16

CPU_MULTIPLIES_BFLOAT16 = cpu_multiplies_bfloat16()
# Least squared distance whose logarithm is taken: of a key that its cluster's mean represents perfectly.
SMALLEST = 1e-30
# Least log-weight beside the largest: below, exp takes some processors fifty times as long, and products with denormal
# numbers ten times.
LEAST_LOG_WEIGHT = -60.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and sums run in float32 below float64: float16 ends at 65,504, which a sum of many rows reaches."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(rows: torch.Tensor) -> torch.dtype:
    """What the forms for a CPU multiply rows in: in float16 scores overflow, and small gradients become 0.

    A processor without instructions for bfloat16 multiplies float32 far faster.
    """
    slow = rows.dtype == torch.bfloat16 and rows.device.type == "cpu" and not CPU_MULTIPLIES_BFLOAT16
    return torch.float32 if slow or rows.dtype == torch.float16 else rows.dtype


def fast_dtype(rows: torch.Tensor) -> torch.dtype:
    """What rows are multiplied in where nothing overflows: their own dtype, on a CPU `product_dtype`."""
    return product_dtype(rows) if rows.device.type == "cpu" else rows.dtype


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; some have none."""
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:
        return False


def cast_by_autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of an attention as autocast would cast them for SDPA; as they are where it is off.

    A rotation, a norm or a cache may have made some of them wider than others.
    """
    device = query.device.type
    if not autocasts(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (rows if rows.dtype == torch.float64 else rows.to(dtype) for rows in (query, key, value))
    return query, key, value


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Two factors of `scale`, for queries of this dtype and for what is multiplied before it is rounded.

    In half precision the first is a power of two, which rounds no query: what all queries share is often large, and so
    is what rounding it adds to the scores of a key. Powers of two, and other dtypes, leave 1 for the second.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return scale, 1.0
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(0.5, exponent), 2 * mantissa


def in_products(keys: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Keys `(P, M, D)` in `product_dtype`; in bfloat16, where a score is rounded to a part in 256, less their mean.

    It adds the same to all scores of a query, which softmax takes away, and what scores share is often large.
    `factor` is of `split_scale`, for `product_dtype`.
    """
    if (dtype := product_dtype(keys)) != torch.bfloat16:
        return keys.to(dtype)
    centered = keys - keys.mean(dim=1, keepdim=True, dtype=torch.float32)
    return (centered if factor == 1 else centered.mul_(factor)).to(keys.dtype)
