"""Do Composite Slice Transformers learn as well as the Transformer, and a converted BERT as well as the exact one?

From scratch, at the size of Lee 2023 (Table 6: 256 wide, 4 heads, pre-norm): IMDb as bytes (the Text task of Long
Range Arena) and 20 Newsgroups with 2 layers, WikiText-2 and books with 4 (Table 9, attention of matched cost, on the
books). The Transformer is the same model with `composition="full"`, whose attention is PyTorch's, and absolute
positions. The BERT is all-MiniLM-L6-v2 on SST-2.

    python -m scripts.reproduce.cst "WikiText-2, 256 tokens"      # adds to scripts/results/cst_training.json
    python -m scripts.reproduce.cst "IMDb bytes" --models "CST L=16 α=1" --steps 1300
    python -m scripts.reproduce.cst "IMDb bytes" --costs          # time and memory of a training step, interleaved

Training writes checkpoints below `--runs`: a run that was stopped goes on from the newest when it is asked for again,
and one that the output file holds is not run. On a CPU set `MALLOC_MMAP_THRESHOLD_=8000000000
MALLOC_TRIM_THRESHOLD_=16000000000`, as for `scripts/train/clm.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_effattn.samples.model import installed_model_folder
from hf_effattn.settings_parsing import method_text

from ..shared.command_line import check_names, command_line_of, run_with_help, switches
from ..shared.data import dataset_path
from ..shared.runs import RESULTS, KeptRuns, print_table, run_folder, with_wall_time
from ..train import classification as run_classification
from ..train import clm as run_clm
from .step_costs import step_costs

TRANSFORMER = "Transformer"
BASELINE: dict[str, dict[str, Any]] = {TRANSFORMER: {"composition": "full", "position_embedding": "absolute"}}
# With the positions of CST, which enter queries and keys of every layer.
TRANSFORMERS = BASELINE | {"Transformer, VIPE": {"composition": "full"}}
# What run_clm and run_classification report of a run.
KEPT = (
    "perplexity", "word_perplexity", "eval_loss", "eval_accuracy", "test_loss", "test_accuracy", "parameters",
    "train_seconds",
)  # fmt: skip
COMMON: dict[str, Any] = {
    "lr_scheduler_type": "linear",
    "save_total_limit": 1,
    "eval_strategy": "no",
    "report_to": "none",
    "resume_from_checkpoint": "last",
}


@dataclass(frozen=True)
class Task:
    """What is learned, and by which models.

    Attributes:
        run: trains, evaluates and returns the metrics: `main` of a training script.
        files: its arguments that name files, as patterns inside the data sets; on files of others it is not trained.
        arguments: its other arguments.
        models: settings of the configuration by name; of the method, where the model is a pretrained one.
        auto_class: makes the model from a configuration.
        batch: batch size and tokens of a training step, and the vocabulary: what the cost is measured with. None for
            a pretrained model.
        sizes: settings of the configuration that all models share.
        predicts: whether the script ends with predictions for test files, not with an evaluation.
    """

    run: Callable[[list[str]], dict[str, float]]
    files: dict[str, tuple[str, ...]]
    arguments: dict[str, Any]
    models: dict[str, dict[str, Any]]
    auto_class: Any = AutoModelForSequenceClassification
    batch: tuple[int, int, int] | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    predicts: bool = False


WIKITEXT: dict[str, tuple[str, ...]] = {
    "train_files": ("wikitext-2/wiki.train.tokens.gz",),
    "validation_files": ("wikitext-2/wiki.valid.tokens.gz",),
}
BOOKS: dict[str, tuple[str, ...]] = {
    "train_files": ("books/*.txt.gz",),
    "validation_files": ("books/pg1661-*.txt.gz", "books/pg98-*.txt.gz"),
}


def language_model(
    files: dict[str, tuple[str, ...]], length: int, epochs: int, models: dict[str, dict[str, Any]]
) -> Task:
    """A model of text in tokens of a BPE, 4,096 of them a step."""
    batch = 4096 // length
    return Task(
        run_clm.main,
        files,
        {
            "vocab_size": 6000,
            "block_length": length,
            "num_train_epochs": epochs,
            "learning_rate": 1e-3,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": batch,
            "warmup_steps": 200,
            "lr_scheduler_type": "cosine",
            "weight_decay": 0.1,
            "adam_beta2": 0.98,
            "save_steps": 250,
        },
        models,
        AutoModelForCausalLM,
        batch=(batch, length, 6000),
        # Attention dropout is off in all tasks from scratch: SDPA on a CPU is slow with it.
        sizes={"num_hidden_layers": 4, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": length},
    )


def slices(slice_length: int, extension_ratio: int) -> dict[str, dict[str, Any]]:
    """A Composite Slice Transformer by its name."""
    settings = {"slice_length": slice_length, "extension_ratio": extension_ratio}
    return {f"CST L={slice_length} α={extension_ratio}": settings}


def classifier(folder: str, batch: tuple[int, int, int], **arguments: Any) -> Task:
    """A classifier of long texts."""
    size, length, _ = batch
    return Task(
        run_classification.main,
        {"train_files": (f"{folder}/train.jsonl.gz",), "test_files": (f"{folder}/test.jsonl.gz",)},
        {
            "max_length": length,
            "validation_share": 0,
            "per_device_train_batch_size": size,
            "per_device_eval_batch_size": size,
            "learning_rate": 5e-4,
            "warmup_steps": 0.1,
            "train_sampling_strategy": "group_by_length",
            **arguments,
        },
        BASELINE | slices(16, 1),
        batch=batch,
        # Word embeddings as large as in the published code of Long Range Arena: from small ones it learns late.
        sizes={
            "num_hidden_layers": 2,
            "attention_probs_dropout_prob": 0.0,
            "embedding_initializer_range": 1.0,
            "max_position_embeddings": length,
        },
        predicts=True,
    )


TASKS = {
    "IMDb bytes": classifier("imdb", (8, 4096, 259), tokenizer_name="bytes", max_predict_samples=1000, save_steps=20),
    "20 Newsgroups": classifier("20newsgroups", (32, 512, 8000), vocab_size=8000, num_train_epochs=4, save_steps=100),
    "WikiText-2, 256 tokens": language_model(WIKITEXT, 256, 3, TRANSFORMERS | slices(32, 3)),
    "WikiText-2, 1,024 tokens": language_model(WIKITEXT, 1024, 2, TRANSFORMERS | slices(32, 3)),
    # Table 9, matched complexity: a Transformer of 256 tokens costs as much attention as the first of each longer one.
    "Books, 256 tokens": language_model(BOOKS, 256, 1, BASELINE),
    "Books, 512 tokens": language_model(BOOKS, 512, 1, BASELINE | slices(64, 3)),
    "Books, 1,024 tokens": language_model(BOOKS, 1024, 1, BASELINE | slices(32, 3)),
    "Books, 2,048 tokens": language_model(BOOKS, 2048, 1, slices(16, 2) | slices(16, 3) | slices(64, 3)),
    "Books, 4,096 tokens": language_model(BOOKS, 4096, 1, slices(32, 3)),
    "SST-2": Task(
        run_classification.main,
        {"train_files": ("glue/SST-2/train.tsv.gz",), "validation_files": ("glue/SST-2/dev.tsv.gz",)},
        {
            "text_column": "sentence",
            "max_length": 128,
            "num_train_epochs": 1,
            "learning_rate": 5e-5,
            "per_device_train_batch_size": 32,
            "per_device_eval_batch_size": 64,
            "warmup_steps": 100,
            "save_steps": 500,
        },
        {
            "BERT": {},
            "BERT, CST L=16 α=1": {"slice_length": 16},
            "BERT, CST L=16 α=3": {"slice_length": 16, "extension_ratio": 3},
        },
    ),
}


def settings_of(values: dict[str, Any]) -> str:
    """Settings as the training scripts take them."""
    return ",".join(f"{name}={value}" for name, value in values.items())


def files_of(task: Task) -> list[str]:
    """The arguments that name the task's files."""

    def matching(pattern: str) -> list[Path]:
        folder, _, name = pattern.rpartition("/")
        return sorted(dataset_path(folder).glob(name))

    files = {name: [path for glob in patterns for path in matching(glob)] for name, patterns in task.files.items()}
    held_out = {path for name, paths in files.items() if name != "train_files" for path in paths}
    files["train_files"] = [path for path in files["train_files"] if path not in held_out]
    return [part for name, paths in files.items() for part in (f"--{name}", *map(str, paths))]


def command_line(task: Task, run: dict[str, Any], folder: Path, low_precision: bool) -> list[str]:
    """The arguments of the training script for one run, whose checkpoints and model lie in `folder`."""
    arguments = {"seed": run["seed"], "output_dir": folder, **COMMON, **task.arguments}
    model = task.models[run["model"]]
    if task.batch is None:
        arguments["model_name_or_path"] = installed_model_folder()
        if model:
            arguments["method"] = method_text("cst", model)
    else:
        arguments |= {"model_type": "cst", "config_overrides": settings_of(task.sizes | model)}
    if run["steps"] is not None:
        arguments["max_steps"] = run["steps"]
    work = ["--do_train", "--do_predict" if task.predicts else "--do_eval"]
    return [*files_of(task), *command_line_of(arguments), *work, *switches(low_precision)]


def folder_of(run: dict[str, Any], runs: Path, low_precision: bool) -> Path:
    """Where the checkpoints of a run lie."""
    name = f"{run['task']}, {run['model']}, seed {run['seed']}"
    return run_folder(runs, name, [run, TASKS[run["task"]].models[run["model"]], low_precision])


def train(run: dict[str, Any], runs: Path, low_precision: bool) -> dict[str, Any]:
    """Train and evaluate one model, from its newest checkpoint where it has one; the row to keep."""
    task = TASKS[run["task"]]
    folder = folder_of(run, runs, low_precision)
    metrics = with_wall_time(partial(task.run, command_line(task, run, folder, low_precision)), folder)
    return run | {name: metrics[name] for name in KEPT if name in metrics}


def costs_of(name: str, device: torch.device, low_precision: bool, repeats: int) -> list[dict[str, Any]]:
    """A row per model: time and memory of forward and backward on a batch of the longest inputs, interleaved."""
    task = TASKS[name]
    if task.batch is None:
        raise typer.BadParameter(f"the cost of {name!r} depends on the lengths of its texts: name another task")
    batch, length, vocab_size = task.batch
    shared = {"task": name, "measured": "step", "batch": batch, "length": length}
    same = {"model_type": "cst", "vocab_size": vocab_size, **task.sizes}
    models = {model: same | settings for model, settings in task.models.items()}
    costs = step_costs(models, TRANSFORMER, task.auto_class, (batch, length), device, low_precision, repeats)
    return [shared | {"model": model} | row for model, row in costs.items()]


def main(
    task: Annotated[str, typer.Argument(help=f"One of: {'; '.join(TASKS)}.")],
    models: Annotated[str | None, typer.Option(help="Separated by semicolons; default: all of the task.")] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    steps: Annotated[int | None, typer.Option(help="Training steps; default: the task's epochs.")] = None,
    costs: Annotated[bool, typer.Option("--costs", help="Measure a step of each model; train nothing.")] = False,
    repeats: Annotated[int, typer.Option(help="Rounds of that measurement.")] = 5,
    dtype: Annotated[str, typer.Option(help="bfloat16: autocast, or float32.")] = "bfloat16",
    runs: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("runs/cst"),
    output: Path = RESULTS / "cst_training.json",
) -> None:
    """Train what the output file does not hold yet, keep it as JSON after every run, and print all of the task."""
    if task not in TASKS:
        raise typer.BadParameter(f"unknown task {task!r}; there are {list(TASKS)}")
    chosen = models.split(";") if models else list(TASKS[task].models)
    check_names("models", chosen, TASKS[task].models)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = KeptRuns(output, {"dtype": dtype}, device)
    low_precision = dtype != "float32"
    if costs:
        if models:
            raise typer.BadParameter("--costs measures all models of a task together: leave out --models")
        if not kept.matching({"task": task, "measured": "step"}):
            kept.add(*costs_of(task, device, low_precision, repeats))
    else:
        arguments = {name: str(value) for name, value in (COMMON | TASKS[task].arguments | TASKS[task].sizes).items()}
        plan = [
            {"task": task, "model": model, "seed": int(seed), "steps": steps, "arguments": arguments}
            for seed in seeds.split(",")
            for model in chosen
        ]
        for run in track(kept.missing(plan), description="models"):
            kept.add(train(run, runs, low_precision))
    shown = pd.DataFrame(kept.matching({"task": task})).drop(columns=["arguments"], errors="ignore")
    print_table(shown, output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
