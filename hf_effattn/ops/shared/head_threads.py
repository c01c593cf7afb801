"""Chunks of heads on a CPU's threads: each thread takes all the small steps of its own chunks alone.

Threads that split every small step wait for each other at its end; beside another busy process one of them is always
late, and the steps take ten times as long. Threads that share no step meet once.

A large operator of the caller between two such meetings costs more than its own time: OpenMP's threads, woken for it,
spin for some milliseconds afterwards, on the cores that the chunks need. What lies between runs in chunks, too.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import Barrier, local
from typing import TypeVar

import torch

Chunk = TypeVar("Chunk")
DENORMAL = 1e-40
_inside = local()  # `chunk`: whether this thread runs one that no other threads may share


@lru_cache
def _workers(count: int, each: int) -> ThreadPoolExecutor:
    """`count` threads whose own operators run on `each` threads."""
    # Every thread has its own number, but torch also keeps the last one set, for new threads.
    here = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "hf_effattn", initializer=_use_threads, initargs=(each,))
    everyone = Barrier(count)  # without it an idle thread would take two tasks, and another would start later
    for _ in pool.map(lambda _: everyone.wait(), range(count)):
        pass
    torch.set_num_threads(here)
    return pool


def _use_threads(each: int) -> None:
    torch.get_num_threads()  # a new thread takes the kept number when it first needs one
    torch.set_num_threads(each)


@contextmanager
def _denormals_as_zero() -> Iterator[None]:
    """This thread's arithmetic with 0 for numbers too small to be normal.

    A product with one takes some processors a hundred times as long, and the smallest weights of a softmax are many.
    Not where operators run on several threads: OpenMP's take the mode of the one that first needs them, and keep it.
    """
    if torch.get_num_threads() > 1:
        yield
        return
    # dtype and device are given, as the caller may have set other defaults.
    before = not torch.tensor(DENORMAL, dtype=torch.float32, device="cpu").mul_(1).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@lru_cache
def _keep_freed_memory() -> None:
    """Let glibc keep what chunks free for the next ones; faulting it in anew takes a third of the time.

    It serves requests below the largest block ever freed, up to 32 MiB, from memory that it keeps. Of this block no
    page is touched.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has none of its parent's threads


def heads_of_threads(heads: int, device: torch.device) -> list[slice]:
    """The heads in as many runs of neighbours as a CPU's threads are; on other devices in one."""
    parts = max(1, min(heads, torch.get_num_threads() if device.type == "cpu" else 1))
    return [slice(heads * i // parts, heads * (i + 1) // parts) for i in range(parts)]


def for_every_chunk(run: Callable[[Chunk], None], chunks: Iterable[Chunk], device: torch.device) -> None:
    """Run every chunk, outside of autocast and autograd; on a CPU one per thread at a time.

    Chunks must not write to the same place. What one raises is raised here. Chunks inside of one that runs beside
    others run one after the other, as it left autocast and autograd.
    """
    chunks = list(chunks)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if getattr(_inside, "chunk", False):
        # The contexts below are on already. Entering them takes a dozen calls, each of which makes threads wait.
        for chunk in chunks:
            run(chunk)
        return
    _keep_freed_memory()
    inference = torch.is_inference_mode_enabled()
    # Fewer chunks than threads get several threads each. One after the other on all threads would take longer, as a
    # second thread saves no more than a third of the time of a head's small steps.
    workers = min(threads, len(chunks))
    shared = threads > 1 and workers < 2  # by those inside of it

    def run_one(chunk: Chunk) -> None:
        no_autocast = torch.autocast(device.type, enabled=False)
        with torch.inference_mode(inference), torch.no_grad(), no_autocast, _denormals_as_zero():
            _inside.chunk = not shared
            try:
                run(chunk)
            finally:
                _inside.chunk = False

    run_all = map if workers < 2 else _workers(workers, threads // workers).map
    for _ in run_all(run_one, chunks):
        pass
