"""What a conversion to slice attention adds to a model: position embeddings of a slice's places and of the slices.

Sizes: `H` heads, `D` head_dim, `L` slice length, `α` extension ratio, `d` hidden size.

One pair of tables serves all layers (MS-VIPE, Lee 2023, section 4.2): each layer projects them by its own weights and
adds them to its queries and keys. They begin at 0, so that a converted model begins with what it knows.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from ...model_types import Stack
from .attention import Projected, Terms

NAME = "hf_effattn_cst"
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

    def forward(self, slices: int) -> torch.Tensor:
        """The rows of a window and of the first slices, `(αL + slices, d)`."""
        return torch.cat([self.token_positions, self.slice_positions[:slices]])

    @property
    def is_trained(self) -> bool:
        """Whether any entry is no longer 0."""
        return any(not table.is_meta and bool(table.any()) for table in self.parameters())

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Places of a window, slices, width."""
        return self.token_positions.shape[0], *self.slice_positions.shape

    def terms(
        self, module: nn.Module, query: torch.Tensor, slice_length: int, slices: int, *, fill: bool = False
    ) -> tuple[Terms, Terms]:
        """The position terms of a layer's queries and keys: in a slice, `(H, L, D)` and `(H, αL, D)`, and of slices.

        Args:
            module (`nn.Module`): the attention module.
            query (`torch.Tensor`): `(B, H, N, D)`, whose dtype and device they get.
            slice_length (`int`): `L`.
            slices (`int`): how many slices the input has.
            fill (`bool`): whether slices behind the table get 0, because they are empty.

        Raises:
            ValueError: more slices than the table has.
        """
        window, most, _ = self.sizes
        if slices > most and not fill:
            raise ValueError(
                f"{query.shape[2]} tokens are {slices} slices of {slice_length}, but the model was converted for "
                f"{most}: call hf_effattn.extend_positions, or truncate the input"
            )
        known = min(slices, most)
        tables = self(known).to(query.device)
        heads, head_dim = query.shape[1], query.shape[3]
        projected = project(module, tables, bias=False)[:2]
        of_query, of_key = (
            rows.to(query.dtype).unflatten(-1, (heads, head_dim)).transpose(0, 1) for rows in projected
        )
        extension = (window - slice_length) // 2
        local = of_query[:, extension : extension + slice_length], of_key[:, :window]
        empty = (0, 0, 0, slices - known)
        return local, (F.pad(of_query[:, window:], empty), F.pad(of_key[:, window:], empty))


def project(module: nn.Module, rows: torch.Tensor, *, bias: bool) -> Projected:
    """Queries, keys and values of rows by an attention module's own projections.

    Args:
        module (`nn.Module`): an attention module of a model type in `PROJECTIONS`.
        rows (`torch.Tensor`): `(..., d)`.
        bias (`bool`): whether to add the projections' biases: not to what is added to rows that have them already.

    Returns: three times `(..., H · D)`.
    """
    names = PROJECTIONS[module.config.model_type]  # type: ignore[union-attr, index]
    projections = [getattr(module, name) for name in names]
    projected = [to(rows) if bias else _without_bias(to, rows) for to in projections]
    query, key, value = projected[0].chunk(3, dim=-1) if len(projected) == 1 else projected
    return query, key, value


def _without_bias(to: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    if type(to) not in (nn.Linear, Conv1D):
        # Adapters and quantised layers: an affine map all the same. Biases are set to 0, for a small sum with a large
        # one is rounded to its size; only one that is not at hand, packed or offloaded, is subtracted.
        biases = {name: bias for name, bias in to.named_parameters() if name.endswith("bias") and not bias.is_meta}
        unbiased = {name: torch.zeros_like(bias) for name, bias in biases.items()}
        at_rows, at_zero = (functional_call(to, unbiased, (x,)) for x in (rows, torch.zeros_like(rows[:1])))
        return at_rows - at_zero
    with _onloaded(to):
        return F.linear(rows, to.weight) if type(to) is nn.Linear else rows @ to.weight  # type: ignore[operator]


def _onloaded(module: nn.Module) -> AbstractContextManager[None]:
    """In this context the weights of an offloaded module are at hand, as they are while it is called."""
    if not module.weight.is_meta:
        return nullcontext()
    # Imported here, for versions that are too old for transformers to offload with do not have it.
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]

    return align_module_device(module)


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
    # Quantised projections may have parameters of integers, or none at all.
    like = next(stack.modules[0].parameters(), None)
    dtype = like.dtype if like is not None and like.is_floating_point() else stack.model.dtype
    device = _execution_device(stack.modules[0])
    if device is None:
        device = stack.model.device if like is None else like.device
    # Tensors made in inference mode could never be trained.
    with torch.inference_mode(False):
        return SlicePositions(*sizes, dtype=dtype, device=device)


def _execution_device(module: nn.Module) -> torch.device | int | str | None:
    """Where the hooks of an offloaded module compute, whose weights are on no device between its calls."""
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((device for device in devices if device is not None), None)


def held_by(model: nn.Module) -> SlicePositions | None:
    """The tables that a model holds: the model without its head does, so that any head can load them.

    What is found may be a wrapper that answers as its tables do, such as PEFT's for `modules_to_save`.
    """
    found: Any = getattr(model, "base_model", model)._modules.get(NAME)
    return found


def attach(model: nn.Module, positions: nn.Module | None) -> None:
    """Make tables a part of a model, with or without a head, in the place of those that it holds."""
    owner = getattr(model, "base_model", model)
    if owner._modules.get(NAME) is not positions:
        detach(model)
        owner.add_module(NAME, positions)


def detach(model: nn.Module) -> None:
    """Take the tables of a model away, if it holds any."""
    getattr(model, "base_model", model)._modules.pop(NAME, None)


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
