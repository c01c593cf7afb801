"""What a new user and a new developer wait for: from a clean clone the install, the demo, the imports and the tests.

Each step needs those before it: `--until` names the last one. Run nothing else on the machine meanwhile, and commit
before, for the clone is of what is committed.

    python -m scripts.benchmark.first_minutes --until demo    # writes scripts/results/first_minutes.json
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shared.command_line import check_names, run_with_help
from ..shared.runs import KeptRuns, print_rows

ROOT = Path(__file__).parents[2]
PYTHON = ".venv/bin/python"
# An import is read from the disk for the first time, and then in a fresh process for the second: the second counts.
STEPS: dict[str, list[list[str]]] = {
    "install": [["make", ".venv/.ready-demo"]],
    "import of transformers": [[PYTHON, "-c", "from transformers import AutoModel, PreTrainedModel"]] * 2,
    "import of hf_effattn": [[PYTHON, "-c", "import hf_effattn"]] * 2,
    "demo": [["make", "demo"]],
    "install for development": [["make", ".venv/.ready"]],
    "test": [["make", "test"]],
    "test-slow": [["make", "test-slow"]],
}


def timed(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a command in a folder, without this environment's Python, and pass on what it prints.

    Returns:
        `dict`: `seconds`, and `first_output`, the seconds until it printed a line; None where it printed nothing.

    Raises:
        CalledProcessError: it failed.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables["PIP_NO_CACHE_DIR"] = "1"  # as where nothing has been downloaded before
    first, start = None, time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            first = first or time.perf_counter() - start
            print(line, end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": time.perf_counter() - start, "first_output": first}


def main(
    until: Annotated[str, typer.Option(help=f"The last step: {', '.join(STEPS)}.")] = "test-slow",
    output: Path = Path(__file__).parents[1] / "results" / "first_minutes.json",
) -> None:
    """Do every step in a clean clone, and keep its seconds with the processor and the versions as JSON."""
    check_names("steps", [until], STEPS)
    output.unlink(missing_ok=True)  # a time of another commit would stand beside these
    kept = KeptRuns(output, {"processors": os.cpu_count()})
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for step, commands in STEPS.items():
            times = [timed(command, clone) for command in commands]
            kept.add({"step": step, **times[-1]})
            if step == until:
                break
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
