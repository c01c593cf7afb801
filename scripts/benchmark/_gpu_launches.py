"""What the host takes to launch a kernel that does nothing, on every way, and for what else a layer needs of it."""

import inspect
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver

from hf_effattn.measuring.cost import captured, synchronize
from hf_effattn.ops.shared.gradients import register_op
from hf_effattn.ops.shared.triton import launch
from hf_effattn.ops.shared.triton.recorded import recorded

from . import _empty_kernels
from ._budgets import Found
from ._gpu_layers import Call, Setup

BATCHES = 5
STATIC = "torch's static launcher"
GRAPHED = 100  # launches in a graph
OURS, REPLAYED = "replayed", 10  # as in a layer of so many launches, which are recorded once
# Modules of torch that launch from C, in the order of its versions: the newest first.
STATIC_LAUNCHERS = ("static_triton_launcher", "static_cuda_launcher")
KERNELS: dict[str, Callable[..., None]] = {
    "5 arguments": _empty_kernels.five,
    "45 arguments": _empty_kernels.forty_five,
}


class Nothing(NamedTuple):
    """The arguments of an op that does nothing."""

    query: torch.Tensor


def _nothing(x: Nothing) -> torch.Tensor:
    return x.query.new_empty(0)


register_op("benchmark_nothing", Nothing, _nothing, fake=_nothing)


def launches(setup: Setup, found: Found) -> None:
    """Microseconds of the ways to launch an empty kernel, of one in a CUDA graph, and of a host's other work."""
    tensor = torch.empty(16, device=setup.device)
    others: dict[str, Call] = {
        "torch.empty": lambda: torch.empty(16, device=setup.device),
        "empty custom op": lambda: torch.ops.hf_effattn.benchmark_nothing(tensor),
        "torch's own small kernel": lambda: tensor.add_(1.0),
        "synchronize": lambda: synchronize(setup.device),
    }
    found["others"] = {name: microseconds(call, setup) for name, call in others.items()}
    for name, function in KERNELS.items():
        ways = ways_to_launch(function, setup)
        time_ways({way: make for way, make in ways.items() if way != STATIC}, setup, found.setdefault(name, {}))
        if setup.on_gpu:
            found[name]["ways"]["CUDA graph"] = in_a_graph(ways["kernel[grid]"](), setup)


def static_launcher(setup: Setup, found: Found) -> None:
    """The same of torch's launcher in C: a step of its own, since arguments that it misreads would end the process."""
    for name, function in KERNELS.items():
        time_ways({STATIC: ways_to_launch(function, setup)[STATIC]}, setup, found.setdefault(name, {}))


def time_ways(ways: Mapping[str, Callable[[], Call]], setup: Setup, found: Found) -> None:
    """Microseconds of `ways`, and why the others are `absent`: the versions of torch and Triton differ."""
    found |= {"ways": {}, "absent": {}}
    for way, make in ways.items():
        try:
            times = microseconds(make(), setup)
            found["ways"][way] = {name: us / (REPLAYED if way == OURS else 1) for name, us in times.items()}
        except Exception as error:
            found["absent"][way] = f"{type(error).__name__}: {error}".splitlines()[0]


def microseconds(call: Call, setup: Setup, count: int | None = None) -> dict[str, float]:
    """Of one call, median over batches: until the host had made all of a batch, and until the device was done."""
    count = max(1, (count or setup.launches) // BATCHES)
    call()
    made, done = [], []
    for _ in range(BATCHES):
        synchronize(setup.device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        made.append(time.perf_counter() - begin)
        synchronize(setup.device)
        done.append(time.perf_counter() - begin)
    return {name: round(1e6 * median(times) / count, 3) for name, times in {"host_us": made, "done_us": done}.items()}


def in_a_graph(call: Call, setup: Setup) -> dict[str, float]:
    """Microseconds of one launch among many in a CUDA graph."""

    def many() -> None:
        for _ in range(GRAPHED):
            call()

    graph = captured(many)
    if graph is None:
        raise RuntimeError("a CUDA graph cannot hold the launches")
    times = microseconds(graph.replay, setup, count=setup.launches // GRAPHED)
    return {name: value / GRAPHED for name, value in times.items()}


def ways_to_launch(function: Callable[..., None], setup: Setup) -> dict[str, Callable[[], Call]]:
    """By name, what makes a call that launches the kernel; it raises where these versions cannot."""
    plain, ours = triton.jit(function), launch.kernel(function)
    arguments, constants = list(arguments_of(function, setup.device)), constants_of(function)
    everything = (*arguments, *constants.values())

    def compiled() -> Any:
        kernel = plain[(1,)](*arguments, **constants)
        if not hasattr(kernel, "packed_metadata"):
            raise NotImplementedError("the interpreter compiles nothing")
        return kernel

    def by_compiled_kernel() -> Call:
        start = compiled()[(1, 1, 1)]
        return lambda: start(*everything)

    def by_launcher() -> Call:
        kernel = compiled()
        run, stream = kernel.run, driver.active.get_current_stream(driver.active.get_current_device())
        before = (1, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None)
        return lambda: run(*before, *everything)

    def by_recording() -> Call:
        places = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]

        @recorded
        def several(*tensors: torch.Tensor) -> torch.Tensor:
            given = list(arguments)
            for i, x in zip(places, tensors, strict=True):
                given[i] = x
            for _ in range(REPLAYED):
                ours[(1,)](*given, **constants)
            return tensors[0].new_empty(1)

        tensors = [arguments[i] for i in places]
        several(*tensors)
        return lambda: several(*tensors)

    def by_static_launcher() -> Call:
        kernel = statically_launched(compiled(), setup.device.index or 0)
        stream = torch.cuda.current_stream().cuda_stream
        return lambda: kernel.run(1, 1, 1, stream, *arguments)

    return {
        "kernel[grid]": lambda: lambda: plain[(1,)](*arguments, **constants),
        OURS: by_recording,
        "compiled[grid]": by_compiled_kernel,
        "compiled.run": by_launcher,
        STATIC: by_static_launcher,
    }


def arguments_of(function: Callable[..., None], device: torch.device) -> Iterator[torch.Tensor | int]:
    """Tensors for names of one letter, numbers for the others: none is 1, which Triton would make a constant."""
    for number, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.annotation is inspect.Parameter.empty:
            yield torch.zeros(16, device=device) if len(name) == 1 else 16 + number


def constants_of(function: Callable[..., None]) -> dict[str, int]:
    """The kernel's constants."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: 16 for p in parameters if p.annotation is not inspect.Parameter.empty}


def statically_launched(kernel: Any, device: int) -> Any:
    """A compiled kernel, loaded by torch's launcher, which is written in C and takes no constants."""
    for name in STATIC_LAUNCHERS:
        try:
            kind = import_module(f"torch._inductor.runtime.{name}").StaticallyLaunchedCudaKernel
        except (ImportError, AttributeError):
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            kernel._cubin_path = file.name
            launched = kind(kernel)
            launched.load_kernel(device)
        return launched
    raise NotImplementedError("torch has no static launcher")
