r"""How much do fine-tuned models lose to clustered attention without retraining? (Source: Vyas 2020, section 3.3)

Tasks of GLUE, and SQuAD, with exact attention and with the methods: the task's metric as mean ± standard
deviation over the seeds of the clustering, its drop, and the error of the attention output in each layer. A text with
no more tokens than clusters is attended to exactly, in the paper too: `longer_share` says how many are longer.

    python -m scripts.reproduce.approximation cola --model runs/cola --card cola.md   # your model, the Hub's data
    python -m scripts.reproduce.approximation cola,mrpc,squad --local --methods "clustered-25;i-clustered-25"

Without `--model` the demo's BERT, or `--base`, is fine-tuned first, in `--runs`, from the newest checkpoint there.
With `all --local` the tasks whose files are not there are left out. What the output file holds is not run again; with
`--model` or `--base` that is `runs/approximation.json`, else the project's own results. On a CPU set
`MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000`, as for `scripts/train/clm.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from hf_effattn import report
from hf_effattn.data import glue_tasks
from hf_effattn.samples.model import DEFAULT_NAME, installed_model_folder
from hf_effattn.settings_parsing import method_text

from ..shared.command_line import command_line_of, run_with_help, switches
from ..shared.data import VARIABLE, dataset_path
from ..shared.markdown import machine, of_frame
from ..shared.runs import KeptRuns, mean_and_deviation, print_table, run_folder
from ..train import glue as run_glue
from ..train import qa as run_qa

FULL = "full"
COMMON: dict[str, Any] = {"report_to": "none", "per_device_eval_batch_size": 32, "eval_strategy": "no"}
FINE_TUNING: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "learning_rate": 5e-5,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "linear",
    "save_total_limit": 1,
    "resume_from_checkpoint": "last",
}
TEXTS_FOR_ERRORS = 16


@dataclass(frozen=True)
class Task:
    """A task as its training script knows it.

    Attributes:
        main: the script's `main`.
        auto_class: of its models.
        arguments: what every run of the script gets.
        hub: where the data are on the Hub.
        local: the same from files: names of arguments, and paths inside the data sets.
        metric: key of the script's metrics.
        best: what the metric is of perfect answers.
        second: key of the same metric on a second set, and what the table calls that.
        training: what differs in fine-tuning.
        paper: the paper's numbers for RoBERTa by the name of the row.
    """

    main: Callable[[list[str]], dict[str, float]]
    auto_class: Any
    arguments: dict[str, Any]
    hub: dict[str, str]
    local: dict[str, str]
    metric: str
    training: dict[str, Any]
    paper: dict[str, float] = field(default_factory=dict)
    best: float = 1.0
    second: tuple[str, str] | None = None


def glue(
    name: str, metric: str, epochs: int, paper: tuple[float, float, float], second: tuple[str, str] | None = None
) -> Task:
    """A task of GLUE, at 128 tokens."""
    return Task(
        run_glue.main,
        AutoModelForSequenceClassification,
        {"task_name": name, "max_length": 128},
        {},
        {"data_dir": "glue"},
        metric,
        {"num_train_epochs": epochs, "save_steps": 200},
        dict(zip((FULL, "clustered-25", "i-clustered-25"), paper, strict=True)),
        second=second,
    )


TASKS = {
    "cola": glue("cola", "eval_matthews_correlation", 4, (0.601, 0.598, 0.601)),
    "mnli": glue(
        *("mnli", "eval_matched_accuracy", 1, (0.880, 0.794, 0.880)),
        second=("eval_mismatched_accuracy", "mismatched"),
    ),
    "mrpc": glue("mrpc", "eval_accuracy", 4, (0.868, 0.436, 0.873)),
    "qnli": glue("qnli", "eval_accuracy", 1, (0.929, 0.746, 0.930)),
    "qqp": glue("qqp", "eval_accuracy", 1, (0.915, 0.894, 0.915)),
    "rte": glue("rte", "eval_accuracy", 4, (0.682, 0.498, 0.704)),
    "sst2": glue("sst2", "eval_accuracy", 1, (0.947, 0.944, 0.947)),
    "stsb": glue("stsb", "eval_pearson", 4, (0.900, 0.789, 0.900)),
    "wnli": glue("wnli", "eval_accuracy", 2, (0.437, 0.437, 0.437)),
    "squad": Task(
        run_qa.main,
        AutoModelForQuestionAnswering,
        {"max_length": 384, "doc_stride": 128},
        {"dataset_name": "rajpurkar/squad"},
        {"train_files": "squad/train-subset-44articles-v1.1.json.gz", "validation_files": "squad/dev-v1.1.json.gz"},
        "eval_f1",
        {
            "num_train_epochs": 1,
            "learning_rate": 1e-4,
            "per_device_train_batch_size": 16,
            "save_steps": 100,
            # SDPA on a CPU is several times slower with it.
            "config_overrides": "attention_probs_dropout_prob=0.0",
        },
        dict(zip((FULL, "clustered-25", "i-clustered-25"), (0.904, 0.006, 0.876), strict=True)),
        best=100.0,
    ),
}


def settings_of(row: str) -> dict[str, Any]:
    """The method and the settings that a row is named after, `method-clusters` or `method-clusters-topk`.

    Bi-clustered attention gets twice as many clusters of keys.

    Returns: nothing for exact attention.

    Raises:
        typer.BadParameter: a name that is none.
    """
    if row == FULL:
        return {}
    parts = re.fullmatch(r"(clustered|i-clustered|bi-clustered)-(\d+)(?:-(\d+))?", row)
    if parts is None or (parts[1] == "clustered" and parts[3]):
        raise typer.BadParameter(f"rows are named 'clustered-25', 'i-clustered-25', 'i-clustered-25-64', not {row!r}")
    clusters = int(parts[2])
    topk = {} if parts[1] == "clustered" else {"topk": int(parts[3] or 32)}
    key_clusters = {"key_clusters": 2 * clusters} if parts[1] == "bi-clustered" else {}
    return {"method": parts[1], "clusters": clusters, **topk, **key_clusters}


def missing_files(name: str, trains: bool) -> list[str]:
    """The task's files, those to train on where it does, that the local data sets do not have."""
    if name == "squad":
        files = list(TASKS[name].local.values())
    else:
        task = glue_tasks.TASKS[name]
        splits = [*(["train"] if trains else []), *task.validation.values()]
        files = [f"glue/{task.folder}/{split}.tsv" for split in splits]
    missing = []
    for file in files:
        folder, _, path = file.partition("/")
        try:
            exists = any(dataset_path(folder).glob(f"{path}*"))  # compressed or not
        except FileNotFoundError:
            exists = False
        if not exists:
            missing.append(file)
    return missing


def run_script(task: Task, arguments: dict[str, Any], local: bool, *more: str) -> dict[str, float]:
    """Run the task's script."""
    data = {name: dataset_path(path) for name, path in task.local.items()} if local else task.hub
    named = COMMON | task.arguments | data | arguments
    return task.main([*command_line_of(named), *more])


def fine_tuned(name: str, base: str, runs: Path, seed: int, local: bool) -> str:
    """Folder of the task's model, trained where it is not there yet."""
    task = TASKS[name]
    arguments = FINE_TUNING | task.training | {"model_name_or_path": base, "seed": seed}
    folder = run_folder(runs, f"{name}, {Path(base).name}, seed {seed}", [arguments, local])
    if not (folder / "all_results.json").exists():  # written last
        run_script(task, arguments | {"output_dir": folder}, local, "--do_train", *switches(low_precision=True))
    return str(folder)


def evaluate(
    name: str, model: str, row: str, seed: int, samples: int | None, local: bool, low_precision: bool
) -> dict[str, float]:
    """The task's metrics of a model whose attention is replaced as the row says."""
    settings = settings_of(row)
    arguments: dict[str, Any] = {"model_name_or_path": model}
    if samples is not None:
        arguments["max_eval_samples"] = samples
    if settings:
        # Forced: exact attention is faster at these lengths.
        arguments["method"] = method_text(settings.pop("method"), settings | {"seed": seed, "min_length": 0})
    task = TASKS[name]
    with TemporaryDirectory() as folder:
        scores = run_script(task, arguments | {"output_dir": folder}, local, "--do_eval", *switches(low_precision))
    kept = {key: value for key, value in scores.items() if key.startswith("eval_") and not key.endswith("_second")}
    return kept | {"value": scores[task.metric] / task.best}


def texts_of(name: str, local: bool) -> list[list[str]]:
    """The texts of the evaluation, or two lists where they are pairs."""
    if name == "squad":
        files = {key: [str(dataset_path(path))] for key, path in TASKS[name].local.items()}
        questions = run_qa.load_questions(run_qa.DataArguments(**(files if local else TASKS[name].hub)))
        rows = questions["validation"]
        columns: tuple[str, ...] = ("question", "context")
    else:
        task = glue_tasks.TASKS[name]
        rows = glue_tasks.load_glue(name, dataset_path("glue") if local else None)[next(iter(task.validation))]
        columns = task.texts
    return [rows[column][:] for column in columns]


def attention_errors(name: str, path: str, row: str, seed: int, local: bool) -> dict[str, Any]:
    """How many of the task's texts have more tokens than there are clusters, and what the method does to them.

    Returns:
        `dict`: `longer_share`, and `layer_errors`, the relative L2 error of the attention output, mean over the heads,
        for every layer, on the first such texts; none of both for exact attention.
    """
    settings = settings_of(row)
    if not settings:
        return {"longer_share": None, "layer_errors": None}
    tokenizer = AutoTokenizer.from_pretrained(path)
    cut = {"truncation": "only_second" if name == "squad" else True, "max_length": TASKS[name].arguments["max_length"]}
    texts = texts_of(name, local)
    lengths = map(len, tokenizer(*texts, **cut)["input_ids"])
    longer = [number for number, length in enumerate(lengths) if length > settings["clusters"]]
    share = len(longer) / len(texts[0])
    if not longer:
        return {"longer_share": share, "layer_errors": None}
    chosen = [[column[number] for number in longer[:TEXTS_FOR_ERRORS]] for column in texts]
    inputs = tokenizer(*chosen, padding=True, return_tensors="pt", **cut)
    model = TASKS[name].auto_class.from_pretrained(path)
    measured = report(model, dict(inputs), [settings | {"seed": seed}], repeats=0, memory=False, progress=False)
    errors = measured.of(next(iter(measured.methods)))[0].attention_error.values()
    return {"longer_share": share, "layer_errors": [sum(heads) / len(heads) for heads in errors]}


def table(rows: list[dict[str, Any]], names: list[str]) -> pd.DataFrame:
    """For every task the metric, its drop against exact attention and the paper's number."""
    columns: dict[str, dict[str, str]] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        values = {name: [row["value"] for row in rows if (row["task"], row["row"]) == (task, name)] for name in names}
        columns[task] = {name: mean_and_deviation(values[name], 3) for name in names}
        second = TASKS[task].second
        if second is not None:
            key, title = second
            others = {name: [row[key] for row in rows if (row["task"], row["row"]) == (task, name)] for name in names}
            columns[f"{task}, {title}"] = {name: mean_and_deviation(others[name], 3) for name in names}
        exact = values[FULL][0]
        columns[f"{task}, drop"] = {
            name: mean_and_deviation((exact - value for value in values[name]), 3) for name in names
        }
        shares = {row["row"]: row["longer_share"] for row in rows if row["task"] == task}
        columns[f"{task}, longer"] = {name: "" if shares[name] is None else f"{shares[name]:.0%}" for name in names}
        columns[f"{task}, paper"] = {name: str(TASKS[task].paper.get(name, "")) for name in names}
    return pd.DataFrame(columns, index=names)


def write_card(path: Path, summary: pd.DataFrame, below: str) -> None:
    """The table as a part of a model card, a column for each method."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"## Its attention replaced, without retraining\n\n{of_frame(summary.T)}{below}\n"
    path.write_text(text, encoding="utf-8")


def checked_files(names: list[str], may_be_left_out: bool, trains: bool) -> list[str]:
    """Those of the tasks whose files are among the local data sets; the others are named.

    Raises:
        typer.BadParameter: there are others, and none may be left out.
    """
    missing = {name: missing_files(name, trains) for name in names}
    told = "; ".join(f"{name}: {', '.join(files)}" for name, files in missing.items() if files)
    if told and not may_be_left_out:
        raise typer.BadParameter(
            f"not among the local data sets: {told}. Put them into the folder {VARIABLE}, leave out --local to take"
            " the Hub's, or name a model that is fine-tuned already, which needs no train files, with --model"
        )
    if told:
        print(f"left out, as their files are not there: {told}")
    return [name for name, files in missing.items() if not files]


def main(
    tasks: Annotated[str, typer.Argument(help=f"Comma-separated, of {', '.join(TASKS)}; or all.")] = "all",
    model: Annotated[str | None, typer.Option(help="Model fine-tuned on the task, where there is one task.")] = None,
    base: Annotated[str | None, typer.Option(help="Model to fine-tune; default: the demo's BERT.")] = None,
    methods: Annotated[str, typer.Option(help="Rows, separated by semicolons.")] = "clustered-25;i-clustered-25",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds of the clustering.")] = "0,1,2",
    training_seed: Annotated[int, typer.Option(help="Seed of the fine-tuning.")] = 0,
    samples: Annotated[int | None, typer.Option(help="Evaluate on so many examples only.")] = None,
    dtype: Annotated[str, typer.Option(help="Of evaluations: bfloat16: autocast, or float32.")] = "bfloat16",
    local: Annotated[bool, typer.Option("--local", help="Data from $HF_EFFATTN_DATA instead of the Hub.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder of what is fine-tuned.")] = Path("runs/approximate"),
    card: Annotated[Path | None, typer.Option(help="Write the table here too, as Markdown for a model card.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Default: scripts/results/, or with --model or --base runs/approximation.json.")
    ] = None,
) -> None:
    """Fine-tune where no model is named, evaluate what the output file does not hold yet, and print the table."""
    chosen = list(TASKS) if tasks == "all" else tasks.split(",")
    unknown = [name for name in chosen if name not in TASKS]
    if unknown or (model is not None and len(chosen) > 1):
        raise typer.BadParameter(f"tasks are {', '.join(TASKS)}, one of them where a model is named; got {tasks!r}")
    rows = [FULL, *methods.split(";")]
    for row in rows:
        settings_of(row)  # a mistake is told before anything runs
    if output is None:
        default_model = model is None and base is None
        output = (Path(__file__).parents[1] / "results" if default_model else Path("runs")) / "approximation.json"
    kept = KeptRuns(output, {"dtype": dtype}, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    origin = model or base or DEFAULT_NAME
    plans: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        data = TASKS[name].local if local else TASKS[name].hub or {"dataset_name": glue_tasks.HUB_NAME}
        identity: dict[str, Any] = {"task": name, "data": data, "model": origin, "samples": samples}
        if model is None:
            identity["training_seed"] = training_seed
        plans[name] = [
            identity | {"row": row, "seed": seed}
            for row in rows
            for seed in ([None] if row == FULL else map(int, seeds.split(",")))
        ]
    unfinished = [name for name, plan in plans.items() if kept.missing(plan)]
    if local:
        there = checked_files(unfinished, tasks == "all", trains=model is None)
        plans = {name: plan for name, plan in plans.items() if name in there or name not in unfinished}
    shown: list[dict[str, Any]] = []
    for name in track(list(plans), description="tasks"):
        missing = kept.missing(plans[name])
        if missing:
            path = model or fine_tuned(name, base or str(installed_model_folder()), runs, training_seed, local)
        for run in missing:
            seed = run["seed"] or 0
            evaluation = evaluate(name, path, run["row"], seed, samples, local, dtype != "float32")
            kept.add(run | evaluation | attention_errors(name, path, run["row"], seed, local))
        shown += [row for run in plans[name] for row in kept.matching(run)]
    summary = table(shown, rows)
    print_table(summary, index=True)
    if card is not None:
        write_card(card, summary, machine(kept.environment, f"{origin}, evaluated in {dtype}. "))
        print(f"written: {card}")
    print(f"written: {output}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
