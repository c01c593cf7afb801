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
from hf_effattn.reporting.table import markdown

from ..kept.markdown import machine, number
from ..kept.runs import mean_and_deviation
from ..lra import train as run_lra
from ..reproduce import approximation as approximate
from ..reproduce import lra as lra_table

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
# Lee 2023, Table 9, in its order: under each Transformer the rows whose attention costs about the same. Validation
# perplexity on PG-19, and the cost against that Transformer's.
PAPER_MATCHED: dict[tuple[int, str], str] = {
    (256, "Transformer"): "19.66 (1.00×)",
    (512, "CST L=64 α=3"): "17.61 (1.00×)",
    (1024, "CST L=32 α=3"): "16.55 (1.02×)",
    (2048, "CST L=16 α=2"): "16.19 (1.00×)",
    (2048, "CST L=16 α=3"): "15.93 (1.25×)",
    (512, "Transformer"): "17.29 (1.00×)",
    (2048, "CST L=64 α=3"): "15.29 (1.00×)",
    (4096, "CST L=32 α=3"): "15.11 (1.06×)",
    (1024, "Transformer"): "15.57 (1.00×)",
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
    """Perplexities on WikiText-2, and the speed of a training step."""

    def lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        header = ["", "perplexity", "per word", "parameters", "step", "against SDPA", "memory of a step", "paper"]
        table = []
        for (task, model, *_), runs in trained(rows).items():
            cost = costs(rows).get((task, model))
            memory = None if cost is None else {"mib": cost["step_peak_bytes"] / 2**20}
            cells = [mean_and_deviation((run[name] for run in runs), 1) for name in ("perplexity", "word_perplexity")]
            cells += [f"{runs[0]['parameters'] / 1e6:.2f} M", number(cost, "step_ms", ".0f", " ms")]
            cells += [number(cost, "speedup", ".2f", "×"), number(memory, "mib", ".0f", " MiB")]
            table.append([f"{task}: {model}", *cells, PAPER_PERPLEXITY.get((task, model), "")])
        return header, table

    note = (
        f"Validation text, {WIDTH}. The paper: WikiText-103, words, a larger model. Steps: forward and "
        "backward, interleaved."
    )
    return of_tasks("WikiText-2", lines, note)


def matched_complexity() -> str:
    """Perplexities on the books of models whose attention costs the same."""

    def lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        groups = {
            (int(runs[0]["arguments"]["block_length"]), model): (steps, runs)
            for (_, model, steps, _), runs in trained(rows).items()
        }
        table = []
        for (length, model), paper in PAPER_MATCHED.items():
            steps, runs = groups.get((length, model), (None, []))
            cells = [mean_and_deviation((run[name] for run in runs), 1) for name in ("perplexity", "word_perplexity")]
            table.append([f"{model}, {length:,} tokens", f"{steps:,}" if steps else "", *cells, paper])
        return ["", "steps", "perplexity", "per word", "paper (cost of attention)"], table

    note = (
        f"Two held-out books, {WIDTH}; the same tokens a step in all rows. Each Transformer is followed by the rows "
        "of about its cost of attention. The paper: PG-19, its validation text, larger models."
    )
    return of_tasks("Books", lines, note)


def classifiers() -> str:
    """Accuracies from scratch on long texts, and the cost of a training step."""

    def lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        header = ["", "steps", "accuracy", "step", "against SDPA", "memory of a step", "paper"]
        table = []
        for (task, model, steps, _), runs in trained(rows).items():
            cost = costs(rows).get((task, model))
            memory = None if cost is None else {"mib": cost["step_peak_bytes"] / 2**20}
            epochs = runs[0]["arguments"].get("num_train_epochs", "3")  # Trainer's own number
            cells = [f"{steps:,}" if steps else f"{epochs} epochs"]
            cells += [mean_and_deviation((100 * run["test_accuracy"] for run in runs), 1)]
            cells += [number(cost, "step_ms", ".0f", " ms"), number(cost, "speedup", ".2f", "×")]
            cells += [number(memory, "mib", ".0f", " MiB"), PAPER_ACCURACY.get((task, model), "")]
            table.append([f"{task}: {model}", *cells])
        return header, table

    text = run_lra.DEFAULTS["text"]
    note = (
        f"{WIDTH}; the paper of the Text task: {text.max_steps:,} steps of {text.batch_size} texts, learning rate "
        f"{text.learning_rate}. Steps of texts of full length, interleaved; in training most are shorter."
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
    """Cosines of the sentence embeddings of a converted BERT with those of the exact one."""
    lengths = sorted({row["length"] for row in result["conversions"]})
    cells = {
        (row["conversion"], row["slice_length"], row["extension_ratio"], row["length"]): f"{row['cosine_mean']:.3f}"
        for row in result["conversions"]
    }
    kinds = dict.fromkeys(key[:3] for key in cells)
    rows = [[f"{name}, L={L} α={ratio}", *(cells[name, L, ratio, N] for N in lengths)] for name, L, ratio in kinds]
    note = f"Mean over {result['conversions'][0]['texts']} passages of novels. "
    return markdown(["", *(f"{N} tokens" for N in lengths)], rows), note


@of_file("benchmark_cst")
def layers(result: dict[str, Any]) -> Table:
    """Speed and memory of a layer of slices against the same with SDPA."""
    header = ["", "forward", "forward + backward", "memory", "memory of SDPA"]
    exact = {(row["length"], row["part"]): row for row in result["layers"] if row["attention"] == "SDPA"}
    rows = []
    for row in result["layers"]:
        if row["attention"] == "SDPA":
            continue
        both = row, exact[row["length"], row["part"]]
        cells = [f"{row[f'{kind}_speedup']:.1f}×" for kind in ("forward", "forward_backward")]
        cells += [f"{one['forward_backward_peak_bytes'] / 2**20:.0f} MiB" for one in both]
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
    """Fine-tuned models with exact attention and with the methods, beside the paper's RoBERTa."""
    frame = pd.DataFrame(in_order(result["rows"])).astype({"data": str})
    names = list(dict.fromkeys(frame["row"]))
    models = list(dict.fromkeys(frame["model"]))
    papers = [name for name in names if any(name in task.paper for task in approximate.TASKS.values())]
    rows = []
    for (task, model, *_), part in frame.groupby(
        ["task", "model", "training_seed", "samples", "data"], sort=False, dropna=False
    ):
        values = {name: part.loc[part["row"] == name, "value"] for name in names}
        lost = [100 * (values[name].mean() - values[approximate.FULL].mean()) for name in names[1:]]
        shares = part.dropna(subset="longer_share").drop_duplicates("row")["longer_share"]
        paper = (approximate.TASKS[str(task)].paper.get(name) for name in papers)
        rows.append(
            [
                f"{task}, {model}" if len(models) > 1 else str(task),
                *(mean_and_deviation(values[name], 3) for name in names),
                *("" if math.isnan(points) else f"{points:+.2f}" for points in lost),
                ", ".join(dict.fromkeys(f"{share:.0%}" for share in shares)),
                *("" if number is None else f"{number:.3f}" for number in paper),
            ]
        )
    losses = (f"{name}, points" for name in names[1:])
    header = ["", *names, *losses, "longer", *(f"{name}, paper" for name in papers)]
    files = dict.fromkeys(
        Path(name).name for row in result["rows"] if row["task"] == "squad" for name in row["data"].values()
    )
    trained_on = f"SQuAD: {', '.join(files)}. " if files else ""
    note = (
        f"{', '.join(models)}. Matthews correlation on CoLA, Pearson on STS-B, F1 on SQuAD, else accuracy; the "
        "deviation is over seeds of the clustering. Points: hundredths gained or lost against exact attention. "
        "Longer: texts with more tokens than clusters, the others are attended to exactly; "
        f"{result['settings']['dtype']}. {trained_on}The paper: RoBERTa. "
    )
    return markdown(header, rows), note


@of_file("approximation")
def layer_errors(result: dict[str, Any]) -> Table:
    """Relative L2 error of the attention output by task, method and layer."""
    groups: dict[tuple[str, str, str], list[list[float]]] = {}
    for row in in_order(sorted(result["rows"], key=lambda row: row["row"])):
        if row["layer_errors"] is not None:
            groups.setdefault((row["task"], row["model"], row["row"]), []).append(row["layer_errors"])
    models = dict.fromkeys(model for _, model, _ in groups)
    layers = max(len(errors[0]) for errors in groups.values())
    rows = []
    for (task, model, name), errors in groups.items():
        means = (f"{statistics.fmean(of_layer):.3f}" for of_layer in zip(*errors, strict=True))
        rows.append([f"{task}, {model}, {name}" if len(models) > 1 else f"{task}, {name}", *means])
    note = f"{', '.join(models)}. Mean over the heads and the seeds of the clustering, on the first longer texts. "
    return markdown(["", *(f"layer {layer}" for layer in range(1, layers + 1))], rows), note


@of_file("lra_table")
def long_range_arena(result: dict[str, Any]) -> Table:
    """Accuracies of the Long Range Arena beside the paper's, and how long the training took."""
    kinds: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        paper = run_lra.DEFAULTS[row["task"]]
        share = row["steps"] * row["batch_size"] / (paper.max_steps * paper.batch_size)
        kind = f"{row['steps']:,} steps of {row['batch_size']}, learning rate {row['learning_rate']:g}"
        kind += f", {share:.2%} of the paper's examples"
        if row["data_settings"]:
            kind += f", {row['data_settings']}"
        if row["samples"] is not None:
            kind += f", tested on {row['samples']:,}"
        of_models = kinds.setdefault((row["task"], kind), {name: [] for name in lra_table.MODELS})
        of_models[row["model"]].append(row)
    rows = []
    for (task, kind), of_models in kinds.items():
        accuracies, minutes = [f"{task}: {kind}"], [f"{task}: minutes of training"]
        for name, runs in of_models.items():
            reached = lra_table.PAPER.get(name, {}).get(task)
            found = mean_and_deviation(100 * run["test_accuracy"] for run in runs)
            accuracies.append(found if reached is None else f"{found} ({reached})".lstrip())
            whole = [run["train_seconds"] / 60 for run in runs if run.get("train_seconds") is not None]
            minutes.append(mean_and_deviation(whole, 0))
        rows += [accuracies, minutes]
    note = (
        "Accuracy on the test set in percent, in brackets the paper's after all its steps; one seed where no "
        "deviation is given. Minutes: beside other work, so they compare no models. "
    )
    return markdown(["", *lra_table.MODELS], rows), note
