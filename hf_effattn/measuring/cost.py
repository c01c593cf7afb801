"""What a call costs: wall time, interleaved with what it is compared with, and the peak memory it adds."""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

SHORTEST_TIMING_SECONDS = 0.5
MOST_ROUNDS_PER_REPEAT = 10

MEMORY_MEASURES = {
    "cpu": "torch.profiler's memory events: the most bytes that PyTorch's CPU allocator held during the call above "
    "those held at its start, result included, on one thread (each further one adds the buffers of a chunk of heads); "
    "buffers that libraries allocate on their own are not seen",
    "cuda": "torch.cuda.max_memory_allocated during the call, above what was allocated at the start, result included",
}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What a call returns and the seconds it took, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def interleaved_rounds(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    *,
    before: Mapping[str, Callable[[], object]] | None = None,
    seconds: dict[str, list[float]] | None = None,
    after_call: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time every call once per round, so that a machine that slows down slows all of them down.

    Args:
        calls (`Mapping[str, Callable]`): what to time, by name.
        device (`torch.device`): where the work is done.
        repeats (`int`): rounds; short calls get more, up to ten times as many, until half a second has been timed.
        before (`Mapping[str, Callable]`, *optional*): what prepares each call, not timed.
        seconds (`dict[str, list[float]]`, *optional*): filled as times are taken: an interruption loses none.
        after_call (`Callable`): told after each call of the first `repeats` rounds, for a progress bar.

    Returns:
        `dict[str, list[float]]`: the seconds of each call, one per round; an interruption leaves whole rounds.
    """
    seconds = {name: [] for name in calls} if seconds is None else seconds
    spent = 0.0
    for done in range(repeats * MOST_ROUNDS_PER_REPEAT):
        if done >= repeats and spent >= SHORTEST_TIMING_SECONDS:
            break
        times = {}
        for name, call in calls.items():
            if before is not None:
                before[name]()
            _, times[name] = timed(call, device)
            if done < repeats:
                after_call()
        for name, taken in times.items():
            seconds[name].append(taken)
            spent += taken
    return seconds


def compare(
    calls: Mapping[str, Callable[[], object]], exact: Collection[str], device: torch.device, repeats: int
) -> dict[str, dict[str, Any]]:
    """Time calls that have run before, interleaved, against the fastest of those that are exact.

    On a GPU they are timed once more as CUDA graphs, which leave out what the host adds: most of a short call.

    Args:
        calls (`Mapping[str, Callable]`): what to time, by name.
        exact (`Collection[str]`): names of what the others are compared with.
        device (`torch.device`): where the work is done.
        repeats (`int`): rounds; short calls get more.

    Returns:
        `dict[str, dict]`: by name `ms`, `speedup` against the fastest exact call (None without one), `rounds` and
        `fastest_exact`, its name; of what a CUDA graph can hold `graph_ms`, and `graph_speedup` among graphs.
    """
    rows = _compare(calls, exact, device, repeats)
    if device.type == "cuda":
        graphs = {name: graph.replay for name, call in calls.items() if (graph := captured(call)) is not None}
        for name, row in _compare(graphs, exact, device, repeats).items():
            rows[name] |= {"graph_ms": row["ms"], "graph_speedup": row["speedup"]}
    return rows


def _compare(
    calls: Mapping[str, Callable[[], object]], exact: Collection[str], device: torch.device, repeats: int
) -> dict[str, dict[str, Any]]:
    seconds = interleaved_rounds(calls, device, repeats)
    fastest = min(
        (name for name in calls if name in exact), key=lambda name: median(seconds[name]) or 0.0, default=None
    )
    return {
        name: {
            "ms": 1e3 * (median(times) or 0.0),
            "speedup": None if fastest is None else median_ratio(seconds[fastest], times),
            "rounds": len(times),
            "fastest_exact": fastest,
        }
        for name, times in seconds.items()
    }


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """A call as a CUDA graph; None where it waits for the host or has no room for a second copy of its memory."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        # A capture that fails leaves its stream as the current one: the outer block does not.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return None
    return graph


def median_ratio(numerator: list[float], denominator: list[float]) -> float | None:
    """Median over rounds of one time divided by the other of the same round; None without a round."""
    ratios = [over / under for over, under in zip(numerator, denominator, strict=False) if under > 0]
    return statistics.median(ratios) if ratios else None


def median(values: list[float]) -> float | None:
    """The median, None of nothing."""
    return statistics.median(values) if values else None


def peak_memory_added(call: Callable[[], Result], device: torch.device) -> tuple[Result, int | None]:
    """What a call returns and the most bytes it held above those held at its start; `MEMORY_MEASURES` says how.

    Args:
        call (`Callable`): run once.
        device (`torch.device`): a CPU or CUDA device; on another one the bytes are None. On CUDA the device's own peak
            statistics are reset.

    Returns:
        `(result, int | None)`: the result and the bytes.
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        result = call()
        synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - held
    if device.type != "cpu":
        return call(), None
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler sees no other thread of Python's
    with without_profiler_notes():
        profile.start()
    try:
        result = call()
    finally:
        with without_profiler_notes():
            profile.stop()
        torch.set_num_threads(threads)
    return result, _highest_sum(profile)


def _highest_sum(profile: torch.profiler.profile) -> int | None:
    """Highest running sum of the bytes allocated (positive) and freed (negative) on the CPU, in order of time."""
    if profile.profiler is None or profile.profiler.kineto_results is None:
        return None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.device_type().name == "CPU":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


@contextlib.contextmanager
def without_profiler_notes() -> Iterator[None]:
    """Keep the notes out of stderr that the profiler's C++ code writes at every start and stop; the rest passes."""
    try:
        sys.stderr.flush()
        stderr = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no stderr: nothing to keep clean
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            caught.seek(0)
            kept = [line for line in caught if b"SyncActivityProfilerHandler" not in line]
            if kept:
                os.write(stderr, b"".join(kept))
            os.close(stderr)
