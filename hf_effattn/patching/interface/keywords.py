"""The keywords that transformers passes to an attention function, and what each means for a method.

Models hand on every keyword of their call, even one that nothing reads: sentence-transformers calls a model with its
own earlier outputs. A keyword that is in no list here therefore counts only where something that computes attention
names it: the forward of the attention module, an attention function of transformers, or transformers' types of the
keywords of a model. All others change nothing in exact attention either, and are ignored. A new version of
transformers may name a new keyword. The layers that get it are then exact, with a warning, and a test fails with it.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TransformersKwargs

from ...ops.shared.callers import stacklevel_of_user
from ..exact.images import IMAGES
from ..position_rows import POSITION_ROWS

# Parameters of `attention`, and keywords that it reads.
READ = frozenset(
    {
        "module",
        "query",
        "key",
        "value",
        "attention_mask",
        "scaling",
        "dropout",
        "is_causal",
        "output_attentions",
        "use_cache",
        "s_aux",
        "softcap",
        IMAGES,
        POSITION_ROWS,
    }
)

# Attention is the same whatever their value: they are for other parts of the model or for the loss, or tell what the
# queries, the keys or the mask hold already.
WITHOUT_EFFECT = frozenset(
    {
        "position_ids",  # in the queries and keys; the mask tells where they begin anew
        "encoder_hidden_states",
        "encoder_attention_mask",
        "past_key_values",
        "cache_position",
        "deterministic",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
        "return_loss",
        "interpolate_pos_encoding",
        "head_mask",  # transformers 5 accepts it and ignores it everywhere
        "max_length_q",  # how long the longest packed text is, beside cu_seq_lens_q
        "max_length_k",
    }
)

# They change attention in a way that no method implements. SDPA does, by its function or by the mask.
EXACT = frozenset({"sliding_window", "position_bias", "cache"})

# SDPA ignores them silently, or raises without saying what to do.
_SAYS_WHAT = {
    "sinks": "an attention sink, one more column in the softmax",
    "indices": "the keys that a sparse attention chose",
    "block_indices": "the blocks of keys that a sparse attention chose",
    "seq_idx": "which of several packed texts a token belongs to",
    "cu_seq_lens_q": "where packed texts begin",
    "cu_seq_lens_k": "where packed texts begin",
}
NOT_IN_SDPA = frozenset(_SAYS_WHAT)
# A dense mask keeps packed texts apart already.
_IN_A_DENSE_MASK = frozenset({"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"})
# Older versions have no position_bias and cache, and take any keyword.
_MISSING_IN_THIS_SDPA = (
    frozenset({"position_bias", "cache"}) - inspect.signature(sdpa_attention_forward).parameters.keys()
)

KNOWN = READ | WITHOUT_EFFECT | EXACT | NOT_IN_SDPA


def needs_exact_attention(
    method: str, module: nn.Module, keywords: Mapping[str, Any], *, dense: bool, causal: bool
) -> bool:
    """Whether a keyword changes attention in a way that no method has, so that SDPA has to run, with all keywords.

    Args:
        method (`str`): the method that would run.
        module (`nn.Module`): the attention module.
        keywords (`Mapping`): what transformers passed beside the named arguments.
        dense (`bool`): whether there is a mask that says for each query what it sees.
        causal (`bool`): whether no query may see a later key; only then transformers makes masks of positions.

    Warns of a keyword that is in no list and that something which attends names.

    Raises:
        ValueError: a keyword that SDPA does not honour either.
    """
    exact, name = False, type(module).__name__
    for keyword, value in keywords.items():
        if value is None or keyword in READ or keyword in WITHOUT_EFFECT:
            continue
        if keyword not in KNOWN and not _is_named(keyword, type(module)):
            continue
        refused = keyword in NOT_IN_SDPA and not (dense and keyword in _IN_A_DENSE_MASK)
        if refused or keyword in _MISSING_IN_THIS_SDPA:
            raise ValueError(_refusal(method, name, keyword, causal=causal))
        if keyword not in KNOWN and not torch.compiler.is_compiling():
            warnings.warn(
                f'{name} gets {keyword}=, which transformers attends with and "{method}" does not know: it attends '
                "exactly, as without the patch. If the keyword came from your call of the model, leave it out there",
                stacklevel=stacklevel_of_user(),
            )
        exact = True
    return exact


@torch.compiler.assume_constant_result
def _is_named(keyword: str, kind: type[nn.Module]) -> bool:
    """Whether something that attends, for modules of a class, names a keyword."""
    declared = TransformersKwargs.__annotations__.keys() | FlashAttentionKwargs.__annotations__.keys()
    return keyword in declared or any(keyword in _names_in(function) for function in _that_attend(kind))


def _that_attend(kind: type[nn.Module]) -> Iterator[Callable]:
    """The forward of a class of modules, the eager function of its file, and transformers' attention functions."""
    yield kind.forward
    for base in kind.__mro__:
        eager = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if eager is not None:
            yield eager
    # Ours are no plain functions.
    yield from filter(inspect.isfunction, ALL_ATTENTION_FUNCTIONS.values())


@cache
def _names_in(function: Callable) -> frozenset[str]:
    """What a function names where it takes and hands on keywords: its parameters, and its constant strings."""
    code = inspect.unwrap(function).__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frozenset(parameters) | frozenset(_strings(code.co_consts))


def _strings(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):  # the keywords of a call
            yield from _strings(constant)
        elif isinstance(constant, CodeType):
            yield from _strings(constant.co_consts)


def _refusal(method: str, name: str, keyword: str, *, causal: bool) -> str:
    what = _SAYS_WHAT.get(keyword)
    instead = (
        "call the model with padding and an attention_mask instead"
        + (", or with position_ids that begin anew at each text" if causal else "")
        if keyword in _IN_A_DENSE_MASK
        else 'keep the attn_implementation that the model had (unpatch_attention), or "eager"'
    )
    return (
        f'{name} passes {keyword}={"" if what is None else f" ({what})"}, which neither "{method}" nor the SDPA of '
        f"this transformers honours; {instead}"
    )
