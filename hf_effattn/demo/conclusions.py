"""The meaning of the demo's numbers, in sentences made from them."""

from ..measuring.candidates import UNPATCHED
from ..reporting import Report
from ..reporting.findings import Measurement
from ..reporting.numbers import megabytes, percent, ratio
from .run import DemoResult, ShortLength

ROUNDING = 1e-4  # a relative change below is that of another order of additions


def conclusions(result: DemoResult) -> list[str]:
    """Paragraphs for the end of the demo.

    Args:
        result (`DemoResult`): the numbers.

    Returns:
        `list[str]`: what they mean, and when not to use the methods.
    """
    said = []
    short = [one for one in result.short if any(change.hidden_error > ROUNDING for change in one.changes.values())]
    same = [one.length for one in result.short if one not in short]
    if same:
        said.append(
            f"At {_listed(same)} tokens nothing was approximated: in a model that masks the future a token attends "
            "exactly to its segment and the window before it, and so short a text has no more."
        )
    if short:
        last = short[-1]
        said += [_closeness(short), *_key_clusters(last), *_clustered_alone(last), _short_inputs(short)]
    if result.long is not None:
        said += [_long_inputs(result.long), _memory(result.long), *_beyond_training(result)]
    return said


def _closeness(short: list[ShortLength]) -> str:
    """How close the methods with exact keys are at each length, and what retrieval with the closest still finds."""
    with_exact_keys = ("i-clustered", "bi-clustered")
    labels = list(dict.fromkeys(label for one in short for label in one.changes if label.startswith(with_exact_keys)))
    parts = []
    for label in labels:
        at = [
            f"{one.changes[label].cosine_mean:.4f} at {one.length} tokens (worst {one.changes[label].cosine_min:.4f})"
            for one in short
            if label in one.changes
        ]
        parts.append(f"{label} {', '.join(at)}")
    last = short[-1]
    best = max(last.changes, key=lambda label: last.changes[label].cosine_mean)
    change = last.changes[best]
    return (
        f"Cosine of the embeddings with the exact model's: {'; '.join(parts)}. At {last.length} tokens with "
        f"{best}, {percent(change.next_found)} of the passages find the next one of their "
        f"book (exact attention {percent(last.next_found)}), and {percent(change.nearest_kept)} keep their nearest "
        "neighbour."
    )


def _key_clusters(one: ShortLength) -> list[str]:
    """The gain of clusters of keys over the centroid's remainder, at equal clusters and topk."""
    by_counts = {
        (found["method"], found["clusters"], found.get("topk")): label for label, found in one.report.methods.items()
    }
    compared = []
    for (method, *counts), label in by_counts.items():
        beside = by_counts.get(("i-clustered", *counts))
        if method == "bi-clustered" and beside is not None:
            errors = (f"{name} {percent(one.changes[name].hidden_error)}" for name in (label, beside))
            compared.append(", ".join(errors))
    if not compared:
        return []
    return [
        "bi-clustered lets every query weigh clusters of the remaining keys to first order, where i-clustered takes "
        f"the centroid's weights. Change of the last hidden state at {one.length} tokens: {'; '.join(compared)}."
    ]


def _clustered_alone(one: ShortLength) -> list[str]:
    improved = [label for label in one.changes if label.startswith("i-clustered")]
    clustered = [label for label in one.changes if label.startswith("clustered")]
    if not improved or not clustered:
        return []
    alone, beside = one.changes[clustered[0]], one.changes[improved[0]]
    heads = [error for m in one.report.of(clustered[0]) for errors in m.attention_error.values() for error in errors]
    names = clustered[0], improved[0]
    if alone.hidden_error <= beside.hidden_error:
        return [f"On this text {names[0]} was as close as {names[1]}."]
    return [
        f"clustered gives every query of a cluster the same attention. At {one.length} tokens {names[0]} moved the "
        f"last hidden state by {percent(alone.hidden_error)} where {names[1]} moved it by "
        f"{percent(beside.hidden_error)}, and its worst head is off by {percent(max(heads))}. Don't use it alone "
        "where single tokens must be found: question answering, matching, copying."
    ]


def _short_inputs(short: list[ShortLength]) -> str:
    speeds = {
        one.length: max(value for m in _approximate(one.report) if (value := one.report.speedup(m)) is not None)
        for one in short
    }
    slower = [length for length, speed in speeds.items() if speed < 1]
    if not slower:
        fastest = max(speeds, key=lambda length: speeds[length])
        return (
            f"Already at {fastest} tokens the fastest of the methods ran {ratio([speeds[fastest]])} as fast as exact."
        )
    return (
        f"Short inputs: at {_listed(slower)} tokens every method was slower than exact attention (the fastest ran "
        f"{ratio([speeds[length] for length in slower])} as fast). There is nothing to gain there, so patch_attention "
        "runs exact attention below min_length; the table above forced the methods."
    )


def _long_inputs(found: Report) -> str:
    parts = []
    for label in found.methods:
        at = [
            f"{ratio([speed])} as fast at {found.inputs[m.input].length:,} tokens with the last hidden state off by "
            f"{percent(m.change.hidden_error)}"
            for m in found.of(label)
            if (speed := found.speedup(m)) is not None and m.change.hidden_error is not None
        ]
        parts.append(f"{label} {', '.join(at)}")
    gained = any((found.speedup(m) or 0) > 1 for m in _approximate(found))
    start = "Long inputs, whole model against exact SDPA" if gained else "No gain on these long inputs"
    return f"{start}: {'; '.join(parts)}. Your task decides whether that error is small enough."


def _memory(found: Report) -> str:
    longest = max(range(len(found.inputs)), key=lambda index: found.inputs[index].length)
    exact = found.of(UNPATCHED, longest)[0].forward_peak_bytes
    others = [
        m.forward_peak_bytes for m in _approximate(found) if m.input == longest and m.forward_peak_bytes is not None
    ]
    if exact is None or not others:
        return "Memory was not measured on this device."
    length = found.inputs[longest].length
    span = " to ".join(dict.fromkeys((megabytes(min(others)), megabytes(max(others)))))
    line = f"Memory: at {length:,} tokens exact SDPA added {megabytes(exact)} at its peak, the methods {span}."
    shortest = min(range(len(found.inputs)), key=lambda index: found.inputs[index].length)
    before = found.of(UNPATCHED, shortest)[0].forward_peak_bytes
    if before is not None and shortest != longest:
        tokens = length / found.inputs[shortest].length
        growth = exact / before
        kind = "linear in the length already" if growth < 1.3 * tokens else "more than linear in the length"
        line += f" With {ratio([tokens])} the tokens SDPA took {ratio([growth])} the memory: it is {kind} here."
    if min(others) > 0.9 * exact:
        faster = any((found.speedup(m) or 0) > 1 for m in _approximate(found) if m.input == longest)
        line += " So the gain here is time, not memory." if faster else " So there is no memory to gain here."
    return line


def _beyond_training(result: DemoResult) -> list[str]:
    if result.long is None or result.trained_length is None:
        return []
    lengths = sorted({one.length for one in result.long.inputs if one.length > result.trained_length})
    if not lengths:
        return []
    return [
        f"Beyond training: this model has {result.trained_length} positions of its own; at {_listed(lengths)} tokens "
        "they are repeated, which it never saw. These rows compare two ways to compute attention; the model may not "
        "understand such texts: use a model made for long texts, or fine-tune."
    ]


def _approximate(found: Report) -> list[Measurement]:
    return [m for m in found.measurements if m.method != UNPATCHED]


def _listed(lengths: list[int]) -> str:
    words = [f"{length:,}" for length in lengths]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
