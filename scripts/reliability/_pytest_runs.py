"""Runs of pytest in other trees, without importing torch and transformers anew for each.

A process that has imported everything but the package and its tests forks for every run: what a tree holds is imported
there, by the child alone. As a program it reads runs from its input, a line of JSON each, and answers with what they
ended with.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

LIBRARIES = (
    "hypothesis", "numpy", "pandas", "pytest", "torch", "transformers", "datasets", "accelerate",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "transformers.trainer",
)  # fmt: skip
TOO_LONG = -signal.SIGXCPU


class PytestRuns:
    """Starts the process that forks; ends it as a context manager."""

    def __enter__(self) -> "PytestRuns":
        # By its path: `-m` would import the package of this tree.
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def run(self, tree: Path, arguments: Iterable[str], longest: int) -> tuple[int, str]:
        """What pytest ends with in a tree, and what it said.

        Args:
            tree (`Path`): where it runs.
            arguments (`Iterable[str]`): of pytest.
            longest (`int`): seconds of a processor's time, after which it ends with `TOO_LONG`: the same on a machine
                that is busy.
        """
        said = tree / ".pytest-said"
        request = {"tree": str(tree), "arguments": list(arguments), "said": str(said), "longest": longest}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that runs pytest has ended")
        return int(answer), said.read_text(encoding="utf-8", errors="replace")


def serve() -> None:
    """Answer every line of the input."""
    if not importlib.import_module("torch").cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as the tests set it, before a library imports triton
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (request["longest"], request["longest"] + 5))
            _run(request["tree"], request["arguments"], request["said"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # negative: of the signal that ended it


def _run(tree: str, arguments: list[str], said: str) -> None:
    """The child: never returns."""
    written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    sys.path[0] = tree
    import pytest

    code = int(pytest.main(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
