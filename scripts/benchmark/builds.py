"""How much faster is this build of the package than an earlier one? Both beside exact attention, in one run.

Each build runs in a process of its own, which sleeps while another is timed; calls of both and of exact attention are
interleaved. Times are of random inputs; the errors are those on the queries, keys and values that the pretrained BERT
of the demo makes of novels (`scripts/benchmark/_inputs.py`), in the same precision, against exact float32 attention.

    python -m scripts.benchmark.builds --before 5f5521a      # writes scripts/results/builds.json

What the output file holds is not measured again. Run nothing else on the machine meanwhile.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from hf_effattn.measuring.cost import median, median_ratio
from hf_effattn.settings_parsing import method_of

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._inputs import attention_inputs
from ._timing import Lengths, Repeats, keep_missing, numbers

ROOT = Path(__file__).parents[2]
DEFAULT_METHODS = (
    "bi-clustered clusters=32 topk=64 key_clusters=32",
    "bi-clustered clusters=64 topk=64 key_clusters=32",
    "i-clustered clusters=100 topk=32",
)
NOW, EXACT = "now", "exact"
# What a build runs: it reads a case per line and answers with a line. It uses what every build has.
WORKER = """
import json, sys, time
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from hf_effattn.patching.methods import make_method

torch.set_num_threads(int(sys.argv[1]))
torch.set_grad_enabled(False)
attend = inputs = None
for line in sys.stdin:
    case = json.loads(line)
    if case:
        dtype = getattr(torch, case["dtype"])
        exact = case["settings"] is None
        forced = {} if case["defaults"] else {"min_length": 0}
        attend = F.scaled_dot_product_attention if exact else make_method(**case["settings"], **forced).run
        generator = torch.Generator().manual_seed(0)
        shape = 1, case["length"], case["heads"], case["head_dim"]
        inputs = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(3)]
        attend(*inputs)
        errors = []
        if not (exact or case["defaults"]):
            seen = load_file(case["real"])
            for layer in range(len(seen) // 3):
                rows = [seen[f"{name}{layer}"] for name in "qkv"]
                right = F.scaled_dot_product_attention(*rows)
                errors.append(float((attend(*(x.to(dtype) for x in rows)).float() - right).norm() / right.norm()))
        answer = {"error": sum(errors) / len(errors) if errors else None}
    else:
        start = time.perf_counter()
        attend(*inputs)
        answer = {"seconds": time.perf_counter() - start}
    print(json.dumps(answer), flush=True)
"""


class Build:
    """A process that runs one build of the package, or exact attention."""

    def __init__(self, folder: Path, threads: int) -> None:
        variables = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", WORKER, str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=variables, cwd=folder, **pipes)  # type: ignore[call-overload]

    def ask(self, case: dict[str, Any] | None = None) -> dict[str, Any]:
        """Prepare a case, which gives its `error`; or run it once more, which gives its `seconds`."""
        print(json.dumps(case), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("a build has stopped; what it said is above")
        return json.loads(answer)


@contextmanager
def builds_of(before: str, threads: int) -> Iterator[dict[str, Build]]:
    """The earlier build, out of git; this one; and a process for exact attention."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.check_output(["git", "archive", before, "hf_effattn"], cwd=ROOT)
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        builds = {before: Build(Path(folder), threads), NOW: Build(ROOT, threads), EXACT: Build(ROOT, threads)}
        try:
            yield builds
        finally:
            for build in builds.values():
                build.process.kill()
                build.process.wait()


def main(
    before: Annotated[str, typer.Option(help="The earlier build, a commit.")],
    lengths: Lengths = "4096,8192,16384",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    method: Annotated[list[str] | None, typer.Option(help="Repeatable; with settings. Default: three.")] = None,
    repeats: Repeats = 5,
    heads: int = 12,
    head_dim: int = 64,
    defaults: Annotated[
        bool, typer.Option(help="Each method from its own min_length on, exact attention below; without errors.")
    ] = False,
    output: Path = RESULTS / "builds.json",
) -> None:
    """Time both builds and exact attention, interleaved, and keep the rows as JSON."""
    threads = torch.get_num_threads()
    kept = KeptRuns(output, {"heads": heads, "head_dim": head_dim})
    cases = [
        {"before": before, "length": length, "dtype": dtype, "method": text, "defaults": defaults}
        for length in numbers(lengths)
        for dtype in dtypes.split(",")
        for text in method or DEFAULT_METHODS
    ]
    with builds_of(before, threads) as builds, tempfile.TemporaryDirectory() as folder:

        def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
            real = Path(folder) / f"{case['length']}.safetensors"
            if not (defaults or real.exists()):
                seen = attention_inputs(case["length"])
                rows = {f"{name}{i}": x for i, qkv in enumerate(seen) for name, x in zip("qkv", qkv, strict=True)}
                save_file({name: x.contiguous() for name, x in rows.items()}, real)
            shape = case | {"heads": heads, "head_dim": head_dim, "real": str(real)}
            settings = {EXACT: None} | dict.fromkeys((before, NOW), method_of(case["method"]))
            errors = {name: build.ask(shape | {"settings": settings[name]})["error"] for name, build in builds.items()}
            seconds: dict[str, list[float]] = {name: [] for name in builds}
            for _ in range(repeats):
                for name, build in builds.items():
                    seconds[name].append(build.ask()["seconds"])
            columns = {"before_ms": before, "now_ms": NOW, "exact_ms": EXACT}
            times = {column: 1e3 * (median(seconds[name]) or 0.0) for column, name in columns.items()}
            ratios = {
                "times_before": median_ratio(seconds[before], seconds[NOW]),
                "times_exact": median_ratio(seconds[EXACT], seconds[NOW]),
                "before_times_exact": median_ratio(seconds[EXACT], seconds[before]),
            }
            return [case | times | ratios | {"error": errors[NOW], "error_before": errors[before]}]

        keep_missing(kept, cases, measure, "builds")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
