"""The exact attention kernels that this machine has: what every speed is compared with."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Materialises the scores, so it is left out where they would not fit.
QUADRATIC = SDPBackend.MATH
MOST_SCORE_BYTES = 2 * 2**30


def sdpa(backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`scaled_dot_product_attention` by one of its backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value)


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The package flash-attn, whose layout is `(B, N, H, D)`."""
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    return flash_attn_func(*(tensor.transpose(1, 2) for tensor in (query, key, value))).transpose(1, 2)


def exact_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[dict[str, Callable[..., torch.Tensor]], dict[str, str]]:
    """The kernels that take these inputs, by name, and why the others don't."""
    candidates: dict[str, Callable[..., torch.Tensor]] = {"SDPA": F.scaled_dot_product_attention}
    # On a CPU there are two, and SDPA itself takes the faster one.
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    named = (*backends, QUADRATIC) if query.is_cuda else (QUADRATIC,)
    candidates |= {f"SDPA {backend.name.lower()}": partial(sdpa, backend) for backend in named}
    candidates["flash-attn"] = flash_attention
    usable, refused = {}, {}
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4
    few = [tensor[:, :, :16].detach() for tensor in (query, key, value)]
    for name, attend in candidates.items():
        if name == f"SDPA {QUADRATIC.name.lower()}" and scores > MOST_SCORE_BYTES:
            refused[name] = f"its scores would take {scores / 2**30:.0f} GiB"
            continue
        try:
            attend(*few)
        except (RuntimeError, ImportError) as error:
            refused[name] = str(error).splitlines()[0]
        else:
            usable[name] = attend
    return usable, refused
