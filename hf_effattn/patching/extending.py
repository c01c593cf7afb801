"""`extend_positions`: learned absolute positions for longer inputs."""

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .methods import METHODS
from .model_types.stacks import reserved_rows
from .model_types.table import MODEL_TYPES, LearnedPositions, OtherPositions
from .planning import not_a_model
from .sentence_transformers import is_sentence_transformer, models_inside, set_max_seq_length
from .transformers_internals import is_distributed, is_offloaded

Model = TypeVar("Model", bound=nn.Module)


def extend_positions(model: Model, max_length: int) -> Model:
    """Let a model with learned absolute positions take longer inputs, by repeating its pretrained positions, in place.

    Token `i` beyond the pretrained length gets the position of token `i % length`. Inputs within that length give what
    they gave before. The positions of slices of a model converted to `"cst"` are repeated likewise.
    `config.max_position_embeddings` follows, so a saved model loads again with plain `from_pretrained`. The repeated
    positions were never trained at these distances: fine-tune, or check the result. Call it before an optimizer is
    made, and set `tokenizer.model_max_length` to the new length yourself (sentence-transformers: done).

    Args:
        model (`PreTrainedModel`): of a type whose positions are "learned, extendable" in `effattn models`, such as
            BERT, RoBERTa, XLM-R or GPT-2, with or without a head; or a model of sentence-transformers with such ones
            inside, whose `max_seq_length` becomes `max_length` too.
        max_length (`int`): the number of tokens, special ones included, that the model shall take.

    Returns:
        The same `model`.

    Raises:
        ValueError: a length below the present one, a model without learned absolute positions, a table of positions
            or of slices that is quantised, sharded, wrapped or offloaded. The model is then unchanged.
        TypeError: something that is not a transformers model, a `max_length` that is not an int.

    Example:
        >>> import hf_effattn
        >>> from transformers import AutoModel
        >>> model = AutoModel.from_pretrained("google-bert/bert-base-uncased")
        >>> hf_effattn.extend_positions(model, 8192).config.max_position_embeddings
        8192
    """
    if not isinstance(model, nn.Module) or not (isinstance(model, PreTrainedModel) or is_sentence_transformer(model)):
        raise not_a_model(model)
    length = _checked_length(max_length)
    for extend in [_plan_extension(inside, length) for inside in models_inside(model)]:
        extend()
    set_max_seq_length(model, length)
    return model


def _plan_extension(model: PreTrainedModel, length: int) -> Callable[[], None]:
    """What extends the positions of one transformers model, once everything has been checked."""
    positions = _learned_positions(model)
    module = model.base_model.get_submodule(positions.embeddings)
    table = _plain_table(module, positions, model)
    reserved = reserved_rows(positions, table.padding_idx)
    present = table.num_embeddings - reserved
    if length < present:
        raise ValueError(
            f"{type(model).__name__} takes {present} tokens already, so max_length must be at least {present}, got "
            f"{length}; to shorten inputs set the tokenizer's model_max_length or truncate instead"
        )
    if length == present:
        return lambda: None
    extensions = [kind.plan_extension(model, present, reserved + length) for kind in METHODS.values()]

    def extend() -> None:
        _grow(table, reserved, length, sinusoidal=getattr(model.config, "sinusoidal_pos_embds", False))
        for name in positions.buffers:
            _grow_buffer(module, name, reserved + length)
        for extend_parameters in extensions:
            if extend_parameters is not None:
                extend_parameters()
        model.config.max_position_embeddings = reserved + length

    return extend


def _checked_length(max_length: Any) -> int:
    if isinstance(max_length, bool) or not hasattr(max_length, "__index__"):
        raise TypeError(f"max_length must be an int, the number of tokens the model shall take; got {max_length!r}")
    return operator.index(max_length)


def _learned_positions(model: PreTrainedModel) -> LearnedPositions:
    model_type = getattr(model.config, "model_type", "unknown")
    entry = MODEL_TYPES.get(model_type)
    if entry is not None and entry.learned is not None:
        return entry.learned
    extendable = ", ".join(name for name, served in MODEL_TYPES.items() if served.learned is not None)
    other = None if entry is None else entry.positions
    reason = other.why if isinstance(other, OtherPositions) else "hf_effattn does not know where its positions are"
    raise ValueError(
        f'{type(model).__name__} (model type "{model_type}") has no learned positions to extend: {reason}. '
        f"extend_positions serves {extendable}"
    )


def _plain_table(module: nn.Module, positions: LearnedPositions, model: PreTrainedModel) -> nn.Embedding:
    table = getattr(module, positions.table)
    if is_offloaded(table):
        raise ValueError(
            f"the positions of {type(model).__name__} are offloaded: load it without device_map, extend its "
            "positions, save it, and load what is saved with device_map"
        )
    # A subclass (quantised, adapter), or a weight that is sharded, stores its rows in a way of its own.
    plain = type(table) is nn.Embedding and table.weight.is_floating_point() and not is_distributed(table.weight)
    if not plain or tuple(table.weight.shape) != (table.num_embeddings, table.embedding_dim):
        raise ValueError(
            f"the positions of {type(model).__name__} are a {type(table).__name__} of dtype {table.weight.dtype} and "
            f"shape {tuple(table.weight.shape)}, not a plain nn.Embedding (quantised, sharded or wrapped?); extend "
            "the positions of the plain model first, then quantise, shard or wrap it"
        )
    return table


# Tensors made in inference mode could never be trained.
@torch.inference_mode(False)
@torch.no_grad()
def _grow(table: nn.Embedding, reserved: int, length: int, *, sinusoidal: bool) -> None:
    """Repeat the rows after the reserved ones until there are `length`; continue the formula of sinusoidal rows."""
    weight = table.weight
    pretrained = weight[reserved:]
    rows = pretrained[torch.arange(length, device=weight.device) % len(pretrained)]
    if sinusoidal and not weight.is_meta:
        formula = _sinusoids(length, weight.shape[1]).to(weight)
        # A table that was trained on is no longer the formula's, and its own rows are the better continuation.
        if torch.allclose(formula[: len(pretrained)], pretrained, atol=1e-2):
            rows = torch.cat([pretrained, formula[len(pretrained) :]])
    table.weight = nn.Parameter(torch.cat([weight[:reserved], rows]), requires_grad=weight.requires_grad)
    table.num_embeddings = reserved + length


def _sinusoids(length: int, width: int) -> torch.Tensor:
    """Sines in the even columns, cosines in the odd, `(length, width)` (Source: Vaswani 2017, section 3.5)."""
    column = torch.arange(width, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (2 * (column // 2) / width)
    return torch.where(column % 2 == 0, angles.sin(), angles.cos())


@torch.inference_mode(False)
def _grow_buffer(module: nn.Module, name: str, columns: int) -> None:
    """A buffer `(1, rows)` of the position table at its new length: indices count on, token types stay 0."""
    buffer = getattr(module, name, None)
    if not isinstance(buffer, torch.Tensor):
        return
    values = torch.arange(columns) if name == "position_ids" else torch.zeros(columns)
    setattr(module, name, values.to(buffer)[None].contiguous())
