"""The private names of other libraries that patching reads or sets: each in one function, with the versions seen.

`tests/test_assumptions.py` holds what they are taken for. Modelling files of transformers are read by
`exact/architectures/`; torch's names that the ops read are in `ops/shared/torch_internals.py`.
"""

from collections.abc import Callable
from math import inf
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, _active_collector

# Attributes that hold the forward of a module: accelerate keeps the one that it has wrapped (1.0 to 1.15).
FORWARDS = "forward", "_old_forward"


# transformers: the attention implementation


def implementation_of(config: Any) -> Any:
    """The attention implementation of a config, or None: `config._attn_implementation`, 5.7 to 5.24."""
    return getattr(config, "_attn_implementation", None)


def set_implementation(config: Any, implementation: str) -> None:
    """Set it, also of the configs inside, and check nothing: `config._attn_implementation`, 5.7 to 5.24."""
    config._attn_implementation = implementation


def can_set_implementation(kind: Any) -> bool:
    """Whether a class of models calls attention functions: `_can_set_attn_implementation`, 5.7 to 5.24."""
    return bool(kind._can_set_attn_implementation())


def supports_sdpa(kind: Any) -> bool:
    """Whether a class of models runs by SDPA: `_supports_sdpa`, 5.7 to 5.24."""
    return bool(kind._supports_sdpa)


# transformers: outputs


def matrices_are_collected(module: nn.Module) -> bool:
    """Whether weights are wanted where no argument says so, as of GPT-2: `_active_collector`, 5.7 to 5.24."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    # In a compiled layer of a model that is not compiled itself, the collector's state cannot be traced.
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False
    return "attentions" in (_active_collector.get() or ())


def remember_outputs(kind: Any) -> None:
    """Let a class of models be asked for what it can record: `_CAN_RECORD_REGISTRY`, by name, 5.7 to 5.24."""
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(kind), kind._can_record_outputs)


# transformers: masks


def reach_of(mask_function: Callable) -> tuple[float, float] | None:
    """How many keys before and after its own place a query sees by a mask function; None if it does not tell.

    Seen in `masking_utils`, 5.7 to 5.24. transformers makes such functions anew for each window. Those of one factory
    share their code object, and the first cell of their closure holds the window, or the functions joined.
    """
    if mask_function is causal_mask_function:
        return inf, 0
    if mask_function is bidirectional_mask_function:
        return inf, inf
    code = getattr(mask_function, "__code__", None)
    if code is not None and _is_alike(code, _ALWAYS):
        return inf, inf
    cell, *_ = getattr(mask_function, "__closure__", None) or (None,)
    if code is None or cell is None:
        return None
    if code is _BOTH_SIDES:
        return cell.cell_contents, cell.cell_contents
    if code is _BACKWARDS:
        return cell.cell_contents - 1, inf
    if code is _CHUNKS or _is_alike(code, _NEARER):
        return cell.cell_contents - 1, cell.cell_contents - 1
    if code not in (_INTERSECTION, _UNION):
        return None
    reaches = [reach_of(part) for part in cell.cell_contents]
    if not reaches or None in reaches:
        return None
    nearest: Any = min if code is _INTERSECTION else max
    before, after = zip(*reaches, strict=True)
    return nearest(before), nearest(after)


_BOTH_SIDES = sliding_window_bidirectional_overlay(1).__code__
_BACKWARDS = sliding_window_overlay(1).__code__
_CHUNKS = chunked_overlay(1, torch.zeros(1, dtype=torch.int64)).__code__
_INTERSECTION = and_masks(causal_mask_function).__code__
_UNION = or_masks(causal_mask_function).__code__


def _nearer(sliding_window: int) -> Callable:
    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        return abs(q_idx - kv_idx) < sliding_window

    return inner_mask


# Gemma 3 defines two more in a module that is not to be imported for them: their bytecode is compared instead.
_ALWAYS = (lambda *args: torch.tensor(True, dtype=torch.bool)).__code__
_NEARER = _nearer(1).__code__


def _is_alike(code: CodeType, other: CodeType) -> bool:
    def read(body: CodeType) -> tuple[Any, ...]:
        return body.co_code, body.co_names, [const for const in body.co_consts if not isinstance(const, str | None)]

    return read(code) == read(other)


# transformers: LongT5


def longt5_means(hidden_states: torch.Tensor, mask: torch.Tensor, block: int) -> torch.Tensor:
    """The sums of LongT5's blocks `(B, blocks, D)`: two helpers of `modeling_longt5`, 5.7 to 5.24."""
    from transformers.models.longt5 import modeling_longt5

    blocks, segments = modeling_longt5._make_global_fixed_block_ids(mask, block)
    return modeling_longt5._create_global_aggregates(hidden_states, blocks, segments.shape[-1])


# Models divided among processes


def tensor_parallel_rank(module: nn.Module) -> int | None:
    """Which of the processes this is that have shares of a module's heads; None where no weight tells.

    transformers' mesh has its tensor-parallel dimension last, 5.24. Earlier versions kept some weights as plain
    tensors.
    """
    distributed: Any = next(filter(is_distributed, module.parameters()), None)
    mesh = None if distributed is None else distributed.device_mesh
    return None if mesh is None else int(mesh.get_local_rank(mesh.ndim - 1))


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `DTensor`, of FSDP or tensor parallelism; their module need not be loaded: 2.6 to 2.13."""
    return hasattr(tensor, "device_mesh")


def replaced_functions() -> dict[str, Any]:
    """Attention functions that others set in place of transformers' own or beside them: `_local_mapping`, 5.7 to 5.24.

    Those that are registered, as ours are, do not stand in it, so it is empty as a rule.
    """
    mapping: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._local_mapping
    return mapping


def is_by_ulysses(function: Any) -> bool:
    """Whether an attention function is DeepSpeed's wrapper: `uattn_wrapper` of `ulysses_sp`, as 0.19.6 was read."""
    return str(getattr(function, "__module__", "")).startswith("deepspeed.")


def drops_masks(module: nn.Module) -> bool:
    """Whether a hook of accelerate hides the future in place of a mask: `_attach_context_parallel_hooks`, 1.15."""
    hooks = module._forward_pre_hooks.values()
    return any(getattr(hook, "__qualname__", "").startswith("_attach_context_parallel_hooks.") for hook in hooks)


def context_parallel_is_on() -> bool:
    """Whether torch's `context_parallel` has taken the place of SDPA, as it does inside its `with`: 2.6 to 2.13."""
    place = getattr(F.scaled_dot_product_attention, "__module__", None) or ""
    return str(place).startswith("torch.distributed.tensor.experimental.")


# torch: hooks of a module


def hooks_of(attributes: dict[str, Any]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The forward hooks in `vars(module)`, before and after, each beside those with keywords: torch 2.6 to 2.13."""
    return [(attributes[name], attributes[f"{name}_with_kwargs"]) for name in ("_forward_pre_hooks", "_forward_hooks")]


def has_hooks(module: nn.Module) -> bool:
    """Whether anything hangs on a call of a module or on its gradient: torch 2.6 to 2.13."""
    return any((
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    ))  # fmt: skip


# accelerate and sentence-transformers


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps the weights of a module elsewhere between its calls: `_hf_hook`, 1.0 to 1.15."""
    return hasattr(module, "_hf_hook") and any(parameter.is_meta for parameter in module.parameters(recurse=False))


def execution_device(module: nn.Module) -> torch.device | int | str | None:
    """Where accelerate computes a module, or a part of it, whose weights may be elsewhere: `_hf_hook`, 1.0 to 1.15."""
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((device for device in devices if device is not None), None)


def document_route(router: Any) -> str:
    """The route of a document through a Router of sentence-transformers: `_resolve_route`, 5.1 to 6.2."""
    return str(router._resolve_route("document", "text"))
