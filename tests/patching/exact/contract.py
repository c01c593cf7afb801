"""A kind of model that stays exact when it is patched, what it promises, and how near "the same" is."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_effattn
from hf_effattn.patching.exact import query_chunks
from hf_effattn.patching.model_types.stacks import find_stacks

METHOD = "exact"
Tensors = Iterable[torch.Tensor] | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Near:
    """How far tensors may be apart.

    Args:
        atol, rtol (`float`): as `torch.testing.assert_close` has them.
        of_each (`float`): beside `atol`, this share of the largest number of the tensor.
        of_all (`float`): and this share of the largest of all: some gradients are nothing but roundings of others.
    """

    atol: float = 0.0
    rtol: float = 0.0
    of_each: float = 0.0
    of_all: float = 0.0

    def check(self, actual: Tensors, expected: Tensors) -> None:
        given, wanted = (out if isinstance(out, Mapping) else dict(enumerate(out)) for out in (actual, expected))
        assert given.keys() == wanted.keys()
        largest = max(tensor.abs().max().item() for tensor in wanted.values())
        for name, tensor in wanted.items():
            atol = self.atol + self.of_each * tensor.abs().max().item() + self.of_all * largest
            torch.testing.assert_close(
                given[name], tensor, rtol=self.rtol, atol=atol, msg=lambda said, at=name: f"{at}: {said}"
            )


EQUAL = Near()


def mask_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, **_: Any
) -> torch.Tensor | None:
    """Of a call of attention, what is recorded: its mask, or what is added to the scores."""
    return None if attn_mask is None else attn_mask.detach()


def record(
    monkeypatch: pytest.MonkeyPatch,
    watched: Iterable[tuple[Any, str]] = ((torch.nn.functional, "scaled_dot_product_attention"),),
    recorded: Callable[..., Any] = mask_of,
) -> list[Any]:
    """What is recorded of every call of the functions that are watched."""
    calls: list[Any] = []

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        def record_and_run(*args: Any, **how: Any) -> Any:
            calls.append(recorded(*args, **how))
            return run(*args, **how)

        return record_and_run

    for module, name in watched:
        monkeypatch.setattr(module, name, wrapped(getattr(module, name)))
    return calls


def shapes(calls: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(mask.shape) for mask in calls]


@dataclass(frozen=True)
class Kind:
    """A kind of model and what it promises. A promise that is None, False or empty is tested elsewhere, or not made.

    Args:
        name (`str`): for the names of its tests.
        make, inputs (`Callable`): the exact model in eval mode, with changes of its config, and its inputs.
        encode (`Callable`): given model and inputs, what is compared; by the last of it gradients are taken.
        ours (`frozenset`): the classes that a patch gives to modules.
        near, slopes (`Near`): of values, and of gradients.
        cases (`dict`): arguments of `inputs` for values and gradients.
        constants (`tuple`): modules, names and values that are set, for more pieces than small inputs have.
        watched, recorded (`tuple`, `Callable`): functions of attention, by module and name, and what a call records.
        ran (`Callable`, *optional*): checks the calls of one patched pass, given those and the inputs.
        alone (`bool`): whether what is watched runs in the patched layers alone, neither for weights nor in a decoder.
        learns (`tuple[str, ...]`): parts of names of parameters, one of which has a gradient.
        part (`Callable`): what of a model is encoded.
        whole, whole_near (`Callable`, `Near`): what the switch of transformers leaves as it is.
        unpatched (`bool`): whether copies, pickles and the way back are promised.
        auto, load (`Any`, `dict`): the class that loads what was saved, and its arguments.
        weigh, weights_near (`Callable`, `Near`): attention weights, and what is returned beside them, of a model.
        eager (`bool`): whether weights are asked of transformers' eager code.
        retrained, drops (`Near`, `bool`): gradients with checkpointing, and whether the last layer can have dropout.
        redrawn (`dict`): changes of the config by which dropout is drawn as in transformers.
        low_precision (`float`, *optional*): the error of bfloat16 and float16, times that of transformers.
        all_padded (`bool`): whether a text of padding alone stays finite.
        traced (`Callable`, *optional*): of outputs and inputs, which tokens are seen; for `torch.jit.trace`.
        compiled, compiled_as (`str`, `dict`): the compiler's backend, and changes of the config for it.
        says (`str`): what all its layers do, in warnings and refusals.
        reports (`tuple`): texts, length and, if it is checked, the baseline in a report.
        write (`Callable`, *optional*): what it generates of inputs.
        heard (`bool`): whether by the switch of transformers, too, what is watched runs.
        causal (`bool`): whether the first of its cases is of texts in which no token sees a later one.
        slow (`bool`): whether quicker kinds show the same.
    """

    name: str
    make: Callable[..., Any]
    inputs: Callable[..., dict[str, torch.Tensor]]
    encode: Callable[[Any, dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]
    ours: frozenset[type] = frozenset()
    near: Near = Near(atol=2e-5)
    slopes: Near = Near(of_each=1e-5, of_all=1e-7)
    cases: dict[str, dict[str, Any]] = field(default_factory=lambda: each(padded=(False, True)))
    constants: tuple[tuple[Any, str, Any], ...] = ()
    watched: tuple[tuple[Any, str], ...] = ((torch.nn.functional, "scaled_dot_product_attention"),)
    recorded: Callable[..., Any] = mask_of
    ran: Callable[[list[Any], dict[str, torch.Tensor]], None] | None = None
    learns: tuple[str, ...] = ()
    part: Callable[[Any], Any] = lambda model: model
    whole: Callable[[Any, dict[str, torch.Tensor]], Tensors] | None = None
    whole_near: Near = Near(atol=2e-5)
    unpatched: bool = False
    auto: Any = None
    load: dict[str, Any] = field(default_factory=dict)
    weigh: Callable[[Any], list[torch.Tensor]] | None = None
    weights_near: Near = Near(atol=2e-5)
    eager: bool = False
    retrained: Near | None = None
    drops: bool = False
    redrawn: dict[str, Any] = field(default_factory=dict)
    low_precision: float | None = None
    all_padded: bool = False
    traced: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor] | None = None
    compiled: str = ""
    compiled_as: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    reports: tuple[int, int, str | None] | tuple[()] = ()
    write: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor] | None = None
    alone: bool = False
    heard: bool = False
    causal: bool = False
    slow: bool = False

    def patched(self, **changes: Any) -> Any:
        return hf_effattn.patch_attention(self.make(**changes), METHOD)

    def check_classes(self, model: Any) -> None:
        """The model has the classes of the patch; the attention modules of all layers are alike."""
        assert classes_of_ours(model) == self.ours
        assert len({type(module) in self.ours for stack in find_stacks(model) for module in stack.modules}) == 1

    def encode_patched(
        self, model: Any, inputs: dict[str, torch.Tensor], calls: list[Any]
    ) -> tuple[torch.Tensor, ...]:
        """What a patched model encodes; its classes and the calls of attention are checked."""
        self.check_classes(model)
        calls.clear()
        with torch.no_grad():
            encoded = self.encode(model, inputs)
        if self.ran is not None:
            self.ran(calls, inputs)
        return encoded

    def gradients(self, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        last = self.encode(model, inputs)[-1]
        (last * torch.linspace(-1, 1, last.shape[-1], dtype=last.dtype)).sum().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def classes_of_ours(model: Any) -> set[type]:
    return {type(module) for module in model.modules() if type(module).__module__.startswith("hf_effattn.")}


def implementations(model: Any) -> list[str]:
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part.config._attn_implementation for part in parts]


def each(**options: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    """All combinations of arguments of `inputs`, by their names."""
    cases = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    return {", ".join(f"{name}={value}" for name, value in case.items()): case for case in cases}


def logits_of_seen(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    mask = inputs.get("attention_mask", torch.ones_like(next(iter(inputs.values()))))
    return (model(**inputs).logits[mask.bool()],)


def write_by_beams(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    given = {name: tensor for name, tensor in inputs.items() if name != "decoder_input_ids"}
    return model.generate(**given, do_sample=False, max_new_tokens=8, num_beams=2)


def with_dropout(model: Any, p: float) -> None:
    """Of the attention weights of the last layer."""
    last = find_stacks(model)[0].modules[-1]
    if hasattr(last, "attention_dropout"):
        last.attention_dropout = p
    elif isinstance(last.dropout, torch.nn.Dropout):
        last.dropout.p = p
    else:
        last.dropout = p


def with_large_weights(model: Any, std: float, **stds: float) -> Any:
    """The model in eval mode, with matrices that are large enough to matter: of `std`, or of the part of the name."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "parametrizations" not in name:
            torch.nn.init.normal_(weight, std=next((sd for part, sd in stds.items() if part in name), std))
    return model.eval()


BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# One token, a last piece that is shorter, rows that are computed again; all precisions of the same.
each_size_and_precision = pytest.mark.parametrize(
    ("length", "masked", "dtype"),
    [
        (1, False, torch.float64),
        (37, True, torch.float64),
        (64, False, torch.float64),
        *((64, True, dtype) for dtype in BOUNDS),
    ],
)


def key_mask(length: int, masked: bool) -> torch.Tensor | None:
    """Of two texts, the second half as long."""
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[1, ..., length // 2 + 1 :] = False
    return mask if masked else None


def check_against(
    definition: Callable[..., torch.Tensor],
    attend: Callable[..., torch.Tensor],
    sizes: list[tuple[int, ...]],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    *,
    constants: int = 0,
    also: tuple[Callable[..., torch.Tensor], ...] = (),
) -> None:
    """Values and gradients in a precision are near to what a definition gives in float64.

    Args:
        definition, attend (`Callable`): of tensors of `sizes`, the last `constants` of which learn nothing.
        also (`tuple`): other ways to attend, compared without gradients, as `attend` is.
    """
    monkeypatch.setattr(query_chunks, "KEPT", 2 * 3 * 40 * 40)  # those of 64 tokens are computed again
    monkeypatch.setitem(query_chunks.SCORES, "cpu", 2 * 3 * 64 * 20)  # several pieces, the last one shorter
    draw = torch.Generator().manual_seed(sizes[0][2])
    given = [torch.randn(size, dtype=torch.float64, generator=draw).to(dtype) for size in sizes]
    with torch.no_grad():
        of_output = definition(*(tensor.double() for tensor in given)).shape
    weights = torch.randn(of_output, dtype=torch.float64, generator=draw)

    def with_gradients(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensor.requires_grad_() for tensor in inputs[: len(inputs) - constants]]
        output = attend(*inputs)
        return [output, *torch.autograd.grad((output * weights).sum(), leaves)]

    passes = with_gradients(attend, given)
    assert passes[0].dtype == dtype
    with torch.no_grad():
        others = [way(*given) for way in (attend, *also)]
    expected = with_gradients(definition, [tensor.detach().double() for tensor in given])
    for tensor, other in zip([*others, *passes], [expected[0]] * len(others) + expected, strict=True):
        assert (tensor - other).norm() <= BOUNDS[dtype] * max(1.0, other.norm().item())


def check_recomputed_dropout(
    attend: Callable[..., torch.Tensor], sizes: list[tuple[int, ...]], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are computed again in the backward pass lose the same weights to dropout, and the others grow."""
    monkeypatch.setitem(query_chunks.SCORES, "cpu", scores)
    monkeypatch.setattr(query_chunks, "KEPT", 0)
    draw = torch.Generator().manual_seed(3)
    leaves = [torch.randn(size, dtype=torch.float64, generator=draw).requires_grad_() for size in sizes]

    def dropped(*tensors: torch.Tensor, dropout: float = 0.4) -> torch.Tensor:
        torch.manual_seed(5)
        return attend(*tensors, dropout=dropout)

    assert torch.autograd.gradcheck(dropped, leaves)
    with torch.no_grad():
        exact = dropped(*leaves, dropout=0.0)
        assert not torch.equal(dropped(*leaves), exact)
        mean = torch.stack([attend(*leaves, dropout=0.4) for _ in range(300)]).mean(dim=0)
    assert (mean - exact).norm() < 0.1 * exact.norm()
