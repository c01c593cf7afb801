"""What transformers calls: an attention function and a mask function, registered under the name of every method.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim.

One function receives every attention of a model. It runs the method in the self-attention of the model types in the
table (of decoders by the method's causal form), and transformers' own SDPA path in everything else: cross-attention,
decoding steps and further chunks of a prompt over a cache (unless the method has a form for them), dense 4-D masks,
packed sequences, layers that are not selected, inputs too short to gain, and wherever a keyword changes attention
(`keywords.py`). Layers with a sliding window are exact, too, in blocks (`windows.py`). Where a method would look into
the future it raises. Longformer, T5 and their kinds attend themselves: `own_attention.py`.
"""

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask
from transformers.utils.output_capturing import _active_collector

from ...ops.shared.callers import stacklevel_of_user
from ...ops.shared.graphs import in_a_graph
from ...ops.shared.precision import cast_by_autocast
from ..exact.images import IMAGES, Attended, attend_to_each
from ..exact.query_chunks import added_mask
from ..exact.reference import exact_weights, sdpa_path, visible_keys
from ..exact.softcap import attend_bent
from ..exact.windows import IN_BLOCKS, attend_in_blocks, dense_mask, mask_of_blocks, sees_all, window_of
from ..measured import expect_measurement, last_measured
from ..methods import METHODS, Method, list_methods, make_method
from ..methods.base import Options
from ..methods.crossover import why_never
from ..model_types.stacks import (
    hides_keys,
    hides_the_future,
    is_causal,
    is_of_transformers,
    is_self_attention,
    is_served,
    is_window_of_image,
    model_type_of,
    supported_model_types,
)
from ..model_types.table import MODEL_TYPES, NOT_SERVED
from ..module_patch import RECORD, ModulePatch
from ..patched_models import warn_of_other_settings
from ..position_rows import POSITION_ROWS, READ_BY, PositionRows, PositionTerms
from ..stored import FIELD, check_layers, read_stored
from .keywords import needs_exact_attention

# Keywords by which transformers' SDPA path adds to the scores of all keys, or finds the keys elsewhere.
NOT_IN_BLOCKS = "position_bias", "cache"


def padding_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int,
    q_offset: int | torch.Tensor = 0,
    mask_function: Callable = causal_mask_function,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The key mask of plain self-attention, bidirectional or causal, and transformers' dense mask of anything else.

    Args:
        batch_size (`int`): `B`.
        kv_length (`int`): `M`.
        q_length (`int`): `N`.
        q_offset (`int`): position of the first query; above 0 where a cache holds earlier keys.
        mask_function (`Callable`): transformers' rule for who sees whom, before padding.
        kwargs: transformers' further arguments, handed on.

    Returns:
        `torch.Tensor`, *optional*: bool `(B, N)`, `(B, 1, N, M)` or, of a sliding window, what `mask_of_blocks` gives,
        True = attend; None where nothing is masked but the future. With a causal `(B, N)`, or None, the queries' own
        keys are the first `N`, whatever room a cache has. Of models that add it to scores of their own, `(B, 1, 1, N)`
        or, of types that are not in the table, `(B, 1, N, M)`, to be added.

    Raises:
        ValueError: a model type that is known and not served, which may hear of the method by its mask alone.
    """
    kwargs |= {"batch_size": batch_size, "kv_length": kv_length, "q_offset": q_offset, "mask_function": mask_function}
    entry = MODEL_TYPES.get(getattr(kwargs.get("config"), "model_type", ""))
    if entry is None and not _is_composite(kwargs.get("config")):
        return _mask_of_unknown(q_length, **kwargs)
    causal = hides_the_future(kwargs.get("config"))
    if causal and _hides_the_future_only(mask_function, q_length, kwargs["config"]):
        if 1 < q_length <= kv_length and _is_first(q_offset) and not kwargs.get("kv_offset"):
            return _prompt_mask(kwargs.get("attention_mask"), q_length)
    elif entry is not None and q_length == kv_length and sees_all(mask_function):
        # All rows of a padding mask are alike: one row is O(M), and transformers decides in it whether any mask is
        # needed.
        plain = {"mask_function": bidirectional_mask_function, "use_vmap": False}
        row = sdpa_mask(q_length=1, **{"allow_is_bidirectional_skip": True} | kwargs | plain)
        if row is not None and entry.attends_itself == "biases":  # what a patch changed reads, and what none did
            return added_mask(row, kwargs.get("dtype", torch.float32))
        return None if row is None else row[:, 0, 0, :]
    elif entry is not None and q_length == kv_length and _is_first(q_offset) and not kwargs.get("kv_offset"):
        key_mask, device = kwargs.get("attention_mask"), kwargs.get("device", "cpu")
        if key_mask is not None and key_mask.ndim == IN_BLOCKS:  # generate has made it, for a static cache
            return key_mask
        mask = mask_of_blocks(
            mask_function, key_mask, causal=causal, batch_size=batch_size, length=q_length, device=device
        )
        if mask is not None:
            return mask
    if entry is not None and entry.attends_itself:  # the call of a decoder beside it, which may not say that it is one
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(q_length=q_length, **kwargs)


def _is_composite(config: Any) -> bool:
    """Whether a config may be that of a model around some that are served."""
    return bool(getattr(config, "sub_configs", None)) and config.model_type not in NOT_SERVED


def _mask_of_unknown(q_length: int, **kwargs: Any) -> torch.Tensor:
    """The mask of a model type outside the table: what calls no attention function adds it to scores of its own."""
    config = kwargs.get("config")
    method, model_type = getattr(config, "_attn_implementation", None), getattr(config, "model_type", "unknown")
    if method in list_methods():
        if model_type in NOT_SERVED:
            name = f"{type(config).__name__.removesuffix('Config')}Model"
            raise ValueError(unsupported_error(method, name, model_type))
        if not torch.compiler.is_compiling():
            warnings.warn(
                f'"{method}" does not know the model type "{model_type}", whose attention stays exact',
                stacklevel=stacklevel_of_user(),
            )
    return eager_mask(q_length=q_length, **kwargs)


def _hides_the_future_only(mask_function: Callable, length: int, config: Any) -> bool:
    """Whether queries see all earlier keys: also within a window that no input of the model is longer than."""
    if mask_function is causal_mask_function:
        return True
    window = window_of(mask_function)
    return window is not None and not hides_keys(1 + window.before, length, config)


def _is_first(position: int | torch.Tensor) -> bool:
    """Whether the queries begin the sequence. A static cache keeps the position in a tensor, unread in a graph."""
    if isinstance(position, torch.Tensor):
        return not in_a_graph() and int(position) == 0
    return position == 0


def _prompt_mask(mask: torch.Tensor | None, q_length: int) -> torch.Tensor | None:
    """The key mask `(B, N)` of queries that are the first `N` tokens; None where none is masked."""
    if mask is None:
        return None
    mask = mask[:, :q_length].bool()
    return None if not in_a_graph() and mask.all() else mask


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
) -> Attended:
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
        kwargs: what else the model passes on; `output_attentions` asks for the weights, `s_aux` `(H,)` are sinks.

    Returns:
        `(torch.Tensor, torch.Tensor | None)`: the output `(B, N, H, D)` and, where asked for, the attention weights
        `(B, H, N, M)` that produced it, before dropout.

    Raises:
        ValueError: a causal model, or any, of a model type that is not in the table, settings that do not fit, a
            keyword that changes attention in a way that SDPA does not know either.
    """
    images = kwargs.pop(IMAGES, None)
    if images is not None:
        kwargs |= {"attention_mask": None, "scaling": scaling, "dropout": dropout}
        return attend_to_each(partial(attention, method, module, **kwargs), images, query, key, value)
    rows: PositionRows | None = kwargs.pop(POSITION_ROWS, None)
    positions = None
    if rows is not None:
        query, key, value, positions = rows.split(query, key, value)
    wants_weights = bool(kwargs.pop("output_attentions", None)) or matrices_are_collected(module)
    sinks, softcap = kwargs.pop("s_aux", None), kwargs.pop("softcap", None)
    chosen = method_for(module, method)
    if chosen is not None and chosen.tolerance is not None:
        expect_measurement(module)
    N, M, dense = query.shape[2], key.shape[2], attention_mask is not None and attention_mask.ndim != 2
    if not hides_keys(kwargs.get("sliding_window"), M, module.config):
        kwargs.pop("sliding_window", None)
    hides_future = _hides_future(module, kwargs.get("is_causal"), attention_mask)
    # The form of a method that hides the future is for decoders; so is a prompt's key mask, which implies it.
    as_its_type = hides_future == _masks_the_future(module)
    unknown = needs_exact_attention(method, module, kwargs, dense=dense, causal=hides_future)
    over_cache = hides_future and M != N and (dense or N == 1)
    if hides_future and not dense and N > 1:
        # A prompt's keys are the first of a static cache; further chunks of a prompt come with a dense mask.
        key, value = key[:, :, :N], value[:, :, :N]
    prompt = not torch.is_grad_enabled() and bool(kwargs.get("use_cache"))
    asked = scaling, dropout, wants_weights, hides_future, prompt
    call = Call(module, query, key, value, attention_mask, sinks, softcap, *asked, kwargs, positions)
    not_by_method = softcap is not None or (sinks is not None and not hides_future)
    attend: Callable[[Call], Attended] = _exact
    if chosen is None or unknown or not as_its_type or not_by_method:
        _say_once_if_trained(chosen, call)
    elif over_cache:
        call.cast()
        attend = partial(_over_cache, chosen)
    elif dense or key.shape[2] != N or (hides_future and N == 1) or is_window_of_image(module, N):
        if dense and hides_future and in_a_graph() and not chosen.is_exact(N, N, query.device.type, causal=True):
            _say_packed(method)
        _say_once_if_trained(chosen, call)
    elif not chosen.chooses_exact(N, query.device.type, causal=hides_future):
        call.cast()
        attend = partial(_by_method, chosen)
    elif hides_future:
        _say_if_never(chosen, query.device.type)
    output, weights = attend(call)
    return output if rows is None else rows.put_in_front(output), weights


def _hides_future(module: nn.Module, asked: bool | None, mask: torch.Tensor | None) -> bool:
    """Whether no query may see a later key: the keyword says so (CLIP's text), or else the module."""
    causal = hides_the_future(module.config)
    if causal and mask is not None and mask.ndim == 2 and is_self_attention(module):
        return True  # such a mask stands for a decoder's dense one, which the keyword does not change
    if asked is None or (asked and not is_self_attention(module)):
        return is_causal(module)
    return bool(asked)


def _masks_the_future(module: nn.Module) -> bool:
    """Whether a module's method is for a decoder: one patched as such is, also in a call that sees both ways."""
    patch: ModulePatch | None = getattr(module, RECORD, None)
    return hides_the_future(module.config) if patch is None else patch.causal


@dataclass
class Call:
    """One call of transformers: the arguments of `attention`, and what they ask for.

    Args:
        sinks (`torch.Tensor`, *optional*): `(H,)`, a score of each query head that has a weight and no value.
        softcap (`float`, *optional*): to which a tanh bends the scores.
        wants_weights (`bool`): whether the attention weights are asked for.
        hides_future (`bool`): whether no query may see a later key.
        prompt (`bool`): whether, of a prompt, only what follows the last token will be read.
        options (`dict`): what else the model passes on, for transformers' own path.
        positions (`tuple`, *optional*): what the module projected of a conversion's positions.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    sinks: torch.Tensor | None
    softcap: float | None
    scale: float | None
    dropout: float
    wants_weights: bool
    hides_future: bool
    prompt: bool
    options: dict[str, Any]
    positions: PositionTerms | None = None

    def cast(self) -> None:
        """Cast as autocast does for SDPA, which no method calls."""
        self.query, self.key, self.value = cast_by_autocast(self.query, self.key, self.value)


@torch.compiler.assume_constant_result  # so that it is said while a graph is made
def _say_packed(method: str) -> None:
    """Warn of a graph that holds a decoder's exact attention, since it has to serve packed texts, too."""
    warnings.warn(
        f'this graph is traced with a dense mask, under which attention stays exact: "{method}" does not run in it. '
        "transformers makes one where texts may be packed: pass attention_mask=torch.ones_like(input_ids) if none is",
        stacklevel=stacklevel_of_user(),
    )


def _say_if_never(method: Method, device_type: str) -> None:
    """Warn of a method that no length starts where the future is masked on this kind of device.

    A model may have come there after its patch.
    """
    if torch.compiler.is_compiling() or method.stays_exact:
        return
    if method.shortest_length(device_type, causal=True) is None:
        said = f"The patch approximates nothing: {why_never(method.method, device_type)}."
        warnings.warn(said, stacklevel=stacklevel_of_user())


# The models that were told, for as long as there are any.
_told: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _say_once_if_trained(method: Method | None, call: Call) -> None:
    """Warn, once for each model, of exact attention in a layer that was trained with another."""
    patch: ModulePatch | None = getattr(call.module, RECORD, None)
    if method is None or not method.needs_fine_tuning or patch is None or patch.owner is None:
        return
    N, M = call.query.shape[2], call.key.shape[2]
    if torch.compiler.is_compiling() or M == N == 1 or patch.owner in _told:
        return
    why = "of a keyword of this call"
    if call.mask is not None and call.mask.ndim != 2:
        why = "of a mask for each query, such as that of packed texts"
    elif M != N:
        why = f"there are {M - N} more keys than tokens, such as a prefix"
    _told.add(patch.owner)
    warnings.warn(
        f'{type(patch.owner).__name__} attends exactly here, not by "{method.method}", which it was converted to, '
        f"because {why}. Train and call it with padding and a 2-D attention_mask alone, or take the exact model",
        stacklevel=stacklevel_of_user(),
    )


def _exact(call: Call) -> Attended:
    """What no method serves, by transformers' own SDPA path; what that has not, by what is next to it."""
    query, key, mask = call.query, call.key, call.mask
    asked: dict[str, Any]
    if call.softcap is not None:
        return _bent(call, call.softcap)
    if mask is not None and mask.ndim == IN_BLOCKS:
        causal = hides_the_future(call.module.config)  # as `padding_mask` has it
        if not call.wants_weights and all(call.options.get(keyword) is None for keyword in NOT_IN_BLOCKS):
            asked = {"dropout": call.dropout, "scale": call.scale, "sinks": call.sinks}
            return attend_in_blocks(query, key, call.value, mask, causal=causal, **asked), None
        mask = dense_mask(mask, query.shape[2], causal=causal)
    elif mask is not None and mask.ndim == 2:
        mask = visible_keys(mask, query.shape[2], causal=call.hides_future)
    asked = {"dropout": call.dropout, "scaling": call.scale, "sinks": call.sinks}
    output = sdpa_path(call.module, query, key, call.value, mask, **asked, **call.options)
    if not call.wants_weights:
        return output, None
    if call.options.get("cache") is not None:
        raise ValueError(
            f"{type(call.module).__name__} passes cache=, with which SDPA gives no attention weights: leave "
            'output_attentions out, or take attn_implementation="eager"'
        )
    given: dict[str, Any] = {"sinks": call.sinks, "bias": call.options.get("position_bias")}
    return output, exact_weights(query, key, mask, call.scale, causal=call.hides_future, **given)


def _bent(call: Call, softcap: float) -> Attended:
    """Exact attention whose scores are bent by a tanh."""
    if call.sinks is not None:
        raise ValueError(
            f"{type(call.module).__name__} passes s_aux= beside softcap=, which nothing here attends with"
        )
    mask, N = call.mask, call.query.shape[2]
    in_blocks = mask is not None and mask.ndim == IN_BLOCKS
    causal = hides_the_future(call.module.config) if in_blocks else call.hides_future and N > 1
    asked: dict[str, Any] = {"softcap": softcap, "scale": call.scale, "dropout": call.dropout}
    output = attend_bent(call.query, call.key, call.value, mask, causal=causal, **asked)
    if not call.wants_weights:
        return output, None
    if mask is not None and in_blocks:
        mask = dense_mask(mask, N, causal=causal)
    elif mask is not None and mask.ndim == 2:
        mask = visible_keys(mask, N, causal=causal)
    return output, exact_weights(call.query, call.key, mask, call.scale, causal=causal, softcap=softcap)


def _over_cache(method: Method, call: Call) -> Attended:
    """The last tokens over a cache: by a method that has a form for them, and exactly where it has none."""
    if call.mask is not None and call.mask.dtype != torch.bool:
        _say_once_if_trained(method, call)
        return _exact(call)
    options = Options(scale=call.scale, causal=True, module=call.module, positions=call.positions)
    attend: Any = partial(method.attend_over_cache, call.query, call.key, mask=call.mask, options=options)
    result = attend(call.value)
    if result is None:
        return _exact(call)
    weights = method.implied_weights(call.query, call.key, attend) if call.wants_weights else None
    return result.transpose(1, 2).contiguous(), weights


def _by_method(method: Method, call: Call) -> Attended:
    """A whole text, or the prompt of one, by the method; its causal form where the future is masked."""
    options: dict[str, Any] = {
        "key_mask": call.mask,
        "scale": call.scale,
        "causal": call.hides_future,
        "prompt": call.prompt,
        "training": call.module.training,
        "sinks": call.sinks,
        "module": call.module,
        "positions": call.positions,
    }
    result = method.run(call.query, call.key, call.value, dropout_p=call.dropout, **options)
    weights = method.weights(call.query, call.key, **options) if call.wants_weights else None
    measured = None if method.tolerance is None else last_measured(call.module)
    if weights is not None and measured is not None and bool(measured.exact.any()):
        mask = visible_keys(call.mask, call.query.shape[2], causal=call.hides_future)
        asked: dict[str, Any] = {"causal": call.hides_future, "sinks": call.sinks}
        exact = exact_weights(call.query, call.key, mask, call.scale, **asked)
        weights = torch.where(measured.exact[..., None, None], exact, weights)
    return result.transpose(1, 2).contiguous(), weights


def matrices_are_collected(module: nn.Module) -> bool:
    """Whether attention matrices were asked for where no argument says so: GPT-2 and OPT keep it to themselves."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    # In a compiled layer of a model that is not compiled itself, the collector's state cannot be traced.
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False
    return "attentions" in (_active_collector.get() or ())


def method_for(module: nn.Module, method: str) -> Method | None:
    """The method of a module: its own patch's, else those of `config.effattn`; None where it stays exact.

    Raises:
        ValueError: a causal module, a model type outside the table, or settings that were made for another method.
    """
    if not is_self_attention(module):
        if model_type_of(module) is None:
            raise ValueError(_not_served(module, method))
        if not is_of_transformers(module):
            _say_unknown(module, method)
        return None  # cross-attention, or the decoder beside an encoder
    if not is_served(module):
        raise ValueError(causal_error(method, type(module).__name__))
    patch: ModulePatch | None = getattr(module, RECORD, None)
    if patch is None and METHODS[method].needs_fine_tuning:
        raise ValueError(
            f'"{method}" adds parameters to a model, which attn_implementation= and config.effattn cannot: convert it '
            f'with patch_attention(model, "{method}", ...), and load a converted one with hf_effattn.from_pretrained'
        )
    chosen = patch.method if patch is not None else _method_from_config(module, method)
    if chosen is not None and chosen.method != method:
        raise ValueError(
            f'attn_implementation is "{method}", but the settings in config.effattn are those of '
            f'"{chosen.method}"; change the method with patch_attention(model, "{method}", ...)'
        )
    return chosen


def _say_unknown(module: nn.Module, method: str) -> None:
    """Warn of attention that someone wrote anew and that may be a layer's self-attention."""
    entry = model_type_of(module)
    if entry is None or torch.compiler.is_compiling():
        return
    warnings.warn(
        f'{type(module).__name__} attends exactly: "{method}" replaces what inherits from '
        f"{' or '.join(entry.attention)}. Let it inherit from it where it is self-attention",
        stacklevel=stacklevel_of_user(),
    )


def _method_from_config(module: nn.Module, method: str) -> Method | None:
    stored, causal = getattr(module.config, FIELD, None), hides_the_future(module.config)
    if stored is None:
        by_default = make_method(method, causal=causal)
        warn_of_other_settings(module.config, by_default, None)
        return by_default.for_layers(())  # raises where each layer needs settings of its own
    chosen, layers = read_stored(stored, method, causal=causal)
    warn_of_other_settings(module.config, chosen, layers)
    if layers is None and not chosen.differs_by_layer:
        return chosen
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(
            f"config.effattn tells layers apart, but a {type(module).__name__} does not know its own index; use "
            "patch_attention or hf_effattn.from_pretrained, which count the layers"
        )
    config: Any = module.config
    selected = layers is None or index in check_layers(layers, config.num_hidden_layers)
    return chosen.for_layers((index,)) if selected else None


def causal_error(method: str, name: str) -> str:
    """Why a method refuses a model that masks the future, and what to do."""
    return (
        f'{name} is causal, and "{method}" serves causal attention in decoders of the types '
        f"{supported_model_types(causal=True)} only; in others its clusters could mix later tokens into earlier ones. "
        'Keep attn_implementation="sdpa"'
    )


def unsupported_error(method: str, name: str, model_type: str) -> str:
    """Why a method refuses a model type that is not in the table, and what to do."""
    if model_type in NOT_SERVED:
        return (
            f'"{method}" does not serve {name}: its model type "{model_type}" {NOT_SERVED[model_type]}. It serves '
            f"{supported_model_types()}; leave this model as it is"
        )
    return (
        f'"{method}" does not know {name} (model type "{model_type}"), so it cannot tell its self-attention from '
        f'other attention. It serves {supported_model_types()}; keep attn_implementation="sdpa" for this model'
    )


def _not_served(module: nn.Module, method: str) -> str:
    name, model_type = type(module).__name__, getattr(module.config, "model_type", "unknown")
    if is_causal(module) and model_type not in NOT_SERVED:
        return causal_error(method, name)
    return unsupported_error(method, name, model_type)


def register() -> None:
    """Make every method known to transformers, as a value for `attn_implementation`; a second call changes nothing."""
    for method in list_methods():
        AttentionInterface.register(method, partial(attention, method))
        # Without a mask function of the same name transformers passes no mask, and padding is attended to.
        AttentionMaskInterface.register(method, padding_mask)
        READ_BY.add(method)
