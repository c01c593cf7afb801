"""Kernels are read once and launched where their tensors are; what is replayed is what a layer launches."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from hf_effattn.ops.shared.triton import launch


def _some_kernel(x_ptr, n, BLOCK):
    """Never compiled here."""


@pytest.mark.parametrize(("interpret", "kind", "read"), [("0", launch.Kernel, 1), ("1", InterpretedFunction, 0)])
def test_a_kernel_is_read_once(interpret, kind, read, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    calls, begin = [], JITFunction.__init__
    monkeypatch.setattr(
        JITFunction, "__init__", lambda self, *args, **named: calls.append(begin(self, *args, **named))
    )
    assert type(launch.kernel(_some_kernel)) is kind
    assert len(calls) == read


def test_a_launch_runs_on_the_gpu_that_holds_the_tensors(monkeypatch):
    launched = []

    class Gpu:
        device = 0

        def get_current_device(self):
            return self.device

    class OnSecondGpu(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 1)

    @contextmanager
    def switched(device):
        before, gpu.device = gpu.device, device.index
        yield
        gpu.device = before

    gpu = Gpu()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **named: launched.append(gpu.device))
    monkeypatch.setattr(launch, "driver", type("Driver", (), {"active": gpu}))
    monkeypatch.setattr(torch.cuda, "device", switched)
    kernel = launch.Kernel(_some_kernel, do_not_specialize=launch.LENGTHS)
    kernel[(3,)](torch.zeros(8).as_subclass(OnSecondGpu), 5, BLOCK=16)
    kernel[(3,)](torch.zeros(8), 5, BLOCK=16)
    kernel[(0,)](torch.zeros(8), 5, BLOCK=16)
    assert launched == [1, 0]
    assert gpu.device == 0


@pytest.mark.slow
def test_replays_make_the_launches_of_a_layer():
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
        assert layer["replays"] >= 2  # forward and backward
