"""The exact attention kernels that this machine has: what every speed is compared with."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Materialises the scores, so it is left out where they would not fit.
QUADRATIC = SDPBackend.MATH
MOST_SCORE_BYTES = 2 * 2**30


BACKENDS = {
    f"SDPA {backend.name.lower()}": backend
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        QUADRATIC,
    )
}
CHOSEN_BY_TORCH = "SDPA"
Result = TypeVar("Result")


def sdpa(
    backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """`scaled_dot_product_attention` by one of its backends; `options` are its own, such as `is_causal`."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, **options)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False
) -> torch.Tensor:
    """The package flash-attn, whose layout is `(B, N, H, D)`."""
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    rows = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return flash_attn_func(*rows, causal=is_causal).transpose(1, 2)


def exact_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
) -> tuple[dict[str, Callable[..., torch.Tensor]], dict[str, str]]:
    """The kernels that take these inputs, by name, and why the others don't."""
    candidates: dict[str, Callable[..., torch.Tensor]] = {CHOSEN_BY_TORCH: F.scaled_dot_product_attention}
    # On a CPU there are two, and SDPA itself takes the faster one.
    named = BACKENDS.items() if query.is_cuda else ((name, sdp) for name, sdp in BACKENDS.items() if sdp is QUADRATIC)
    candidates |= {name: partial(sdpa, backend) for name, backend in named}
    candidates["flash-attn"] = flash_attention
    usable, refused = {}, {}
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4
    few = [tensor[:, :, :16].detach() for tensor in (query, key, value)]
    for name, kernel in candidates.items():
        attend = partial(kernel, is_causal=True) if causal else kernel
        if BACKENDS.get(name) is QUADRATIC and scores > MOST_SCORE_BYTES:
            refused[name] = f"its scores would take {scores / 2**30:.0f} GiB"
            continue
        try:
            attend(*few)
        except (RuntimeError, ImportError) as error:
            refused[name] = str(error).splitlines()[0]
        else:
            usable[name] = attend
    return usable, refused


def run_in(context: Callable[[], AbstractContextManager[Any]], call: Callable[[], Result]) -> Result:
    """What a call returns inside of a context."""
    with context():
        return call()


def exact_contexts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """For layers that call SDPA on such inputs: what they are to be called in to run each of its kernels, by name.

    On a CPU that is the kernel which SDPA takes by itself.
    """
    usable = exact_kernels(query, key, value)[0] if query.is_cuda else ()
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {CHOSEN_BY_TORCH: nullcontext}
    return contexts | {name: partial(sdpa_kernel, BACKENDS[name]) for name in usable if name in BACKENDS}
