"""What a conversion to slice attention adds to a model: position embeddings of a slice's places and of the slices.

Sizes: `H` heads, `D` head_dim, `L` slice length, `α` extension ratio, `d` hidden size.

One pair of tables serves all layers (MS-VIPE, Lee 2023, section 4.2): each layer projects them by its own weights and
adds them to its queries and keys. They begin at 0, so that a converted model begins with what it knows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache

from ....ops.shared.graphs import is_exported
from ...model_types.stacks import Stack, find_stacks
from ...module_patch import RECORD, ModulePatch
from ...position_rows import POSITION_ROWS, READ_BY, PositionRows
from ...transformers_internals import execution_device, hooks_of, implementation_of
from .attention import Projected

NAME = "hf_effattn_cst"
# Smaller positions than 2 ** -6 are left small: beside queries and keys they are rounding.
_EXPONENTS = -6, 14
# Names of the modules that project queries, keys and values, or of the one that projects all three, by model type.
_BERT_PROJECTIONS = ("query", "key", "value")
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "bert": _BERT_PROJECTIONS,
    "roberta": _BERT_PROJECTIONS,
    "xlm-roberta": _BERT_PROJECTIONS,
    "camembert": _BERT_PROJECTIONS,
    "electra": _BERT_PROJECTIONS,
    "albert": _BERT_PROJECTIONS,
    "distilbert": ("q_lin", "k_lin", "v_lin"),
    "gpt2": ("c_attn",),
}


class SlicePositions(nn.Module):
    """Args:
    window (`int`): places of an extended slice, `αL`.
    slices (`int`): slices of the longest input.
    width (`int`): `d`.
    options: dtype and device.
    """

    def __init__(self, window: int, slices: int, width: int, **options: Any) -> None:
        super().__init__()
        self.token_positions = nn.Parameter(torch.zeros(window, width, **options))
        self.slice_positions = nn.Parameter(torch.zeros(slices, width, **options))

    def forward(self, hidden_states: torch.Tensor, slices: int) -> torch.Tensor:
        """The rows of a window and of the first slices, `(αL + slices, d)`; wrappers see whose they are to be."""
        return torch.cat([self.token_positions, self.slice_positions[:slices]])

    @property
    def is_trained(self) -> bool:
        """Whether any entry is no longer 0."""
        return any(not table.is_meta and bool(table.any()) for table in self.parameters())

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Places of a window, slices, width."""
        return self.token_positions.shape[0], *self.slice_positions.shape


def project(module: nn.Module, rows: torch.Tensor) -> Projected:
    """Queries, keys and values `(..., H · D)` of rows `(..., d)` by an attention module's own projections."""
    projected = [to(rows) for to in _projections(module)]
    query, key, value = projected[0].chunk(3, dim=-1) if len(projected) == 1 else projected
    return query, key, value


def _projections(module: nn.Module) -> list[nn.Module]:
    return [getattr(module, name) for name in PROJECTIONS[module.config.model_type]]  # type: ignore[union-attr, index]


def put_positions_in_front(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of converted attention modules: rows of the tables go in front of the hidden states.

    None where another attention runs.
    """
    patch: ModulePatch | None = vars(module).get(RECORD)
    method: Any = None if patch is None else patch.method
    implementation = implementation_of(module.config)
    if patch is None or patch.owner is None or method is None or implementation not in READ_BY:
        return None
    tables = held_by(patch.owner)
    arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs
    where = 0 if args else "hidden_states"
    cache = next((name for name, given in arguments.items() if isinstance(given, Cache)), None)
    hidden = arguments[where]
    B, N, width = hidden.shape
    if tables is None or not B:
        return None
    is_exact = implementation == method.method and (method.min_length > N or _has_dense_mask(arguments))
    used = cache is not None or not is_exact
    before = 0 if cache is None else arguments[cache].get_seq_length(module.layer_idx)
    most = tables.sizes[1]
    # In a graph for many lengths and batches a count of rows that follows from theirs would be a condition on them. A
    # static cache keeps its length in a tensor.
    is_graph = torch.compiler.is_compiling()
    slices = (
        most if is_graph or isinstance(before, torch.Tensor) else min(-(-(before + N) // method.slice_length), most)
    )
    if not used and not torch.is_grad_enabled():
        return None
    # A pipeline cannot place the call of this module within another.
    table = (tables.forward if is_exported() else tables)(hidden[:, :0], slices).to(hidden.device)
    if not used:
        # None of its rows, so that outputs are those of exact attention; yet the tables have a gradient, of zeros,
        # without which DDP waits for one.
        arguments[where] = torch.cat([table[:0].to(hidden.dtype).expand(B, 0, width), hidden], dim=1)
        return _as_given(arguments, len(args))
    scale = _scale_to_hidden_states(table)
    rows = F.pad((table * scale).to(hidden.dtype), (0, 0, 1, 0))
    # A hook may treat each text differently, as PEFT's do for a batch of several adapters.
    shared = not any(hooks_of(vars(projection))[0][0] for projection in _projections(module))
    count = rows.shape[0]
    in_front = -(-count // B) if shared and not is_graph else count
    if in_front < count:
        each = F.pad(rows, (0, 0, 0, in_front * B - count)).unflatten(0, (B, in_front))
    else:
        each = rows.expand(B, count, width)
    given = None if cache is None else arguments[cache]
    positions = PositionRows(table.shape[0], in_front, scale, shared=shared, cache=given)
    arguments |= {where: torch.cat([each, hidden], dim=1), POSITION_ROWS: positions}
    if cache is not None:
        arguments[cache] = positions
    return _as_given(arguments, len(args))


def _as_given(arguments: dict[Any, Any], count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by their place or name, as positional ones and keywords."""
    return tuple(arguments[place] for place in range(count)), {
        name: given for name, given in arguments.items() if isinstance(name, str)
    }


def _has_dense_mask(arguments: dict[Any, Any]) -> bool:
    masks = (arguments.get(name) for name in (1, "attention_mask"))
    return any(isinstance(mask, torch.Tensor) and mask.ndim != 2 for mask in masks)


def _scale_to_hidden_states(table: torch.Tensor) -> torch.Tensor:
    """A power of two for each row `(R, 1)` that makes its largest entry about 1, the size of hidden states.

    What is projected in low precision, and biases are added to, then keeps of small positions what it keeps of tokens.
    """
    largest = table.detach().abs().amax(dim=1, keepdim=True)
    return torch.exp2(-largest.float().log2().floor().clamp(*_EXPONENTS)).to(table.dtype)


def take_positions_away(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """A forward hook of converted attention modules: the outputs of the tokens alone."""
    rows: PositionRows | None = kwargs.get(POSITION_ROWS)
    return None if rows is None else (output[0][:, rows.in_front :], *output[1:])


def positions_for(stack: Stack, window: int, slice_length: int) -> SlicePositions:
    """Tables for a stack: those that it has, where they are of the right sizes, else new ones.

    Args:
        stack (`Stack`): of a model type in `PROJECTIONS`.
        window (`int`): `αL`.
        slice_length (`int`): `L`.
    """
    config: Any = stack.model.config
    sizes = window, -(-config.max_position_embeddings // slice_length), config.hidden_size
    present = held_by(stack.model)
    if present is not None and present.sizes == sizes:
        return present
    # Quantised projections may have parameters of integers, or none at all; others are stored in a byte each, and
    # computed with in more.
    parameters = *stack.modules[0].parameters(), *stack.model.parameters()
    trainable = (tensor.dtype for tensor in parameters if tensor.is_floating_point() and tensor.element_size() > 1)
    dtype = next(trainable, torch.get_default_dtype())
    like = next(stack.modules[0].parameters(), None)
    device = execution_device(stack.modules[0])
    if device is None:
        device = stack.model.device if like is None else like.device
    # Tensors made in inference mode could never be trained.
    with torch.inference_mode(False):
        return SlicePositions(*sizes, dtype=dtype, device=device)


def held_by(model: nn.Module) -> SlicePositions | None:
    """The tables that a model holds: the model without its head does, so that any head can load them.

    What is found may be a wrapper that answers as its tables do, such as PEFT's for `modules_to_save`.
    """
    tables: Any = getattr(model, "base_model", model)._modules.get(NAME)
    return tables


def attach(model: nn.Module, positions: nn.Module | None) -> None:
    """Make tables a part of a model, with or without a head, in the place of those that it holds."""
    owner = getattr(model, "base_model", model)
    if owner._modules.get(NAME) is positions:
        return
    detach(model)
    owner.add_module(NAME, positions)
    for module in next(stack.modules for stack in find_stacks(model) if stack.model is model):
        module.register_forward_pre_hook(put_positions_in_front, with_kwargs=True)
        module.register_forward_hook(take_positions_away, with_kwargs=True)


def detach(model: nn.Module) -> None:
    """Take the tables of a model away, if it holds any."""
    getattr(model, "base_model", model)._modules.pop(NAME, None)
    for module in model.modules():
        for hooks, with_kwargs in hooks_of(vars(module)):
            for key in [key for key, hook in hooks.items() if hook in (put_positions_in_front, take_positions_away)]:
                del hooks[key], with_kwargs[key]


def plain_tables(model: nn.Module) -> SlicePositions | None:
    """The tables that a model holds, to be changed.

    Raises:
        ValueError: they are inside a wrapper.
    """
    tables = held_by(model)
    if tables is not None and not isinstance(tables, SlicePositions):
        raise ValueError(
            f"the {NAME} of {type(model).__name__} are inside a {type(tables).__name__}; extend the positions of the "
            "plain model first, then wrap it"
        )
    return tables


# Tensors made in inference mode could never be trained.
@torch.inference_mode(False)
@torch.no_grad()
def grow_slices(tables: SlicePositions, filled: int, slices: int) -> None:
    """Repeat the positions of the first `filled` slices until there are `slices`."""
    weight = tables.slice_positions
    grown = weight[torch.arange(slices, device=weight.device) % filled]
    tables.slice_positions = nn.Parameter(grown, requires_grad=weight.requires_grad)
