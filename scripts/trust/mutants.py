"""Plants defects in a copy of the package, one at a time, and asks whether the tests see them.

A defect is an exact replacement in `scripts/trust/mutants/*.toml`: a `name`, the `file`, the text `old`, which occurs
there once, what stands there instead, `new`, and the files of `tests` that are expected to fail. They run up to their
first failure; `--whole` lets `make test`'s own choice of tests look at those that survive. Results are kept after
every defect: stop it whenever you like and start it again.

    python -m scripts.trust.mutants                 # writes scripts/results/mutants.json
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..kept.command_line import run_with_help
from ..kept.runs import KeptRuns

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "mutants"
LONGEST = 900  # seconds; a defect that makes tests hang is seen


@dataclass(frozen=True)
class Mutant:
    """A planted defect."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def identity(self) -> dict[str, str]:
        """What its row is found by: another replacement is another defect."""
        change = "\0".join((self.file, self.old, self.new, *self.tests))
        return {"name": self.name, "change": hashlib.sha256(change.encode()).hexdigest()[:12]}

    def planted(self, text: str) -> str:
        """The text of its file with the defect.

        Raises:
            ValueError: the text to replace does not occur once.
        """
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name!r}: its text occurs {text.count(self.old)} times in {self.file}, not once; bring "
                "scripts/trust/mutants up to date"
            )
        return text.replace(self.old, self.new)


def listed_mutants() -> list[Mutant]:
    """All planted defects."""
    rows = [row for file in sorted(LISTS.glob("*.toml")) for row in tomllib.loads(file.read_text())["mutant"]]
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in rows]


def copy_of_the_tree(folder: Path) -> Path:
    """What git tracks, and what it would, in a folder of its own."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in named.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def first_failure(tree: Path, tests: Iterable[str]) -> str | None:
    """The first test that fails in a tree, or what else ended the run; None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    variables = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LONGEST} s"
    if done.returncode == 0:
        return None
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed and done.returncode in (3, 4, 5):  # pytest's own failures: wrong arguments, nothing collected
        raise RuntimeError(f"pytest did not run:\n{done.stdout}{done.stderr}")
    return failed[0] if failed else f"pytest ended with {done.returncode}"


def try_mutant(mutant: Mutant, tree: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Its row: whether the tests fail in the tree with the defect, which it is without again afterwards."""
    file = tree / mutant.file
    text, start = file.read_text(encoding="utf-8"), time.monotonic()
    file.write_text(mutant.planted(text), encoding="utf-8")
    try:
        failure = first_failure(tree, tests)
    finally:
        file.write_text(text, encoding="utf-8")
    seconds = round(time.monotonic() - start, 1)
    return mutant.identity | {
        "file": mutant.file,
        "by": "whole" if not tests else "named",
        "caught": failure is not None,
        "failure": failure,
        "seconds": seconds,
    }


def main(
    only: Annotated[str, typer.Option(help="Only defects with this in their name or file.")] = "",
    whole: Annotated[bool, typer.Option(help="Let all tests look at those that survive.")] = False,
    output: Annotated[Path, typer.Option(help="JSON file of the results; defects in it are kept.")] = (
        ROOT / "scripts/results/mutants.json"
    ),
) -> None:
    kept = KeptRuns(output, {})
    chosen = [mutant for mutant in listed_mutants() if only in mutant.name or only in mutant.file]
    missing = [mutant for mutant in chosen if not kept.matching(mutant.identity)]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        tests = sorted({test for mutant in missing for test in mutant.tests})
        print(f"{len(missing)} of {len(chosen)} defects to plant; first the tests without any", flush=True)
        failure = first_failure(tree, tests) if missing else None
        if failure is not None:
            raise SystemExit(f"{failure} fails without any defect: mend it first")
        for number, mutant in enumerate(missing, start=1):
            row = try_mutant(mutant, tree, mutant.tests)
            kept.add(row)
            caught = "caught" if row["caught"] else "SURVIVED"
            print(f"{number}/{len(missing)} {caught} in {row['seconds']:.0f} s: {mutant.name}", flush=True)
        survivors = [mutant for mutant in chosen if not any(row["caught"] for row in kept.matching(mutant.identity))]
        for mutant in survivors if whole else ():
            if not any(row["by"] == "whole" for row in kept.matching(mutant.identity)):
                kept.add(try_mutant(mutant, tree, ()))
    seen = [mutant for mutant in chosen if any(row["caught"] for row in kept.matching(mutant.identity))]
    print(f"{len(seen)} of {len(chosen)} caught: {output}")
    for mutant in chosen:
        if mutant not in seen:
            print(f"survived: {mutant.name} ({mutant.file})")


if __name__ == "__main__":
    run_with_help(main, __doc__)
