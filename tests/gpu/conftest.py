import os

# cuBLAS reads it once; `use_deterministic_algorithms` asks for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The GPU that these tests are about; `make test-gpu` runs them, `make test` leaves the folder out."""
    if not torch.cuda.is_available():
        pytest.fail("there is no GPU: a run of these tests without one must not look like a pass")
    torch.cuda.empty_cache()
    return torch.device("cuda")


@pytest.fixture
def captured() -> Callable[[Callable[[], Any]], tuple[torch.cuda.CUDAGraph, Any]]:
    """Makes a call a CUDA graph, warmed up on a stream of its own as torch asks for; with what replays write to."""

    def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        return graph, output

    return capture


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch told to be deterministic, as long as a test runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
