"""Does ClusterFormer translate as well as the Transformer, from scratch? (Source: Wang 2022, Table 1)

All are one model, which differs in how words are sorted; the Transformer is the same with `assignment="full"`. In the
rows of an "encoder" it alone sorts: a decoder that sorts seldom sees the word before. "The paper's decoder" is that of
its App. B, where later words move the clusters of earlier ones; "neural" is the paper's form.
The paper trains on the 160 thousand pairs of IWSLT14; these are the 29 thousand of Multi30k, German to English, whose
sentences are shorter still: the table compares the methods, its levels are not the paper's. The test set is
test_2016_flickr, translated with beams after all epochs: no model is chosen by what it is tested on.

    python -m scripts.reproduce.translation                  # writes scripts/results/translation_table.json
    python -m scripts.reproduce.translation --seeds 0 --epochs 2 --checkpoints runs/translation

With `--checkpoints` a run that was stopped goes on from its last epoch; without, it begins anew.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track

from ..shared.command_line import check_names, command_line_of, run_with_help, switches
from ..shared.data import dataset_path
from ..shared.runs import RESULTS, KeptRuns, mean_and_deviation, print_table, run_folder, with_wall_time
from ..train import translation as run_translation
from .classification import (
    CENTROIDS,
    DEFAULTS,
    GATED,
    LOSSES,
    PAPERS_FORM,
    TRANSFORMER,
    WEIGHTED_CENTROIDS,
    data_folder,
    differences,
)

# The paper's number of centroids and heads; layers and width are less, as the data are.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 128,
    "clusters": 3,
    "hidden_dropout_prob": 0.1,
    # Off, because SDPA on a CPU is slow with it, and the comparison would be one of that.
    "attention_probs_dropout_prob": 0.0,
}
TRAINING: dict[str, Any] = {
    "vocab_size": 8000,
    "learning_rate": 1e-3,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "label_smoothing_factor": 0.1,
    "per_device_train_batch_size": 64,
    "max_source_length": 128,
    "max_target_length": 128,
    "num_beams": 4,
}
ENCODER_ALONE = {"decoder_assignment": "full"}
MODELS: dict[str, dict[str, Any]] = {
    TRANSFORMER: {"assignment": "full"},
    "neural": PAPERS_FORM,
    "gated": GATED,
    "neural, paper's decoder": PAPERS_FORM | {"causal": "paper"},
    "gated, paper's decoder": GATED | {"causal": "paper"},
    "neural encoder": PAPERS_FORM | ENCODER_ALONE,
    "neural encoder, losses of 0.01": ENCODER_ALONE
    | {"gated": False, "cluster_loss_weight": 0.01, "sorting_loss_weight": 0.01},
    "neural encoder, no loss": LOSSES["neural, no loss"] | ENCODER_ALONE,
    "gated encoder": GATED | ENCODER_ALONE,
    "gated encoder, centroids": CENTROIDS | ENCODER_ALONE,
    "gated encoder, weighted centroids": WEIGHTED_CENTROIDS | ENCODER_ALONE,
    "gated encoder, L1 and L2": LOSSES["gated, L1 and L2"] | ENCODER_ALONE,
    "identity order encoder": {"assignment": "identity", **ENCODER_ALONE},
}
# Tokenized BLEU on IWSLT14, German to English.
PAPER = {TRANSFORMER: 34.4, "Reformer": 34.0, "Routing Transformer": 32.5, "ClusterFormer": 34.9}
FILES = {"train": "train", "test": "test_2016_flickr"}


def train_once(run: dict[str, Any], low_precision: bool, folder: Path) -> dict[str, float]:
    """Train and test one model, from the last checkpoint of the folder if there is one."""
    arguments = {
        "model_type": "clusterformer",
        "config_overrides": json.dumps(SIZES | run["settings"]),
        "num_train_epochs": run["epochs"],
        "max_steps": run["max_steps"],
        "per_device_eval_batch_size": 64,
        "train_sampling_strategy": "group_by_length",
        "optim": "adamw_torch_fused",
        "seed": run["seed"],
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "report_to": "none",
        "resume_from_checkpoint": "last",
        "output_dir": folder,
        **TRAINING,
    }
    for split, name in FILES.items():
        arguments |= {f"{split}_source": dataset_path(f"multi30k/{name}.de.gz")}
        arguments |= {f"{split}_target": dataset_path(f"multi30k/{name}.en.gz")}
    if run["test_samples"] is not None:
        arguments["max_predict_samples"] = run["test_samples"]
    work = ["--do_train", "--do_predict"]
    return run_translation.main([*command_line_of(arguments), *work, *switches(low_precision)])


def measure(run: dict[str, Any], low_precision: bool, folder: Path) -> dict[str, Any]:
    """The run, whose checkpoints lie in `folder`, with its BLEU, its losses and its time."""
    metrics = with_wall_time(partial(train_once, run, low_precision, folder), folder)
    seconds = metrics["train_seconds"]
    return run | {
        "bleu": metrics["test_bleu"],
        "brevity_penalty": metrics["test_bp"],
        "test_loss": metrics["test_loss"],
        "parameters": metrics["parameters"],
        "seconds_per_epoch": None if seconds is None else seconds / metrics["epoch"],
        "test_seconds": metrics["test_runtime"],
    }


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """BLEU, its difference to the Transformer with the same seed, the cost; the paper's BLEU, on other data, below."""
    frame = pd.DataFrame(rows).astype({"seconds_per_epoch": float})
    named = frame.groupby("name", sort=False)
    gains = {
        str(name): mean_and_deviation(differences(frame, "bleu", str(name), TRANSFORMER)) for name in named.groups
    }
    columns = {
        "BLEU": named["bleu"].apply(mean_and_deviation),
        f"BLEU - {TRANSFORMER}": pd.Series(gains if TRANSFORMER in gains else {}, dtype=object),
        "brevity penalty": named["brevity_penalty"].mean().round(3).astype(str),
        "s/epoch": named["seconds_per_epoch"].median().round(1).astype(str).replace("nan", ""),
        "s to translate": named["test_seconds"].median().round(1).astype(str),
        "parameters": named["parameters"].first().astype(int).astype(str),
    }
    shown = pd.DataFrame(columns).reindex([name for name in MODELS if name in gains])
    papers = pd.DataFrame({"BLEU": {f"{name}, paper, IWSLT14": str(score) for name, score in PAPER.items()}})
    return pd.concat([shown, papers]).fillna("")


def main(
    names: Annotated[
        str | None, typer.Option(help="Rows of the table, separated by semicolons; default: all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(help="Of every model.")] = 6,
    max_steps: Annotated[int, typer.Option(help="Train so many steps only; -1: all epochs.")] = -1,
    test_samples: Annotated[int | None, typer.Option(help="Translate so many texts only.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16: autocast, or float32.")] = "bfloat16",
    checkpoints: Annotated[Path | None, typer.Option(help="Folder of the checkpoints of a run.")] = None,
    output: Path = RESULTS / "translation_table.json",
) -> None:
    """Run what the output file does not hold yet, keep it as JSON after every run, and print the table."""
    chosen = names.split(";") if names else list(MODELS)
    check_names("rows", chosen, MODELS)
    sizes = {"epochs": epochs, "max_steps": max_steps, "test_samples": test_samples}
    plan = [
        (name, {"settings": MODELS[name], "seed": int(seed)} | sizes) for seed in seeds.split(",") for name in chosen
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = KeptRuns(output, {"sizes": SIZES, "training": TRAINING, "defaults": DEFAULTS, "dtype": dtype}, device)
    with data_folder(), TemporaryDirectory() as temporary:
        for run in track(kept.missing(run for _, run in plan), description="models"):
            low_precision = dtype != "float32"
            identity = [SIZES, TRAINING, run, low_precision]
            folder = run_folder(checkpoints or Path(temporary), "translation", identity)
            kept.add(measure(run, low_precision, folder))
            shutil.rmtree(folder)
    rows = [row | {"name": name} for name, run in plan for row in kept.matching(run)]
    print_table(table(rows), output, index=True)


if __name__ == "__main__":
    run_with_help(main, __doc__)
