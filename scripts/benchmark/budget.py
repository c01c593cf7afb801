"""Do calibrated heads keep their budget of error on other texts, does a tolerance catch the rest, and what is gained?

The model is all-MiniLM-L6-v2, its positions repeated beyond 512 tokens, its attention exact: on its own queries, keys
and values every candidate of `hf_effattn.calibrate` runs, and of every layer, head and text the error is
kept, and the bounds that a tolerance decides by, of the first queries and of all. Heads are calibrated on six books;
five others and four QMSum meetings are held out. Times are those of all six layers' attention on the first held-out
book, interleaved.

    python -m scripts.benchmark.budget              # writes scripts/results/budget.json
    python -m scripts.benchmark.budget --speed      # the times alone, for a machine with nothing else to do
    python -m scripts.benchmark.budget --decoder    # SmolLM2, strict, at 4,096: scripts/results/budget_decoder.json

What the output file holds is not measured again.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer

from hf_effattn.measuring.candidate_errors import CANDIDATES, default_candidates, text_errors, text_squares
from hf_effattn.measuring.candidates import name_settings
from hf_effattn.measuring.choosing import OfHeads, errors_of, held_out_coverage, least_margin
from hf_effattn.measuring.cost import compare, timed
from hf_effattn.ops import predicted_error, query_residuals
from hf_effattn.patching.methods import Method, make_method
from hf_effattn.patching.methods.clustered import BiClustered
from hf_effattn.patching.methods.per_head import PerHead
from hf_effattn.patching.tolerance import MethodOutput
from hf_effattn.reporting.calibration import COVERAGE
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Book, Passages

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table
from ._inputs import Inputs, book_text, layer_inputs
from ._timing import CPU, Lengths, Repeats, Rows, keep_missing, numbers
from .language_model import WEIGHTS
from .language_model import load as load_decoder
from .retrieval import read_meetings

EXACT = "exact"
BUDGETS = (0.05, 0.1, 0.2)
TIMED_LENGTH = 8192
DECODER_LENGTH = 4096
CALIBRATED = (
    "pg1023-bleak-house", "pg1342-pride-and-prejudice", "pg1399-anna-karenina", "pg1404-the-federalist-papers",
    "pg145-middlemarch", "pg2701-moby-dick-or-the-whale",
)  # fmt: skip
HELD_OUT = (
    "pg1661-the-adventures-of-sherlock-holmes", "pg98-a-tale-of-two-cities", "pg2554-crime-and-punishment",
    "pg3300-wealth-of-nations", "pg996-don-quixote",
)  # fmt: skip
MEETINGS = 4
LETTERS_READ = 600_000  # of a book
DIGITS = 4
LARGEST = 99.0  # for JSON, which has no infinite numbers


def candidates(decoder: bool = False) -> list[Any]:
    """The candidates, forced at every length."""
    return [make_method(**kwargs, causal=decoder, min_length=0) for kwargs in default_candidates(causal=decoder)]


def texts(length: int) -> list[dict[str, str]]:
    """The texts of a length: of which part, and which; in turn, so that a part of them tells something."""
    meetings = [meeting.name for meeting in read_meetings(["test"]) if len(meeting.text) > 6 * length]
    parts = [
        [("calibrated", name) for name in CALIBRATED[::2]],
        [("calibrated", name) for name in CALIBRATED[1::2]],
        [("books", name) for name in HELD_OUT],
        [("meetings", name) for name in meetings[:MEETINGS]],
    ]
    turns = [text for turn in zip_longest(*parts) for text in turn if text is not None]
    return [{"part": part, "text": name} for part, name in turns]


def tokens_of(tokenizer: Any, part: str, name: str, length: int) -> torch.Tensor:
    """The first tokens of a meeting, or those from a third of a book on, `(1, length)`."""
    if part == "meetings":
        text = next(meeting.text for meeting in read_meetings(["test"]) if meeting.name == name)
    else:
        text = book_text(f"books/{name}.txt.gz")
        text = text[len(text) // 3 :][:LETTERS_READ]
    return Passages(tokenizer, [Book(name, text[: 12 * length])]).longest(length)


def inputs_of(run: dict[str, Any], decoder: bool = False, folder: str | None = None) -> list[Inputs]:
    """Query, key and value of every layer on one text; of the model in a folder, where one is given."""
    model, tokenizer = load_decoder() if decoder else load_model(folder)[:2]
    tokens = tokens_of(tokenizer, run["part"], run["text"], run["length"])
    return layer_inputs(model.base_model, tokens, range(model.config.num_hidden_layers), None, torch.float32)


@torch.no_grad()
def measure_errors(run: dict[str, Any], decoder: bool = False, folder: str | None = None) -> dict[str, Any]:
    """The error of every candidate, layer and key/value head on one text, and the bounds by which a tolerance decides.

    Where the future is masked there are no first queries: all of them decide.
    """
    names = ["errors", "bounds", *([] if decoder else ["first_bounds"])]
    measured: dict[str, list[list[list[float]]]] = {name: [] for name in names}
    for query, key, value in inputs_of(run, decoder, folder):
        group = query.shape[1] // key.shape[1]
        exact = F.scaled_dot_product_attention(query, key, value, is_causal=decoder, enable_gqa=group > 1)
        exact = exact.transpose(1, 2)
        for of_layers in measured.values():
            of_layers.append([])
        for candidate in candidates(decoder):
            output = candidate.run(query, key, value, causal=decoder)
            attended = MethodOutput(query, key, value, None, None, decoder, output)
            of_heads = {"errors": text_errors(text_squares(exact, output.transpose(1, 2), None), key.shape[1])}
            of_heads["bounds"] = attended.sampled_errors()[1].unflatten(1, (-1, group)).amax(dim=2)
            if not decoder:
                of_heads["first_bounds"] = attended.first_errors()[1].unflatten(1, (-1, group)).amax(dim=2)
            for name, values in of_heads.items():
                measured[name][-1].append([round(value, DIGITS) for value in values[0].clamp(max=LARGEST).tolist()])
    return {"kind": "errors", **run, **measured}


def stacked(rows: Rows, name: str) -> torch.Tensor:
    """Of every text, candidate, layer and head, `(T, R, L, H)`."""
    return torch.tensor([row[name] for row in rows]).transpose(1, 2)


def calibrated(rows: Rows, length: int, budget: float) -> tuple[torch.Tensor, float, float]:
    """The table of heads `(L, H)` that the calibration texts give, its margin, and its coverage of texts left out."""
    errors = stacked([row for row in rows if (row["length"], row["part"]) == (length, "calibrated")], "errors")
    margin = least_margin(errors, budget, COVERAGE, OfHeads())
    return OfHeads().choose(errors, budget, margin), margin, held_out_coverage(errors, budget, margin, OfHeads())


def coverage(rows: Rows) -> pd.DataFrame:
    """The part of held-out (layer, head, text) triples within each budget, without and with a tolerance."""
    lines = []
    for length in sorted({row["length"] for row in rows if row["part"] != "calibrated"}):
        for budget in BUDGETS:
            table, margin, left_out = calibrated(rows, length, budget)
            line: dict[str, Any] = {"length": length, "budget": budget, "margin": margin, "left out": left_out}
            line["exact heads"] = int((table == len(CANDIDATES)).sum())
            held = [row for row in rows if row["length"] == length and row["part"] != "calibrated"]
            errors, bounds = (errors_of(table, stacked(held, name)) for name in ("errors", "bounds"))
            above, within = bounds > budget, errors <= budget
            if all("first_bounds" in row for row in held):
                undecided = errors_of(table, stacked(held, "first_bounds")) > budget
                line["undecided"] = undecided.float().mean().item()
                above &= undecided
            line |= {
                "texts": len({row["text"] for row in rows if (row["length"], row["part"]) == (length, "calibrated")}),
                "held out": len(held),
                "triples": errors.numel(),
                "within": within.float().mean().item(),
                "worst": errors.max().item(),
                "within, tolerance": (above | within).float().mean().item(),
                "worst, tolerance": errors.masked_fill(above, 0).max().item(),
                "recomputed": above.float().mean().item(),
            }
            for part in ("books", "meetings"):
                of_part = within[[row["part"] == part for row in held]]
                line[f"within, {part}"] = of_part.float().mean().item()
            lines.append(line)
    return pd.DataFrame(lines)


def predicted(candidate: BiClustered, inputs: Inputs) -> torch.Tensor:
    """The error that a candidate predicts of every head before it attends, `(H,)`."""
    query, key, _ = inputs
    labels, key_labels = candidate.group(query, key, None)
    residuals, mask = query_residuals(query, labels, candidate.clusters)
    return predicted_error(residuals, mask, key, key_labels, candidate.key_clusters)[0]


@torch.no_grad()
def best_uniform(
    errors: torch.Tensor, layers: list[Inputs], worst: float, costs: list[float]
) -> tuple[BiClustered, dict[str, Any]]:
    """Of the candidates, each for all heads but those predicted above a threshold, the fastest with no worse a head.

    The threshold is the largest with which the worst head of this very text stays within the error: chosen with
    hindsight, unlike the table of heads.

    Args:
        errors (`torch.Tensor`): `(R, L, H)` of this text.
        layers (`list[Inputs]`): of this text.
        worst (`float`): the error allowed to the worst head.
        costs (`list[float]`): seconds of a layer by candidate, exact attention last.
    """
    trials = []
    for candidate, of_candidate, cost in zip(candidates(), errors, costs, strict=False):
        of_heads = torch.stack([predicted(candidate, inputs) for inputs in layers])  # (L, H)
        above = of_heads[of_candidate > worst]
        threshold = None if not len(above) else float(above.min()) * (1 - 1e-6)
        exact = 0 if threshold is None else int((of_heads > threshold).sum())
        seconds = cost * (of_heads.numel() - exact) + costs[-1] * exact
        trials.append((seconds, replace(candidate, max_predicted_error=threshold), exact))
    _, candidate, exact = min(trials, key=lambda trial: trial[0])
    return candidate, {"setting": name_settings(candidate), "exact_heads": exact}


@torch.no_grad()
def measure_speed(rows: Rows, length: int, repeats: int) -> Rows:
    """Times of all layers' attention: exact, calibrated heads with and without a tolerance, the best of all alike.

    And the part of the time of calibrated heads that their check adds.
    """
    run = {"part": "books", "text": HELD_OUT[0], "length": length}
    layers = inputs_of(run)
    (row,) = [row for row in rows if run.items() <= row.items()]
    errors = stacked([row], "errors")
    costs = []
    for method in (*candidates(), None):
        attend = F.scaled_dot_product_attention if method is None else method.run
        attend(*layers[0])
        costs.append(timed(partial(attend, *layers[0]), CPU)[1])

    calls: dict[str, Callable[[], object]] = {EXACT: all_layers(None, layers)}
    about: dict[str, dict[str, Any]] = {EXACT: {"call": EXACT}}
    for budget in BUDGETS:
        table, margin, _ = calibrated(rows, length, budget)
        heads = PerHead(candidates=candidates(), heads=table.tolist(), min_length=0)
        checked = replace(heads, tolerance=budget, on_excess="warn")
        worst = float(errors_of(table, errors).max())
        uniform, described = best_uniform(errors[0], layers, max(worst, budget), costs)
        named: dict[str, Method] = {
            "per head": heads,
            "per head, checked": checked,
            "per head, tolerance": replace(checked, on_excess="exact"),
            "uniform": uniform,
        }
        for name, chosen in named.items():
            calls[f"{name} {budget}"] = all_layers(chosen, layers)
            more = described if name == "uniform" else {"margin": margin, "worst_head": worst}
            about[f"{name} {budget}"] = {"call": name, "budget": budget, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heads above the tolerance, on purpose
        for call in calls.values():
            call()
        times = compare(calls, {EXACT}, CPU, repeats)
    rows = [{"kind": "speed", "length": length, **about[name], **times[name]} for name in calls]
    for budget in BUDGETS:
        without, with_check = (times[f"per head{check} {budget}"] for check in ("", ", checked"))
        added = without["speedup"] / with_check["speedup"] - 1
        rows.append({"kind": "check", "length": length, "budget": budget, "rounds": without["rounds"], "added": added})
    return rows


def all_layers(chosen: Method | None, layers: list[Inputs]) -> Callable[[], None]:
    """The attention of all layers by a method; None: exact."""
    methods = [chosen and chosen.for_layers((layer,)) for layer in range(len(layers))]

    def attend() -> None:
        for method, inputs in zip(methods, layers, strict=True):
            (F.scaled_dot_product_attention if method is None else method.run)(*inputs)

    return attend


def main(
    lengths: Lengths = "512,4096,8192",
    speed: Annotated[bool, typer.Option(help="The times alone; the errors have to be there.")] = False,
    repeats: Repeats = 15,
    decoder: Annotated[bool, typer.Option(help="The errors of SmolLM2, at 4,096 tokens.")] = False,
    output: Path | None = None,
) -> None:
    """Measure the errors, or with --speed the times, and print all tables."""
    settings = {"model": WEIGHTS if decoder else "all-MiniLM-L6-v2", "candidates": default_candidates(causal=decoder)}
    if decoder:
        lengths = str(DECODER_LENGTH)
    kept = KeptRuns(output or RESULTS / ("budget_decoder.json" if decoder else "budget.json"), settings)
    if not speed:
        runs = [text | {"length": length} for length in numbers(lengths) for text in texts(length)]
        keep_missing(kept, runs, lambda run: [measure_errors(run, decoder)], "texts")
    errors = kept.matching({"kind": "errors"})
    if speed and not kept.matching({"kind": "speed"}):
        kept.add(*measure_speed(errors, TIMED_LENGTH, repeats))
    print_table(coverage(errors), kept.path)
    for kind in "speed", "check":
        if timed_rows := kept.matching({"kind": kind}):
            print_table(pd.DataFrame(timed_rows).drop(columns=list(kept.machine)))


if __name__ == "__main__":
    run_with_help(main, __doc__)
