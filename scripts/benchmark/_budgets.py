"""Steps of a measurement, each with a budget of seconds: what one finds is kept at once, and none stops the next."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from hf_effattn.measuring.json_numbers import finite_or_none

from ..shared.runs import KeptRuns

Found = dict[str, Any]
# What became of a step. BEGUN stays where the process ended in it, by a crash or a kill.
BEGUN, DONE, FAILED, OVERRAN, HUNG, INTERRUPTED = "begun", "done", "failed", "overran", "hung", "interrupted"
RESTART = 75  # exit status: this process can measure no more, and a new one goes on behind the step
AGAIN_SECONDS = 5.0  # an alarm that is swallowed, by a callback of C's, rings again
GRACE_SECONDS = 10.0  # beyond its budget, for a step to come back to Python, where the alarm is heard


class OutOfTimeError(BaseException):
    """A budget is spent. What a step measures may catch every `Exception`; it must not catch this."""


class DeviceLostError(Exception):
    """The device answers no more, whatever it is asked: after an illegal access CUDA needs a new process."""


@dataclass(frozen=True)
class Step:
    """A part of a measurement.

    Args:
        name (`str`): identifies it in the file.
        seconds (`float`): its budget.
        measure (`Callable`): fills the dict that it is given with JSON values, as soon as it has them.
    """

    name: str
    seconds: float
    measure: Callable[[Found], None]


def within(seconds: float, call: Callable[[], object]) -> None:
    """Call, and break the call off with `OutOfTimeError` once the seconds are over. Main thread only."""

    def ring(*_: Any) -> NoReturn:
        raise OutOfTimeError(f"not done within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def last_rows(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last row of every step: the others say that it was begun."""
    return {row["step"]: row for row in rows}


def run_steps(
    steps: Iterable[Step],
    kept: KeptRuns,
    end: float,
    healthy: Callable[[], bool],
    about: dict[str, Any],
    again: Collection[str] = (),
    grace: float = GRACE_SECONDS,
) -> list[str]:
    """Measure the steps that the file has no row of; a row has `step`, `status`, `seconds`, `found` and `error`.

    Args:
        steps (`Iterable[Step]`): in their order.
        kept (`KeptRuns`): the file.
        end (`float`): of all steps, by `time.monotonic`. A step whose budget reaches beyond it is not begun.
        healthy (`Callable`): whether the device still answers, asked after a step that was not done.
        about (`dict`): what every row says, too.
        again (`Collection[str]`): steps to measure whatever the file holds.
        grace (`float`): seconds beyond a budget after which a step that hears no alarm ends the process.

    Returns:
        `list[str]`: the steps that there was no time for.

    Raises:
        DeviceLostError: the device does not answer. What was found is kept.
    """
    late = []
    for step in steps:
        row = last_rows(kept.rows).get(step.name)
        if step.name not in again and row is not None and row["status"] != INTERRUPTED:
            continue
        if time.monotonic() + step.seconds > end:
            late.append(step.name)
            continue
        print(f"{step.name}: at most {step.seconds:g} seconds", flush=True)
        status = _run(step, kept, about, grace)
        if status != DONE and not healthy():
            raise DeviceLostError(step.name)
    return late


def _run(step: Step, kept: KeptRuns, about: dict[str, Any], grace: float) -> str:
    """Measure a step and keep what it found and what became of it."""
    begin, found = time.monotonic(), Found()

    def keep(status: str, error: BaseException | str | None = None) -> None:
        row: dict[str, Any] = about | {"step": step.name, "status": status, "budget_seconds": step.seconds}
        row |= {"seconds": round(time.monotonic() - begin, 2), "found": finite_or_none(found)}
        if isinstance(error, BaseException):
            lines = traceback.format_exception(error)
            row |= {"error": lines[-1].strip().splitlines()[0], "where": lines[-2].strip().splitlines()[0]}
        elif error:
            row["error"] = error
        kept.add(row)

    def give_up() -> None:  # in a thread of its own: the step waits in C
        keep(HUNG, "heard no alarm")
        os._exit(RESTART)

    keep(BEGUN)
    watch = threading.Timer(step.seconds + grace, give_up)
    watch.daemon = True
    watch.start()
    status: str = DONE
    error: BaseException | None = None
    try:
        within(step.seconds, partial(step.measure, found))
    except OutOfTimeError as over:
        status, error = OVERRAN, over
    except KeyboardInterrupt as stop:
        keep(INTERRUPTED, stop)
        raise
    except Exception as problem:
        status, error = FAILED, problem
    finally:
        watch.cancel()
    keep(status, error)
    return status
