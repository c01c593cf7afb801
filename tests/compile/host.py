"""What the host does for a layer on a GPU, without one: all but the launches themselves runs.

    python tests/compile/host.py                    # prints whether replays make the launches of every layer
    python tests/compile/host.py --time             # prints microseconds of the host for each layer, as JSON
    python tests/compile/host.py --chains           # prints its launches, the longest chain, the bytes of their code
    python tests/compile/host.py --before COMMIT    # writes host.json: all of these, beside an earlier build

The driver's launch does nothing, so a short layer takes as long as Python, torch and Triton need to come to its
launches. Run nothing else on the machine meanwhile.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch
from compile_kernels import NamedGpu, fill_outputs, start
from machine_code import GPU, layers

LAUNCHED: list[tuple[Any, ...]] = []
REPEATS, ROUNDS, SHORT = 200, 6, 2048
MACHINE_CODE = Path(__file__).with_name("machine_code.json")
RECORD = Path(__file__).with_name("host.json")
ROOT = Path(__file__).parents[2]


class Loader:
    """What loads kernels onto a GPU, and says what the GPU has."""

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """A module, a function, registers, spilled ones, the most threads of a program."""
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}


class Noting:
    """A launcher that notes what is launched: the kernel, its grid, and all of its arguments that are no addresses."""

    def __init__(self, source: Any, _: Any) -> None:
        self.kernel = source.fn.__name__
        self.kinds = list(source.signature.values())

    def __call__(self, *arguments: Any) -> None:
        grid, given = arguments[:3], arguments[9:]
        pairs = zip(self.kinds, given, strict=True)
        LAUNCHED.append((self.kernel, grid, *("address" if kind[0] == "*" else x for kind, x in pairs)))


class Idle:
    """A launcher that does nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        pass


class IdleGpu(NamedGpu):
    """A driver whose GPU does nothing."""

    utils = Loader()
    launcher_cls: type[Any] = Idle


def launches(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Of the forward and the backward pass."""
    LAUNCHED.clear()
    call().sum().backward()
    return list(LAUNCHED)


def check() -> dict[str, Any]:
    """Of every layer how many launches there are, and which of those that are replayed differ."""
    from hf_effattn.ops.shared.triton import recorded

    IdleGpu.launcher_cls = Noting
    fill_outputs()
    replay, replayed = recorded.Recording.replay, []

    def counted(self: Any, inputs: Any) -> Any:
        replayed.append(self)
        return replay(self, inputs)

    recorded.Recording.replay = counted  # type: ignore[method-assign]
    found = {}
    for name, call in layers().items():
        recorded.RECORDS = False
        expected = launches(call)
        recorded.RECORDS = True
        launches(call)
        replayed.clear()
        differing = [old[0] for old, new in zip(expected, launches(call), strict=True) if old != new]
        found[name] = {"launches": len(expected), "differing": differing, "replays": len(replayed)}
    return found


def time() -> dict[str, float]:
    """Microseconds of the host for the forward pass of a layer, without gradients.

    Causal attention is left out: it calls ops of torch, which run for real here.
    """
    medians = {}
    for name, call in layers(SHORT).items():
        if name == "causal":
            continue
        with torch.no_grad():
            for _ in range(3):
                call()
            seconds = []
            for _ in range(REPEATS):
                begin = thread_time()
                call()
                seconds.append(thread_time() - begin)
        medians[name] = 1e6 * median(seconds)
    return medians


def chains() -> dict[str, dict[str, int]]:
    """Of every layer's forward pass: launches, the longest chain of them, and the bytes of code that they read.

    Two launches follow each other where both get the same memory, other than an argument: even if both only read it.
    """
    from hf_effattn.ops.shared.triton import recorded

    fill_outputs()
    recorders: list[Any] = []
    recording = recorded.Recorder.recording

    def kept(self: Any, *given: Any) -> Any:
        recorders.append(self)
        return recording(self, *given)

    recorded.Recorder.recording = kept  # type: ignore[method-assign]
    code = json.loads(MACHINE_CODE.read_text())["layers"]
    found = {}
    for name, call in layers().items():
        recorders.clear()
        with torch.no_grad():
            call()
        longest = 0
        for recorder in recorders:  # of the clustering, and of the attention that follows it
            depths: dict[int, int] = {}
            for step in recorder.steps:
                places = step.places if isinstance(step, recorded.Launch) else ()
                memory = {source for _, source, _ in places if source >= recorder.inputs}
                depths |= dict.fromkeys(memory, 1 + max((depths.get(source, 0) for source in memory), default=0))
            longest += max(depths.values(), default=0)
        count = sum(isinstance(step, recorded.Launch) for recorder in recorders for step in recorder.steps)
        found[name] = {
            "launches": count,
            "chain": longest,
            "code_bytes": 16 * sum(x["instructions"] for x in code[name]),
        }
    return found


def compare(before: str) -> dict[str, Any]:
    """The fastest of some rounds: both builds are timed in turn, each in a process of its own. And their ratios."""
    rounds: dict[str, list[dict[str, float]]] = {before: [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.check_output(["git", "archive", before, "hf_effattn"], cwd=ROOT)
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        for _ in range(ROUNDS):
            for build, measured in rounds.items():
                path = folder if build == before else str(ROOT)
                command = [sys.executable, __file__, "--time"]
                measured.append(json.loads(subprocess.check_output(command, env=os.environ | {"PYTHONPATH": path})))
    names = rounds["now"][0]
    best = {build: {name: min(row[name] for row in rows) for name in names} for build, rows in rounds.items()}
    rows = {
        name: {"before_us": round(best[before][name], 1), "now_us": round(best["now"][name], 1)}
        | {"times_before": round(best[before][name] / best["now"][name], 2)}
        for name in names
    }
    found = json.loads(subprocess.check_output([sys.executable, __file__, "--chains"]))
    layers_found = {name: found[name] | rows.get(name, {}) for name in found}
    return {"before": before, "torch": torch.__version__, "tokens": SHORT, "layers": layers_found}


if __name__ == "__main__":
    if "--before" in sys.argv:
        RECORD.write_text(json.dumps(compare(sys.argv[-1]), indent=1) + "\n")
        print(RECORD.read_text())
    else:
        start(GPU, IdleGpu)
        chosen = {"--time": time, "--chains": chains}.get(sys.argv[-1], check)
        print(json.dumps(chosen(), indent=1))
