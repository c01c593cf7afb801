"""The launches of a function, made again with other addresses and without the Python that decided on them.

On the host a layer of attention is a dozen launches or more, some empty tensors, and Python that finds grids,
configurations and numbers: always the same for arguments of the same kind. `recorded` notes in the first call what is
launched with what, and later calls only fill in where the tensors are. Unlike a CUDA graph, a recording holds no
memory of the GPU, its tensors may be anywhere, and it takes the current stream.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from triton import knobs
from triton.runtime import driver

from ..precision import autocasts
from .chips import tf32_allowed

RECORDS = not knobs.runtime.interpret
MOST = 256  # recordings of a function, so that lengths that come only once do not fill the memory
POINTER_ALIGNMENT = 16  # bytes; Triton compiles for tensors that begin at a multiple, and for others
ALIGNMENT = 512  # bytes, of tensors in the workspace, as torch's allocator aligns them

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_now = threading.local()


class NotRecordableError(Exception):
    """What a function does cannot be repeated from its launches alone."""


class View(NamedTuple):
    """A tensor on some memory: which one, and how many bytes from its beginning."""

    source: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor in that place."""
        if self.offset == 0 and base.shape == self.size and base.stride() == self.stride:
            return base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset // base.itemsize)


class Launch(NamedTuple):
    """A launch: what is called, with what, and which of the arguments are addresses."""

    run: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    arguments: list[Any]
    places: list[tuple[int, int, int]]  # index of the argument, the memory, bytes from its beginning


class Call(NamedTuple):
    """A call of one of torch's own ops, and which of its results are new memory."""

    op: Callable[..., Any]
    arguments: list[Any]  # tensors as `View`
    structure: TreeSpec
    results: list[tuple[int, int]]  # index of the result, the memory


class Allocate(NamedTuple):
    """A tensor of its own, for what is returned and for torch's ops."""

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Release(NamedTuple):
    """A tensor that no later step reads."""

    source: int


@dataclass
class Source:
    """Memory that a recorded function reads or writes, where it was and when it was used."""

    start: int
    bytes: int
    dtype: torch.dtype
    tensor: View | None = None  # of memory that the function allocated; None: of arguments and of what torch computed
    owned: bool = False  # whether it has to be a tensor, beside an address
    first: int | None = None  # the step that used it first, and last
    last: int = 0


class Recorder(TorchDispatchMode):
    """Follows a call: every kernel that is launched, every tensor that is allocated, every op of torch."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.inputs = len(inputs)
        self.device = inputs[0].device
        self.storages = [x.untyped_storage().data_ptr() for x in inputs]
        ends = [x.untyped_storage().data_ptr() + x.untyped_storage().nbytes() for x in inputs]
        self.sources = [Source(x.data_ptr(), end - x.data_ptr(), x.dtype) for x, end in zip(inputs, ends, strict=True)]
        self.steps: list[Launch | Call] = []
        self.refused: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of torch, and note what it allocates or computes."""
        result = func(*args, **(kwargs or {}))
        try:
            self._note(func, args, kwargs or {}, result)
        except NotRecordableError as error:
            self.refused = self.refused or str(error)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if func._schema.name.removeprefix("aten::") in _EMPTY and result.device == self.device:
            place = len(self.sources)
            view = View(place, 0, result.dtype, tuple(result.shape), result.stride())
            self.sources.append(Source(result.data_ptr(), result.untyped_storage().nbytes(), result.dtype, view))
            return
        given, structure = tree_flatten((args, kwargs))
        results = tree_flatten(result)[0]
        if func.is_view:
            viewed = next(x for x in given if isinstance(x, torch.Tensor))
            if all(x.untyped_storage().data_ptr() == viewed.untyped_storage().data_ptr() for x in results):
                self._check_view(viewed, results)
                return  # else a cast, or a copy that was needed
        if any(not isinstance(x, torch.Tensor) or x.device != self.device for x in results):
            raise NotRecordableError(f"{func} brings numbers to the host")
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            raise NotRecordableError(f"{func} returns what depends on numbers")
        arguments = [self._view(x) if isinstance(x, torch.Tensor) else x for x in given]
        new = []
        for i, x in enumerate(results):
            if not any(x is other for other in given):
                new.append((i, len(self.sources)))
                self.sources.append(Source(x.data_ptr(), x.untyped_storage().nbytes(), x.dtype))
                self._use(new[-1][1])
        self.steps.append(Call(func, arguments, structure, new))

    def _check_view(self, of: torch.Tensor, views: Iterable[torch.Tensor]) -> None:
        """A part of an argument that shares its memory with another one may lie elsewhere the next time."""
        shared = self.storages.count(of.untyped_storage().data_ptr()) > 1
        if shared and any(view.data_ptr() != of.data_ptr() for view in views):
            raise NotRecordableError("it reads a part of an argument that shares its memory with another")

    def _place(self, address: int) -> tuple[int, int]:
        """The memory that an address is in, and its distance from there.

        A later tensor may have the memory of an earlier one. Arguments keep theirs, and begin where they did.
        """
        starts = [source.start for source in self.sources[: self.inputs]]
        if address in starts:
            return starts.index(address), 0
        for i in reversed(range(len(self.sources))):
            offset = address - self.sources[i].start
            if 0 <= offset < self.sources[i].bytes:
                return i, offset
        raise NotRecordableError("it reads memory that is neither its arguments' nor its own")

    def _use(self, source: int) -> None:
        used = self.sources[source]
        used.first = len(self.steps) if used.first is None else used.first
        used.last = len(self.steps)

    def _view(self, x: torch.Tensor) -> View:
        """Where a tensor is that torch needs as one."""
        if x.numel() == 0:
            raise NotRecordableError("it computes with an empty tensor")
        source, offset = self._place(x.data_ptr())
        if self.sources[source].dtype != x.dtype:
            raise NotRecordableError("it reads memory as numbers of another kind")
        self.sources[source].owned = True
        self._use(source)
        return View(source, offset, x.dtype, tuple(x.shape), x.stride())

    def launched(self, compiled: Any, grid: tuple[int, ...], arguments: list[Any]) -> None:
        """Note a launch of a compiled kernel with all arguments in its order."""
        places = []
        if compiled is None:  # a hook has kept Triton from launching it
            self.refused = "a kernel was not launched"
            return
        try:
            for i, x in enumerate(arguments):
                if isinstance(x, torch.Tensor):
                    arguments[i] = 0
                    if address := x.data_ptr():
                        source, offset = self._place(address)
                        self._use(source)
                        places.append((i, source, offset))
        except NotRecordableError as error:
            self.refused = self.refused or str(error)
        x, y, z = (*grid, 1, 1)[:3]
        launch = Launch(compiled.run, (x, y, z), compiled.function, compiled.packed_metadata, arguments, places)
        self.steps.append(launch)

    def recording(self, result: Any, wanted: int | None) -> "Recording | None":
        """What has been recorded, once the function has returned; None where it cannot be repeated."""
        listed = list(result)[:wanted] if isinstance(result, list | tuple) else [result]
        try:
            outputs = [self._view(x) if x.numel() else self._empty(x) for x in listed]
        except NotRecordableError as error:
            self.refused = self.refused or str(error)
            return None
        for view, x in zip(outputs, listed, strict=True):
            source = self.sources[view.source]
            if source.tensor is not None and view.offset == 0 and x.nbytes == source.bytes:
                source.tensor = view  # allocated as it is returned
        return None if self.refused else Recording(self, outputs, type(result))

    def _empty(self, x: torch.Tensor) -> View:
        """An output without numbers."""
        view = View(len(self.sources), 0, x.dtype, tuple(x.shape), x.stride())
        self.sources.append(Source(0, 0, x.dtype, view, owned=True, first=0))
        return view


class Recording:
    """The steps of a recorded call, its temporary tensors in one workspace."""

    def __init__(self, recorder: Recorder, outputs: list[View], kind: type) -> None:
        self.device, self.outputs, self.kind = recorder.device, outputs, kind
        self.sources = len(recorder.sources)
        temporary = [
            (i, source)
            for i, source in enumerate(recorder.sources)
            if source.tensor is not None and not source.owned and source.first is not None
        ]
        offsets, self.workspace = packed([(source.first or 0, source.last, source.bytes) for _, source in temporary])
        in_workspace = {i: offset for (i, _), offset in zip(temporary, offsets, strict=True)}
        returned = {view.source for view in outputs}
        before: dict[int, list[Allocate]] = {}
        behind: dict[int, list[Release]] = {}
        for i, source in enumerate(recorder.sources):
            if source.first is None:
                continue
            if source.owned and (tensor := source.tensor) is not None:
                allocate = Allocate(i, tensor.size, tensor.stride, tensor.dtype)
                before.setdefault(source.first, []).append(allocate)
            if i >= recorder.inputs and i not in in_workspace and i not in returned:
                behind.setdefault(source.last, []).append(Release(i))
        self.steps: list[Launch | Call | Allocate | Release] = []
        for number, step in enumerate([*recorder.steps, None]):
            self.steps += before.get(number, [])
            if isinstance(step, Launch):
                places = [
                    (index, self.sources, in_workspace[source] + offset)
                    if source in in_workspace
                    else (index, source, offset)
                    for index, source, offset in step.places
                ]
                step = step._replace(places=places)
            if step is not None:
                self.steps.append(step)
            self.steps += behind.get(number, [])

    def replay(self, inputs: list[torch.Tensor]) -> Any:
        """Make the launches again, for arguments of the same kind in other places."""
        missing = [None] * (self.sources - len(inputs))
        tensors: list[Any] = [*inputs, *missing]
        addresses = [x.data_ptr() for x in inputs] + [0] * (len(missing) + 1)
        if self.workspace:
            workspace = torch.empty(self.workspace, dtype=torch.uint8, device=self.device)
            addresses[-1] = workspace.data_ptr()
        stream = driver.active.get_current_stream(self.device.index)
        for step in self.steps:
            if isinstance(step, Launch):
                run, (x, y, z), function, metadata, arguments, places = step
                arguments = arguments.copy()
                for index, source, offset in places:
                    arguments[index] = addresses[source] + offset
                run(x, y, z, stream, function, metadata, None, None, None, *arguments)
            elif isinstance(step, Allocate):
                source, size, stride, dtype = step
                made = torch.empty_strided(size, stride, dtype=dtype, device=self.device)
                tensors[source], addresses[source] = made, made.data_ptr()
            elif isinstance(step, Release):
                tensors[step.source] = None
            else:
                op, given, structure, results = step
                given = [x.on(tensors[x.source]) if type(x) is View else x for x in given]
                args, kwargs = tree_unflatten(given, structure)
                returned = op(*args, **kwargs)
                flat = tree_flatten(returned)[0] if results else ()
                for index, source in results:
                    tensors[source], addresses[source] = flat[index], flat[index].data_ptr()
        outputs = [view.on(tensors[view.source]) for view in self.outputs]
        return outputs[0] if self.kind is torch.Tensor else self.kind(outputs)


def packed(intervals: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where in a workspace tensors `(first step, last step, bytes)` lie, those of the same time apart; its bytes."""
    placed: list[tuple[int, int, int, int]] = []  # first step, last step, offset, end
    offsets = []
    for first, last, size in intervals:
        offset = 0
        for other_first, other_last, other_offset, other_end in sorted(placed, key=lambda row: row[2]):
            meets = other_first <= last and first <= other_last
            if meets and offset + size > other_offset and offset < other_end:
                offset = other_end
        end = offset + -(-size // ALIGNMENT) * ALIGNMENT
        placed.append((first, last, offset, end))
        offsets.append(offset)
    return offsets, max((end for *_, end in placed), default=0)


def recorder() -> Recorder | None:
    """The recorder of the call that is being recorded in this thread, if any."""
    return getattr(_now, "recorder", None)


def constant(function: Callable[..., Any], *numbers: Any) -> Any:
    """What a function makes of numbers alone, with torch on the host: no part of a recording."""
    if recorder() is None:
        return function(*numbers)
    with _disable_current_modes():
        return function(*numbers)


def _is_watched() -> bool:
    """Whether someone, a profiler, is to hear of every launch; a chain of hooks is empty where nobody is."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def signature(arguments: Iterable[Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """The kinds of arguments, of which all launches follow; their tensors are added to a list."""
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
            aligned = argument.data_ptr() % POINTER_ALIGNMENT
            kinds.append((argument.dtype, argument.shape, argument.stride(), argument.device, aligned))
        elif isinstance(argument, list | tuple):
            counts = argument and isinstance(argument[0], int)  # of heads
            kinds.append(tuple(argument) if counts else signature(argument, tensors))
        else:
            kinds.append((argument, type(argument)))
    return tuple(kinds)


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of what launches kernels: from the second call with arguments of a kind on, only its launches run.

    The function gets tensors on one device, None, numbers, and lists and tuples of these, and returns new tensors:
    one, or a list or tuple of them. What it does may depend on the kinds of its arguments (dtypes, sizes, strides) and
    on the numbers among them, not on what tensors hold. The new function runs outside of autocast and has an argument
    more: `wanted`, how many of the tensors it has to return, the first of a list or tuple; the others need no memory
    of their own.
    """
    recordings: dict[Any, Recording | Literal[False]] = {}  # False: cannot be recorded

    @wraps(function)
    def call(*arguments: Any, wanted: int | None = None) -> Any:
        tensors: list[torch.Tensor] = []
        kinds = signature(arguments, tensors)
        device = tensors[0].device
        if autocasts(device.type):  # a replay calls torch's ops in the same dtypes, whoever asks for it
            with torch.autocast(device.type, enabled=False):
                return call(*arguments, wanted=wanted)
        if not RECORDS or recorder() is not None or _is_watched():
            return function(*arguments)
        places = [x.data_ptr() for x in tensors]
        same = map(places.index, places)  # which tensors are in the same place
        key = wanted, torch.are_deterministic_algorithms_enabled(), tf32_allowed(), *same, kinds
        recording = recordings.get(key)
        if recording is None:
            _now.recorder = Recorder(tensors)
            try:
                with _now.recorder:
                    result = function(*arguments)
                if len(recordings) >= MOST:
                    recordings.clear()
                recordings[key] = _now.recorder.recording(result, wanted) or False
            finally:
                _now.recorder = None
            return result
        if not recording:
            return function(*arguments)
        if device.type == "cpu" or device.index == driver.active.get_current_device():
            return recording.replay(tensors)
        with torch.cuda.device(device):  # kernels are launched on the current GPU
            return recording.replay(tensors)

    call.is_recorded = True  # type: ignore[attr-defined]
    return call
