"""What the host does for a layer on a GPU, without one: all but the launches themselves runs.

    python tests/compile/host.py          # prints the launches whose arguments were not those that Triton passes
    python tests/compile/host.py --time   # prints microseconds of the host for each layer, as JSON

The driver's launch does nothing, so a short layer takes as long as Python, torch and Triton need to come to its
launches.
"""

import json
import sys
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from compile_kernels import NamedGpu, fill_outputs, start
from machine_code import GPU, layers

from hf_effattn.ops.shared.triton import launch

LAUNCHED: list[tuple[Any, ...]] = []
PASSED: list[int] = []  # where the tensors of the last launch are
REPEATS, SHORT = 100, 256


class Loader:
    """What loads kernels onto a GPU, and says what the GPU has."""

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """A module, a function, registers, spilled ones, the most threads of a program."""
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}


class Launcher:
    """Notes what is launched, by kinds of tensors and numbers."""

    def __init__(self, source: Any, _: Any) -> None:
        self.kernel = source.fn.__name__

    def __call__(self, *arguments: Any) -> None:
        grid, given = arguments[:3], arguments[9:]
        PASSED[:] = addresses(given)
        kinds = ((x.dtype, x.shape, x.stride()) if torch.is_tensor(x) else x for x in given)
        LAUNCHED.append((self.kernel, grid, *kinds))


def addresses(arguments: Iterable[Any]) -> list[int]:
    """Where the tensors among some arguments are."""
    return [x.data_ptr() for x in arguments if torch.is_tensor(x)]


class Called(launch.Kernel):
    """Raises where a kernel gets other tensors than it was called with, or in another order."""

    def run(self, *args: Any, **named: Any) -> Any:
        by_name = dict(zip(self.arg_names, args, strict=False)) | named
        compiled = super().run(*args, **named)
        if addresses(by_name[name] for name in self.arg_names) != PASSED:
            raise AssertionError(f"{self.__name__} got other tensors than it was called with")
        return compiled


class IdleGpu(NamedGpu):
    """A driver whose GPU does nothing."""

    utils = Loader()
    launcher_cls = Launcher


def launches(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Of the forward and the backward pass."""
    LAUNCHED.clear()
    call().sum().backward()
    return list(LAUNCHED)


def check() -> dict[str, Any]:
    """Of every layer how many launches there are, and which of those that were remembered differ."""
    fill_outputs()
    for module in list(sys.modules.values()):
        for kernel in vars(module).values() if module.__name__.startswith("hf_effattn") else ():
            if isinstance(kernel, launch.Kernel):
                kernel.__class__ = Called
    counts = {}
    for name, call in layers().items():
        launch.REMEMBERS = False
        expected = launches(call)
        launch.REMEMBERS = True
        first, remembered = launches(call), launches(call)
        pairs = zip(expected, first, remembered, strict=True)
        differing = [old[0] for old, new, again in pairs if not old == new == again]
        counts[name] = {"launches": len(expected), "differing": differing}
    return counts


def time() -> dict[str, Any]:
    """Microseconds of the host for the forward pass, with what is remembered and without, in turn."""
    medians: dict[str, Any] = {}
    for name, call in layers(SHORT).items():
        call()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(REPEATS):
            for remembers, kept in seconds.items():
                launch.REMEMBERS = remembers
                begin = perf_counter()
                call()
                kept.append(perf_counter() - begin)
        keys = {False: "found out anew", True: "remembered"}
        medians[name] = {keys[which]: round(1e6 * median(kept), 1) for which, kept in seconds.items()}
    return medians


if __name__ == "__main__":
    start(GPU, IdleGpu)
    print(json.dumps(time() if "--time" in sys.argv else check(), indent=1))
