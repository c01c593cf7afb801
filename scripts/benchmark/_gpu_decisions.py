"""What follows from the first look at a GPU: one line for every decision, below the tables."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ._budgets import DONE, last_rows
from ._gpu_kernels import CACHES
from ._gpu_tables import (
    PREDICTED,
    TABLES,
    Row,
    Rows,
    by_length,
    fastest_exact,
    recorded,
    short,
    steps_table,
    tokens,
)

FEW_LAUNCHES, THEIR_US = 10, 100.0  # a layer of ten launches is to take the host a tenth of a millisecond
MOST_US = 20.0  # of a launch: beyond it only graphs gain
FEW_KERNELS = 2  # that hold half of a layer's time are worth mending
COLD_SHARE = 0.25  # of the kernels' time, from which on cold code explains it
ERROR_FACTOR, ROUNDING = 1.25, 0.01  # of the kernels' errors beside those in float64
REHEARSED = "**A rehearsal on a CPU: no number below says anything about a GPU.**"
SAME = 0.1  # relative difference of times that are called the same


def decisions(rows: Iterable[dict[str, Any]]) -> str:
    """Tables and decisions from the rows of a file.

    Args:
        rows (`Iterable[dict]`): as `run_steps` keeps them; what was not measured is left out.

    Returns:
        `str`: Markdown.
    """
    last = last_rows(rows)
    found = {name: row["found"] for name, row in last.items() if row.get("found")}
    parts = [REHEARSED] * any(row.get("rehearsal") for row in last.values()) + [steps_table(last)]
    parts += [f"## {name}\n\n{table(found[name])}" for name, table in TABLES.items() if name in found]
    lines = [line for name, decide in DECISIONS.items() if name in found for line in decide(found)]
    parts.append("## Decisions\n\n" + "\n".join(f"- {line}" for line in lines))
    parts += [
        f"Not whole, so read with care: {name} ({row['status']})."
        for name, row in last.items()
        if row["status"] != DONE
    ]
    return "\n\n".join(parts)


def of_exact(found: Rows) -> Iterator[str]:
    """Whether what was measured before still holds."""
    step = found["exact"]
    if "product_tflops" in step:
        copy, product = step["copy_gb_a_second"], step["product_tflops"]
        yield f"A copy moves {copy:g} GB/s, a large product makes {product:g} TFLOP/s."
    for length, ms in fastest_exact(step).items():
        before = recorded("SDPA", length)
        if before is not None:
            same = abs(ms / before - 1) < SAME
            verdict = "as before" if same else "not as before, so compare nothing with earlier numbers"
            yield f"Exact attention, {tokens(length)} tokens: {ms:.3f} ms, recorded are {before:.3f}: {verdict}."


def of_launches(found: Rows) -> Iterator[str]:
    """Whether layers can gain without graphs."""
    ways = found["launches"].get("45 arguments", {}).get("ways", {})
    if "replayed" not in ways:
        yield "What a replayed launch costs was not measured."
        return
    us = ways["replayed"]["host_us"]
    if us > MOST_US:
        verdict = f"more than {MOST_US:g} each: only graphs gain on this machine, so put layers into CUDA graphs first"
    elif FEW_LAUNCHES * us > THEIR_US:
        verdict = f"more than {THEIR_US:g}: save launches and Python around them before work in kernels"
    else:
        verdict = f"within {THEIR_US:g}: layers of few launches gain without graphs"
    yield f"A launch takes the host {us:.1f} µs, {FEW_LAUNCHES} take {FEW_LAUNCHES * us:.0f}, {verdict}."
    if "compiled.run" in ways:
        raw = ways["compiled.run"]["host_us"]
        yield f"Triton's launcher alone takes {raw:.1f} µs, so Python around it can save {us - raw:.1f} at most."
    for way, row in found.get("static launcher", {}).get("45 arguments", {}).get("ways", {}).items():
        verdict = "use it" if row["host_us"] < us / 2 else "it saves too little"
        yield f"Launched by {way} it takes {row['host_us']:.1f} µs: {verdict}."
    exact, counts = fastest_exact(found.get("exact", {})), dict[str, int]()
    for name, _, row in by_length(found.get("durations", {})):
        counts[name] = max(row["launches"], counts.get(name, 0))
    for name, count in counts.items():
        host = us * count / 1e3
        first = next((tokens(length) for length, ms in exact.items() if host < ms), None)
        verdict = (
            f"less than exact attention from {first} tokens on" if first else "more than exact attention anywhere"
        )
        yield f"{name}: {count} launches take the host {host:.2f} ms, {verdict}."


def of_durations(found: Rows) -> Iterator[str]:
    """Whether a few kernels or all launches hold the time."""
    for name, length, row in by_length(found["durations"]):
        few = holding_half(row["kernels"])
        where = f"{name}, {tokens(length)} tokens"
        verdict = "mend these first" if len(few) <= FEW_KERNELS else "it is spread out, so save launches (lean)"
        yield f"{where}: half of {row['total_us']:.0f} µs is in {', '.join(few)}: {verdict}."
        if (predicted := PREDICTED.get(name, {}).get(length)) is not None:
            yield f"{where}: {row['span_us'] / predicted:.1f} times what was predicted."
    if not list(by_length(found["durations"])):
        yield "The profiler saw no kernel, so none can be named: allow CUPTI, or time kernels by events."


def holding_half(kernels: list[Row]) -> list[str]:
    """The fewest kernels, the longest first, that take half of the time of all."""
    total, held, few = sum(row["us"] for row in kernels), 0.0, []
    for row in kernels:
        few.append(short(row["kernel"]))
        held += row["us"]
        if held >= total / 2:
            break
    return few


def of_counters(found: Rows) -> Iterator[str]:
    """What the warps of the longest kernels wait for most."""
    for name, counts in next(
        (found["counters"][caches] for caches in CACHES if caches in found["counters"]), {}
    ).items():
        stalls = {metric: value for metric, value in counts.items() if metric.startswith("stalled_")}
        if stalls:
            most = max(stalls, key=lambda metric: stalls[metric])
            verdict = "cold code" if "no_instruction" in most else "no cold code"
            yield f"{short(name)}: warps are {most.split()[0].replace('_', ' ')} most: {verdict}."


def of_cold_code(found: Rows) -> Iterator[str]:
    """Whether code that no cache holds explains the time."""
    for name, length, row in by_length(found["cold code"]):
        share = 1 - row["later_us"] / row["first_us"] if row["first_us"] else 0.0
        verdict = "write less code" if share >= COLD_SHARE else "look for steps that wait for each other instead"
        yield f"{name}, {tokens(length)} tokens: cold code is at most {share:.0%} of the kernels' time: {verdict}."


def of_layers(found: Rows) -> Iterator[str]:
    """Where layers gain, with graphs and without, and whether their kernels are right."""
    gains: dict[str, dict[str, list[str]]] = {}
    for length, row in found["layers"].items():
        for name, times in (row.get("encoder", {}) | row.get("cst", {})).items():
            for way in ("streaming", "graph"):
                if is_method(name) and (times.get(f"{way}_speedup") or 0.0) > 1:
                    gains.setdefault(name, {}).setdefault(way, []).append(tokens(length))
        for name, errors in row.get("errors", {}).items():
            right = errors["error"] <= ERROR_FACTOR * errors["float64"] + ROUNDING
            yield f"{name}, {tokens(length)} tokens: kernels {'right' if right else 'WRONG'}, {apart(errors)}."
    timed = (row.get("encoder", {}) | row.get("cst", {}) for row in found["layers"].values())
    for name in dict.fromkeys(name for rows in timed for name in rows):
        if is_method(name):
            alone, graph = (gains.get(name, {}).get(way, []) for way in ("streaming", "graph"))
            verdict = "graphs win" if len(graph) > len(alone) else "graphs change nothing"
            yield f"{name} gains without a graph at {listed(alone)}, in a graph at {listed(graph)}: {verdict}."


def is_method(name: str) -> bool:
    """Whether a call is none of exact attention's."""
    return not name.startswith(("SDPA", "flash-attn"))


def listed(lengths: list[str]) -> str:
    """Lengths in a sentence."""
    return f"{' and '.join(lengths)} tokens" if lengths else "no length"


def apart(errors: Row) -> str:
    """Both errors in a sentence."""
    return f"error {errors['error']:.3f}, {errors['float64']:.3f} in float64"


def of_models(found: Rows) -> Iterator[str]:
    """Where whole models gain."""
    for length, rows in found["models"].items():
        for name, row in rows.items():
            if name != "exact" and row.get("forward_speedup"):
                graph = row.get("forward_graph_speedup")
                inside = "no graph could be captured" if graph is None else f"{graph:.2f}× in a graph"
                yield f"The model by {name}, {tokens(length)} tokens: {row['forward_speedup']:.2f}×, {inside}."


def of_causal(found: Rows) -> Iterator[str]:
    """Whether the kernels of the causal form are right, and to be kept."""
    step = found["causal"]
    if "check" not in step:
        yield f"The causal kernels were not checked: {step.get('left_out', 'the step ended before')}."
        return
    check = step["check"]
    near, later = check["error_of_first_segment"], not check["sees_no_later_token"]
    right = check["error"] <= ERROR_FACTOR * check["float64"] + ROUNDING and near < ROUNDING and not later
    seen = "a LATER TOKEN changes them" if later else "no later token changes them"
    verdict = "right" if right else "WRONG"
    yield f"The causal kernels' outputs are {verdict}: {apart(check)}, {near:.4f} where they are exact; {seen}."
    speeds = [
        (row.get(f"{way}_speedup") or 0.0, f"{tokens(length)} tokens, {way}")
        for length, rows in step.items()
        if length.isdigit()
        for name, row in rows.items()
        if is_method(name)
        for way in ("streaming", "graph")
    ]
    if speeds:
        best, where = max(speeds)
        verdict = (
            "keep them" if best > 1 else "replace them by an exact window of a maintained kernel and lean older keys"
        )
        yield f"The causal kernels are at best {best:.2f}× as fast as exact attention ({where}): {verdict}."


def of_tests(found: Rows) -> Iterator[str]:
    """Whether the README can say that all tests pass."""
    step = found["tests"]
    passed = [name for name, word in step["outcomes"].items() if word == "passed"]
    verdict = "say so in the ops' README" if len(passed) == step["asked_for"] else "mend the others first"
    yield f"{len(passed)} of {step['asked_for']} tests that had not passed on a GPU pass: {verdict}."


def of_crossovers(found: Rows) -> Iterator[str]:
    """What `min_length` is to be."""
    for name, lengths in found["crossovers"].get("crossover", {}).items():
        alone, graph = (
            f"{lengths[field]:,}" if field in lengths else "unknown" for field in ("speedup", "graph_speedup")
        )
        yield f"{name}, default settings: min_length {alone} without a graph, {graph} in one."


DECISIONS: dict[str, Callable[[Rows], Iterator[str]]] = {
    "exact": of_exact, "launches": of_launches, "durations": of_durations, "counters": of_counters,
    "cold code": of_cold_code, "layers": of_layers, "models": of_models, "causal": of_causal, "tests": of_tests,
    "crossovers": of_crossovers,
}  # fmt: skip
