"""What transformers calls: an attention function, registered under the name of every method with its mask function.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim.

One function receives every attention of a model. It runs the method in the self-attention of the model types in the
table (of decoders by the method's causal form), and transformers' own SDPA path in everything else: cross-attention,
decoding steps and further chunks of a prompt over a cache (unless the method has a form for them), dense 4-D masks,
packed sequences, layers that are not selected, inputs too short to gain, and wherever a keyword changes attention
(`keywords.py`). Layers with a sliding window are exact, too, in blocks (`exact/windows.py`). Where a method would look
into the future it raises. Longformer, T5 and their kinds have a forward of their own, which calls no such function:
`exact/architectures/`.
"""

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...ops.shared.callers import stacklevel_of_user
from ...ops.shared.graphs import in_a_graph
from ..exact.call import Call, run_exactly
from ..exact.images import IMAGES, AttentionOutput, attend_to_each
from ..exact.reference import exact_weights, visible_keys
from ..exact.windows import hides_keys
from ..measured import expect_measurement, last_measured
from ..methods import Method, list_methods
from ..methods.base import Options
from ..methods.crossover import why_never
from ..model_types.stacks import (
    hides_the_future,
    is_causal,
    is_self_attention,
    is_window_of_image,
)
from ..module_patch import RECORD, ModulePatch
from ..parallel_state import check_tokens_undivided
from ..position_rows import POSITION_ROWS, READ_BY, PositionRows
from ..transformers_internals import matrices_are_collected
from .keywords import needs_exact_attention
from .mask_function import padding_mask
from .settings import method_for


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
) -> AttentionOutput:
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
            keyword that changes attention in a way that SDPA does not know either, or texts divided by tokens.
    """
    if not torch.compiler.is_compiling():  # what divides texts comes after the patch, as a rule
        check_tokens_undivided([module], method)
    images = kwargs.pop(IMAGES, None)
    if images is not None:
        kwargs |= {"attention_mask": None, "scaling": scaling, "dropout": dropout}
        return attend_to_each(partial(attention, method, module, **kwargs), images, query, key, value)
    rows: PositionRows | None = kwargs.pop(POSITION_ROWS, None)
    positions = None
    if rows is not None:
        query, key, value, positions = rows.split(query, key, value)
    wants_weights = bool(kwargs.pop("output_attentions", None)) or matrices_are_collected(module)
    attention_sinks, softcap = kwargs.pop("s_aux", None), kwargs.pop("softcap", None)
    chosen = method_for(module, method)
    if chosen is not None and chosen.tolerance is not None:
        expect_measurement(module)
    N, M, dense = query.shape[2], key.shape[2], attention_mask is not None and attention_mask.ndim != 2
    if not hides_keys(kwargs.get("sliding_window"), M, module.config):
        kwargs.pop("sliding_window", None)
    hides_future = _hides_future(module, kwargs.get("is_causal"), attention_mask)
    # A method's causal form is for decoders alone, and so is a prompt's key mask, which implies that form.
    as_its_type = hides_future == _masks_the_future(module)
    unknown = needs_exact_attention(method, module, kwargs, dense=dense, causal=hides_future)
    over_cache = hides_future and M != N and (dense or N == 1)
    if hides_future and not dense and N > 1:
        # The keys of a prompt are the first rows of a static cache. Later chunks of a prompt come with a dense mask.
        key, value = key[:, :, :N], value[:, :, :N]
    prompt = not torch.is_grad_enabled() and bool(kwargs.get("use_cache"))
    settings = scaling, dropout, wants_weights, hides_future, prompt
    call = Call(module, query, key, value, attention_mask, attention_sinks, softcap, *settings, kwargs, positions)
    not_by_method = softcap is not None or (attention_sinks is not None and not hides_future)
    attend: Callable[[Call], AttentionOutput] = run_exactly
    if chosen is None or unknown or not as_its_type or not_by_method:
        _say_once_if_trained(chosen, call)
    elif over_cache:
        call.cast()
        attend = partial(_over_cache, chosen)
    elif dense or key.shape[2] != N or (hides_future and N == 1) or is_window_of_image(module, N):
        if dense and hides_future and in_a_graph() and not chosen.is_exact(N, query.device.type):
            _say_packed(method)
        _say_once_if_trained(chosen, call)
    elif not chosen.chooses_exact(N, query.device.type):
        call.cast()
        attend = partial(_by_method, chosen)
    elif hides_future:
        _say_if_never(chosen, query.device.type)
    output, weights = attend(call)
    return output if rows is None else rows.put_in_front(output), weights


def _hides_future(module: nn.Module, keyword: bool | None, mask: torch.Tensor | None) -> bool:
    """Whether no query may see a later key: the keyword says so (CLIP's text), or else the module."""
    causal = hides_the_future(module.config)
    if causal and mask is not None and mask.ndim == 2 and is_self_attention(module):
        return True  # `padding_mask` gives `(B, N)` in place of a decoder's dense mask, whatever the keyword says
    if keyword is None or (keyword and not is_self_attention(module)):
        return is_causal(module)
    return bool(keyword)


def _masks_the_future(module: nn.Module) -> bool:
    """Whether a module has a method for decoders: its patch decides, also for calls that attend both ways."""
    patch: ModulePatch | None = getattr(module, RECORD, None)
    return hides_the_future(module.config) if patch is None else patch.causal


@torch.compiler.assume_constant_result  # so that it is said while a graph is made
def _say_packed(method: str) -> None:
    """Warn that a graph holds a decoder's exact attention, because it has to serve packed texts as well."""
    warnings.warn(
        f'this graph is traced with a dense mask, under which attention stays exact: "{method}" does not run in it. '
        "transformers makes one where texts may be packed: pass attention_mask=torch.ones_like(input_ids) if none is",
        stacklevel=stacklevel_of_user(),
    )


def _say_if_never(method: Method, device_type: str) -> None:
    """Warn where a decoder's method never starts by itself on this kind of device.

    The model may have been moved there after it was patched.
    """
    if torch.compiler.is_compiling():
        return
    if method.shortest_length(device_type) is None:
        said = f"The patch approximates nothing: {why_never(method.method, device_type)}."
        warnings.warn(said, stacklevel=stacklevel_of_user())


# The models for which the warning has been given.
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


def _over_cache(method: Method, call: Call) -> AttentionOutput:
    """The last tokens over a cache: by a method that has a form for them, and exactly where it has none."""
    if call.mask is not None and call.mask.dtype != torch.bool:
        _say_once_if_trained(method, call)
        return run_exactly(call)
    options = Options(scale=call.scale, causal=True, module=call.module, positions=call.positions)
    attend: Any = partial(method.attend_over_cache, call.query, call.key, mask=call.mask, options=options)
    result = attend(call.value)
    if result is None:
        return run_exactly(call)
    weights = method.implied_weights(call.query, call.key, attend) if call.wants_weights else None
    return result.transpose(1, 2).contiguous(), weights


def _by_method(method: Method, call: Call) -> AttentionOutput:
    """A whole text, or the prompt of one, by the method; its causal form where the future is masked."""
    options: dict[str, Any] = {
        "key_mask": call.mask,
        "scale": call.scale,
        "causal": call.hides_future,
        "prompt": call.prompt,
        "training": call.module.training,
        "attention_sinks": call.attention_sinks,
        "module": call.module,
        "positions": call.positions,
    }
    result = method.run(call.query, call.key, call.value, dropout_p=call.dropout, **options)
    weights = method.weights(call.query, call.key, **options) if call.wants_weights else None
    measured = None if method.tolerance is None else last_measured(call.module)
    if weights is not None and measured is not None and bool(measured.exact.any()):
        mask = visible_keys(call.mask, call.query.shape[2], causal=call.hides_future)
        exact_options: dict[str, Any] = {"causal": call.hides_future, "attention_sinks": call.attention_sinks}
        exact = exact_weights(call.query, call.key, mask, call.scale, **exact_options)
        weights = torch.where(measured.exact[..., None, None], exact, weights)
    return result.transpose(1, 2).contiguous(), weights


def register() -> None:
    """Make every method known to transformers, as a value for `attn_implementation`; a second call changes nothing."""
    for method in list_methods():
        AttentionInterface.register(method, partial(attention, method))
        # Without a mask function of the same name transformers passes no mask, and padding is attended to.
        AttentionMaskInterface.register(method, padding_mask)
        READ_BY.add(method)
