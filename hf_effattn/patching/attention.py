"""What transformers calls: an attention function and a mask function, registered under the name of every method.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim.

One function receives every attention of a model. It runs the method in the self-attention of the model types in the
table (of decoders by the method's causal form), and transformers' own SDPA path in everything else: cross-attention,
decoding steps and further chunks of a prompt over a cache (unless the method has a form for them), dense 4-D masks,
packed sequences, sliding windows, layers that are not selected, inputs too short to gain. Where a method would look
into the future it raises.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .methods import (
    METHODS,
    MethodSettings,
    attend,
    attention_matrix,
    find_groups,
    implied_weights,
    list_methods,
    make_settings,
)
from .methods.base import RECORD, MethodOverCache, ModulePatch
from .methods.drafts import READS_DRAFTS
from .model_types import MODEL_TYPES, is_causal, is_self_attention, is_served, model_type_of, supported_model_types
from .stored import FIELD, check_layers, read_stored

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # older versions have none
    _active_collector = None


def padding_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    cache_position: torch.Tensor | None = None,
    mask_function: Callable = causal_mask_function,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The key mask of plain self-attention, bidirectional or causal, and transformers' dense mask of anything else.

    Args:
        batch_size (`int`): `B`.
        kv_length (`int`): `M`.
        q_length (`int`, *optional*): `N`.
        q_offset (`int`): position of the first query; above 0 where a cache holds earlier keys.
        cache_position (`torch.Tensor`, *optional*): positions of the queries, `(N,)`; what transformers before 5.4
            passes instead of `q_length`.
        mask_function (`Callable`): transformers' rule for who sees whom, before padding.
        kwargs: transformers' further arguments, handed on.

    Returns:
        `torch.BoolTensor`, *optional*: `(B, N)` or `(B, 1, N, M)`, True = attend; None where nothing is masked but the
        future. With a causal `(B, N)`, or None, the queries' own keys are the first `N`, whatever room a cache has.
    """
    queries: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
    one_query: dict[str, Any] = {"q_length": 1, "q_offset": q_offset}
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
        queries, one_query = {"cache_position": cache_position}, {"cache_position": cache_position[:1]}
    kwargs |= {"batch_size": batch_size, "kv_length": kv_length, "mask_function": mask_function}
    entry = MODEL_TYPES.get(getattr(kwargs.get("config"), "model_type", ""))
    if entry is not None and entry.causal and mask_function is causal_mask_function:
        if q_length is not None and 1 < q_length <= kv_length and _is_first(q_offset) and not kwargs.get("kv_offset"):
            return _prompt_mask(kwargs.get("attention_mask"), q_length)
    elif entry is not None and q_length == kv_length and mask_function is bidirectional_mask_function:
        # All rows of a padding mask are alike: one row is O(M), and transformers decides in it whether any mask is
        # needed.
        row = sdpa_mask(**one_query, **kwargs)
        return None if row is None else row[:, 0, 0, :]
    return sdpa_mask(**queries, **kwargs)


def _is_first(position: int | torch.Tensor) -> bool:
    """Whether the queries begin the sequence. A static cache keeps the position in a tensor, unread when compiled."""
    if isinstance(position, torch.Tensor):
        return not torch.compiler.is_compiling() and int(position) == 0
    return position == 0


def _prompt_mask(mask: torch.Tensor | None, q_length: int) -> torch.Tensor | None:
    """The key mask `(B, N)` of queries that are the first `N` tokens; None where none is masked."""
    if mask is None:
        return None
    mask = mask[:, :q_length].bool()
    return None if not torch.compiler.is_compiling() and mask.all() else mask


def attention(
    method: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one module by a method, or exactly where the method does not apply.

    Args:
        method (`str`): the name under which transformers called.
        module (`nn.Module`): the attention module; its config and its patch decide.
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, H, M, D)`.
        value (`torch.Tensor`): `(B, H, M, D)`.
        attention_mask (`torch.Tensor`, *optional*): from `padding_mask`, or a dense mask of the user.
        scaling (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout (`float`): dropout on the attention weights.
        kwargs: what else the model passes on; `output_attentions` asks for the weights.

    Returns:
        `(torch.Tensor, torch.Tensor | None)`: the output `(B, N, H, D)` and, where asked for, the attention weights
        `(B, H, N, M)` that produced it, before dropout.

    Raises:
        ValueError: a causal model, or any, of a model type that is not in the table, settings that do not fit.
    """
    wants_weights = bool(kwargs.pop("output_attentions", None)) or _matrices_are_collected(module)
    reads_drafts = kwargs.pop(READS_DRAFTS, False)
    settings = settings_for(module, method)
    dense = attention_mask is not None and attention_mask.ndim != 2
    causal = is_causal(module) and kwargs.get("is_causal") is not False
    over_cache = causal and query.shape[2] != key.shape[2] and (dense or query.shape[2] == 1)
    readable = attention_mask is None or attention_mask.dtype == torch.bool
    if over_cache and readable and isinstance(settings, MethodOverCache):
        kind = query.device.type
        forced = settings.shortest_length(kind, causal=True) == 0
        M = key.shape[2] if forced else _length_so_far(key, attention_mask)
        if not settings.is_exact(M, M, kind, causal=True):
            return _over_cache(settings, module, query, key, value, attention_mask, scaling, wants_weights)
    if causal and not dense and query.shape[2] > 1:
        # A prompt's keys are the first of a static cache; further chunks of a prompt come with a dense mask.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if (
        settings is None
        or dense
        or query.shape[2] != key.shape[2]
        or kwargs.get("sliding_window") is not None
        or (causal and query.shape[2] == 1)
        or settings.is_exact(query.shape[2], key.shape[2], query.device.type, causal=causal)
    ):
        if attention_mask is not None and not dense:
            attention_mask = attention_mask[:, None, None, :].expand(-1, 1, query.shape[2], -1)
            if causal:  # given a mask, the SDPA path no longer hides the future itself
                attention_mask = attention_mask & causal_square(query.shape[2], query.device)
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        weights = exact_attention_matrix(query, key, attention_mask, scaling, causal=causal) if wants_weights else None
        return output, weights

    if causal:
        prompt = not torch.is_grad_enabled() and bool(kwargs.get("use_cache")) and not reads_drafts
        options: dict[str, Any] = {"key_mask": attention_mask, "scale": scaling, "prompt": prompt, "module": module}
        options["training"] = module.training
        result = settings.attend_causal(query, key, value, dropout_p=dropout, **options)
        weights = None
        if wants_weights:
            weights = implied_weights(
                settings, query, key, lambda values: settings.attend_causal(query, key, values, **options)
            )
        return result.transpose(1, 2).contiguous(), weights

    groups = find_groups(settings, query, key, attention_mask)
    options = {"key_mask": attention_mask, "scale": scaling, "module": module}
    result = attend(settings, query, key, value, groups, dropout_p=dropout, **options)
    weights = attention_matrix(settings, query, key, groups, **options) if wants_weights else None
    return result.transpose(1, 2).contiguous(), weights


def _matrices_are_collected(module: nn.Module) -> bool:
    """Whether attention matrices were asked for where no argument says so: GPT-2 and OPT keep it to themselves."""
    if getattr(module.config, "output_attentions", False):
        return True
    # In a compiled layer of a model that is not compiled itself, the collector's state cannot be traced.
    if _active_collector is None or (torch.compiler.is_compiling() and not _active_collector.compiling):
        return False
    return "attentions" in (_active_collector.get() or ())


def _length_so_far(key: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Tokens, and padding before them, up to the last query; a static cache has empty rows behind those.

    A compiled graph cannot ask for it, and takes the size of the cache.
    """
    if mask is None or torch.compiler.is_compiling():
        return key.shape[2]
    rows = torch.arange(1, key.shape[2] + 1, device=mask.device)
    return int((rows * mask).amax())


def _over_cache(
    settings: MethodOverCache,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    wants_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The last tokens over a cache, by a method that has a form for them."""
    options: dict[str, Any] = {"mask": attention_mask, "scale": scaling, "module": module}
    result, weights = settings.attend_over_cache(query, key, value, **options), None
    if wants_weights:
        weights = implied_weights(
            settings, query, key, lambda values: settings.attend_over_cache(query, key, values, **options)
        )
    return result.transpose(1, 2).contiguous(), weights


def settings_for(module: nn.Module, method: str) -> MethodSettings | None:
    """The settings of a module: its own patch's, else those of `config.effattn`; None where it stays exact.

    Raises:
        ValueError: a causal module, a model type outside the table, or settings that were made for another method.
    """
    if not is_self_attention(module):
        if model_type_of(module) is None:
            raise ValueError(_not_served(module, method))
        return None  # cross-attention, or the decoder beside an encoder
    if not is_served(module):
        raise ValueError(causal_error(method, type(module).__name__))
    patch: ModulePatch | None = getattr(module, RECORD, None)
    if patch is None and METHODS[method].needs_fine_tuning:
        raise ValueError(
            f'"{method}" adds parameters to a model, which attn_implementation= and config.effattn cannot: convert it '
            f'with patch_attention(model, "{method}", ...), and load a converted one with hf_effattn.from_pretrained'
        )
    settings = patch.settings if patch is not None else _settings_from_config(module, method)
    if settings is not None and settings.method != method:
        raise ValueError(
            f'attn_implementation is "{method}", but the settings in config.effattn are those of '
            f'"{settings.method}"; change the method with patch_attention(model, "{method}", ...)'
        )
    return settings


def _settings_from_config(module: nn.Module, method: str) -> MethodSettings | None:
    stored = getattr(module.config, FIELD, None)
    if stored is None:
        return make_settings(method)
    settings, layers = read_stored(stored, method)
    if layers is None:
        return settings
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(
            f"config.effattn selects layers {layers}, but a {type(module).__name__} does not know its own index; use "
            f'patch_attention(model, "{method}", layers=...) or hf_effattn.from_pretrained, which count the layers'
        )
    config: Any = module.config
    return settings if index in check_layers(layers, config.num_hidden_layers) else None


def exact_attention_matrix(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    *,
    causal: bool,
) -> torch.Tensor:
    """The weights `(B, H, N, M)` of transformers' SDPA path, which returns none itself."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = causal_square(query.shape[2], scores.device)
    if attention_mask is None:
        return scores.softmax(dim=-1)
    if attention_mask.dtype == torch.bool:
        return scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min).softmax(dim=-1) * attention_mask
    return (scores + attention_mask).softmax(dim=-1)


def causal_square(length: int, device: torch.device) -> torch.Tensor:
    """Who sees whom where the future is hidden, `(N, N)`."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def causal_error(method: str, name: str) -> str:
    """Why a method refuses a model that masks the future, and what to do."""
    return (
        f'{name} is causal, and "{method}" serves causal attention in decoders of the types '
        f"{supported_model_types(causal=True)} only; in others its clusters could mix later tokens into earlier ones. "
        'Keep attn_implementation="sdpa"'
    )


def unsupported_error(method: str, name: str, model_type: str) -> str:
    """Why a method refuses a model type that is not in the table, and what to do."""
    return (
        f'"{method}" does not know {name} (model type "{model_type}"), so it cannot tell its self-attention from '
        f'other attention. It serves {supported_model_types()}; keep attn_implementation="sdpa" for this model'
    )


def _not_served(module: nn.Module, method: str) -> str:
    name = type(module).__name__
    if is_causal(module):
        return causal_error(method, name)
    return unsupported_error(method, name, getattr(module.config, "model_type", "unknown"))


def _function_for(method: str) -> Callable:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return attention(method, module, *args, **kwargs)

    return run


def register() -> None:
    """Make every method known to transformers, as a value for `attn_implementation`; a second call changes nothing."""
    for method in list_methods():
        AttentionInterface.register(method, _function_for(method))
        # Without a mask function of the same name transformers passes no mask, and padding is attended to.
        AttentionMaskInterface.register(method, padding_mask)
