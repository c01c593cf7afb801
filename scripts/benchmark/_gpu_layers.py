"""What the first look at a GPU measures: its sizes, and the layers, each with the exact attention it is to beat."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_effattn.measuring.bench import Attend, Inputs, forward, random_inputs
from hf_effattn.measuring.exact_kernels import exact_kernels
from hf_effattn.ops import causal_clustered_attention
from hf_effattn.patching.methods import Method, make_method

from ._budgets import DONE, FAILED, Found
from ._timing import forward as forward_model
from .attention import METHODS
from .cst import ExactAttention, make_layer
from .cst import forward as forward_cst
from .models import SHAPES, last_hidden_state, random_models, random_tokens
from .prefill import PATCHED, exact_calls

Call = Callable[[], Any]
ENCODER = (
    "i-clustered clusters=100 topk=32",
    "bi-clustered clusters=64 topk=64 key_clusters=32",
    "bi-clustered clusters=128 topk=128 key_clusters=64",
)
SLICES, CAUSAL = "cst slice_length=32", "causal bi-clustered"
CST = {"slice_length": 32, "extension_ratio": 1.0}
DEFAULTS = ("clustered", "i-clustered", "bi-clustered")
MODELS = "models"
# Steps that later ones read: a layer that does not run at all is seen in the first.
COMPILE, DURATIONS = "compile", "durations"


@dataclass(frozen=True)
class Setup:
    """The device and all sizes of the measurement.

    Args:
        device (`torch.device`): where it runs.
        dtype (`torch.dtype`): of queries, keys, values and models.
        heads (`int`): `H` of encoders.
        head_dim (`int`): `D` of encoders.
        crossover_heads (`int`): `H` where the default settings are timed, as in `scripts.benchmark.crossover`.
        causal_shape (`tuple`): heads of queries, of keys and values, and head_dim of decoders.
        exact_lengths (`tuple`): tokens at which SDPA's kernels are timed.
        kernel_lengths (`tuple`): tokens at which every kernel is timed.
        lengths (`tuple`): tokens at which layers and models are timed.
        crossover_lengths (`tuple`): tokens at which the default settings are timed.
        checked_length (`int`): tokens of the causal kernels' comparison with their definition.
        model (`dict`): settings of the random BERT.
        copied_bytes (`int`): of the copy.
        matrix (`int`): rows and columns of the product.
        launches (`int`): of an empty kernel, in all.
        calls (`int`): of a layer without waiting in between.
        repeats (`int`): rounds of timing.
        results (`dict`): what earlier steps found, by step.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    heads: int = 16
    head_dim: int = 64
    crossover_heads: int = 12
    causal_shape: tuple[int, int, int] = (32, 8, 128)
    exact_lengths: tuple[int, ...] = (4096, 8192, 16384, 65536)
    kernel_lengths: tuple[int, ...] = (4096, 16384)
    lengths: tuple[int, ...] = (4096, 8192, 16384)
    crossover_lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    checked_length: int = 2048
    model: dict[str, int] = field(default_factory=lambda: SHAPES["base"])
    copied_bytes: int = 2**30
    matrix: int = 8192
    launches: int = 2000
    calls: int = 30
    repeats: int = 3
    results: dict[str, Found] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether there are kernels, graphs and counters to look at."""
        return self.device.type == "cuda"


def rehearsal() -> Setup:
    """Sizes that a CPU does in seconds."""
    return Setup(
        torch.device("cpu"), torch.float32, heads=2, head_dim=16, crossover_heads=2, causal_shape=(4, 2, 16),
        exact_lengths=(256,), kernel_lengths=(256,), lengths=(256,), crossover_lengths=(256, 512), checked_length=1536,
        model={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        copied_bytes=2**20, matrix=128, launches=50, calls=2, repeats=1,
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Layers of one shape on the same inputs.

    Args:
        exact (`dict`): calls of exact attention, by kernel.
        methods (`dict`): calls of the methods, by name.
    """

    exact: dict[str, Call]
    methods: dict[str, Call]


def encoder(setup: Setup, length: int) -> Family:
    """The methods on random queries, keys and values, as the benchmark of attention times them."""
    inputs = random_inputs(1, length, setup.heads, setup.head_dim, setup.dtype, setup.device)
    exact, _ = exact_kernels(*inputs)
    attends = {name: METHODS[name].run for name in ENCODER if approximates(METHODS[name], length)}
    return Family(on_inputs(exact, inputs), on_inputs(attends, inputs))


def on_inputs(attends: Mapping[str, Attend], inputs: Inputs) -> dict[str, Call]:
    """Calls without gradients."""
    return {name: partial(forward, attend, inputs) for name, attend in attends.items()}


def cst(setup: Setup, length: int) -> Family:
    """The attention of a layer of slices with its projections, and the same layer with SDPA."""
    width = setup.heads * setup.head_dim
    layer, hidden, tables = make_layer(length, {"width": width, "heads": setup.heads} | CST, setup.dtype, setup.device)
    modules: tuple[nn.Module, nn.Module] = ExactAttention(layer.attention), layer.attention
    exact, slices = (partial(forward_cst, module, hidden, tables) for module in modules)
    return Family({"SDPA": exact}, {SLICES: slices})


def causal(setup: Setup, length: int) -> Family:
    """A prompt in a model that masks the future, of Llama's shape."""
    inputs = causal_inputs(setup, length, setup.dtype)
    method = partial(causal_clustered_attention, **PATCHED)
    return Family(on_inputs(exact_calls(inputs), inputs), on_inputs({CAUSAL: method}, inputs))


def causal_inputs(setup: Setup, length: int, dtype: torch.dtype) -> Inputs:
    """Random queries, keys and values of a decoder."""
    heads, key_heads, head_dim = setup.causal_shape
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(1, length, count, head_dim, generator=generator).to(setup.device, dtype).transpose(1, 2)
        for count in (heads, key_heads, key_heads)
    )
    return query, key, value


FAMILIES: dict[str, Callable[[Setup, int], Family]] = {"encoder": encoder, "cst": cst, "causal": causal}
FAMILY_OF: dict[str, str] = dict.fromkeys(ENCODER, "encoder") | {SLICES: "cst", CAUSAL: "causal"}


def approximates(method: Method, length: int) -> bool:
    """Whether a method with `min_length=0` has something to approximate."""
    return not method.counts_reach(length)


def layer(setup: Setup, name: str, length: int) -> Call | None:
    """The call of a layer by its name; None where it would be exact attention."""
    return FAMILIES[FAMILY_OF[name]](setup, length).methods.get(name)


def runs(setup: Setup, name: str) -> bool:
    """Whether a layer ran in the process that compiled its kernels, or was not tried there."""
    tried = {task: row["status"] for task, row in setup.results.get(COMPILE, {}).get("tasks", {}).items()}
    # Where none ran, the GPU takes no second process, which says nothing of the layers.
    return tried.get(name) != FAILED or DONE not in tried.values()


def crossover_inputs(setup: Setup, length: int) -> Inputs:
    """Random queries, keys and values of the shape that crossovers are measured with."""
    return random_inputs(1, length, setup.crossover_heads, setup.head_dim, setup.dtype, setup.device)


def default_methods(length: int) -> dict[str, Method]:
    """The methods with the settings that users get, forced."""
    methods = {name: make_method(name, min_length=0) for name in DEFAULTS}
    return {name: method for name, method in methods.items() if approximates(method, length)}


def of_one_length(setup: Setup, length: int) -> Setup:
    """The same with layers of one length."""
    return replace(setup, checked_length=length, kernel_lengths=(length,), lengths=(length,))


def warm_ups(setup: Setup) -> dict[str, Call]:
    """Calls that compile all kernels of the later steps, each for a process of its own."""

    def layers(name: str) -> None:
        for length in sorted({setup.checked_length, *setup.kernel_lengths, *setup.lengths}):
            if (call := layer(setup, name, length)) is not None:
                call()

    def models() -> None:
        for length in setup.lengths:
            run = partial(last_hidden_state, tokens=random_tokens(length, setup.device))
            for model in random_models(setup.model, length, setup.dtype, setup.device).values():
                forward_model(model, run)

    def defaults(name: str) -> None:
        for length in setup.crossover_lengths:
            if (method := default_methods(length).get(name)) is not None:
                forward(method.run, crossover_inputs(setup, length))

    calls: dict[str, Call] = {name: partial(layers, name) for name in FAMILY_OF}
    calls |= {MODELS: models}
    return calls | {default_task(name): partial(defaults, name) for name in DEFAULTS}


def default_task(name: str) -> str:
    """What compiles the kernels of a method with its default settings."""
    return f"default {name}"
