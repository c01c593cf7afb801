"""How long every kernel of a layer takes, and why: beside its code, by counters, and launched again at once."""

import csv
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from hf_effattn.measuring.cost import captured, synchronize, without_profiler_notes
from hf_effattn.ops.shared.triton import launch, recorded

from ._budgets import Found
from ._gpu_layers import DURATIONS, FAMILY_OF, Call, Setup, layer, runs
from ._gpu_processes import COMMAND, ROOT, printed

REPLAYS = 5
RELAUNCHES = 10
WORST = 8  # kernels that counters are read of
MACHINE_CODE = ROOT / "tests" / "compile" / "machine_code.json"
SHOWN = ("instructions", "registers", "blocks_per_sm", "programs")
PLACES_OF_NCU = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
STALLS = ("no_instruction", "barrier", "long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle")
METRICS = (
    "gpu__time_duration.sum",
    "smsp__inst_executed.sum",
    "dram__bytes.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    *(f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS),
)
CODE_CACHES = ("sm__icc_requests.sum", "sm__icc_requests_lookup_miss.sum")  # not on every chip
# Name of what is found: what ncu empties before each pass, --cache-control.
CACHES = {"caches emptied": "all", "caches kept": "none"}


class Event(NamedTuple):
    """A kernel that ran, or an operator on a CPU."""

    name: str
    start: float  # microseconds
    end: float


def durations(setup: Setup, found: Found) -> None:
    """Of every layer and length the microseconds of each kernel, in a replayed graph where one can be captured."""
    codes = recorded_code()
    for name, length in each_layer(setup, found):
        call = layer(setup, name, length)
        if call is None:
            continue
        call()
        graph = captured(call) if setup.on_gpu else None
        replays = [device_events(call if graph is None else graph.replay, setup.device) for _ in range(REPLAYS)]
        row = summary(replays, codes[name.split()[0]])
        found.setdefault(name, {})[str(length)] = {"graph": graph is not None, "ours": len(launched(call))} | row


def each_layer(setup: Setup, found: Found) -> Iterator[tuple[str, int]]:
    """Layers and lengths at which kernels are looked at, without the layers that did not run when compiled."""
    for name in FAMILY_OF:
        if runs(setup, name):
            yield from ((name, length) for length in setup.kernel_lengths)
        else:
            found[name] = {"left_out": "it did not run in the step before"}


def recorded_code() -> dict[str, dict[str, dict[str, Any]]]:
    """What the kernels of each layer became for an H100, by layer and kernel; those of other layers where it has none.

    At the length, head_dim and settings of the record, which are not those of every layer here.
    """
    layers: dict[str, list[dict[str, Any]]] = json.loads(MACHINE_CODE.read_text(encoding="utf-8"))["layers"]
    kernels = {row["kernel"]: row for rows in layers.values() for row in rows}
    return {name: kernels | {row["kernel"]: row for row in rows} for name, rows in layers.items()}


def device_events(call: Call, device: torch.device) -> list[Event]:
    """The kernels of one call in their order; on a CPU the operators that it calls itself."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with without_profiler_notes(), torch.profiler.profile(activities=activities) as profile:
        call()
        synchronize(device)
    events = [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == device.type.upper() and event.cpu_parent is None and not event.is_user_annotation
    ]
    return sorted(events, key=lambda event: event.start)


def summary(replays: list[list[Event]], code: dict[str, dict[str, Any]]) -> Found:
    """How many `launches` a replay has, `total_us` of all, `span_us` from the first to the last, and each kernel's.

    Args:
        replays (`list`): the events of each.
        code (`dict`): what is known of each kernel's code, put beside its time.

    Returns:
        `dict`: medians over replays; `kernels` are sorted by their time of a replay, the longest first; `absent` says
        why where none was seen.
    """
    replays = [events for events in replays if events]
    if not replays:
        return {"absent": "the profiler saw no kernel: CUPTI is missing, or not allowed"}
    times: dict[str, list[float]] = defaultdict(list)
    for events in replays:
        for event in events:
            times[event.name].append(event.end - event.start)
    kernels = [
        {
            "kernel": name[:100],
            "calls": len(taken) / len(replays),
            "us": round(sum(taken) / len(replays), 2),
            "us_a_call": round(median(taken), 2),
        }
        | {field: code[name][field] for field in SHOWN if name in code}
        for name, taken in times.items()
    ]
    return {
        "launches": max(map(len, replays)),
        "total_us": round(median(sum(e.end - e.start for e in events) for events in replays), 2),
        "span_us": round(median(max(e.end for e in events) - events[0].start for events in replays), 2),
        "kernels": sorted(kernels, key=lambda row: -float(row["us"])),
    }


@contextmanager
def instead_of_launches(run: Callable[..., Any]) -> Iterator[None]:
    """`run` is called in place of `Kernel.run`, with that first, then the kernel and what it is launched with.

    Nothing is replayed meanwhile, since replays pass by kernels.
    """
    original, records = launch.Kernel.run, recorded.RECORDS

    def called(kernel: Any, *args: Any, **named: Any) -> Any:
        return run(original, kernel, *args, **named)

    launch.Kernel.run = called  # type: ignore[assignment, method-assign]
    recorded.RECORDS = False
    try:
        yield
    finally:
        launch.Kernel.run = original  # type: ignore[method-assign]
        recorded.RECORDS = records


def launched(call: Call) -> list[str]:
    """The package's kernels that a call launches, in their order."""
    names: list[str] = []

    def note(original: Callable[..., Any], kernel: Any, *args: Any, **named: Any) -> Any:
        names.append(kernel.__name__)
        return original(kernel, *args, **named)

    with instead_of_launches(note):
        call()
    return names


def cold_code(setup: Setup, found: Found) -> None:
    """Every kernel of a layer launched ten times in a row on copies of what it is given, the first against the others.

    The numbers that they read are as cold for each: what the first takes longer is the price of code that no cache
    holds. In a layer it is that or less, since making the copies empties the L2 cache of code, too.
    """
    for name, length in each_layer(setup, found):
        call = layer(setup, name, length)
        if call is None:
            continue
        call()
        relaunched: list[str] = []
        with instead_of_launches(lambda *given, names=relaunched, **named: relaunch(names, *given, **named)):
            events = device_events(call, setup.device)
        row = first_and_later(events, set(relaunched))
        if not row["kernels"]:
            row = {"absent": "no launch was seen" if not relaunched else "the profiler saw no kernel"}
        found.setdefault(name, {})[str(length)] = row | {"launches": len(relaunched)}


def relaunch(names: list[str], original: Callable[..., Any], kernel: Any, *args: Any, **named: Any) -> Any:
    """Launch a kernel on copies of its tensors, as often as `RELAUNCHES` says, and then on the tensors themselves."""
    names.append(kernel.__name__)
    copies = [with_copies(args, named) for _ in range(RELAUNCHES)]
    for copied_args, copied_named in copies:
        original(kernel, *copied_args, **copied_named)
    return original(kernel, *args, **named)


def with_copies(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments on memory of their own: what shares memory does so among the copies, too."""
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = storage.clone()
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        return empty.set_(memory[storage.data_ptr()], x.storage_offset(), x.shape, x.stride())

    return tuple(map(copy, args)), {name: copy(x) for name, x in named.items()}


def first_and_later(events: list[Event], names: set[str]) -> Found:
    """Microseconds of the first launch in a row and the median of the later ones, by kernel and of a layer in all."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.name in names:
            times[event.name].append(event.end - event.start)
    each, kernels = RELAUNCHES + 1, []
    for name, taken in times.items():
        in_rows = [taken[begin : begin + each] for begin in range(0, len(taken) - each + 1, each)]
        first, later = sum(row[0] for row in in_rows), sum(median(row[1:]) for row in in_rows)
        kernels.append((first - later, name, first, later, len(in_rows)))
    return {
        "first_us": round(sum(first for _, _, first, _, _ in kernels), 2),
        "later_us": round(sum(later for _, _, _, later, _ in kernels), 2),
        "kernels": [
            {"kernel": name, "calls": calls, "first_us": round(first, 2), "later_us": round(later, 2)}
            for _, name, first, later, calls in sorted(kernels, reverse=True)
        ],
    }


def counters(setup: Setup, found: Found) -> None:
    """Nsight Compute's counters of the kernels that take longest at the longest length, with cold caches and warm."""
    tool = find_ncu()
    if tool is None:
        found["absent"] = "ncu is not on this machine"
        return
    length = str(max(setup.kernel_lengths))
    worst = sorted(
        (
            (row["us"], name, row["kernel"])
            for name, by_length in setup.results.get(DURATIONS, {}).items()
            for row in by_length.get(length, {}).get("kernels", ())
            if name in FAMILY_OF and "instructions" in row
        ),
        reverse=True,
    )[:WORST]
    if not worst:
        found["absent"] = "no durations say which kernels to look at"
        return
    layers, kernels = (list(dict.fromkeys(column)) for column in list(zip(*worst, strict=True))[1:])
    for caches, emptied in CACHES.items():
        for metrics in ((*METRICS, *CODE_CACHES), METRICS):
            command = [
                tool, "--csv", "--clock-control", "none", "--cache-control", emptied, "--kernel-name",
                f"regex:^({'|'.join(kernels)})$", "--launch-count", str(4 * WORST), "--metrics", ",".join(metrics),
                *COMMAND, "--warm-up", ",".join(layers), "--length", length,
            ]  # fmt: skip
            _, output = printed(command)
            rows = counted(output)
            if rows:
                found[caches] = rows
                break
            said = [line for line in output.splitlines() if "ERR" in line]
            found["refused"] = (said or ["no row was printed"])[0]
            if "ERR_NVGPUCTRPERM" in found["refused"]:  # whatever is asked
                return


def find_ncu() -> str | None:
    """Nsight Compute's command line, wherever NVIDIA's installers put it."""
    found = [str(path) for pattern in PLACES_OF_NCU for path in sorted(Path("/").glob(pattern[1:]))]
    return shutil.which("ncu") or (found[-1] if found else None)


def counted(output: str) -> dict[str, dict[str, float]]:
    """Medians over launches of every metric, by kernel, of what `ncu --csv` printed."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(lines):
        try:
            number = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # "n/a"
            continue
        metric = row["Metric Name"].removeprefix("smsp__average_warps_issue_").removesuffix("_per_issue_active.ratio")
        values[row["Kernel Name"].split("(")[0]][f"{metric} {row['Metric Unit']}".strip()].append(number)
    return {name: {metric: median(v) for metric, v in metrics.items()} for name, metrics in values.items()}
