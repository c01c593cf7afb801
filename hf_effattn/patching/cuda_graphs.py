"""Attention as a CUDA graph: what the host starts kernel by kernel is captured once, and then started in one call.

A call's signature is all that decides which kernels run on what sizes. Its first call runs as it is, the second is
captured, and later ones copy their inputs into the graph's, replay it and copy its output.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from ..ops.derivatives import learns
from ..ops.shared.callers import stacklevel_of_user
from ..ops.shared.torch_internals import is_plain, is_watched
from ..ops.shared.triton.chips import tf32_allowed

CUDA_GRAPH = ("auto", "never")
# The signatures of a device that are kept, the latest. With settings for every head each layer has one of its own, and
# models have up to 32 layers or so. A graph holds its inputs and output: 0.1 GB of a BERT of base size, 16,384 tokens.
MOST_SIGNATURES = 32
Tensors = Sequence[torch.Tensor | None]


class CudaBackend:
    """What captures and replays on one device need of `torch.cuda`; tests on a CPU put another in its place."""

    capturing = threading.Lock()  # torch allows one capture at a time in a process, on whatever device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One pool for all graphs of the device: they hold what is between inputs and output in the same memory, so no
        # two of them may run at a time. torch shares it between captures on the same stream.
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def is_capturing(device: torch.device) -> bool:
        """Whether the device's current stream is being captured already."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """What repeats `run` on the memory that it read, and the tensor that it then writes."""
        with torch.cuda.device(self.device), self.capturing:
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                run()  # what a stream's first use sets up, such as cuBLAS's workspace, cannot be captured
            current.wait_stream(self.stream)
            # Kept also where the capture fails: torch's allocator may go on asking this graph which memory is its own.
            graph = self.graph = torch.cuda.CUDAGraph()
            how: Any = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
            # A capture that fails leaves its stream as the current one: the outer block does not.
            with torch.cuda.stream(current), torch.cuda.graph(graph, **how):
                output = run()
        return graph.replay, output

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Around a replay, which waits on the device for the one before it; one thread at a time."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self.last is not None and self.last[0] != stream:
                stream.wait_event(self.last[1])
            done = torch.cuda.Event() if self.last is None else self.last[1]
            yield
            done.record(stream)
        self.last = stream, done

    def wait(self) -> None:
        """Let the host wait for the last replay."""
        if self.last is not None:
            self.last[1].synchronize()


class _Captured:
    """An attention function on inputs of its own."""

    def __init__(self, backend: CudaBackend, attend: Callable[..., torch.Tensor], tensors: Tensors) -> None:
        # Made in inference mode, they could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
            self._fill(tensors)
            self._replay, self._output = backend.capture(lambda: attend(*self._inputs))

    def _fill(self, tensors: Tensors) -> None:
        for own, given in zip(self._inputs, tensors, strict=True):
            if own is not None and given is not None:
                own.copy_(given)

    def __call__(self, tensors: Tensors) -> torch.Tensor:
        """The output for other inputs, in memory of its own: the next replay writes over the graph's."""
        self._fill(tensors)
        self._replay()
        return self._output.clone()


class DeviceGraphs:
    """The graphs of one device, by signature, and the signatures that came once, whose value is None."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._known: OrderedDict[Hashable, _Captured | None] = OrderedDict()
        self._failed = False
        self._lock = threading.Lock()  # graphs share memory, so one replay is started after the other

    def attend(self, attend: Callable[..., torch.Tensor], tensors: Tensors, signature: Hashable) -> torch.Tensor:
        """`attend(*tensors)`, by a graph from the signature's second call on."""
        with self._lock:
            graph = None if self._failed else self._graph_of(signature, attend, tensors)
            if graph is not None:
                with self._backend.in_order():
                    return graph(tensors)
        return attend(*tensors)

    def _graph_of(
        self, signature: Hashable, attend: Callable[..., torch.Tensor], tensors: Tensors
    ) -> _Captured | None:
        is_first = signature not in self._known
        graph = self._known.pop(signature, None)
        if graph is None and not is_first:
            try:
                graph = _Captured(self._backend, attend, tensors)
            except Exception as error:  # whatever it is, attention itself goes on without, and raises what is its own
                self._give_up(error)
                return None
        self._known[signature] = graph
        if len(self._known) > MOST_SIGNATURES:
            _, dropped = self._known.popitem(last=False)
            if dropped is not None:
                self._backend.wait()  # its memory is free for the stream it was made on, whichever it last ran on
        return graph

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self._backend.wait()
        self._known.clear()
        said = str(error).partition("\n")[0]
        warnings.warn(
            f"attention could not be captured as a CUDA graph ({type(error).__name__}: {said}): from now on it runs "
            'without, more slowly and with the same result. cuda_graph="never" does so from the start',
            stacklevel=stacklevel_of_user(),
        )


BACKENDS: dict[str, type[CudaBackend]] = {"cuda": CudaBackend}
_devices: dict[torch.device, DeviceGraphs] = {}
_making = threading.Lock()


def attend_by_graph(attend: Callable[..., torch.Tensor], tensors: Tensors, settings: Hashable) -> torch.Tensor:
    """`attend(*tensors)`, by a CUDA graph from the second call of a signature on, bit for bit the same.

    As it is where no graph can stand for it: on other devices than GPUs, in a capture by others, where autograd,
    `torch.func` or a mode follows the call, of float64, which PyTorch's operators compute. Not while a graph of
    `torch.compile` or `torch.jit.trace` is made.

    Args:
        attend (`Callable`): a function of the tensors, which reads no other tensor that may change.
        tensors (`Sequence[torch.Tensor | None]`): the query `(B, H, N, D)` and the other inputs.
        settings (`Hashable`): all else that decides what is computed.

    Returns:
        `torch.Tensor`: in memory that no later call writes to.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    backend = BACKENDS.get(device.type)
    if backend is None or backend.is_capturing(device) or not _can_be_copied(given):
        return attend(*tensors)
    with _making:
        graphs = _devices.get(device) or _devices.setdefault(device, DeviceGraphs(backend(device)))
    forms = tuple(None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors)
    return graphs.attend(attend, tensors, (forms, settings, _numerics(device.type)))


def _can_be_copied(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors' values are all that a computation with them depends on."""
    return (
        all(tensor.device == tensors[0].device and tensor.numel() and is_plain(tensor) for tensor in tensors)
        and tensors[0].dtype.itemsize <= 4
        and not (learns(*tensors) or is_watched())
        and all(forward_ad.unpack_dual(tensor).tangent is None for tensor in tensors)
    )


def _numerics(device_type: str) -> Hashable:
    """The switches of torch that change how it computes."""
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    sdpa = torch.backends.cuda
    kernels = sdpa.flash_sdp_enabled(), sdpa.mem_efficient_sdp_enabled(), sdpa.math_sdp_enabled()
    return autocast, tf32_allowed(), torch.are_deterministic_algorithms_enabled(), *kernels, sdpa.cudnn_sdp_enabled()
