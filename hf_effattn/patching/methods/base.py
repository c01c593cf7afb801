"""What all attention methods share.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.

A method is a subclass of `Method`, a frozen dataclass, with its line in `methods.METHODS`: its fields are what a user
may set, validated once, `group` makes everything that carries no gradient (labels), `attend` and `attend_causal` run
the ops. One that changes a model beyond its attention says how: `parameters_for`, `attach` and `detach`, and for
trained parameters `from_checkpoint`, `lost_by`, `plan_extension`. The rest of patching knows no method by its name.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import nn

from ...ops.derivatives import check_no_onnx
from ...ops.shared.graphs import in_a_graph, is_exported_to_onnx, is_traced
from ..cuda_graphs import CUDA_GRAPH, attend_by_graph
from ..exact.reference import exact_attention, exact_weights, visible_keys
from ..model_types.stacks import Stack
from ..position_rows import PositionTerms
from ..tolerance import ON_EXCESS, MethodOutput
from ..traced_lengths import hold_choice
from .crossover import crossover_length

Groups = tuple[torch.Tensor, ...]

LARGEST_COUNT = 2**31 - 1  # of tokens, clusters, ...: the ops take integers of 64 bits and multiply them


@dataclass(kw_only=True)
class Options:
    """The arguments of a call of attention, except queries, keys and values.

    Args:
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = attend; it masks the same rows of the queries.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights.
        causal (`bool`): whether no query sees a later key.
        prompt (`bool`): where causal, whether only what follows the last token will be read, so that a tolerance may
            change what comes before it.
        training (`bool`): where causal, whether the model learns from the output.
        attention_sinks (`torch.Tensor`, *optional*): where causal, `(H,)`, a score of each query head that takes its
            weight in every softmax and has no value (gpt-oss).
        module (`nn.Module`, *optional*): the attention module, for methods that use its weights.
        positions (`tuple`, *optional*): what the module projected of the positions that the method gave it, see
            `position_rows.py`.
    """

    key_mask: torch.Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    causal: bool = False
    prompt: bool = True
    training: bool = False
    attention_sinks: torch.Tensor | None = None
    module: nn.Module | None = None
    positions: PositionTerms | None = None

    @property
    def learns(self) -> bool:
        """Whether the model is in training."""
        return self.training or (self.module is not None and self.module.training)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """An attention method; its fields are the settings.

    Args:
        min_length (`int`, *optional*): inputs shorter than this many tokens run exact attention. Default: the length
            from which the method is faster with these settings, from what was measured on this kind of device
            (`crossover.json`; where nothing was, 4 times the length measured on others, and no length at all where
            the future is masked); 0 forces the method.
        tolerance (`float`, *optional*): the relative L2 error of a head's attention output that is allowed: in every
            forward pass 64 queries of each text and head are computed exactly too, on a CPU only 16 where these show
            a head well within it, and `on_excess` says what happens where their error, with a margin, is larger.
            `hf_effattn.measured_error` tells what they measured. Default: nothing is measured.
        on_excess (`str`): `"exact"`: the head is computed exactly, too; `"warn"` or `"raise"` a `RuntimeError`. In
            compiled graphs, in training and where the future is masked (but for generation's prompts) errors are
            measured and nothing else.
        cuda_graph (`str`): `"auto"`: on a GPU the attention of inputs of one shape is captured as a CUDA graph at the
            second call and replayed after that, bit for bit the same: the host then starts one graph and not a dozen
            kernels or more. Not in training, in graphs of `torch.compile`, in float64, with dropout, a tolerance or
            `check_finite`. Layers share graphs, and those of the latest 32 shapes are kept, with room for their inputs
            and outputs. Where a capture fails, one warning says so. The default is `"never"`, because no capture has
            run on a GPU yet.
    """

    method: ClassVar[str]
    causal: ClassVar[bool | None] = None  # whether the settings are those of decoders; None: of all models
    summary: ClassVar[str]  # half a sentence, for a reader who has to choose
    needs_fine_tuning: ClassVar[bool] = False  # it changes what the model computes, and is trained into it
    stays_exact: ClassVar[bool] = False  # in every layer, at every length
    price: ClassVar[tuple[str, ...]] = ()  # the counts that the method's time depends on most
    parameters_name: ClassVar[str] = ""  # of the module with the parameters that it adds to the model without its head
    # By how much it raised the perplexity of a language model at most.
    decoder_loss: ClassVar[float | None] = None
    purpose: ClassVar[dict[str, str]] = {
        "min_length": "inputs with fewer tokens run exact attention; None: the measured length, 0: force the method",
        "tolerance": "the error allowed, measured on up to 64 queries of each head and text; None: unmeasured",
        "on_excess": "what to do with a head above its tolerance: exact, warn or raise",
        "cuda_graph": "whether a GPU replays attention as a CUDA graph from a shape's second call on: auto or never",
    }
    differs_by_layer: ClassVar[bool] = False  # `for_layers` decides what a layer runs
    unnamed: ClassVar[tuple[str, ...]] = ("min_length", "cuda_graph")  # settings that a short name leaves out

    # Beyond these a hand-edited config would run for hours, or out of memory, before anyone learns why.
    most: ClassVar[dict[str, int]] = {"iterations": 1_000, "bits": 4_096}

    min_length: int | None = None
    tolerance: float | None = None
    on_excess: str = "exact"
    cuda_graph: str = "never"

    def __post_init__(self) -> None:
        if self.min_length is not None:
            self._check_int("min_length", minimum=0)
        self._check_number("tolerance")
        self._check_choice("on_excess", ON_EXCESS)
        if self.tolerance is not None and (self.needs_fine_tuning or self.stays_exact):
            trained = "is trained as it is and " if self.needs_fine_tuning else ""
            raise ValueError(f'"{self.method}" {trained}approximates nothing: it takes no tolerance; leave it out')
        self._check_choice("cuda_graph", CUDA_GRAPH)
        if self.cuda_graph != "never" and self.stays_exact:
            raise ValueError(f'"{self.method}" starts few kernels: it takes no cuda_graph; leave it out')

    def is_exact(self, length: int, device_type: str) -> bool:
        """Whether exact attention runs instead on so many tokens, because the method would save nothing."""
        shortest = self.shortest_length(device_type)
        return shortest is None or length < shortest or self.counts_reach(length)

    def counts_reach(self, length: int) -> bool:
        """Whether there is nothing to approximate in so many tokens, because one of the counts reaches them."""
        return any(getattr(self, name) >= length for name in self.price)

    def why_exact(self, length: int, device_type: str) -> str | None:
        """Why exact attention runs on so many tokens; None where it does not.

        Returns:
            `str`, *optional*: `"settings"` (there is nothing to approximate) or `"min_length"` (the method can be
            forced, as a report does).
        """
        if self.counts_reach(length):
            return "settings"
        return "min_length" if self.is_exact(length, device_type) else None

    def shortest_length(self, device_type: str) -> int | None:
        """The number of tokens from which the method runs on this kind of device ("cpu", "cuda", ...); None: never."""
        if self.min_length is not None:
            return self.min_length
        price = {name: getattr(self, name) for name in self.price}
        return crossover_length(self.method, price, device_type, causal=bool(self.causal))

    def chooses_exact(self, length: int, device_type: str) -> bool:
        """What `is_exact` says of so many tokens; a traced graph raises at lengths of which it says otherwise."""
        if is_traced() and not is_exported_to_onnx():
            hold_choice(length, partial(self.is_exact, device_type=device_type), self.shortest_length(device_type))
        return self.is_exact(length, device_type)

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Self-attention by the method, its clustering included; exact attention where the method would save nothing.

        Args:
            query (`torch.Tensor`): `(B, H, N, D)`, any strides.
            key (`torch.Tensor`): `(B, H, N, D)`, any strides.
            value (`torch.Tensor`): `(B, H, N, Dv)`, any strides.
            arguments: fields of `Options`.

        Returns:
            `torch.Tensor`: `(B, H, N, Dv)`. Masked rows are 0 where the method ran.

        Raises:
            ValueError: more queries than keys or fewer, sizes that do not fit together.
            TypeError: a mask that is not boolean.
        """
        options = Options(**arguments)
        N, M = query.shape[2], key.shape[2]
        if self.is_exact(min(N, M), query.device.type):
            return attend_exactly(query, key, value, options)
        check_no_onnx(self.instead_of_onnx)
        if self.cuda_graph != "never" and not in_a_graph():
            return self._run_by_graph(query, key, value, options)
        if options.causal:
            result = self.attend_causal(query, key, value, options)
        elif N != M:
            raise ValueError(
                f"{self.method!r} serves self-attention, where queries and keys are as many; got {N} queries and {M} "
                "keys"
            )
        else:
            groups = self.group(query.detach(), key.detach(), options.key_mask, options.scale)
            result = self.attend(query, key, value, options, groups)
        if self.tolerance is None or options.dropout_p > 0:
            return result
        # A graph cannot wait for what is measured, and a decoder's earlier tokens must not depend on later ones.
        captured = torch.compiler.is_compiling() or (query.is_cuda and torch.cuda.is_current_stream_capturing())
        decides = not (options.learns or captured or (options.causal and not options.prompt))
        if is_traced():
            if decides:
                raise NotImplementedError(
                    "a tolerance decides by each text, and torch.jit.trace would keep what it decided for one: patch "
                    "the model without a tolerance to trace it"
                )
            return result
        heads = self.approximated_heads(query.shape[1] // key.shape[1])
        given = query, key, value, options.key_mask, options.scale, options.causal, result
        attended = MethodOutput(*given, heads, options.attention_sinks)
        return attended.checked(self.tolerance, self.on_excess if decides else None, options.module)

    def _run_by_graph(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """The same by a CUDA graph, where one can stand for it."""

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, sinks: Any, *positions: Any
        ) -> torch.Tensor:
            given = replace(options, key_mask=mask, attention_sinks=sinks, positions=positions or None)
            return replace(self, cuda_graph="never").run(query, key, value, **vars(given))

        tensors = query, key, value, options.key_mask, options.attention_sinks, *(options.positions or ())
        others = self.graph_key(options)
        if others is None or options.learns or options.dropout_p > 0 or self.tolerance is not None:
            return attend(*tensors)
        return attend_by_graph(attend, tensors, (self, options.scale, options.causal, others))

    def graph_key(self, options: Options) -> Hashable | None:
        """What the output depends on beside the settings, tensors, scale and `causal`; None: no graph can hold it."""
        return ()

    @property
    def instead_of_onnx(self) -> str:
        """What to do instead of exporting to ONNX, which has no such op, for messages."""
        if self.needs_fine_tuning:
            return f'use torch.export or torch.compile; what was trained with "{self.method}" has no exact model'
        return "call unpatch_attention(model) and export the exact model, or use torch.export or torch.compile"

    def approximated_heads(self, group: int) -> Sequence[int] | None:
        """The query heads that the settings let be approximated, of which `group` share keys; None: all."""
        return None

    def weights(
        self, query: torch.Tensor, key: torch.Tensor, *, columns: slice = slice(None), **arguments: Any
    ) -> torch.Tensor:
        """The attention weights of `run` before dropout, `(B, H, N, M)`; `columns`: on these keys alone.

        Raises:
            ValueError: the settings compute no such weights.
        """
        N, M = query.shape[2], key.shape[2]
        options = Options(**arguments)
        if self.is_exact(min(N, M), query.device.type):
            mask = visible_keys(options.key_mask, N, causal=options.causal)
            causal, sinks = options.causal, options.attention_sinks
            exact = exact_weights(query, key, mask, options.scale, causal=causal, attention_sinks=sinks)
            return exact[..., columns]
        # The seed makes the groups the same each time. What a tolerance corrects is added by the caller.
        plain = self.tolerance is None and self.cuda_graph == "never"
        method = self if plain else replace(self, tolerance=None, cuda_graph="never")
        return self.implied_weights(query, key, lambda values: method.run(query, key, values, **arguments), columns)

    def implied_weights(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attend: Callable[[torch.Tensor], torch.Tensor],
        columns: slice = slice(None),
    ) -> torch.Tensor:
        """The weights `(B, H, N, M)` of an attention that gives none: what it makes of an identity as values.

        Raises:
            ValueError: the settings compute no such weights.
        """
        self.check_weights()
        identity = torch.eye(key.shape[2], dtype=query.dtype, device=query.device)[:, columns]
        return attend(identity.expand(*key.shape[:2], -1, -1))

    def is_for(self, stack: Stack) -> bool:
        """Whether the settings were made for a stack, or for none in particular."""
        return True

    def check_stack(self, stack: Stack) -> None:  # noqa: B027
        """Raise where the method cannot serve a stack that others can."""

    def parameters_for(self, stack: Stack) -> nn.Module | None:
        """The module with the parameters that the method adds to a stack: a new one, or the one that it holds."""
        return None

    def attach(self, model: nn.Module, parameters: nn.Module | None) -> None:  # noqa: B027
        """Add to a model, with or without a head, what the method needs there: its parameters, hooks."""

    @classmethod  # noqa: B027
    def detach(cls, model: nn.Module) -> None:
        """Take away from a model what the method added to it, if it did."""

    @classmethod
    def lost_by(cls, stack: Stack, method: "Method", parameters: nn.Module | None, saved: bool) -> str | None:
        """What a stack loses of this kind's trained parameters when it is patched anew, as a warning; None: nothing.

        Args:
            stack (`Stack`): to be patched.
            method (`Method`): with what.
            parameters (`nn.Module`, *optional*): what `method` adds to it.
            saved (`bool`): whether its config says that it was patched by this kind, and its modules do not.
        """
        return None

    @classmethod
    def while_loading(cls) -> AbstractContextManager[None]:
        """Around the loading of a model whose parameters `from_checkpoint` will read."""
        return nullcontext()

    def from_checkpoint(  # noqa: B027
        self, model: nn.Module, stack: Stack, name_or_path: Any, options: Mapping[str, Any]
    ) -> None:
        """Fill what the method added to a stack from the checkpoint that the model was loaded from.

        Args:
            model (`nn.Module`): the whole model.
            stack (`Stack`): patched with this method, as when it was saved.
            name_or_path (`str` or `os.PathLike`): a folder, or a name on the Hub.
            options (`Mapping`): keywords of `from_pretrained`.

        Raises:
            ValueError: the checkpoint has no such parameters, or of other sizes.
        """

    @classmethod
    def plan_extension(cls, model: nn.Module, present: int, rows: int) -> Callable[[], None] | None:
        """What makes the parameters that the method added to a model serve longer inputs; None where it added none.

        Args:
            model (`nn.Module`): with or without a head.
            present (`int`): the tokens that it takes.
            rows (`int`): the rows of its longer table of positions.

        Raises:
            ValueError: parameters that cannot be made longer.
        """
        return None

    def group(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None = None
    ) -> Groups:
        """What the method decides about the input before it attends, without gradient: labels, if any."""
        return ()

    def exact_heads(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None = None
    ) -> list[int]:
        """The query heads that attend exactly, in some text of the batch, though the method runs."""
        return []

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        groups: Groups = (),
    ) -> torch.Tensor:
        """Attention with the groups that `group` returned, `(B, H, N, Dv)`."""

    def check_weights(self) -> None:  # noqa: B027
        """Raise where what the method computes is no matrix of weights on the values."""

    @abstractmethod
    def attend_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Causal self-attention, `(B, H, N, Dv)`."""

    def attend_over_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor | None:
        """Causal attention of the last tokens over a cache, `(B, H, N, Dv)`; None where it is to be exact.

        `mask` `(B, 1, N, M)`: which keys a query sees; None where its one query sees all of them.
        """
        return None

    def for_layers(self, layers: Sequence[int]) -> "Method | None":
        """What the module of these layers runs; None where it stays exact."""
        return self

    def for_share(self, rank: int | None, ranks: int) -> "Method | None":
        """What a process runs in a layer of which it has one of `ranks` equal shares of the heads; None: it is exact.

        Raises:
            ValueError: settings of heads, and it is not known which heads these are.
        """
        return self

    @property
    def label_parts(self) -> dict[str, Any]:
        """What a short name says beside the settings."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values, and `"causal"` where a decoder's; without a tolerance or graph none of it."""
        settings = {"causal": True} if self.causal else {}
        settings |= {setting.name: getattr(self, setting.name) for setting in fields(self)}
        if self.tolerance is None:
            del settings["tolerance"], settings["on_excess"]
        if self.cuda_graph == "never":
            del settings["cuda_graph"]
        return settings

    def _check_number(self, name: str) -> None:
        """Store the field as a plain float where it is not None, or raise."""
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number or None, got {value!r}: {self.purpose[name]}")
        if not float(value) >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}: {self.purpose[name]}")
        object.__setattr__(self, name, float(value))

    def _check_int(self, name: str, *, minimum: int, maximum: int | None = None) -> None:
        """Store the field as a plain int (a numpy int is no JSON value), or raise."""
        value = getattr(self, name)
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}: {self.purpose[name]}")
        if number < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {number}: {self.purpose[name]}")
        maximum = self.most.get(name, LARGEST_COUNT) if maximum is None else maximum
        if number > maximum:
            raise ValueError(f"{name} must be at most {maximum}, got {number}: {self.purpose[name]}")
        object.__setattr__(self, name, number)

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(
                f"{name} must be one of {quoted(choices)}, got {value!r}{closest(value, choices)}: "
                f"{self.purpose[name]}"
            )


def attend_exactly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> torch.Tensor:
    """Exact attention as the options ask for it, `(B, H, N, Dv)`."""
    return exact_attention(
        query,
        key,
        value,
        visible_keys(options.key_mask, query.shape[2], causal=options.causal),
        scale=options.scale,
        dropout_p=options.dropout_p,
        causal=options.causal,
        module=options.module,
        attention_sinks=options.attention_sinks,
    )


def quoted(names: Sequence[str] | dict[str, Any]) -> str:
    """The names in quotes, for a message."""
    return ", ".join(f'"{name}"' for name in names)


def closest(name: object, names: Sequence[str] | dict[str, Any]) -> str:
    """The name that was probably meant, for a message; empty where none is near."""
    lower = {known.lower(): known for known in names}
    matches = get_close_matches(str(name).lower(), list(lower), n=1)
    return f' (did you mean "{lower[matches[0]]}"?)' if matches else ""
