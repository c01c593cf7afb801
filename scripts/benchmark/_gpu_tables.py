"""The numbers of the first look at a GPU as tables, one function for each step."""

import json
from collections.abc import Callable
from typing import Any

from hf_effattn.reporting.table import markdown

from ..shared.markdown import number
from ..shared.runs import RESULTS
from ._gpu_kernels import CACHES

BEFORE = RESULTS / "gpu" / "benchmark_attention.json"
# Microseconds of a layer at 4,096 and 16,384 tokens by a model of the chip, made before the kernels were measured: of
# its throughput and of steps that wait for each other.
PREDICTED = {
    "i-clustered clusters=100 topk=32": {"4096": 100, "16384": 172},
    "bi-clustered clusters=64 topk=64 key_clusters=32": {"4096": 165, "16384": 271},
    "bi-clustered clusters=128 topk=128 key_clusters=64": {"4096": 267, "16384": 433},
}
WAYS = ("waiting", "streaming", "graph")
SHOWN_KERNELS = 5
Row = dict[str, Any]
Rows = dict[str, Row]


def steps_table(last: Rows) -> str:
    """What became of every step, and where."""
    fields = ("device_name", "torch", "code", "commit")
    about = {", ".join(f"{field} {row.get(field)}" for field in fields) for row in last.values()}
    cells = [
        [name, row["status"], number(row, "seconds", ".1f"), number(row, "budget_seconds", "g"), row.get("error", "")]
        for name, row in last.items()
    ]
    header = ["step", "status", "seconds", "budget", "error"]
    return "\n\n".join([*sorted(about), markdown(header, cells, right=(2, 3))])


def tokens(length: str) -> str:
    """A length as a table writes it."""
    return f"{int(length):,}"


def short(kernel: str) -> str:
    """The beginning of a kernel's name."""
    return kernel.strip("_")[:40]


def by_length(step: Row) -> list[tuple[str, str, Row]]:
    """Name, length and row of what a step found of layers, without those that were left out or not seen."""
    return [
        (name, length, row)
        for name, rows in step.items()
        for length, row in rows.items()
        if length.isdigit() and "absent" not in row
    ]


def fastest_exact(step: Row) -> dict[str, float]:
    """Milliseconds of the fastest exact kernel by length, in a graph where that was measured."""
    times = {
        length: [row.get("graph_ms", row["ms"]) for row in kernels.values() if "ms" in row]
        for length, kernels in step.get("sdpa", {}).items()
    }
    return {length: min(of_kernels) for length, of_kernels in times.items() if of_kernels}


def recorded(name: str, length: str) -> float | None:
    """Milliseconds in a graph as they were measured before."""
    rows = json.loads(BEFORE.read_text(encoding="utf-8"))["rows"]
    same = {"method": name, "length": int(length), "batch": 1}
    ms: float | None = next((row.get("forward_graph_ms") for row in rows if same.items() <= row.items()), None)
    return ms


def exact(step: Row) -> str:
    """SDPA's kernels by length."""
    lengths, fields = step.get("sdpa", {}), ("ms", "graph_ms")
    kernels = dict.fromkeys(name for rows in lengths.values() for name in rows)
    cells = [
        [name, *(" / ".join(number(rows.get(name), field, ".3f") for field in fields) for rows in lengths.values())]
        for name in kernels
    ]
    return markdown(["ms / in a graph", *map(tokens, lengths)], cells)


def launches(step: Row) -> str:
    """The host's time of every way to launch, or why there is none."""
    kinds = {name: row for name, row in step.items() if "ways" in row}
    names = dict.fromkeys(way for row in kinds.values() for way in (*row["ways"], *row["absent"]))

    def cell(row: Row, way: str) -> str:
        return number(row["ways"].get(way), "host_us", ".2f") or row["absent"].get(way, "")[:60]

    cells = [[way, *(cell(row, way) for row in kinds.values())] for way in names]
    others = step.get("others", {})
    cells += [[name, *[number(row, "host_us", ".2f")] * len(kinds)] for name, row in others.items()]
    return markdown(["µs of the host", *kinds], cells)


def durations(step: Row) -> str:
    """Layers with their longest kernels."""
    header = [
        "layer",
        "tokens",
        "launches",
        "ours",
        "µs of kernels",
        "with gaps",
        "predicted",
        "before",
        "graph",
        "longest",
    ]
    cells = []
    for name, length, row in by_length(step):
        before = recorded(name, length)
        longest = "; ".join(map(described, row["kernels"][:SHOWN_KERNELS]))
        cells.append([
            name, tokens(length), str(row["launches"]), str(row["ours"]),
            f"{row['total_us']:.0f}", f"{row['span_us']:.0f}",
            str(PREDICTED.get(name, {}).get(length, "")), "" if before is None else f"{1e3 * before:.0f}",
            "yes" if row["graph"] else "no", longest,
        ])  # fmt: skip
    return markdown(header, cells, right=range(1, 8))


def described(kernel: Row) -> str:
    """A kernel's name, its time, how often it runs, and its instructions where they are recorded."""
    code = f", {kernel['instructions']} instructions" if "instructions" in kernel else ""
    return f"{short(kernel['kernel'])} {kernel['us']:.0f} µs ×{kernel['calls']:g}{code}"


def counters(step: Row) -> str:
    """Nsight Compute's counters."""
    tables = []
    for caches in CACHES:
        rows = step.get(caches, {})
        metrics = list(dict.fromkeys(metric for row in rows.values() for metric in row))
        cells = [[short(name), *(number(row, metric, ".4g") for metric in metrics)] for name, row in rows.items()]
        tables += [markdown([caches, *metrics], cells)] if cells else []
    return "\n\n".join(tables) or step.get("absent") or step.get("refused", "")


def cold_code(step: Row) -> str:
    """The first launch in a row beside the later ones."""
    cells = []
    for name, length, row in by_length(step):
        most = (f"{short(k['kernel'])} {k['first_us']:.0f} → {k['later_us']:.0f}" for k in row["kernels"][:3])
        times = (f"{row[field]:.0f}" for field in ("first_us", "later_us"))
        cells.append([name, tokens(length), *times, "; ".join(most)])
    return markdown(["layer", "tokens", "µs at first", "µs later", "most"], cells, right=range(1, 4))


def timed(row: Row) -> list[str]:
    """Cells of a call that was timed in three ways."""
    times = [number(row, f"{way}_ms", ".3f") for way in WAYS]
    return times + [number(row, f"{way}_speedup", ".2f", "×") for way in WAYS]


TIMED = [*(f"ms, {way}" for way in WAYS), *(f"speed, {way}" for way in WAYS)]


def layers(step: Row) -> str:
    """Layers beside exact attention, with the errors of their kernels and of the same method in float64."""
    cells = []
    for length, row in step.items():
        for family in ("encoder", "cst"):
            for name, times in row.get(family, {}).items():
                error = row.get("errors", {}).get(name)
                errors = (number(error, field, ".3f") for field in ("error", "float64"))
                cells.append([name, tokens(length), *timed(times), *errors])
    return markdown(["call", "tokens", *TIMED, "error", "in float64"], cells)


def models(step: Row) -> str:
    """Whole models."""
    fields = (("ms", ".2f", ""), ("speedup", ".2f", "×"), ("graph_speedup", ".2f", "×"))
    cells = [
        [name, tokens(length)]
        + [number(row, f"forward_{field}", form, unit) for field, form, unit in fields]
        + [number(row, "moved", ".3f"), row.get("forward_refused", "")]
        for length, rows in step.items()
        for name, row in rows.items()
    ]
    return markdown(["model", "tokens", "ms", "speed", "in a graph", "moved", "refused"], cells)


def causal(step: Row) -> str:
    """A prompt of a decoder."""
    lengths = {length: rows for length, rows in step.items() if length.isdigit()}
    cells = [[name, tokens(length), *timed(row)] for length, rows in lengths.items() for name, row in rows.items()]
    return markdown(["call", "tokens", *TIMED], cells)


def tests(step: Row) -> str:
    """What pytest said."""
    outcomes = [f"{name}: {word}" for name, word in step.get("outcomes", {}).items()]
    return "\n".join([*outcomes, *step.get("said", [])])


def crossovers(step: Row) -> str:
    """The default settings by length."""
    fields = (("ms", ".3f", ""), ("speedup", ".2f", "×"), ("graph_speedup", ".2f", "×"))
    cells = [
        [name, tokens(length), *(number(row, field, form, unit) for field, form, unit in fields)]
        for length, rows in step.get("lengths", {}).items()
        for name, row in rows.items()
        if "ms" in row
    ]
    return markdown(["call", "tokens", "ms", "speed", "in a graph"], cells)


TABLES: dict[str, Callable[[Row], str]] = {
    "exact": exact, "launches": launches, "static launcher": launches, "durations": durations, "counters": counters,
    "cold code": cold_code, "layers": layers, "models": models, "causal": causal, "tests": tests,
    "crossovers": crossovers,
}  # fmt: skip
