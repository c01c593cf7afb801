"""Does ClusterFormer classify texts better than its rivals and the Transformer? (Source: Wang 2022, Tables 2 to 5)

Every model has 2 layers, 300 wide, with 4 heads (for pairs of texts 1 layer with 6 heads, as in the paper), and the
mean of its words as the text's vector. They differ in how words are sorted (`assignment`, the gate and the losses) and
in attention to the centroids; the Transformer is the same model with `assignment="full"`, whose attention is
PyTorch's. There are no GloVe vectors here, as the paper has: its differences can be compared with these, its levels
cannot. Short texts do not tell the methods apart; the controls, random and identity order, show how much the routing
itself is worth.

Every seed holds out another tenth of CR, MR, SUBJ and MPQA; the other data sets have a test set. All runs see all
their epochs: no model is chosen by what it is tested on.

    python -m scripts.reproduce.classification               # writes scripts/results/classification_table.json
    python -m scripts.reproduce.classification --sweep clusters
    python -m scripts.reproduce.classification --sweep clusters --costs     # time and memory of a step, interleaved
    python -m scripts.reproduce.classification --sweep losses --data-sets WikiQA,SICK
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import datasets
import pandas as pd
import torch
import typer
from rich.progress import track
from transformers import AutoModelForSequenceClassification

from hf_effattn import ClusterFormerConfig

from ..shared.command_line import check_names, command_line_of, run_with_help, switches
from ..shared.runs import RESULTS, KeptRuns, mean_and_deviation, print_rows, print_table
from ..train import classification as run_classification
from .answer_ranking import rank_answers
from .classification_data import DATA_SETS
from .step_costs import step_costs

TRANSFORMER, RANDOM, DEFAULT = "Transformer", "random order", "gated, centroids"
# Attention dropout is off: SDPA on a CPU is slow with it, and the comparison would be one of that.
SIZES: dict[str, Any] = {
    "hidden_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 600,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
}
TRAINING: dict[str, Any] = {
    "vocab_size": 8000,
    "learning_rate": 5e-4,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "per_device_train_batch_size": 32,
}
# All rows with centroids say how they are trained: the defaults came out of these tables.
WITH_L1, WITHOUT_L1 = {"cluster_loss_weight": 1e-4}, {"cluster_loss_weight": 0.0}
WITH_L2, WITHOUT_L2 = {"sorting_loss_weight": 1e-4}, {"sorting_loss_weight": 0.0}
PAPERS_FORM: dict[str, Any] = {"gated": False, **WITH_L1, **WITH_L2}
WITH_GATE = {"gated": True, "attend_centroids": False}
GATED: dict[str, Any] = {**WITH_GATE, **WITHOUT_L1, **WITHOUT_L2}
CENTROIDS: dict[str, Any] = GATED | {"attend_centroids": True}
WEIGHTED_CENTROIDS: dict[str, Any] = GATED | {"attend_centroids": "weighted"}
ROUTINGS: dict[str, dict[str, Any]] = {
    TRANSFORMER: {"assignment": "full"},
    "neural": PAPERS_FORM,
    "gated": GATED,
    DEFAULT: CENTROIDS,
    "K-means": {"assignment": "kmeans"},
    "LSH": {"assignment": "lsh"},
    RANDOM: {"assignment": "random"},
    "identity order": {"assignment": "identity"},
}
CLUSTERS = (5, 10, 20, 30, 60, 100, 300)
LOSSES: dict[str, dict[str, Any]] = {
    f"{name}, {losses}": gate | weights
    for name, gate in (("neural", {"gated": False}), ("gated", WITH_GATE))
    for losses, weights in (
        ("no loss", WITHOUT_L1 | WITHOUT_L2),
        ("L2", WITHOUT_L1 | WITH_L2),
        ("L1", WITH_L1 | WITHOUT_L2),
        ("L1 and L2", WITH_L1 | WITH_L2),
    )
}
SWEEPS: dict[str, dict[str, dict[str, Any]]] = {
    "routings": ROUTINGS,
    "clusters": {TRANSFORMER: ROUTINGS[TRANSFORMER]} | {f"k={k}": CENTROIDS | {"clusters": k} for k in CLUSTERS},
    "losses": LOSSES,
}
DATA_SETS_OF_SWEEP = {
    "routings": "CR,MR,SUBJ,MPQA,20 Newsgroups,WikiQA,SICK",
    "clusters": "20 Newsgroups",
    "losses": "20 Newsgroups,WikiQA,SICK",
}
# What a row's settings leave as it is: results of other defaults are not compared with these.
DEFAULTS = {
    name: getattr(ClusterFormerConfig(), name)
    for name in (*("window_blocks", "similarity", "sharpness", "causal", "pre_norm", "pooling", "assignment_seed"),)
}


@contextmanager
def data_folder() -> Iterator[Path]:
    """A temporary folder that holds the caches of the data sets too."""
    cache = datasets.config.HF_DATASETS_CACHE
    with TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        try:
            yield Path(folder)
        finally:
            datasets.config.HF_DATASETS_CACHE = cache


def train_once(run: dict[str, Any], paths: dict[str, Path], low_precision: bool) -> dict[str, float]:
    """Train and test one model; what `run_classification` reports, and how it ranks answers."""
    data = DATA_SETS[run["dataset"]]
    arguments = {
        "model_type": "clusterformer",
        "config_overrides": json.dumps(SIZES | {"max_position_embeddings": run["max_length"]} | run["settings"]),
        "train_files": paths["train"],
        "max_length": run["max_length"],
        "num_train_epochs": run["epochs"],
        "per_device_eval_batch_size": 64,
        "train_sampling_strategy": "group_by_length",
        "optim": "adamw_torch_fused",
        "seed": run["seed"],
        "split_seed": run["seed"],
        "save_strategy": "no",
        "report_to": "none",
        **TRAINING,
    }
    if run["train_samples"] is not None:
        arguments["max_train_samples"] = run["train_samples"]
    if data.pairs:
        arguments["text_pair_column"] = "second_text"
    tests = "test" in paths
    if tests:
        arguments |= {"test_files": paths["test"], "validation_share": 0}
    work = ["--do_train", "--do_predict" if tests else "--do_eval"]
    with TemporaryDirectory() as folder:
        arguments["output_dir"] = folder
        scores = run_classification.main([*command_line_of(arguments), *work, *switches(low_precision)])
        if data.metric == "map" and data.test is not None:
            scores |= rank_answers(folder, data.test(), run["max_length"])
        return scores


def costs_of(
    runs: dict[str, dict[str, Any]], device: torch.device, low_precision: bool, repeats: int
) -> list[dict[str, Any]]:
    """A row per model: time and memory of a training step on a full batch of the longest texts, interleaved."""
    first = next(iter(runs.values()))
    shared = {name: first[name] for name in ("dataset", "max_length")}
    same = {"model_type": "clusterformer", "vocab_size": TRAINING["vocab_size"], **SIZES}
    same["max_position_embeddings"] = shared["max_length"]
    models = {name: same | run["settings"] for name, run in runs.items()}
    shape = TRAINING["per_device_train_batch_size"], shared["max_length"]
    auto_class = AutoModelForSequenceClassification
    costs = step_costs(models, TRANSFORMER, auto_class, shape, device, low_precision, repeats)
    return [shared | {"settings": runs[name]["settings"], "measured": "step"} | row for name, row in costs.items()]


def measure(run: dict[str, Any], paths: dict[str, Path], low_precision: bool) -> dict[str, Any]:
    """The run with its scores in percent and its time, which is of whatever else ran beside."""
    scores = train_once(run, paths, low_precision)
    ranked = {name: scores[name] for name in ("map", "mrr") if name in scores}
    return (
        run
        | ranked
        | {
            "accuracy": 100 * (scores["test_accuracy"] if "test" in paths else scores["eval_accuracy"]),
            "seconds_per_epoch": scores["train_runtime"] / run["epochs"],
            "parameters": scores["parameters"],
        }
    )


def differences(frame: pd.DataFrame, metric: str, name: str, to: str) -> list[float]:
    """Differences of the metric between two runs of the same seed."""
    by_seed = frame.pivot(index="seed", columns="name", values=metric)
    return [] if to not in by_seed or name == to else (by_seed[name] - by_seed[to]).dropna().tolist()


def table(rows: list[dict[str, Any]], sweep: str) -> pd.DataFrame:
    """For every data set its metric, and the differences to the Transformer and to the random order."""
    columns: dict[str, pd.Series] = {}
    for dataset, part in pd.DataFrame(rows).groupby("dataset", sort=False):
        by_name, metric = part.groupby("name", sort=False), DATA_SETS[str(dataset)].metric
        columns[str(dataset)] = by_name[metric].apply(mean_and_deviation)
        for short, to in (("Transformer", TRANSFORMER), ("random", RANDOM)):
            gains = {name: mean_and_deviation(differences(part, metric, str(name), to)) for name in by_name.groups}
            columns[f"{dataset} - {short}"] = pd.Series(gains)
    shown = pd.DataFrame(columns)
    return shown.reindex([name for name in SWEEPS[sweep] if name in shown.index]).fillna("")


def settings_of(sweep: str, name: str, dataset: str) -> dict[str, Any]:
    """The model's settings for a row of a sweep on a data set, beside the sizes that all have."""
    data = DATA_SETS[dataset]
    return {**data.settings, "clusters": data.clusters, **SWEEPS[sweep][name]}


def named_rows(rows: list[dict[str, Any]], sweep: str, measured: str | None = None) -> list[dict[str, Any]]:
    """Those of kept rows that belong to the sweep, with their names in it: trainings, or costs of a `"step"`."""
    return [
        row | {"name": name}
        for name in SWEEPS[sweep]
        for row in rows
        if row.get("measured") == measured
        and row["dataset"] in DATA_SETS_OF_SWEEP[sweep].split(",")
        and row["settings"] == settings_of(sweep, name, row["dataset"])
    ]


def planned(
    sweep: str,
    names: Iterable[str],
    data_sets: Iterable[str],
    seeds: Iterable[int],
    epochs: int | None,
    max_length: int | None,
    train_samples: int | None,
) -> list[tuple[str, dict[str, Any]]]:
    """The runs of a sweep with their names; a model that is in two sweeps is one run."""
    return [
        (
            name,
            {
                "dataset": dataset,
                "settings": settings_of(sweep, name, dataset),
                "seed": seed,
                "epochs": epochs or DATA_SETS[dataset].epochs,
                "max_length": max_length or DATA_SETS[dataset].max_length,
                "train_samples": train_samples,
            },
        )
        for dataset in data_sets
        for seed in seeds
        for name in names
    ]


def main(
    sweep: Annotated[str, typer.Option(help="routings, clusters or losses.")] = "routings",
    data_sets: Annotated[str | None, typer.Option(help="Comma-separated; default: the sweep's.")] = None,
    names: Annotated[
        str | None, typer.Option(help="Rows of the table, separated by semicolons; default: all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0,1,2",
    epochs: Annotated[int | None, typer.Option(help="Default: the data set's.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a text. Default: the data set's.")] = None,
    train_samples: Annotated[int | None, typer.Option(help="Train on so many texts only.")] = None,
    costs: Annotated[bool, typer.Option("--costs", help="Measure a step of each model; train nothing.")] = False,
    repeats: Annotated[int, typer.Option(help="Rounds of that measurement.")] = 5,
    dtype: Annotated[str, typer.Option(help="bfloat16: autocast, or float32.")] = "bfloat16",
    output: Path = RESULTS / "classification_table.json",
) -> None:
    """Run what the output file does not hold yet, keep it as JSON after every run, and print the table."""
    if sweep not in SWEEPS:
        raise typer.BadParameter(f"unknown sweep {sweep!r}; there are {list(SWEEPS)}")
    chosen = names.split(";") if names else list(SWEEPS[sweep])
    data = (data_sets or DATA_SETS_OF_SWEEP[sweep]).split(",")
    check_names("rows", chosen, SWEEPS[sweep])
    check_names("data sets", data, DATA_SETS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = KeptRuns(output, {"sizes": SIZES, "training": TRAINING, "defaults": DEFAULTS, "dtype": dtype}, device)
    if costs:
        if names:
            raise typer.BadParameter("--costs measures all models of a sweep together: leave out --names")
        for dataset in data:
            runs = dict(planned(sweep, chosen, [dataset], [0], epochs, max_length, None))
            measured = {"dataset": dataset, "max_length": next(iter(runs.values()))["max_length"], "measured": "step"}
            if not all(kept.matching(measured | {"settings": run["settings"]}) for run in runs.values()):
                kept.add(*costs_of(runs, device, dtype != "float32", repeats))
        print_rows(kept)
        return
    plan = planned(sweep, chosen, data, [int(seed) for seed in seeds.split(",")], epochs, max_length, train_samples)
    with data_folder() as folder:
        paths: dict[str, dict[str, Path]] = {}
        for run in track(kept.missing(run for _, run in plan), description="models"):
            name = run["dataset"]
            if name not in paths:
                paths[name] = DATA_SETS[name].write(folder / name.replace(" ", "-"))
            kept.add(measure(run, paths[name], dtype != "float32"))
    rows = [row | {"name": name} for name, run in plan for row in kept.matching(run)]
    print_table(table(rows, sweep), output, index=True)


if __name__ == "__main__":
    run_with_help(main, __doc__)
