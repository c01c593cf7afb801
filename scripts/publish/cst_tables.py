"""Tables of `scripts/results/` with the papers' numbers beside them, as Markdown; `publish/readme.py` places them."""

import json
import math
import statistics
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pandas as pd

from hf_effattn import CSTConfig
from hf_effattn.patching.methods.cst import CompositeSlices
from hf_effattn.reporting.table import markdown

from ..benchmark import cst as benchmark_cst
from ..lra import train as run_lra
from ..reproduce import approximation as approximate
from ..reproduce import lra as lra_table
from ..shared.markdown import machine, number
from ..shared.runs import mean_and_deviation

RESULTS = Path(__file__).resolve().parents[1] / "results"
NOT_RUN = "Not run yet."
# A table as Markdown, and the line below.
Table = tuple[str, str]
# Lee 2023, Tables 2 to 4, on WikiText-103: validation perplexity at 256 tokens, the test text's at 1,024, of which the
# paper has no other; in brackets the speed-up of training against the Transformer.
PAPER_PERPLEXITY = {
    ("WikiText-2, 256 tokens", "Transformer"): "33.15",
    ("WikiText-2, 256 tokens", "CST L=32 α=3"): "34.18 (1.51×)",
    ("WikiText-2, 1,024 tokens", "Transformer"): "25.26 (test)",
    ("WikiText-2, 1,024 tokens", "CST L=32 α=3"): "26.82 (test)",
}
SHOWN_ARGUMENTS = (
    "num_hidden_layers",
    "vocab_size",
    "block_length",
    "max_length",
    "per_device_train_batch_size",
    "num_train_epochs",
    "max_predict_samples",
    "learning_rate",
)
WIDTH = f"{CSTConfig().hidden_size} wide, {CSTConfig().num_attention_heads} heads"
# Lee 2023, Table 1: accuracy of the Text task.
PAPER_ACCURACY = {
    ("IMDb bytes", name): f"{lra_table.PAPER[row]['text']:.1f}"
    for name, row in (("Transformer", "Transformer"), ("CST L=16 α=1", "CST L=16"))
}


def kept(name: str) -> dict[str, Any] | None:
    """A file of results, if it is there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def of_file(name: str) -> Callable[[Callable[[dict[str, Any]], Table]], Callable[[], str]]:
    """Make the text of a table from a file of results, or say that there is none, or none of what is asked for."""

    def text_of(make: Callable[[dict[str, Any]], Table]) -> Callable[[], str]:
        @wraps(make)
        def text() -> str:
            result = kept(name)
            table, note = ("", "") if result is None else make(result)
            return table + machine(result["environment"], note) if result is not None and table else NOT_RUN

        return text

    return text_of


def of_tasks(
    prefix: str, lines: Callable[[list[dict[str, Any]]], tuple[list[str], list[list[str]]]], note: str
) -> str:
    """A table of the trained models whose task begins with `prefix`."""
    result = kept("cst_training")
    rows = [] if result is None else [row for row in result["rows"] if row["task"].startswith(prefix)]
    if result is None or not any("arguments" in row for row in rows):
        return NOT_RUN
    precision = "" if result.get("settings", {}).get("dtype") != "bfloat16" else "bfloat16 autocast. "
    return markdown(*lines(rows)) + machine(result["environment"], f"{note} {trained_with(rows)}{precision}")


def trained_with(rows: list[dict[str, Any]]) -> str:
    """The arguments of the training scripts that say how large the models and the budget were, for each task."""
    by_task = {row["task"]: row["arguments"] for row in rows if "arguments" in row}
    return "".join(
        f"{task}: {', '.join(f'{name} {arguments[name]}' for name in SHOWN_ARGUMENTS if name in arguments)}. "
        for task, arguments in by_task.items()
    )


def trained(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int | None, str], list[dict[str, Any]]]:
    """The rows of training by task, model, steps and arguments, in the order they stand in."""
    groups: dict[tuple[str, str, int | None, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "arguments" in row:
            arguments = json.dumps(row["arguments"], sort_keys=True)
            groups.setdefault((row["task"], row["model"], row["steps"], arguments), []).append(row)
    return groups


def costs(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The measured training steps by task and model."""
    return {(row["task"], row["model"]): row for row in rows if "step_ms" in row}


def language_models() -> str:
    """Perplexities on WikiText-2, and the speed of a training step against SDPA."""

    def lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        header = ["", "perplexity", "parameters", "speed of a step", "perplexity, paper"]
        table = []
        for (task, model, *_), runs in trained(rows).items():
            cells = [mean_and_deviation((run["perplexity"] for run in runs), 1)]
            cells += [f"{runs[0]['parameters'] / 1e6:.2f} M"]
            cells += [number(costs(rows).get((task, model)), "speedup", ".2f", "×")]
            table.append([f"{task}: {model}", *cells, PAPER_PERPLEXITY.get((task, model), "")])
        return header, table

    note = (
        f"Validation text, {WIDTH}. The paper: WikiText-103, words, a larger model. Speed: of forward and "
        "backward, against SDPA."
    )
    return of_tasks("WikiText-2", lines, note)


def classifiers() -> str:
    """Accuracies from scratch on long texts, and the speed of a training step against SDPA."""

    def lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        header = ["", "steps", "accuracy", "speed of a step", "accuracy, paper"]
        table = []
        for (task, model, steps, _), runs in trained(rows).items():
            epochs = runs[0]["arguments"].get("num_train_epochs", "3")  # Trainer's own number
            cells = [f"{steps:,}" if steps else f"{epochs} epochs"]
            cells += [mean_and_deviation((100 * run["test_accuracy"] for run in runs), 1)]
            cells += [number(costs(rows).get((task, model)), "speedup", ".2f", "×")]
            cells += [PAPER_ACCURACY.get((task, model), "")]
            table.append([f"{task}: {model}", *cells])
        return header, table

    text = run_lra.DEFAULTS["text"]
    note = (
        f"{WIDTH}; the paper of the Text task: {text.max_steps:,} steps of {text.batch_size} texts, learning rate "
        f"{text.learning_rate}. Speed: of texts of full length, against SDPA; in training most are shorter."
    )
    parts = [of_tasks(task, lines, note) for task in ("IMDb bytes", "20 Newsgroups")]
    return "\n\n".join(parts)


def converted() -> str:
    """Fine-tuning of a converted BERT beside the exact one."""

    def lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        groups = trained(rows)
        table = []
        for (task, model, steps, arguments), runs in groups.items():
            baseline = groups.get((task, "BERT", steps, arguments), [])
            exact = {run["seed"]: run["eval_accuracy"] for run in baseline}
            gains = [100 * (run["eval_accuracy"] - exact[run["seed"]]) for run in runs if run["seed"] in exact]
            each = ", ".join(f"{100 * run['eval_accuracy']:.2f}" for run in runs)
            table.append([model, each, f"{statistics.fmean(gains):+.2f}" if gains else ""])
        return ["", "accuracy, by seed", "against exact attention"], table

    return of_tasks("SST-2", lines, "Validation set, the same settings for all.")


@of_file("benchmark_cst")
def before_fine_tuning(result: dict[str, Any]) -> Table:
    """Cosines of the sentence embeddings of a converted BERT with those of the exact one; default slices."""
    conversions = [row for row in result["rows"] if row["measured"] == benchmark_cst.CONVERSION]
    lengths = sorted({row["length"] for row in conversions})
    cells = {
        (row["conversion"], row["slice_length"], row["extension_ratio"], row["length"]): f"{row['cosine_mean']:.3f}"
        for row in conversions
    }
    kinds = dict.fromkeys(key[:3] for key in cells if key[1] == CompositeSlices.slice_length)
    rows = [[f"{name}, L={L} α={ratio}", *(cells[name, L, ratio, N] for N in lengths)] for name, L, ratio in kinds]
    note = f"Mean over {conversions[0]['texts']} passages of novels. "
    return markdown(["", *(f"{N} tokens" for N in lengths)], rows), note


@of_file("benchmark_cst")
def layers(result: dict[str, Any]) -> Table:
    """Speed and memory of a layer of slices against the same with SDPA."""
    header = ["", "forward", "forward + backward", "memory", "memory of SDPA"]
    measured = [row for row in result["rows"] if row["measured"] == benchmark_cst.LAYER]
    exact = {(row["length"], row["part"]): row for row in measured if row["attention"] == "SDPA"}
    rows = []
    for row in measured:
        if row["attention"] == "SDPA":
            continue
        both = row, exact[row["length"], row["part"]]
        cells = [f"{row[f'{kind}_speedup']:.1f}×" for kind in ("forward", "forward_backward")]
        cells += [f"{layer['forward_backward_peak_bytes'] / 2**20:.0f} MiB" for layer in both]
        rows.append([f"{row['length']:,} tokens, {row['part']}", *cells])
    settings = result["settings"]
    note = (
        f"{settings['width']} wide, {settings['heads']} heads, L={settings['slice_length']}, {settings['dtype']}, one "
        "sequence; a layer with its feed-forward network, an attention with its projections. "
    )
    return markdown(header, rows), note


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of fine-tuned models, the tasks as the paper orders them."""
    return sorted(rows, key=lambda row: list(approximate.TASKS).index(row["task"]))


@of_file("approximation")
def approximation(result: dict[str, Any]) -> Table:
    """Fine-tuned models with exact attention and with the methods."""
    frame = pd.DataFrame(in_order(result["rows"])).astype({"data": str})
    names = list(dict.fromkeys(frame["row"]))
    models = list(dict.fromkeys(frame["model"]))
    rows = []
    for (task, model, *_), part in frame.groupby(
        ["task", "model", "training_seed", "samples", "data"], sort=False, dropna=False
    ):
        values = {name: part.loc[part["row"] == name, "value"] for name in names}
        lost = [100 * (values[name].mean() - values[approximate.FULL].mean()) for name in names[1:]]
        shares = part.dropna(subset="longer_share").drop_duplicates("row")["longer_share"]
        rows.append(
            [
                f"{task}, {model}" if len(models) > 1 else str(task),
                *(mean_and_deviation(values[name], 3) for name in names),
                *("" if math.isnan(points) else f"{points:+.2f}" for points in lost),
                ", ".join(dict.fromkeys(f"{share:.0%}" for share in shares)),
            ]
        )
    losses = (f"{name}, points" for name in names[1:])
    header = ["", *names, *losses, "longer"]
    files = dict.fromkeys(
        Path(name).name for row in result["rows"] if row["task"] == "squad" for name in row["data"].values()
    )
    trained_on = f"SQuAD: {', '.join(files)}. " if files else ""
    note = (
        f"{', '.join(models)}. Matthews correlation on CoLA, Pearson on STS-B, F1 on SQuAD, else accuracy; the "
        "deviation is over seeds of the clustering. Points: hundredths gained or lost against exact attention. "
        "Longer: texts with more tokens than clusters, the others are attended to exactly; "
        f"{result['settings']['dtype']}. {trained_on}"
    )
    return markdown(header, rows), note
