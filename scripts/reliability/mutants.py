"""Plants defects in a copy of the package, one at a time, and asks whether the tests see them.

A defect is an exact replacement in `scripts/reliability/mutants/*.toml`: a `name`, the `file`, the text `old`, which
occurs there once, what stands there instead, `new`, and the files of `tests` that are expected to fail. They run up to
their first failure, and the tests that failed must pass without a defect; `--whole` lets `make test`'s own choice of
tests look at those that survive. Results are kept after every four defects: stop it whenever you like and start it
again.

    python -m scripts.reliability.mutants                 # writes scripts/results/mutants.json
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns
from ._pytest_runs import TOO_LONG, PytestRuns

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "mutants"
LONGEST = 300  # seconds of a processor; a defect that makes tests hang is seen
CHECKED_AT_ONCE = 4  # defects whose tests run without them in one go
# A line of pytest's summary: the test, whose parameters may hold " - " themselves, and what it said.
FAILED = re.compile(r"(?:FAILED|ERROR) ([^\[\s]+(?:\[.*?\])?)(?: - .*)?$")


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
                "scripts/reliability/mutants up to date"
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


def first_failure(runs: PytestRuns, tree: Path, tests: Iterable[str], *options: str) -> str | None:
    """The first test that fails in a tree, or what else ended the run; None where all pass."""
    code, said = runs.run(tree, ["-x", "-q", "-rfE", "-p", "no:cacheprovider", *options, *tests], LONGEST)
    if code == TOO_LONG:
        return f"not done after {LONGEST} s"
    if code == 0:
        return None
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [match[1] for line in lines if (match := FAILED.match(line))]
    if not failed and code in (3, 4, 5):  # pytest's own failures: wrong arguments, nothing collected
        raise RuntimeError(f"pytest did not run:\n{said}")
    return failed[0] if failed else f"pytest ended with {code}"


def try_mutant(mutant: Mutant, runs: PytestRuns, tree: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Its row: whether the tests fail in the tree with the defect, which it is without again afterwards."""
    file = tree / mutant.file
    text, start = file.read_text(encoding="utf-8"), time.monotonic()
    file.write_text(mutant.planted(text), encoding="utf-8")
    try:
        failure = first_failure(runs, tree, tests)
    finally:
        file.write_text(text, encoding="utf-8")
    seconds = round(time.monotonic() - start, 1)
    return mutant.identity | {
        "file": mutant.file,
        "by": "named" if tests else "whole",
        "caught": failure is not None,
        "failure": failure,
        "seconds": seconds,
    }


def failing_anyway(runs: PytestRuns, tree: Path, rows: Sequence[dict[str, Any]]) -> str | None:
    """The first of the tests that caught defects which fails in the tree without any."""
    tests = sorted({row["failure"] for row in rows if row["failure"] and row["failure"].startswith("tests/")})
    return first_failure(runs, tree, tests) if tests else None


def main(
    only: Annotated[str, typer.Option(help="Only defects with this in their name or file.")] = "",
    whole: Annotated[bool, typer.Option(help="Let all tests look at those that survive.")] = False,
    output: Annotated[Path, typer.Option(help="JSON file of the results; defects in it are kept.")] = (
        ROOT / "scripts/results/mutants.json"
    ),
) -> None:
    listed = listed_mutants()
    kept = KeptRuns(output, {}, counts=lambda row: any(mutant.identity.items() <= row.items() for mutant in listed))
    chosen = [mutant for mutant in listed if only in mutant.name or only in mutant.file]
    # By their hashes, so that those that are done at any time are a sample of all.
    missing = sorted(
        (mutant for mutant in chosen if not kept.matching(mutant.identity)),
        key=lambda mutant: mutant.identity["change"],
    )
    with tempfile.TemporaryDirectory() as folder, PytestRuns() as runs:
        tree = copy_of_the_tree(Path(folder))
        print(f"{len(missing)} of {len(chosen)} defects to plant", flush=True)
        for start in range(0, len(missing), CHECKED_AT_ONCE):
            rows = []
            for number, mutant in enumerate(missing[start : start + CHECKED_AT_ONCE], start=start + 1):
                rows.append(row := try_mutant(mutant, runs, tree, mutant.tests))
                caught = "caught" if row["caught"] else "SURVIVED"
                print(f"{number}/{len(missing)} {caught} in {row['seconds']:.0f} s: {mutant.name}", flush=True)
            while (failure := failing_anyway(runs, tree, rows)) is not None:
                print(f"fails without any defect, and shows nothing: {failure}", flush=True)
                rows = [row for row in rows if row["failure"] != failure]
            kept.add(*rows)
        survivors = [mutant for mutant in chosen if not any(row["caught"] for row in kept.matching(mutant.identity))]
        for mutant in survivors if whole else ():
            if not any(row["by"] == "whole" for row in kept.matching(mutant.identity)):
                kept.add(try_mutant(mutant, runs, tree, ()))
    seen = [mutant for mutant in chosen if any(row["caught"] for row in kept.matching(mutant.identity))]
    print(f"{len(seen)} of {len(chosen)} caught: {output}")
    for mutant in chosen:
        if mutant not in seen:
            print(f"survived: {mutant.name} ({mutant.file})")


if __name__ == "__main__":
    run_with_help(main, __doc__)
