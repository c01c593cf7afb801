"""Results kept after every run: a stopped experiment goes on where it was."""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock

from hf_effattn.measuring.environment import environment

RESULTS = Path(__file__).parents[1] / "results"


class KeptRuns:
    """The rows of a JSON file: what identifies a run, and what came out of it.

    Args:
        path (`Path`): the file; made with the first run, its folder too.
        settings (`dict`): JSON values that all runs of the file share.
        device (`torch.device`, *optional*): where the runs are made. Default: the CPU.
        counts (`Callable`, *optional*): whether a row still does; others are gone with the next run. Default: all.

    Raises:
        ValueError: the file holds runs with other settings.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        device: torch.device | None = None,
        counts: Callable[[dict[str, Any]], bool] = lambda row: True,
    ) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.environment = environment(device)
        self.counts = counts
        self.rows: list[dict[str, Any]] = []
        self.read()

    def read(self) -> None:
        """Take over what the file holds: other processes may add to it too, other runs with the same settings."""
        if not self.path.exists():
            return
        kept = json.loads(self.path.read_text(encoding="utf-8"))
        other = [name for name in self.settings | kept["settings"] if self.differs(name, kept["settings"])]
        if other:
            raise ValueError(
                f"{self.path} holds runs with other settings ({', '.join(other)}): name another file with --output"
            )
        self.rows = [row for row in kept["rows"] if self.counts(row)]

    def differs(self, name: str, settings: dict[str, Any]) -> bool:
        """Whether a setting is another one in `settings`."""
        return (name in settings, settings.get(name)) != (name in self.settings, self.settings.get(name))

    def matching(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows with all the values of `run`."""
        return [row for row in self.rows if run.items() <= row.items()]

    def missing(self, runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of `runs` that have no row yet."""
        return [run for run in runs if not self.matching(run)]

    def add(self, *rows: dict[str, Any]) -> None:
        """Keep rows, on disk too; a run that is stopped while writing leaves the file as it was."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock")):
            self.read()
            self.rows += [row | self.machine for row in rows]
            written = self.path.with_suffix(".part")
            kept = {"environment": self.environment, "settings": self.settings, "rows": self.rows}
            written.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            written.replace(self.path)

    @property
    def machine(self) -> dict[str, Any]:
        """What every row says of where it was measured: the file's `environment` is that of the last one."""
        versions = {name: self.environment["versions"][name] for name in ("torch", "transformers")}
        return {name: self.environment[name] for name in ("device_name", "threads")} | versions


def print_rows(kept: KeptRuns) -> None:
    """The rows as a table, and where they are."""
    print_table(pd.DataFrame(kept.rows).drop(columns=list(kept.machine)), kept.path)


def print_table(table: pd.DataFrame, *written: Path, index: bool = False, digits: int = 3) -> None:
    """A whole table, with its index if that says something, and the files that were written."""
    with pd.option_context("display.precision", digits):
        print(table.to_string(index=index))
    if written:
        print(f"written: {' and '.join(map(str, written))}")


def device_defaults(name: str, dtype: str | None, output: Path | None) -> tuple[torch.device, str, Path]:
    """The GPU where there is one, else the CPU; what is measured there by default, and the file of its results."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    default = RESULTS / f"{name}{'_gpu' if on_gpu else ''}.json"
    return device, dtype or ("bfloat16" if on_gpu else "float32"), output or default


def with_wall_time(train: Callable[[], dict[str, float]], folder: Path) -> dict[str, Any]:
    """What a training returns, and `train_seconds`: None where the folder has a checkpoint from which it goes on.

    Trainer measures from where it went on.
    """
    resumed = any(folder.glob("checkpoint-*"))
    metrics = train()
    return metrics | {"train_seconds": None if resumed else metrics["train_runtime"]}


def run_folder(parent: Path, name: str, identity: Any) -> Path:
    """Where the checkpoints of a run lie: a folder of its own for everything that makes it another run.

    Args:
        parent (`Path`): of all runs.
        name (`str`): begins the folder's name.
        identity: JSON values.
    """
    whole = json.dumps(identity, sort_keys=True)
    return parent / f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}".replace(" ", "_").replace(",", "")


def mean_and_deviation(values: Iterable[float], digits: int = 1) -> str:
    """Mean ± standard deviation of the sample and the number of values; without a deviation where there is one."""
    values = list(values)
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)})"
