"""Watching a model's exact attention from inside: its queries, keys and values, one layer at a time, never kept.

The function registered here under `RECORDING` is transformers' own SDPA path plus a call of the observer. A model is
switched to it for the time of a `with` block and is afterwards what it was, whatever happens inside.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ..ops.shared.precision import cast_by_autocast
from ..patching.exact.images import IMAGES, AttentionOutput, attend_to_each
from ..patching.exact.reference import sdpa_path
from ..patching.exact.windows import hides_keys
from ..patching.methods import list_methods
from ..patching.model_types.stacks import Stack, is_causal, is_window_of_image
from ..patching.parallel_state import head_share
from ..patching.planning import stacks_to_patch
from ..patching.position_rows import POSITION_ROWS, READ_BY, PositionRows, PositionTerms
from ..patching.snapshot import as_it_was
from ..patching.transformers_internals import supports_sdpa

RECORDING = "effattn-recording"
BASELINE = "sdpa"
EAGER = "eager"  # what models are compared with whose attention has no SDPA in transformers


@dataclass(frozen=True)
class SeenAttention:
    """One call of exact self-attention. Sizes: `B` batch, `H` heads, `N` length, `D` head_dim.

    Args:
        module (`nn.Module`): the attention module.
        layer (`int`): counted through all stacks of the model that can be patched, in their order.
        call (`int`): the number of the layer's call in this forward pass; only images and frames need several.
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, H, N, D)`.
        value (`torch.Tensor`): `(B, H, N, D)`.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = attend; None where nothing is masked.
        scale (`float`, *optional*): factor on the scores; None means `D ** -0.5`.
        causal (`bool`): whether no query sees a later key.
        attention_sinks (`torch.Tensor`, *optional*): `(H,)`, of a score that has a weight and no value.
        positions (`tuple`, *optional*): what a converted module projected of its positions.
        exact (`Callable`): runs the model's exact attention, `(B, N, H, D)`.
    """

    module: nn.Module
    layer: int
    call: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    scale: float | None
    causal: bool
    attention_sinks: torch.Tensor | None
    positions: PositionTerms | None
    exact: Callable[[], torch.Tensor]

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `Options` for `Method.run`."""
        names = "key_mask", "scale", "causal", "attention_sinks", "positions"
        return {name: getattr(self, name) for name in names}


Observer = Callable[[SeenAttention], torch.Tensor]


@dataclass
class _Watch:
    observer: Observer
    layers: tuple[int, ...]
    calls: int = 0


_watched: "weakref.WeakKeyDictionary[nn.Module, _Watch]" = weakref.WeakKeyDictionary()


def recording_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> AttentionOutput:
    """Exact attention, shown to the module's observer where it has one; arguments and result are transformers'."""
    images = kwargs.pop(IMAGES, None)
    if images is not None:
        kwargs |= {"attention_mask": None, "scaling": scaling, "dropout": dropout}
        return attend_to_each(partial(recording_attention, module, **kwargs), images, query, key, value)
    rows: PositionRows | None = kwargs.pop(POSITION_ROWS, None)
    positions = None
    if rows is not None:
        query, key, value, positions = rows.split(query, key, value)

    def exact() -> torch.Tensor:
        options = {"dropout": dropout, "scaling": scaling, "attention_sinks": attention_sinks}
        return sdpa_path(module, query, key, value, attention_mask, **options, **kwargs)

    attention_sinks = kwargs.pop("s_aux", None)
    watch = _watched.get(module)
    M, window = key.shape[2], kwargs.get("sliding_window")
    is_window = hides_keys(window, M, module.config) or is_window_of_image(module, M)
    if watch is None or query.shape[2] != M or is_window:
        output = exact()
    else:
        call, which = divmod(watch.calls, len(watch.layers))
        watch.calls += 1
        inputs = cast_by_autocast(query, key, value)  # as methods get them
        mask, causal = _padding_of(attention_mask), is_causal(module)
        seen = SeenAttention(
            module, watch.layers[which], call, *inputs, mask, scaling, causal, attention_sinks, positions, exact
        )
        output = watch.observer(seen)
    return output if rows is None else rows.put_in_front(output), None


def _padding_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The key mask `(B, N)` of a dense mask `(B, 1, N, N)`: the last row's, which sees all that is not padding."""
    return None if mask is None else mask[:, 0, -1, :].contiguous()


@dataclass(frozen=True)
class Measured:
    """A model that is measured, and where its attention is.

    Args:
        model (`PreTrainedModel`): the model.
        stacks (`list[Stack]`): those that patching would change.
        modules (`dict[nn.Module, tuple[int, ...]]`): the layers that each module serves, counted through all stacks;
            without the modules that stay exact.
        layers (`dict[int, str]`): by layer the path of its attention module.
    """

    model: PreTrainedModel
    stacks: list[Stack]
    modules: dict[nn.Module, tuple[int, ...]]
    layers: dict[int, str]

    @classmethod
    def of(cls, model: Any, *, to_record: bool = False) -> "Measured":
        """Look for the attention of a model.

        Args:
            model (`PreTrainedModel`): the model.
            to_record (`bool`): whether there must be a layer that does not stay exact.

        Raises:
            ValueError: there is nothing to patch, or to record, or the model is divided among processes, which would
                measure different times, decide otherwise and wait for each other.
        """
        stacks = stacks_to_patch(model, list_methods()[0])
        shares = [head_share(module, stack.model.tp_size) for stack in stacks for module in stack.modules]
        divided = next((share for share in shares if share is not None), None)
        if divided is not None:
            raise ValueError(
                f"{type(model).__name__} is divided among {divided.ranks} processes, and only a whole model can be "
                "measured: load it on one process, report or calibrate there, then divide it"
            )
        modules, offset = {}, 0
        for stack in stacks:
            for module, layers in zip(stack.modules, stack.layers, strict=True):
                if stack.exact.serves(module):
                    modules[module] = tuple(offset + layer for layer in layers)
            offset += stack.depth
        if to_record and not modules:
            raise ValueError(
                f"{type(model).__name__} has no attention to measure: all its layers {stacks[0].exact.why}, and "
                "patch_attention runs them exactly"
            )
        paths = {module: path for path, module in model.named_modules()}
        names = {layer: paths[module] for module, layers in modules.items() for layer in layers}
        return cls(model, stacks, modules, names)


@contextmanager
def recording(measured: Measured, observer: Observer) -> Iterator[None]:
    """Run a model's attention exactly inside the block, one forward pass, and show every call to an observer.

    Args:
        measured (`Measured`): its model is restored when the block ends.
        observer (`Callable`): gets a `SeenAttention`, returns the attention's output `(B, N, H, D)`.
    """
    with as_it_was(measured.model):
        for stack in measured.stacks:
            _switch(stack, RECORDING)
        try:
            for module, layers in measured.modules.items():
                _watched[module] = _Watch(observer, layers)
            yield
        finally:
            for module in measured.modules:
                _watched.pop(module, None)


def make_exact(stacks: Sequence[Stack]) -> None:
    """Switch the attention of stacks to exact SDPA, or transformers' own code; to be called inside `as_it_was`."""
    for stack in stacks:
        # Where transformers has none, for want of attention sinks, what runs under the other name has.
        _switch(stack, BASELINE if supports_sdpa(type(stack.model)) else RECORDING)


def _switch(stack: Stack, implementation: str) -> None:
    """Set the attention implementation of a stack; its own code is back where it calls none."""
    if stack.exact.is_recorded:
        stack.exact.switch(implementation, on=implementation == RECORDING)
    else:
        stack.exact.switch(stack.exact.baseline, on=False)


AttentionInterface.register(RECORDING, recording_attention)
# The baseline's own mask function, so that the exact run pays for exactly the mask that the baseline gets.
AttentionMaskInterface.register(RECORDING, sdpa_mask)
READ_BY.add(RECORDING)
