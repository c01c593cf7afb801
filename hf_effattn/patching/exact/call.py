"""Exact attention of one call of transformers, each by the function that serves it.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops.shared.precision import cast_by_autocast
from ..model_types.stacks import hides_the_future
from ..position_rows import PositionTerms
from .images import AttentionOutput
from .reference import exact_weights, sdpa_path, visible_keys
from .softcap import attend_with_softcap
from .windows import IN_BLOCKS, attend_in_blocks, dense_mask

# Keywords by which transformers' SDPA path adds to the scores of all keys, or finds the keys elsewhere.
NOT_IN_BLOCKS = "position_bias", "cache"


@dataclass
class Call:
    """One call of transformers: the arguments of `attention`, and what they ask for.

    Args:
        attention_sinks (`torch.Tensor`, *optional*): `(H,)`, of a score that has a weight and no value.
        softcap (`float`, *optional*): the bound of the scores, by a tanh.
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
    attention_sinks: torch.Tensor | None
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


def run_exactly(call: Call) -> AttentionOutput:
    """What no method serves, by transformers' own SDPA path; what that has not, by what is next to it."""
    query, key, mask = call.query, call.key, call.mask
    options: dict[str, Any]
    if call.softcap is not None:
        return _with_softcap(call, call.softcap)
    if mask is not None and mask.ndim == IN_BLOCKS:
        causal = hides_the_future(call.module.config)  # as `padding_mask` has it
        if not call.wants_weights and all(call.options.get(keyword) is None for keyword in NOT_IN_BLOCKS):
            options = {"dropout": call.dropout, "scale": call.scale, "attention_sinks": call.attention_sinks}
            return attend_in_blocks(query, key, call.value, mask, causal=causal, **options), None
        mask = dense_mask(mask, query.shape[2], causal=causal)
    elif mask is not None and mask.ndim == 2:
        mask = visible_keys(mask, query.shape[2], causal=call.hides_future)
    options = {"dropout": call.dropout, "scaling": call.scale, "attention_sinks": call.attention_sinks}
    output = sdpa_path(call.module, query, key, call.value, mask, **options, **call.options)
    if not call.wants_weights:
        return output, None
    if call.options.get("cache") is not None:
        raise ValueError(
            f"{type(call.module).__name__} passes cache=, with which SDPA gives no attention weights: leave "
            'output_attentions out, or take attn_implementation="eager"'
        )
    given: dict[str, Any] = {"attention_sinks": call.attention_sinks, "bias": call.options.get("position_bias")}
    return output, exact_weights(query, key, mask, call.scale, causal=call.hides_future, **given)


def _with_softcap(call: Call, softcap: float) -> AttentionOutput:
    """Exact attention with logit softcapping."""
    if call.attention_sinks is not None:
        raise ValueError(
            f"{type(call.module).__name__} passes s_aux= beside softcap=, which nothing here attends with"
        )
    mask, N = call.mask, call.query.shape[2]
    in_blocks = mask is not None and mask.ndim == IN_BLOCKS
    causal = hides_the_future(call.module.config) if in_blocks else call.hides_future and N > 1
    options: dict[str, Any] = {"softcap": softcap, "scale": call.scale, "dropout": call.dropout}
    output = attend_with_softcap(call.query, call.key, call.value, mask, causal=causal, **options)
    if not call.wants_weights:
        return output, None
    if mask is not None and in_blocks:
        mask = dense_mask(mask, N, causal=causal)
    elif mask is not None and mask.ndim == 2:
        mask = visible_keys(mask, N, causal=causal)
    return output, exact_weights(call.query, call.key, mask, call.scale, causal=causal, softcap=softcap)
