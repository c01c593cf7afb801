"""The tables of `model_cards/RELIABILITY.md`, from what the scripts of `scripts/trust` keep."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_effattn.reporting.table import markdown

from ..kept.markdown import machine
from ..trust.faults import TRIALS, VERDICTS
from ..trust.memory import ALLOWED, LENGTHS, slope
from ..trust.mutants import listed_mutants
from ..trust.versions import TRIED, suites_of

RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "results"
MEBIBYTE = 2**20
OUR_SUITES = {"core": "our core tests", "compatibility": "our tests beside other libraries"}


class NotRunError(Exception):
    """The results of a command are not there."""


def or_not_run(make: Callable[[], str]) -> Callable[[], str]:
    """A table, or the sentence that it was not run."""

    def table() -> str:
        try:
            return make()
        except NotRunError as missing:
            return f"Not run to its end yet: `make {missing}`."

    return table


def kept(name: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file, and the line under their table; NotRunError where there is none."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise NotRunError(name)
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["rows"], machine(found["environment"])


@or_not_run
def properties() -> str:
    """Random cases by what was checked, and rounds in which a property did not hold."""
    rows, note = kept("fuzz")
    cases: Counter[str] = Counter()
    for row in rows:
        cases.update(row["cases"])
    failed = Counter(test for row in rows for test in row["failed"])
    lines = [[name, f"{number:,}"] for name, number in sorted(cases.items())]
    lines.append(["**together**", f"**{sum(cases.values()):,}**"])
    found = ", ".join(f"`{test}` {times}" for test, times in sorted(failed.items())) or "none"
    return f"{markdown(['property', 'cases'], lines)}\n\nTests that failed in {len(rows)} rounds: {found}.{note}"


@or_not_run
def defects() -> str:
    """Planted defects by room: caught, of those tried, of those listed."""
    rows, note = kept("mutants")
    listed = listed_mutants()
    by_change = {mutant.identity["change"]: mutant for mutant in listed}
    tried = {row["change"] for row in rows} & by_change.keys()
    caught = {row["change"] for row in rows if row["caught"]} & tried
    rooms = Counter(room_of(mutant.file) for mutant in listed)
    lines = []
    for room, number in sorted(rooms.items()):
        of_room = {change for change in tried if room_of(by_change[change].file) == room}
        lines.append([room, str(number), str(len(of_room)), str(len(of_room & caught))])
    share = f" ({len(caught) / len(tried):.0%})" if tried else ""
    lines.append(["**together**", f"**{len(listed)}**", f"**{len(tried)}**", f"**{len(caught)}{share}**"])
    escaped = [by_change[change].name for change in sorted(tried - caught)]
    names = "; ".join(sorted(escaped)) or "none"
    return f"{markdown(['room', 'listed', 'tried', 'caught'], lines)}\n\nEscaped: {names}.{note}"


def room_of(file: str) -> str:
    """The room of the package that a file is in."""
    return Path(file).parts[1]


@or_not_run
def faults() -> str:
    """Trials by fault and verdict."""
    rows, note = kept("faults")
    counts = Counter((row["fault"], row["verdict"]) for row in rows)
    lines = [
        [fault, str(sum(counts[fault, one] for one in VERDICTS)), *(str(counts[fault, one]) for one in VERDICTS)]
        for fault in TRIALS
        if any(counts[fault, one] for one in VERDICTS)
    ]
    sums = [sum(counts[fault, one] for fault in TRIALS) for one in VERDICTS]
    lines.append([f"**{cell}**" for cell in ("together", sum(sums), *sums)])
    return markdown(["fault", "trials", *VERDICTS], lines) + note


@or_not_run
def peaks() -> str:
    """Memory that one pass adds, and the power of the length that it grows with."""
    rows, note = kept("memory")
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["measure"] == "peak":
            found.setdefault(row["kind"], {})[row["length"]] = row["bytes"]
    lengths = sorted({length for at in found.values() for length in at})
    lines = []
    for kind, at in found.items():
        power = f"{slope(at):.2f}" if max(at) == LENGTHS[-1] else ""
        sizes = [f"{at[length] / MEBIBYTE:,.0f} MiB" if length in at else "" for length in lengths]
        lines.append([kind, *sizes, power])
    return markdown(["", *(f"{length:,}" for length in lengths), "power"], lines) + note


@or_not_run
def growth() -> str:
    """What passes, patches and threads leave behind."""
    rows, note = kept("memory")
    lines = []
    for row in rows:
        if row["measure"] in ("passes", "patches"):
            first = f"{row['first'] / MEBIBYTE:.1f} MiB" if "first" in row else ""
            what = f"{row['bytes'] / 1024:+.1f} KiB, {row['objects']:+,} objects, {row['blocks']:+,} blocks"
            lines.append([row["kind"], f"{row['steps']:,} {row['measure']}", first, what, held(row)])
        elif row["measure"] == "threads":
            what = f"{row['equal']} of {row['steps']} outputs bit-equal"
            lines.append([row["kind"], "8 threads", "", what, held(row)])
    order = sorted(lines, key=lambda line: line[1])
    table = markdown(["", "run", "first pass of each length", "second half, or outputs", "held"], order)
    allowed = ", ".join(f"{most:g} {name}" for name, most in ALLOWED.items())
    return f"{table}\n\nAllowed of a step: {allowed}.{note}"


def held(row: dict[str, Any]) -> str:
    """A cell."""
    return "yes" if row["held"] else "**no**"


@or_not_run
def versions() -> str:
    """Suites by the versions they ran with, the combinations that were not, and every failure."""
    rows, _ = kept("versions")
    lines = [
        [
            row["versions"],
            OUR_SUITES.get(row["suite"], f"transformers' own, {row['suite']}"),
            *(str(row[name]) for name in ("passed", "skipped", "excepted")),
            str(len(row["failed"] + row["passed_but_excepted"])),
        ]
        for row in sorted(rows, key=lambda row: (numbers_in(row["versions"]), row["suite"]))
    ]
    table = markdown(["versions", "tests", "passed", "skipped", "excepted", "failed"], lines)
    failed = [
        f"`{test}`{f' {cases} times' if cases > 1 else ''} ({row['versions']})"
        for row in rows
        for test, cases in Counter(one.partition("[")[0] for one in row["failed"]).items()
    ]
    failed += [f"`{test}` passed ({row['versions']})" for row in rows for test in row["passed_but_excepted"]]
    missing = [
        f"{tried.name} ({', '.join(left)})" if len(left) < len(suites_of(tried)) else tried.name
        for tried in TRIED
        if (left := [suite for suite in suites_of(tried) if not any_row(rows, tried.name, suite)])
    ]
    said = [f"Failed: {', '.join(failed) or 'none'}.", f"Not run here: {'; '.join(missing) or 'none'}."]
    devices = ", ".join(sorted({row["device_name"] for row in rows}))
    return "\n\n".join([table, *said, f"<sub>{devices}</sub>"])


def numbers_in(versions: str) -> list[int]:
    """By which 5.7.0 comes before 5.23.0."""
    return [int(number) for number in re.findall(r"\d+", versions)]


def any_row(rows: list[dict[str, Any]], versions: str, suite: str) -> bool:
    """Whether a suite ran with some versions."""
    return any((row["versions"], row["suite"]) == (versions, suite) for row in rows)
