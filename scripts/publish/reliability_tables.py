"""The tables of what the scripts of `scripts/reliability` keep: of `model_cards/RELIABILITY.md`, and one other."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_effattn.reporting.numbers import count
from hf_effattn.reporting.table import markdown

from ..reliability.faults import VERDICTS
from ..reliability.memory import LENGTHS, slope
from ..reliability.mutants import listed_mutants
from ..reliability.versions import TRIED, suites_of
from .cst_tables import Table, of_file

RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "results"
OUR_SUITES = ("core", "compatibility")
Rows = list[dict[str, Any]]


def verdicts() -> str:
    """What came out of each trial, with a link to what was kept of it."""
    return markdown(
        ["question", "what came out", "results"],
        [
            [f"[{question}](#{name})", _came_out(kept, say), f"[JSON](../scripts/results/{kept}.json)"]
            for name, kept, question, say in QUESTIONS
        ],
        right=(),
    )


def _came_out(kept: str, say: Callable[[Rows], str]) -> str:
    path = RESULTS / f"{kept}.json"
    return say(_rows(kept)) if path.exists() else f"Not run to its end yet: `make {kept}`."


def _rows(kept: str) -> Rows:
    rows: Rows = json.loads((RESULTS / f"{kept}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def _random_inputs(rows: Rows) -> str:
    cases = sum(sum(row["cases"].values()) for row in rows)
    return f"{cases:,} cases in {len(rows)} rounds, {sum(len(row['failed']) for row in rows)} failures"


def _defects(rows: Rows) -> str:
    listed = {mutant.identity["change"]: mutant.name for mutant in listed_mutants()}
    tried = {row["change"]: row["caught"] for row in rows if row["change"] in listed}
    escaped = sorted(listed[change] for change, caught in tried.items() if not caught)
    return f"{len(listed)} defects, {len(tried)} of them tried; not seen: {'; '.join(escaped) or 'none'}"


def _faults(rows: Rows) -> str:
    counts = Counter(row["verdict"] for row in rows)
    return f"{len(rows)} trials: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"


def _memory(rows: Rows) -> str:
    peaks: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["measure"] == "peak":
            peaks.setdefault(row["kind"], {})[row["length"]] = row["bytes"]
    powers = [slope(at) for at in peaks.values() if max(at) == LENGTHS[-1]]
    runs = [row["held"] for row in rows if row["measure"] != "peak"]
    return (
        f"the peak grows with the length to the power of {min(powers):.2f} to {max(powers):.2f}; "
        f"{sum(runs)} of {len(runs)} runs left nothing behind"
    )


def _versions(rows: Rows) -> str:
    failed = sum(len(row["failed"] + row["passed_but_excepted"]) for row in rows)
    return f"{sum(row['passed'] for row in rows):,} tests passed, {failed} failed"


def _processes(rows: Rows) -> str:
    seconds = {(row["processes"], row["threads_each"]): row["seconds"] for row in rows if not row["kills"]}
    numbers = sorted({processes for processes, _ in seconds})
    bits = len({row["result"] for row in rows})
    return (
        f"by {', '.join(map(str, numbers))} processes and after {sum(row['killed'] for row in rows)} kills "
        f"{'the same bits' if bits == 1 else f'{bits} results'}; on two cores 2 processes are "
        f"{seconds[1, 1] / seconds[2, 1]:.1f} times as fast as 1 of one thread, and "
        f"{seconds[1, 2] / seconds[2, 1]:.1f} times as fast as 1 of two"
    )


# The heading of each section, the file of its results, its question, and what to say of its rows.
QUESTIONS = (
    ("random-inputs", "fuzz", "Does a random input break anything?", _random_inputs),
    ("planted-defects", "mutants", "Do the tests see a defect?", _defects),
    ("faults", "faults", "What does a crash or a damaged file leave behind?", _faults),
    ("processes", "corpora", "Do several processes give a corpus the same vectors?", _processes),
    ("memory", "memory", "Does memory grow faster than the input, or with every call?", _memory),
    ("versions", "versions", "Which versions of transformers work?", _versions),
)


def versions() -> str:
    """Tests by the versions they ran with, the combinations that were not, and every failure."""
    rows = _rows("versions")
    lines = []
    for name in sorted({row["versions"] for row in rows}, key=numbers_in):
        here = [row for row in rows if row["versions"] == name]
        ours, theirs = ([row for row in here if (row["suite"] in OUR_SUITES) == is_ours] for is_ours in (True, False))
        counts = [sum(row["passed"] for row in ours), len(theirs), sum(row["passed"] for row in theirs)]
        counts.append(sum(row["excepted"] for row in theirs))
        counts.append(sum(len(row["failed"] + row["passed_but_excepted"]) for row in here))
        lines.append([name, *(f"{count:,}" for count in counts)])
    header = ["versions", "our tests", "models of transformers", "their tests", "expected failures", "failed"]
    failed = [
        f"`{test}`{f' {cases} times' if cases > 1 else ''} ({row['versions']})"
        for row in rows
        for test, cases in Counter(test_case.partition("[")[0] for test_case in row["failed"]).items()
    ]
    failed += [f"`{test}` passed ({row['versions']})" for row in rows for test in row["passed_but_excepted"]]
    missing = [
        f"{tried.name} ({', '.join(left)})" if len(left) < len(suites_of(tried)) else tried.name
        for tried in TRIED
        if (left := [suite for suite in suites_of(tried) if not any_row(rows, tried.name, suite)])
    ]
    said = [f"Failed: {', '.join(failed) or 'none'}.", f"Not run here: {'; '.join(missing) or 'none'}."]
    return "\n\n".join([markdown(header, lines), *said])


@of_file("tensor_parallel")
def one_text(result: dict[str, Any]) -> Table:
    """One text on one process and on several: what the process that holds most holds, and seconds."""
    divisions: dict[tuple[int, int, int], Rows] = {}
    for row in result["rows"]:
        division = row["tokens"], row["processes"], row["threads_each"]
        divisions.setdefault(division, []).append(row)
    lines = []
    for (tokens, processes, threads), ranks in divisions.items():
        most = {name: max(row[name] for row in ranks) for name in ("seconds", "peak", "weights", "difference")}
        share = most["peak"] / divisions[tokens, 1, 1][0]["peak"]
        lines.append([
            f"{tokens:,}",
            f"{processes} process{'es' if processes > 1 else ''} of {count(threads, 'thread')}",
            f"{most['seconds']:,.0f} s",
            f"{most['peak'] / 2**20:,.0f} MiB, {share:.2f}×",
            f"{most['weights'] / 2**20:,.0f} MiB",
            f"{most['difference']:.0e}" if most["difference"] else "",
        ])  # fmt: skip
    idle = max(row["idle"] for row in result["rows"]) / 2**20
    settings = result["settings"]
    note = (
        f"{settings['model']}, {settings['layers']} layers, random weights, {settings['method']}, float32, one pass "
        f"without gradients. Memory: the most that a process held, less the {idle:,.0f} MiB that it held after its "
        "imports, and what of it are weights; times of one process of one thread. Difference: relative L2 distance of "
        "the last hidden state from that process's. "
    )
    return markdown(["tokens", "on", "time", "memory", "weights", "difference"], lines), note


def numbers_in(versions: str) -> list[int]:
    """By which 5.7.0 comes before 5.23.0."""
    return [int(number) for number in re.findall(r"\d+", versions)]


def any_row(rows: Rows, versions: str, suite: str) -> bool:
    """Whether a suite ran with some versions."""
    return any((row["versions"], row["suite"]) == (versions, suite) for row in rows)
