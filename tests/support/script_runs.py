"""What the tests of the scripts share: results that were kept, data sets in files, and trainings that are resumed."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def write_gzip(path: Path, content: bytes | str) -> None:
    """A compressed file, its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content.encode() if isinstance(content, str) else content))


def whole_and_resumed(
    main: Callable[[list[str]], dict[str, float]], arguments: list[str], folder: Path, step: int
) -> tuple[dict[str, float], dict[str, float]]:
    """What a training ends with in `whole`, and in `stopped` from its checkpoint of a step on."""
    whole = main([*arguments, "--output_dir", str(folder / "whole")])
    shutil.copytree(folder / "whole" / f"checkpoint-{step}", folder / "stopped" / f"checkpoint-{step}")
    resume = ["--resume_from_checkpoint", "last"]
    return whole, main([*arguments, "--output_dir", str(folder / "stopped"), *resume])
