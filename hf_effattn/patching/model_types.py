"""What can be patched: one table of model types, and how to find the self-attention modules of a model.

Modules are recognised by the name of their class, so that no modelling file of transformers is imported.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class LearnedPositions:
    """Where a model type keeps its absolute positions.

    Args:
        embeddings (`str`): path, from the model without its head, of the module that holds the table and its buffers.
        table (`str`): name of the `nn.Embedding` in that module.
        reserved_by_padding (`bool`): whether positions begin after `padding_idx` (RoBERTa: 2 rows more than tokens).
        buffers (`tuple[str, ...]`): buffers of that module with one column per row of the table.
    """

    embeddings: str = "embeddings"
    table: str = "position_embeddings"
    reserved_by_padding: bool = False
    buffers: tuple[str, ...] = ("position_ids", "token_type_ids")


def _one_module_per_layer(config: Any, modules: int) -> list[tuple[int, ...]]:
    return [(index,) for index in range(modules)]


def _albert_layers(config: Any, modules: int) -> list[tuple[int, ...]]:
    """ALBERT's groups of layers share their modules: each module serves every layer of its group."""
    layers_per_group = config.num_hidden_layers / config.num_hidden_groups
    group_of_layer = [int(layer / layers_per_group) for layer in range(config.num_hidden_layers)]
    return [
        tuple(layer for layer, group in enumerate(group_of_layer) if group == module // config.inner_group_num)
        for module in range(modules)
    ]


@dataclass(frozen=True)
class ModelType:
    """How to recognise the self-attention of one model type.

    Args:
        attention (`tuple[str, ...]`): class names of the modules that call the attention function for self-attention.
        positions (`LearnedPositions`, *optional*): where the learned positions are.
        no_positions (`str`): why `extend_positions` has nothing to do, where `positions` is None.
        has_decoder (`bool`): whether a decoder uses the same classes beside the encoder; it stays exact.
        causal (`bool`): whether it is a decoder alone, whose attention masks the future.
        says_use_cache (`bool`): whether its layers hand `use_cache` on, by which a prompt is known.
        window_in_config (`bool`): whether all its layers see the window only that the config names.
        layers (`Callable`): the layers that each of the modules serves, given the config and the number of modules.
    """

    attention: tuple[str, ...]
    positions: LearnedPositions | None = None
    no_positions: str = ""
    has_decoder: bool = False
    causal: bool = False
    says_use_cache: bool = True
    window_in_config: bool = False
    layers: Callable[[Any, int], list[tuple[int, ...]]] = _one_module_per_layer


_BERT_POSITIONS = LearnedPositions()
_ROBERTA_POSITIONS = LearnedPositions(reserved_by_padding=True)
_IMAGE_POSITIONS = (
    "its positions form a grid of image patches; pass interpolate_pos_encoding=True to the model's forward instead"
)
_CONVOLUTIONAL_POSITIONS = "its positions come from a convolution, so inputs of any length fit already"
_ROTARY_POSITIONS = "its positions are rotary, computed for any length; see config.rope_parameters to scale them"
_GPT2_POSITIONS = LearnedPositions(embeddings="", table="wpe", buffers=())


def _decoder(attention: str, no_positions: str = _ROTARY_POSITIONS, **options: Any) -> ModelType:
    return ModelType((attention,), no_positions=no_positions, causal=True, **options)


MODEL_TYPES: dict[str, ModelType] = {
    "bert": ModelType(("BertSelfAttention",), _BERT_POSITIONS),
    "roberta": ModelType(("RobertaSelfAttention",), _ROBERTA_POSITIONS),
    "xlm-roberta": ModelType(("XLMRobertaSelfAttention",), _ROBERTA_POSITIONS),
    "camembert": ModelType(("CamembertSelfAttention",), _ROBERTA_POSITIONS),
    "electra": ModelType(("ElectraSelfAttention",), _BERT_POSITIONS),
    "distilbert": ModelType(("DistilBertSelfAttention",), LearnedPositions(buffers=("position_ids",))),
    "albert": ModelType(("AlbertAttention",), _BERT_POSITIONS, layers=_albert_layers),
    "modernbert": ModelType(
        ("ModernBertAttention",),
        no_positions="its positions are rotary, computed for any length; raise config.max_position_embeddings if a "
        "tokenizer or pipeline stops you",
    ),
    "vit": ModelType(("ViTAttention", "ViTSelfAttention"), no_positions=_IMAGE_POSITIONS),
    "deit": ModelType(("DeiTAttention", "DeiTSelfAttention"), no_positions=_IMAGE_POSITIONS),
    "wav2vec2": ModelType(("Wav2Vec2Attention",), no_positions=_CONVOLUTIONAL_POSITIONS),
    "hubert": ModelType(("HubertAttention",), no_positions=_CONVOLUTIONAL_POSITIONS),
    "whisper": ModelType(
        ("WhisperAttention",),
        no_positions="its encoder takes exactly 30 seconds of audio (config.max_source_positions)",
        has_decoder=True,
    ),
    "gpt2": _decoder("GPT2Attention", "", positions=_GPT2_POSITIONS),
    "opt": _decoder(
        "OPTAttention", "its table of positions counts from 2 and has a class of its own", says_use_cache=False
    ),
    "gpt_neox": _decoder("GPTNeoXAttention"),
    "llama": _decoder("LlamaAttention"),
    "qwen2": _decoder("Qwen2Attention"),
    "qwen3": _decoder("Qwen3Attention"),
    "mistral": _decoder("MistralAttention", window_in_config=True),
    "gemma": _decoder("GemmaAttention"),
}


@dataclass(frozen=True)
class Stack:
    """The self-attention of an encoder, or decoder alone, with one config: a composite model can hold several.

    Args:
        model (`PreTrainedModel`): the outermost model with this config.
        modules (`tuple[nn.Module, ...]`): its self-attention modules, in the order of its layers. Their config is the
            model's own, but for the old composite models, which give their parts a second copy.
        layers (`tuple[tuple[int, ...], ...]`): for each module the layers it serves (ALBERT's serve several).
    """

    model: PreTrainedModel
    modules: tuple[nn.Module, ...]
    layers: tuple[tuple[int, ...], ...]


def model_type_of(module: nn.Module) -> ModelType | None:
    """The entry of the table for a module's config."""
    return MODEL_TYPES.get(getattr(getattr(module, "config", None), "model_type", ""))


def is_self_attention(module: nn.Module) -> bool:
    """Whether this is a self-attention module, causal or not, of a model type in the table."""
    entry = model_type_of(module)
    # Only the modules that call the attention function carry is_causal; wrappers of older versions do not.
    if entry is None or type(module).__name__ not in entry.attention or not hasattr(module, "is_causal"):
        return False
    if entry.causal:  # not the cross-attention of GPT-2, nor a decoder that is run without a causal mask
        return is_causal(module) and getattr(module.config, "is_causal", True) is not False
    return not (entry.has_decoder and getattr(module, "is_decoder", False))


def is_served(module: nn.Module) -> bool:
    """Whether this is a self-attention module that a method can take over: causal ones in decoders alone."""
    entry = model_type_of(module)
    return entry is not None and is_self_attention(module) and (entry.causal or not is_causal(module))


def is_causal(module: nn.Module) -> bool:
    """Whether an attention module masks the future."""
    return bool(getattr(module, "is_causal", False))


def is_sliding_window(module: nn.Module) -> bool:
    """Whether an attention module sees a window only; ModernBERT and Qwen have such layers among their full ones."""
    entry = model_type_of(module)
    holder = module.config if entry is not None and entry.window_in_config else module
    return getattr(holder, "sliding_window", None) is not None


def find_stacks(model: nn.Module) -> list[Stack]:
    """Every encoder, or decoder alone, of the table in a model, in the order of its modules."""
    found: list[tuple[PreTrainedModel, list[nn.Module]]] = []
    _collect(model, None, found, set())
    return [
        Stack(owner, tuple(modules), tuple(MODEL_TYPES[owner.config.model_type].layers(owner.config, len(modules))))
        for owner, modules in found
        if modules
    ]


def _collect(
    module: nn.Module,
    owner: tuple[PreTrainedModel, list[nn.Module]] | None,
    found: list[tuple[PreTrainedModel, list[nn.Module]]],
    seen: set[nn.Module],
) -> None:
    """Put every self-attention module that is served to the model around it, the outermost with the same config."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, PreTrainedModel) and (owner is None or module.config is not owner[0].config):
        owner = (module, [])
        found.append(owner)
    if owner is not None and is_served(module) and model_type_of(module) is model_type_of(owner[0]):
        owner[1].append(module)
    for child in module.children():
        _collect(child, owner, found, seen)


def longest_input(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """How many tokens the learned absolute positions of a model reach; None where it has none that are known.

    RoBERTa's `max_position_embeddings` also counts the rows up to its padding's, which no token gets.

    Args:
        model (`PreTrainedModel` or `PreTrainedConfig`): with or without a head; or its config alone.
    """
    config: Any = model if isinstance(model, PreTrainedConfig) else model.config
    entry = MODEL_TYPES.get(getattr(config, "model_type", ""))
    if entry is None or entry.positions is None:
        return None
    if model is config:
        return int(config.max_position_embeddings) - reserved_rows(entry.positions, config.pad_token_id)
    table = getattr(model.base_model.get_submodule(entry.positions.embeddings), entry.positions.table)
    return int(table.num_embeddings) - reserved_rows(entry.positions, table.padding_idx)


def reserved_rows(positions: LearnedPositions, padding: int | None) -> int:
    """Rows of the table before the first token's."""
    return padding + 1 if positions.reserved_by_padding and padding is not None else 0


def usual_length(config: Any) -> int | None:
    """The tokens of a model's usual image, or the most of one whose positions are computed or fixed."""
    sizes = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if None not in sizes:
        image, patch = (size if isinstance(size, Iterable) else (size, size) for size in sizes)
        special = 2 if config.model_type == "deit" else 1
        return special + math.prod(pixels // of_patch for pixels, of_patch in zip(image, patch, strict=True))
    longest = getattr(config, "max_source_positions", None) or getattr(config, "max_position_embeddings", None)
    return None if longest is None else int(longest)


def causal_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that mask the future."""
    return (module for module in model.modules() if is_causal(module))


def supported_model_types(*, causal: bool | None = None) -> str:
    """The model types of the table, or its causal ones, or the others, for messages."""
    return ", ".join(name for name, entry in MODEL_TYPES.items() if causal is None or entry.causal == causal)
