"""Calls in processes of their own that share what this one has imported: forked, so POSIX alone."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")


class Child:
    """A call in a forked process; what it says goes to a file.

    Args:
        call (`Callable`): gets no arguments; what it returns must pickle.
        said (`Path`): gets its output, and the traceback of what it raises.
    """

    def __init__(self, call: Callable[[], Any], said: Path) -> None:
        self.said = said
        self._answers, answer = FORK.Pipe(duplex=False)
        self.process: BaseProcess = FORK.Process(target=_call, args=(call, said, answer))
        self.process.start()
        answer.close()

    def kill(self, after: float) -> bool:
        """SIGKILL after so many seconds; whether it was still running then."""
        self.process.join(after)
        killed = self.process.is_alive()
        if killed and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.join()
        return killed

    def result(self, longest: float) -> Any:
        """What the call returns.

        Raises:
            TimeoutError: it had not ended after `longest` seconds, and is killed.
            RuntimeError: it raised something or was killed; with the last line of what it said, which names no folder
                above the project's where the disk was full in the middle of a traceback.
        """
        answer = None
        with suppress(EOFError):  # it ended without an answer
            answer = self._answers.recv() if self._answers.poll(longest) else None
        if self.kill(longest):
            raise TimeoutError(f"not done after {longest:g} s")
        if self.process.exitcode != 0:
            lines = self.said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1].replace(f"{ROOT}/", "") if lines else f"ended with {self.process.exitcode}")
        return answer


def run(call: Callable[[], Any], said: Path, longest: float = 600.0) -> Any:
    """What a call returns that is made in a process of its own; raises as `Child.result`."""
    return Child(call, said).result(longest)


def _call(call: Callable[[], Any], said: Path, answer: Connection) -> None:
    written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(written), "w", buffering=1) for _ in range(2))
    torch.set_num_threads(1)  # a pool of OpenMP threads does not survive a fork
    try:
        answer.send(call())
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)
