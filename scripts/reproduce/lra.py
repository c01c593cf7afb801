"""How do the models compare on the Long Range Arena, trained from scratch? (Source: Lee 2023, Table 1)

Every model has the sizes of the paper's Table 6, and its settings of training unless `--batch-size` and
`--learning-rate` name others; `--share` of its steps are run, with as large a share of the warm-up; attention dropout
is off where a model has it. The Transformer is CST without slices, with absolute positions. FNet is that of
transformers, unmodified, its initialization too; it classifies by the first token.

    python -m scripts.reproduce.lra --tasks listops,image --share 0.01      # adds to scripts/results/lra_table.json
    python -m scripts.reproduce.lra --tasks text --data-path imdb --models "Transformer;CST L=8"

Training writes checkpoints below `--runs`: a run that was stopped goes on from the newest when it is asked for again,
and one that the output file holds is not run. On a CPU set `MALLOC_MMAP_THRESHOLD_=8000000000
MALLOC_TRIM_THRESHOLD_=16000000000`, as for `scripts/train/clm.py`.
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track

from ..lra import train as run_lra
from ..lra.load import GENERATED
from ..shared.command_line import check_names, command_line_of, run_with_help, switches
from ..shared.runs import RESULTS, KeptRuns, mean_and_deviation, print_table, run_folder, with_wall_time

KEPT = ("test_accuracy", "test_loss", "parameters", "train_seconds")
# Attention dropout is off: SDPA on a CPU is slow with it, and the comparison would be one of that.
WITHOUT_DROPOUT = {"attention_probs_dropout_prob": 0.0}
# Word embeddings start as in the benchmark's own code; from small ones a model without a norm after them learns late.
OF_CST = WITHOUT_DROPOUT | {"embedding_initializer_range": 1.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Transformer": ("cst", OF_CST | {"composition": "full", "position_embedding": "absolute"}),
    "CST L=8": ("cst", OF_CST | {"slice_length": 8}),
    "CST L=16": ("cst", OF_CST | {"slice_length": 16}),
    "ClusterFormer": ("clusterformer", WITHOUT_DROPOUT | {"gated": False}),
    "FNet": ("fnet", {}),
}
PAPER: dict[str, dict[str, float]] = {
    "Transformer": {"listops": 39.92, "text": 64.20, "retrieval": 82.11, "image": 44.25, "pathfinder": 74.79},
    "FNet": {"listops": 36.74, "text": 64.37, "retrieval": 74.29, "image": 44.08, "pathfinder": 50.22},
    "CST L=8": {"listops": 37.45, "text": 77.23, "retrieval": 84.15, "image": 51.27, "pathfinder": 76.32},
    "CST L=16": {"listops": 37.90, "text": 73.60, "retrieval": 84.00, "image": 51.39, "pathfinder": 76.97},
}


def train(run: dict[str, Any], data_path: Path | None, runs: Path, low_precision: bool) -> dict[str, Any]:
    """Train and test one model, from its newest checkpoint where it has one; the row to keep."""
    model_type, settings = MODELS[run["model"]]
    defaults = run_lra.DEFAULTS[run["task"]]
    steps = max(1, round(run["share"] * defaults.max_steps))
    name = f"{run['task']}, {run['model']}, seed {run['seed']}"
    folder = run_folder(runs, name, [run, model_type, settings, str(data_path), low_precision])
    arguments: dict[str, Any] = {
        "task": run["task"],
        "model_type": model_type,
        "config_overrides": json.dumps(settings),
        "max_steps": steps,
        "warmup_steps": max(1, round(run["share"] * defaults.warmup_steps)),
        "per_device_train_batch_size": run["batch_size"],
        "per_device_eval_batch_size": run["batch_size"],
        "learning_rate": run["learning_rate"],
        "data_settings": run["data_settings"],
        "seed": run["seed"],
        "output_dir": folder,
        "save_steps": max(1, steps // 20),
        "save_total_limit": 1,
        "report_to": "none",
        "resume_from_checkpoint": "last",
    }
    if run["samples"] is not None:
        arguments["max_predict_samples"] = run["samples"]
    if data_path is not None and run["task"] not in GENERATED:
        arguments["data_path"] = data_path
    command_line = [*command_line_of(arguments), "--do_train", "--do_predict", *switches(low_precision)]
    metrics = with_wall_time(partial(run_lra.main, command_line), folder)
    return run | {"steps": steps} | {name: metrics[name] for name in KEPT if name in metrics}


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """For every task the accuracy in percent, and the paper's."""
    columns: dict[str, dict[str, str]] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        groups = {
            name: [100 * row["test_accuracy"] for row in rows if (row["task"], row["model"]) == (task, name)]
            for name in MODELS
        }
        columns[task] = {name: mean_and_deviation(values) for name, values in groups.items()}
        columns[f"{task}, paper"] = {name: str(PAPER.get(name, {}).get(task, "")) for name in MODELS}
    return pd.DataFrame(columns, index=list(MODELS))


def main(
    tasks: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(run_lra.DEFAULTS)}.")] = (
        "listops,text,image,pathfinder"
    ),
    models: Annotated[str | None, typer.Option(help="Rows, separated by semicolons; default: all.")] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    share: Annotated[float, typer.Option(help="Of the paper's steps.", min=0.0, max=1.0)] = 1.0,
    batch_size: Annotated[int | None, typer.Option(help="Default: the paper's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: the paper's.")] = None,
    samples: Annotated[int | None, typer.Option(help="Test on so many only.")] = None,
    data_settings: Annotated[str, typer.Option(help="Of the data, such as train_size=1000.")] = "",
    data_path: Annotated[Path | None, typer.Option(help="Files of the task that is not generated.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16: autocast, or float32.")] = "bfloat16",
    runs: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("runs/lra"),
    output: Path = RESULTS / "lra_table.json",
) -> None:
    """Train what the output file does not hold yet, keep it as JSON after every run, and print the table."""
    chosen = models.split(";") if models else list(MODELS)
    wanted = tasks.split(",")
    check_names("models", chosen, MODELS)
    check_names("tasks", wanted, run_lra.DEFAULTS)
    kept = KeptRuns(output, {"dtype": dtype}, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    plan = [
        {
            "task": task,
            "model": model,
            "seed": int(seed),
            "share": share,
            "batch_size": batch_size or run_lra.DEFAULTS[task].batch_size,
            "learning_rate": learning_rate or run_lra.DEFAULTS[task].learning_rate,
            "samples": samples,
            "data_settings": data_settings,
        }
        for task in wanted
        for seed in seeds.split(",")
        for model in chosen
    ]
    for run in track(kept.missing(plan), description="models"):
        kept.add(train(run, data_path, runs, dtype != "float32"))
    print_table(table([row for run in plan for row in kept.matching(run)]), output, index=True)


if __name__ == "__main__":
    run_with_help(main, __doc__)
