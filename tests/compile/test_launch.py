"""A remembered launch is the one that Triton would have made."""

import json
import os
import subprocess
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from hf_effattn.ops.shared.triton import launch


def _some_kernel(x_ptr, n, BLOCK):
    """Never compiled here."""


class Compiled:
    """Stands for what Triton has compiled; notes how it is launched."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *given: self.launches.append((grid, given))


@pytest.fixture
def compiled(monkeypatch):
    """A kernel, and what it was compiled to, one for each time that Triton had to look at the arguments."""
    kernels: list[Compiled] = []

    def run(self, *args, grid, warmup, **constants):
        kernels.append(Compiled())
        return kernels[-1]

    class Gpu:
        device = 0

        def get_current_device(self):
            return self.device

    gpu = Gpu()
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch, "REMEMBERS", True)
    monkeypatch.setattr(launch, "driver", type("Driver", (), {"active": gpu}))
    return launch.Kernel(_some_kernel, do_not_specialize=launch.LENGTHS), kernels, gpu


@pytest.mark.parametrize(("interpret", "kind", "read"), [("0", launch.Kernel, 1), ("1", InterpretedFunction, 0)])
def test_a_kernel_is_read_once(interpret, kind, read, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    calls, begin = [], JITFunction.__init__
    monkeypatch.setattr(
        JITFunction, "__init__", lambda self, *args, **named: calls.append(begin(self, *args, **named))
    )
    assert type(launch.kernel(_some_kernel)) is kind
    assert len(calls) == read


def test_the_same_arguments_are_looked_at_once(compiled):
    kernel, kernels, _ = compiled
    first, second = torch.zeros(8), torch.ones(8)
    for tensor in (first, second):
        kernel[(3,)](tensor, 5, BLOCK=16, num_warps=4)
    assert len(kernels) == 1
    ((grid, given),) = kernels[0].launches
    assert grid == (3, 1, 1)
    assert given[0] is second
    assert given[1:] == (5, 16)


def test_whatever_triton_compiles_for_is_told_apart(compiled):
    kernel, kernels, gpu = compiled
    numbers = torch.zeros(64)
    odd = numbers[1:]  # begins at no multiple of 16 bytes
    calls = [
        ((numbers, 5), {"BLOCK": 16}),
        ((odd, 5), {"BLOCK": 16}),
        ((numbers.half(), 5), {"BLOCK": 16}),
        ((None, 5), {"BLOCK": 16}),
        ((numbers, 16), {"BLOCK": 16}),
        ((numbers, 1), {"BLOCK": 16}),
        ((numbers, 2**40), {"BLOCK": 16}),
        ((numbers, 5), {"BLOCK": 32}),
        ((numbers, 5), {"BLOCK": 16, "num_warps": 8}),
        ((numbers, 5), {"BLOCK": 16, "maxnreg": 8}),
    ]
    for gpu.device in (0, 1):
        for args, constants in calls * 2:
            kernel[(1,)](*args, **constants)
    assert len(kernels) == 2 * len(calls)
    assert all(len(binary.launches) == 1 for binary in kernels)


def test_a_launch_runs_on_the_gpu_that_holds_the_tensors(compiled, monkeypatch):
    kernel, _, gpu = compiled

    class OnSecondGpu(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 1)

    @contextmanager
    def switched(device):
        before, gpu.device = gpu.device, device.index
        yield
        gpu.device = before

    monkeypatch.setattr(torch.cuda, "device", switched)
    kernel[(3,)](torch.zeros(8).as_subclass(OnSecondGpu), 5, BLOCK=16)
    assert [used for used, *_ in kernel.remembered] == [1]
    assert gpu.device == 0


def test_what_is_not_compiled_is_not_remembered_and_memory_is_bounded(compiled, monkeypatch):
    kernel, _, _ = compiled
    monkeypatch.setattr(launch, "MOST_REMEMBERED", 10)
    for length in range(25):
        kernel[(1,)](torch.zeros(8), length, BLOCK=16)
        assert len(kernel.remembered) <= 10
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    kernel[(1,)](torch.zeros(8), 100, BLOCK=16)
    assert all(binary is not None for binary, _ in kernel.remembered.values())


def test_tensors_by_name_are_passed_and_not_kept(compiled):
    kernel, kernels, _ = compiled
    tensors = [torch.zeros(8), torch.ones(8)]
    for tensor in tensors:
        kernel[(1, 2)](BLOCK=16, n=5, x_ptr=tensor)
    assert len(kernels) == 1
    ((grid, given),) = kernels[0].launches
    assert grid == (1, 2, 1)
    assert given[0] is tensors[1]
    assert given[1:] == (5, 16)
    kept = [weakref.ref(tensor) for tensor in tensors]
    kernels[0].launches.clear()
    del tensors, tensor, given
    assert all(reference() is None for reference in kept)


@pytest.mark.slow
def test_remembered_launches_pass_what_triton_passes():
    """Of whole layers, forward and backward, compiled for a GPU whose driver does nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("host.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    layers = json.loads(done.stdout)
    assert layers
    for layer in layers.values():
        assert layer["launches"] > 3
        assert not layer["differing"]
