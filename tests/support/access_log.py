"""Every load, store and atomic operation of every program of a launch, on Triton's interpreter, and what is wrong.

The interpreter runs programs one after the other, so a race gives the right result on it; the log shows the race.

Programs may arrive at a counter: by an atomic operation that acquires and releases, directly behind a barrier. What
the last one does after it is ordered behind all that the others did before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from triton._C.libtriton import ir
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

POISON = 0xA5  # every byte of memory that nobody has written
LOAD, STORE, ATOMIC = range(3)
Accesses = dict[str, np.ndarray]


@dataclass
class AccessLog:
    """What the launches since the log was opened did.

    Attributes:
        kernels: names of the kernels that were launched.
        findings: one line for each kind of fault of a launch.
    """

    kernels: set[str] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)
    _records: list[tuple[int, int, np.ndarray, bool]] = field(default_factory=list)
    _ranges: list[tuple[int, int]] = field(default_factory=list)
    _arrivals: list[tuple[int, int, int]] = field(default_factory=list)
    _barrier: int = -1

    def note_barrier(self) -> None:
        """The running program's threads have waited for each other."""
        self._barrier = len(self._records)

    def note(self, kind: int, pointers: Any, mask: Any, values: np.ndarray | None, arrives: bool = False) -> None:
        """One operation of the running program: `values` are those that it read; it `arrives` if it orders others."""
        chosen = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        if not chosen.any():
            return
        x, y, z = interpreter_builder.grid_idx
        _, along_y, along_z = interpreter_builder.grid_dim
        poisoned = False
        if values is not None:
            read = np.ascontiguousarray(np.broadcast_to(values, pointers.data.shape)[chosen])
            poisoned = bool((read.view(np.uint8).reshape(len(read), -1) == POISON).all(axis=1).any())
        program = (x * along_y + y) * along_z + z
        if arrives and chosen.size == 1 and self._barrier == len(self._records):
            self._arrivals.append((len(self._records), program, int(pointers.data.item())))
        self._records.append((kind, program, pointers.data[chosen].astype(np.int64), poisoned))

    def finish(self, kernel: str) -> None:
        """Judge the launch that has just ended."""
        self.kernels.add(kernel)
        if self._records:
            self.findings += [
                f"{kernel}: {fault}" for fault in faults(*self._accesses(), self._ranges, self._arrivals)
            ]
            if any(record[3] for record in self._records):
                self.findings.append(f"{kernel}: read of memory that nobody has written")
        self._records, self._ranges, self._arrivals, self._barrier = [], [], [], -1

    def _accesses(self) -> tuple[np.ndarray, ...]:
        """Kind, program, place in time and address of every number touched."""
        kinds, programs, addresses, _ = zip(*self._records, strict=True)
        sizes = [len(block) for block in addresses]
        columns = (np.repeat(column, sizes) for column in (kinds, programs, np.arange(len(sizes))))
        return *columns, np.concatenate(addresses)


def ordered(
    program: np.ndarray, time: np.ndarray, arrivals: list[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Which accesses are those of a last program after its arrival, and who must not meet them.

    That is a number for each access: the same for all that they are ordered with.
    """
    behind, together = np.zeros(len(time), dtype=bool), program.copy()
    for number, counter in enumerate({address for _, _, address in arrivals}, program.max() + 1):
        at_counter = {who: when for when, who, address in arrivals if address == counter}
        last = max(at_counter, key=lambda who: at_counter[who])
        for who, when in at_counter.items():
            behind |= (program == who) & (time > when) & (who == last)
            together[(program == who) & ((time <= when) | (who == last))] = number
    return behind, together


def faults(
    kind: np.ndarray,
    program: np.ndarray,
    time: np.ndarray,
    address: np.ndarray,
    ranges: list[tuple[int, int]],
    arrivals: list[tuple[int, int, int]],
) -> Iterator[str]:
    """What is wrong with the accesses of one launch."""
    starts, ends = (np.array(sorted(bound)) for bound in zip(*ranges, strict=True))
    place = np.searchsorted(starts, address, side="right") - 1
    if ((place < 0) | (address >= ends[place])).any():
        yield "access outside of all arguments"

    _, address = np.unique(address, return_inverse=True)
    behind, together = ordered(program, time, arrivals)
    met = set(meetings(kind[~behind], program[~behind], address[~behind])) | set(meetings(kind, together, address))
    yield from sorted(met)

    # A thread may load before another one has stored, on AMD even where a barrier stands between.
    stored = kind != LOAD
    _, place = np.unique((2 * address + behind) * (program.max() + 1) + program, return_inverse=True)
    first_store = np.full(place.max() + 1, len(time))
    np.minimum.at(first_store, place[stored], time[stored])
    if (time[~stored] > first_store[place[~stored]]).any():
        yield "load of what the program itself stored"


def meetings(kind: np.ndarray, program: np.ndarray, address: np.ndarray) -> Iterator[str]:
    """What programs do where others do something else, if nothing orders them; addresses are numbers from 0 on."""
    programs = {}
    for which in (LOAD, STORE, ATOMIC):
        chosen = kind == which
        lowest, highest = np.full(address.max() + 1, np.iinfo(np.int64).max), np.full(address.max() + 1, -1)
        np.minimum.at(lowest, address[chosen], program[chosen])
        np.maximum.at(highest, address[chosen], program[chosen])
        programs[which] = lowest, highest

    def meet(a: int, b: int) -> bool:
        """Whether a program does `a` where another one does `b`."""
        both = (programs[a][1] >= 0) & (programs[b][1] >= 0)
        return bool((both & ((programs[a][0] != programs[b][1]) | (programs[a][1] != programs[b][0]))).any())

    if meet(STORE, STORE):
        yield "store by two programs"
    if meet(LOAD, STORE):
        yield "load by one program and store by another"
    if meet(ATOMIC, LOAD) or meet(ATOMIC, STORE):
        yield "atomic operation by one program and plain access by another"


@contextmanager
def logged_accesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[AccessLog]:
    """A log of all launches inside; `torch.empty` and its kin hand out poison."""
    log = AccessLog()
    builder = InterpreterBuilder
    barrier = builder.create_barrier
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    arguments_on_host, call = GridExecutor._init_args_hst, GridExecutor.__call__

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        loaded = load(self, ptrs, mask, *rest)
        log.note(LOAD, ptrs, mask, loaded.data)
        return loaded

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        log.note(STORE, ptrs, mask, None)
        return store(self, ptrs, value, mask, *rest)

    def atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        before = atomic(self, operation, ptr, val, mask, *rest)
        log.note(ATOMIC, ptr, mask, before.data, arrives=rest[0] == ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
        return before

    def create_barrier(self: Any) -> Any:
        log.note_barrier()
        return barrier(self)

    def init_arguments(self: GridExecutor, *arguments: Any) -> Any:
        on_host = arguments_on_host(self, *arguments)
        for tensor in (*on_host[0], *on_host[1].values()):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                log._ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return on_host

    def launch(self: GridExecutor, *arguments: Any, **options: Any) -> None:
        call(self, *arguments, **options)
        log.finish(self.fn.__name__)

    def poisoned(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            tensor = make(*arguments, **options)
            if tensor.device.type == "cpu":  # not those that only plan an op
                torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)
            return tensor

        return made

    with monkeypatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        patch.setattr(builder, "create_masked_load", masked_load)
        patch.setattr(builder, "create_masked_store", masked_store)
        patch.setattr(builder, "create_atomic_rmw", atomic_rmw)
        patch.setattr(builder, "create_barrier", create_barrier)
        patch.setattr(GridExecutor, "_init_args_hst", init_arguments)
        patch.setattr(GridExecutor, "__call__", launch)
        yield log
