"""The private names of torch that the ops read: each as one function, with the versions that it was seen in.

`tests/test_assumptions.py` holds what they are taken for.
"""

from collections.abc import Iterable
from typing import Any

import torch


def is_traced() -> bool:
    """Whether `torch.jit.trace`, or an export by it, is running: `torch._C._get_tracing_state`, 2.6 to 2.13."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor within `vmap` stands for, as many of them side by side: `torch._C._functorch`, 2.6 to 2.13."""
    functorch = torch._C._functorch
    while not torch.compiler.is_compiling() and functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_followed_by_func(tensor: torch.Tensor) -> bool:
    """Whether `torch.func` follows a tensor for its gradient, under any `vmap`: `torch._C._functorch`, 2.6 to 2.13."""
    tensor = unbatched(tensor)
    return bool(torch._C._functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass and not within `torch.func`: `torch._C._functorch`, 2.6 to 2.13."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not is_wrapped(tensor)


def is_watched() -> bool:
    """Whether a mode sees each operator, as counters do: `torch._C._len_torch_dispatch_stack`, 2.6 to 2.13."""
    return torch._C._len_torch_dispatch_stack() > 0


def softmax_backward(grad: torch.Tensor, softmax: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient of the scores of a softmax, in one pass: `torch._softmax_backward_data`, 2.6 to 2.13."""
    return torch._softmax_backward_data(grad, softmax, dim, softmax.dtype)


def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it: `torch.ops.mkldnn._is_mkldnn_bf16_supported`, 2.6 to 2.13."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_followed(arguments: Iterable[Any]) -> bool:
    """Whether other than numbers is wanted of a computation: gradients, a graph, sizes, what a mode or subclass does.

    `torch._C`, 2.6 to 2.13.
    """
    if (
        torch.compiler.is_compiling()
        or is_traced()
        or is_watched()
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)  # modes of `make_fx`
    ):
        return True
    learns = torch.is_grad_enabled()
    return any(
        (learns and x.requires_grad) or x.is_meta or not is_plain(x) for x in arguments if isinstance(x, torch.Tensor)
    )
