"""The ops that have gradients, side by side: their cases, and one way to call each, for tests that all must pass."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import attention_cases, block_cases, causal_cases, clustering_cases, slice_cases
from support.closeness import assert_close_to_reference

from hf_effattn.ops import cluster_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensors = dict[str, Any]
# Which dimension of inputs and outputs counts tokens.
TOKENS = {
    **dict.fromkeys(("query", "key", "value", "key_labels", "output", "lse"), 2),
    **dict.fromkeys(("membership", "words", "sink_mask", "of_words"), 1),
}
# What the whole batch has in common.
SHARED = ("query_positions", "key_positions", "attention_sinks")


@dataclass(frozen=True)
class Op:
    """An op with what it is tested on.

    Attributes:
        registered: its name in `torch.ops.hf_effattn`.
        make: the inputs of a case by name, in a dtype; masks have "mask" in their names.
        call: the outputs by name.
        cases: compared with the reference.
        typical: a few with masks, grouped heads and whatever else the op has.
        kernel_cases: smaller ones, for Triton's interpreter.
        low_precision: cases in which no choice, of keys or of clusters, depends on rounding.
        small: for numerical derivatives.
        long: a case of `N` tokens.
    """

    name: str
    registered: str
    make: Callable[..., Tensors]
    call: Callable[..., Tensors]
    cases: tuple[Any, ...]
    typical: tuple[Any, ...]
    kernel_cases: tuple[Any, ...]
    low_precision: tuple[Any, ...]
    small: Any = None
    long: Callable[[int], Any] | None = None

    def __str__(self) -> str:
        return self.name


def named(cases: tuple[Any, ...], *names: str) -> tuple[Any, ...]:
    """Those of some names."""
    return tuple(next(case for case in cases if case.name == name) for name in names)


def _attention(name: str) -> Op:
    cases, Case = attention_cases.CASES, attention_cases.Case
    all_keys = [replace(case, topk=case.M) for case in named(cases, "plain", "odd_dimensions", "holes")]

    def call(case: Any, inputs: Tensors, **options: Any) -> Tensors:
        return {"output": attention_cases.attend(name, case, attention_cases.Inputs(**inputs), **options)}

    return Op(
        name,
        name,
        lambda *given, **options: dict(vars(attention_cases.make_inputs(*given, **options))),
        call,
        cases,
        named(cases, "grouped_heads", "one_key_head_and_holes"),
        attention_cases.KERNEL_CASES,
        (*all_keys, Case("separated", N=40, M=32, clusters=4, topk=4, separated=True)),
        Case("small", B=1, key_heads=1, N=5, M=4, D=2, Dv=2, clusters=2, topk=2, key_clusters=2),
        lambda N: Case("long", B=1, N=N, M=N, clusters=16, topk=8),
    )


def _causal(method: str) -> Op:
    cases, Case = causal_cases.CASES, causal_cases.Case

    def make(case: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
        *tensors, mask = causal_cases.make_inputs(case, dtype, seed)
        names = ("query", "key", "value", "key_mask", "attention_sinks")
        return dict(zip(names, (*tensors, mask, causal_cases.make_sinks(case, dtype)), strict=True))

    def call(case: Any, inputs: Tensors, **options: Any) -> Tensors:
        query, key, value, mask, sinks = inputs.values()
        return {
            "output": causal_cases.attend(
                method, case, query, key, value, mask, **{"attention_sinks": sinks, **options}
            )
        }

    window = 41 if method == "clustered" else 8  # else all older keys are exact
    return Op(
        f"causal {method}",
        "causal_clustered_attention",
        make,
        call,
        cases,
        named(cases, "sinks_of_grouped_heads_and_holes", "one_key_head_and_holes"),
        causal_cases.KERNEL_CASES,
        (Case("low", B=1, N=41, D=16, Dv=16, topk=41, segment_length=8, window=window),),
    )


def _slices() -> Op:
    cases, Case = slice_cases.CASES, slice_cases.Case

    def call(case: Any, inputs: Tensors, **options: Any) -> Tensors:
        output, pooled, lse = slice_cases.attend(case, inputs, **options)
        mask = inputs.get("key_mask")
        lse = lse if mask is None else lse.masked_fill(~mask[:, None], 0.0)  # the lowest number there is
        return {"output": output, "pooled": pooled, "lse": lse}

    return Op(
        "slice_attention",
        "slice_attention",
        slice_cases.make_inputs,
        call,
        cases,
        named(cases, "grouped_heads", "one_key_head_and_holes"),
        slice_cases.KERNEL_CASES,
        named(cases, "extended", "causal_sinks", "odd_dimensions", "holes", "grouped_heads"),
        Case("small", B=1, key_heads=1, N=7, L=3, ratio=5 / 3, D=2, Dv=2, positions=True, sinks=True),
        lambda N: Case("long", B=1, N=N, L=16, ratio=3),
    )


def _blocks() -> Op:
    cases, Case = block_cases.CASES, block_cases.Case

    def call(case: Any, inputs: Tensors, **options: Any) -> Tensors:
        return {"output": block_cases.attend(case, block_cases.Inputs(**inputs), **options)}

    return Op(
        "sorted_block_attention",
        "sorted_block_attention",
        lambda *given, **options: dict(vars(block_cases.make_inputs(*given, **options))),
        call,
        cases,
        named(cases, "gated_and_holes", "strict_and_left_padding"),
        block_cases.KERNEL_CASES,
        named(cases, "plain", "odd_dimensions", "holes", "gated_and_holes"),
        Case("small", B=1, key_heads=1, N=7, D=2, Dv=2, clusters=3, gated=True),
        lambda N: Case("long", B=1, N=N, D=16, Dv=16, clusters=N // 64),
    )


def _neural_clustering() -> Op:
    cases, Case = clustering_cases.CASES, clustering_cases.Case

    def make(*given: Any, **options: Any) -> Tensors:
        return dict(zip(("words", "centroids", "mask"), clustering_cases.make_inputs(*given, **options), strict=True))

    def call(case: Any, inputs: Tensors, **options: Any) -> Tensors:
        outputs = clustering_cases.cluster(case, *inputs.values(), **options)
        return dict(zip(("updated", "of_words"), outputs, strict=True))

    typical = named(cases, "holes", "holes_cosine")
    return Op(
        "neural_clustering",
        "neural_clustering",
        make,
        call,
        cases,
        typical,
        clustering_cases.KERNEL_CASES,
        tuple(replace(case, N=60, sharpness=1.5) for case in typical),
        Case("small", N=6, k=3, d=3, masks="holes", similarity="cosine", sharpness=2.0),
    )


CLUSTERED = tuple(
    _attention(name) for name in ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
)
CAUSAL = tuple(_causal(method) for method in causal_cases.METHODS)
SLICES, BLOCKS, NEURAL_CLUSTERING = _slices(), _blocks(), _neural_clustering()
ATTENTION = (*CLUSTERED, *CAUSAL, SLICES, BLOCKS)  # those that have a dropout
OPS = (*ATTENTION, NEURAL_CLUSTERING)


def each(ops: tuple[Op, ...], cases: Callable[[Op], Any], quick: Callable[[Op, Any], bool] | None = None) -> Any:
    """Parametrizes a test by `op` and `case`; those that are not `quick` are slow."""

    def parameters() -> Iterator[Any]:
        for op in ops:
            for case in cases(op):
                marks = [] if quick is None or quick(op, case) else [pytest.mark.slow]
                yield pytest.param(op, case, id=f"{op.name}-{case.name}", marks=marks)

    return pytest.mark.parametrize(("op", "case"), list(parameters()))


def leaves_of(inputs: Tensors) -> list[str]:
    """The names of the inputs that have gradients."""
    return [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]


def to_dtype(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """The inputs with what has gradients in another dtype."""
    return inputs | {name: inputs[name].detach().to(dtype) for name in leaves_of(inputs)}


def with_gradients(
    op: Op, case: Any, inputs: Tensors, *, seed: int = 4, run: Any = None, device: str | None = None, **options: Any
) -> Tensors:
    """Outputs and gradients of a fixed random sum of the outputs, on the CPU; kernels run on a GPU if there is one."""
    device = device or (DEVICE if options.get("backend") == "triton" else "cpu")
    inputs = {name: x.detach().to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    leaves = {name: inputs[name].requires_grad_() for name in leaves_of(inputs)}
    torch.manual_seed(seed)
    outputs = (run or op.call)(case, inputs, **options)
    generator, learned = torch.Generator().manual_seed(1), [x for x in outputs.values() if x.requires_grad]
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in learned]
    gradients = torch.autograd.grad(learned, list(leaves.values()), weights)
    tensors = outputs | {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def check_kernels(op: Op, case: Any, inputs: Tensors, **options: Any) -> None:
    """The kernels' error is what plain PyTorch has in the same dtype, in outputs and gradients."""
    plain = {"backend": "reference", "device": DEVICE} | options  # there seeds of a dropout are the same
    expected = with_gradients(op, case, to_dtype(inputs, torch.float64), **plain)
    baseline = with_gradients(op, case, inputs, **plain)
    dtype = inputs[leaves_of(inputs)[0]].dtype
    for name, actual in with_gradients(op, case, inputs, backend="triton", **options).items():
        if not actual.is_floating_point():  # labels: of two that are nearly as near rounding takes one
            assert (actual == expected[name]).double().mean() >= (1 if dtype == torch.float32 else 0.95)
        elif expected[name].abs().max() < 1e-12:  # of a query with one key: rounding is all there is
            assert actual.abs().max() < 1e-6, name
        else:
            assert actual.dtype == baseline[name].dtype
            assert_close_to_reference(
                name, actual, expected[name], baseline[name], rtol=1e-6, factor=3.0 if "words" in inputs else 2.0
            )


def hidden_rows(name: str, inputs: Tensors) -> torch.Tensor | None:
    """Which rows `(B, N)` of an input or an output are masked; None where it has no rows of tokens."""
    of_query = name in ("query", "output") and inputs.get("query_mask") is not None
    mask = inputs["query_mask"] if of_query else inputs.get("key_mask", inputs.get("mask"))
    return None if mask is None or name not in TOKENS else ~mask


def rows_of_tokens(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor seen as `(B, N, ...)`."""
    return tensor.movedim(TOKENS[name], 1)


def last_item(inputs: Tensors) -> Tensors:
    """The last item of a batch alone, without what is masked."""
    last: Tensors = {}
    for name, x in inputs.items():
        if "mask" in name and name not in TOKENS:
            last[name] = None
        elif not isinstance(x, torch.Tensor) or name in SHARED:
            last[name] = x
        elif (hidden := hidden_rows(name, inputs)) is None:
            last[name] = x[-1:]
        else:
            last[name] = rows_of_tokens(name, x[-1:])[:, ~hidden[-1]].movedim(1, TOKENS[name])
    if "labels" in inputs:
        query_mask = inputs.get("query_mask", inputs["key_mask"])
        last["labels"] = inputs["labels"][-1:, ..., query_mask[-1]]
    if "order" in inputs:
        last["order"] = cluster_order(last["labels"])
    return last
