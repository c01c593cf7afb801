"""How a model is divided among processes: which heads are this one's, and whether it has some of the tokens only."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from .transformers_internals import (
    context_parallel_is_on,
    drops_masks,
    is_by_ulysses,
    replaced_functions,
    tensor_parallel_rank,
)

if TYPE_CHECKING:
    from .methods import Method

# An attribute of the attention modules that `parallelize` has divided.
SHARE = "_effattn_share"


class HeadShare(NamedTuple):
    """Which of the heads of an attention module a process has, of as many equal shares as there are ranks.

    Args:
        rank (`int`, *optional*): from 0, the number of the share; None where nothing tells.
        ranks (`int`): how many shares there are.
    """

    rank: int | None
    ranks: int


def head_share(module: nn.Module, tp_size: int | None = None) -> HeadShare | None:
    """The share of the heads that this process has; None where it has all of them.

    Args:
        module (`nn.Module`): an attention module.
        tp_size (`int`, *optional*): of the model around it, which transformers may have divided.
    """
    if SHARE in vars(module) or tp_size in (None, 1):
        return vars(module).get(SHARE)
    return HeadShare(tensor_parallel_rank(module), tp_size)


def for_this_process(method: "Method | None", module: nn.Module, tp_size: int | None = None) -> "Method | None":
    """What this process runs of the method of a layer: settings of single heads are those of its share.

    Args:
        method (`Method`, *optional*): what `Method.for_layers` gave; None where the layer stays exact.
        module (`nn.Module`): the attention module.
        tp_size (`int`, *optional*): as in `head_share`.

    Raises:
        ValueError: settings of single heads, and it is not known which heads are this process's.
    """
    share = head_share(module, tp_size)
    return method if method is None or share is None else method.for_share(*share)


def check_tokens_undivided(modules: Iterable[nn.Module], method: str) -> None:
    """Raise where texts are divided by tokens, of which a method would attend to each part alone.

    Args:
        modules (`Iterable[nn.Module]`): attention modules.
        method (`str`): what runs in them, or is to.

    Raises:
        ValueError: DeepSpeed's Ulysses, accelerate's or torch's context parallelism is on.
    """
    who = _who_divides_tokens(modules)
    if who is not None:
        raise ValueError(
            f'{who}, and "{method}" would attend to each part of a text alone, or without its padding mask. Divide '
            "the heads instead: hf_effattn.parallelize(model, mesh), or transformers' tp_plan. Or keep the exact "
            "model: unpatch_attention(model)"
        )


def _who_divides_tokens(modules: Iterable[Any]) -> str | None:
    ulysses = next((name for name, attend in replaced_functions().items() if is_by_ulysses(attend)), None)
    if ulysses is not None:
        return f'DeepSpeed\'s Ulysses has taken the place of "{ulysses}" attention and divides texts by tokens'
    if any(map(drops_masks, modules)):
        return "accelerate's context parallelism divides texts by tokens and drops attention masks"
    if context_parallel_is_on():
        return "torch's context parallelism divides texts by tokens"
    return None
