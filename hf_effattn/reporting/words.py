"""A report in plain words."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ..measuring.candidates import UNPATCHED, make_candidates
from ..measuring.cost import median
from ..measuring.recording import EAGER
from ..patching.methods import METHODS
from ..patching.methods.crossover import why_never
from .findings import Findings, MeasuredInput, Measurement
from .numbers import NOT_FINITE, count, duration, megabytes, percent, ratio

MOST_LENGTHS_APART = 4


def summary(report: Findings) -> str:
    """What a report found: the setting, each method at each length (at most four; else all together), the choice."""
    lines = [_headline(report)]
    if not report.complete:
        lines.append("The measurement was interrupted; the numbers below were measured before that.")
    lengths: Sequence[int | None] = sorted({measured.length for measured in report.inputs})
    if len(lengths) > MOST_LENGTHS_APART:
        lengths = [None]
    for length in lengths:
        lines += ["", _inputs_line(report, length)]
        lines += [_method_line(report, label, length) for label in report.methods]
        lines += _min_length_line(report, length)
    lines += _fine_tuning_line(report)
    lines += ["", *choice_lines(report)] if report.max_error is not None else []
    return "\n".join(lines)


def _headline(report: Findings) -> str:
    at = report.environment
    where = f"{at['dtype']} on {at['device']}" + (
        f", {count(at['threads'], 'thread')}" if at["device"] == "cpu" else ""
    )
    layers = count(len(report.layers), "attention layer") if report.layers else "all layers run exactly"
    against = "transformers' own code" if at.get("baseline") == EAGER else "exact SDPA"
    return f"{at['model']} ({layers}, {where}) against {against}."


def _at(report: Findings, label: str, length: int | None) -> list[Measurement]:
    return [m for m in report.of(label) if length is None or report.inputs[m.input].length == length]


def _inputs_line(report: Findings, length: int | None) -> str:
    measured = [batch for batch in report.inputs if length is None or batch.length == length]
    lengths = sorted({batch.length for batch in measured})
    texts = sum(batch.batch_size for batch in measured)
    span = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    line = f"{count(texts, 'text')} of {span} tokens{encoder_lengths(measured)}"
    exact = _at(report, UNPATCHED, length)
    seconds = [value for m in exact if (value := median(m.forward_seconds)) is not None]
    peaks = [m.forward_peak_bytes for m in exact if m.forward_peak_bytes is not None]
    facts = []
    if seconds:
        facts.append(f"takes {duration(sum(seconds) / len(seconds))} per forward pass")
    if peaks:
        facts.append(f"adds {megabytes(max(peaks))} at its peak")
    return line + (f"; exact attention {' and '.join(facts)}:" if facts else ":")


def _method_line(report: Findings, label: str, length: int | None) -> str:
    measurements = _at(report, label, length)
    if measurements and all(m.why_exact == "settings" for m in measurements):
        return f"- {label}: one of its counts reaches the length, so this is exact attention."
    stays_exact = METHODS[report.methods[label]["method"]].stays_exact or not report.layers
    facts = []
    errors = [
        (value, layer, head)
        for m in measurements
        for layer, heads in m.attention_error.items()
        for head, value in enumerate(heads)
    ]
    broken = [f"layer {layer}, head {head}" for value, layer, head in errors if not math.isfinite(value)]
    if broken:
        facts.append(f"the attention output is {NOT_FINITE} ({broken[0]}{' and others' if len(broken) > 1 else ''})")
    elif stays_exact:
        facts.append("nothing is approximated")
    elif errors:
        worst, layer, head = max(errors)
        mean = sum(value for value, _, _ in errors) / len(errors)
        facts.append(
            f"the attention output is off by {percent(mean)} (worst: layer {layer}, head {head}, {percent(worst)})"
        )
    facts += _asked(report.methods[label], errors)
    facts += _exact_heads(measurements)
    hidden = [m.change.hidden_error for m in measurements if m.change.hidden_error is not None]
    if not all(map(math.isfinite, hidden)):
        facts.append(f"the last hidden state is {NOT_FINITE}")
    elif hidden:
        verb = "" if errors and not broken and not stays_exact else "is off "
        facts.append(f"the last hidden state {verb}by {percent(fmean(hidden))}")
    cosines = [cosine for m in measurements for cosine in m.change.embedding_cosines or []]
    if not all(map(math.isfinite, cosines)):
        facts.append(f"the mean-pooled embedding is {NOT_FINITE}")
    elif cosines:
        lowest = f", lowest {min(cosines):.4f}" if len(cosines) > 1 else ""
        facts.append(f"the mean-pooled embedding keeps a cosine of {sum(cosines) / len(cosines):.4f}{lowest}")
    for name in measurements[0].change.argmax_agreement if measurements else ():
        same = [m.change.argmax_agreement[name] for m in measurements if name in m.change.argmax_agreement]
        facts.append(f"{percent(sum(same) / len(same))} of the choices by {name} stay the same")
    speeds = [value for m in measurements if (value := report.speedup(m)) is not None]
    if speeds:
        alone = [value for m in measurements if (value := report.speedup(m, "attention")) is not None]
        # Layers with windows are not timed alone.
        aside = "" if stays_exact else f" (attention alone {ratio(alone)})"
        facts.append(f"the model runs {ratio(speeds)} as fast{aside}")
    peaks = [m.forward_peak_bytes for m in measurements if m.forward_peak_bytes is not None]
    if peaks:
        facts.append(f"adding {megabytes(max(peaks))} at its peak")
    return f"- {label}: {'; '.join(facts)}." if facts else f"- {label}: not measured."


def _asked(settings: Mapping[str, Any], errors: Sequence[tuple[float, int, int]]) -> list[str]:
    """Of calibrated settings: what was asked, found in calibrating, and found here."""
    calibration = settings.get("calibration") or {}
    facts = []
    if calibration.get("error_of") == "layer":
        facts.append(
            f"asked was at most {percent(calibration['max_error'])} in the mean of the layers, which has been at most "
            f"{percent(calibration['layers_error'])} on the texts it was calibrated on"
        )
    elif "max_error" in calibration and errors:
        beyond = sum(value > calibration["max_error"] for value, _, _ in errors)
        calibrated = max(value for row in calibration["errors"] for value in row)
        facts.append(
            f"asked was at most {percent(calibration['max_error'])} in every head, which has been at most "
            f"{percent(calibrated)} on the texts it was calibrated on, and here is {percent(max(errors)[0])}"
            + (f", with {count(beyond, 'head')} of {len(errors)} beyond" if beyond else "")
        )
    if settings.get("tolerance") is not None:
        facts.append(f"heads measured above {percent(settings['tolerance'])} in a pass: {settings['on_excess']}")
    return facts


def _exact_heads(measurements: Sequence[Measurement]) -> list[str]:
    """Which heads attended exactly in some of the inputs, as the method predicted a large error of them."""
    layers = sorted({layer for m in measurements for layer in m.exact_heads})
    if not layers:
        return []
    heads = {layer: sorted({head for m in measurements for head in m.exact_heads.get(layer, [])}) for layer in layers}
    listed = "; ".join(f"layer {layer}, head {', '.join(map(str, heads[layer]))}" for layer in layers)
    return [
        f"{count(sum(map(len, heads.values())), 'head')} ran exactly, their predicted error being large ({listed})"
    ]


def _min_length_line(report: Findings, length: int | None) -> list[str]:
    """For which methods a patched model would run exact attention because the input is short."""
    short = [label for label in report.methods if any(m.why_exact == "min_length" for m in _at(report, label, length))]
    if not short:
        return []
    who = "any of these methods" if len(short) == len(report.methods) else ", ".join(short)
    inputs = "some of these inputs" if length is None else "these inputs"
    device = report.environment.get("device", "cpu")
    shortest = []
    for label in short:
        (candidate,) = make_candidates(report.methods[label])
        shortest.append(candidate.settings.shortest_length(device))
    lengths = [length for length in shortest if length is not None]
    if not lengths:
        never = why_never(report.methods[short[0]]["method"], device)
        return [f"Patched with {who}, the model would run exact attention: {never}, as here."]
    span = f"{min(lengths):,}" if min(lengths) == max(lengths) else f"{min(lengths):,} to {max(lengths):,}"
    several = any(report.inputs[m.input].encoder_lengths for label in short for m in _at(report, label, length))
    why = "in the encoders where they are" if several else "they are"
    return [
        f"Patched with {who}, the model would run exact attention on {inputs}{' ' if several else ': '}{why} shorter "
        f"than min_length ({span} tokens here). The method was forced here (min_length=0)."
    ]


def _fine_tuning_line(report: Findings) -> list[str]:
    """Which methods convert the model, so that these numbers are only where its training begins."""
    converting = [label for label, settings in report.methods.items() if METHODS[settings["method"]].needs_fine_tuning]
    if not converting:
        return []
    return [
        "",
        f"{', '.join(converting)}: a conversion of the model, which needs fine-tuning on your task before you use it. "
        "Errors against exact attention say how near it begins; judge the fine-tuned model on the task.",
    ]


def choice_lines(report: Findings) -> list[str]:
    """The method to choose within the error allowed, or that there is none."""
    budget = report.max_error
    if budget is None:
        return []
    start = f"Error of the last hidden state at most {percent(budget)}: "
    if all(m.change.hidden_error is None for m in report.measurements):
        return [start + "not decided, no last hidden state was measured."]
    label = report.fastest_within(budget)
    if label is None:
        return [
            start
            + "none of these settings meets it on every input. Keep exact attention, or try more clusters and topk."
        ]
    speeds = [value for m in report.of(label) if (value := report.speedup(m)) is not None]
    errors = [m.change.hidden_error for m in report.of(label) if m.change.hidden_error is not None]
    line = (
        f"{start}{label} is the fastest that meets it, off by at most {percent(max(errors))} and {ratio(speeds)} as "
        "fast as exact attention."
    )
    measurements = report.of(label)
    short = sorted({report.inputs[m.input].length for m in measurements if m.why_exact == "min_length"})
    if short:
        those = "These lengths are" if all(m.why_exact == "min_length" for m in measurements) else _lengths_are(short)
        line += f" {those} below its min_length: to force the method, patch with min_length=0."
    if max(speeds) <= 1:
        line += " It is not faster than exact attention on these inputs: keep exact attention."
    return [line]


def _lengths_are(lengths: list[int]) -> str:
    """The subject of a sentence about some of the lengths."""
    return f"{', '.join(f'{length:,}' for length in lengths)} tokens are"


def encoder_lengths(inputs: Sequence[MeasuredInput]) -> str:
    """In brackets the tokens of each encoder, where the model has several."""
    lengths: dict[str, set[int]] = {}
    for batch in inputs:
        for name, length in batch.encoder_lengths.items():
            lengths.setdefault(name, set()).add(length)
    spans = {name: " to ".join(f"{end:,}" for end in sorted({min(seen), max(seen)})) for name, seen in lengths.items()}
    return f" ({', '.join(f'{name} {span}' for name, span in spans.items())})" if spans else ""
