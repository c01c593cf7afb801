"""Checks the properties of `tests/properties` on random cases, by the hundred thousand.

In rounds of about 11,000 cases, each with a seed of its own: stop it whenever you like and start it again, it goes on
where it was. A round that finds something ends it, and shows the smallest case that fails.

    python -m scripts.reliability.fuzz                 # writes scripts/results/fuzz.json
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns

ROOT = Path(__file__).parents[2]
TESTS = "tests/properties"
TIMES = 8  # as many cases in a round as `make test` checks


def fuzz_once(seed: int, times: int) -> tuple[dict[str, Any], str]:
    """One round, of `times` as many cases as in `make test`: its row, and what pytest said."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        variables = {"HF_EFFATTN_FUZZ_TIMES": str(times), "HF_EFFATTN_FUZZ_COUNTS": str(counts)}
        # Those that are `slow`, too.
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "-m", "", TESTS, f"--hypothesis-seed={seed}"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        # Without counts the tests did not run at all.
        cases = json.loads(counts.read_text(encoding="utf-8")) if counts.exists() else {}
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode and not failed:
        raise RuntimeError(f"pytest did not run:\n{done.stdout}{done.stderr}")
    return {"seed": seed, "times": times, "cases": cases, "failed": failed}, done.stdout


def main(
    cases: Annotated[int, typer.Option(min=1, help="How many, with those of the file.")] = 100_000,
    times: Annotated[int, typer.Option(min=1, help="Cases of a round, in numbers of those in `make test`.")] = TIMES,
    output: Annotated[Path, typer.Option(help="JSON file of the counts; rounds in it are kept.")] = (
        ROOT / "scripts/results/fuzz.json"
    ),
) -> None:
    kept = KeptRuns(output, {"tests": TESTS})
    while (done := sum(sum(row["cases"].values()) for row in kept.rows)) < cases:
        print(f"{done:,} of {cases:,} cases", flush=True)
        row, said = fuzz_once(secrets.randbelow(2**31), times)
        kept.add(row)
        if row["failed"]:
            raise SystemExit(f"{said}\nSeed {row['seed']} fails: {', '.join(row['failed'])}")
    print(f"{done:,} cases, all properties held: {output}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
