"""What do a decoder's methods keep of what it finds in long prompts? RULER's tasks, SmolLM2-135M (Source: Hsieh 2024).

The tasks are those of `lm_eval` that need no download: numbers to be found in noise and among other numbers, chains of
variables, the most common words. Its prompts, its metric (the part of the answers that the generated text holds), the
model's own cache; the same prompts for exact attention and for every method. Retention is a method's mean score
beside the exact model's.

    python -m scripts.benchmark.ruler                     # adds to scripts/results/ruler.json; pip install .[judges]
    python -m scripts.benchmark.ruler --lengths 4096 --prompts 10 --tasks niah_single_1
"""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pandas as pd
import typer
from rich.progress import track

import hf_effattn

from ..shared.command_line import check_names, run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table
from .language_model import EXACT, METHODS, WEIGHTS, load

TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")


def prompts_of(task: str, length: int, tokenizer: Any) -> dict[str, Any]:
    """A task of `lm_eval` with prompts of that many tokens.

    Raises:
        typer.BadParameter: `lm_eval` is not installed.
    """
    try:
        tasks = import_module("lm_eval.tasks")
    except ImportError as missing:
        raise typer.BadParameter("lm_eval is not installed: pip install .[judges]") from missing
    with TemporaryDirectory() as folder:  # tasks load the tokenizer themselves, by name
        tokenizer.save_pretrained(folder)
        manager = tasks.TaskManager(metadata={"tokenizer": folder, "max_seq_lengths": [length]})
        return dict(manager.load([task]))


def score(model: Any, tokenizer: Any, task: dict[str, Any], name: str, length: int, prompts: int) -> float:
    """The mean of a task's metric over its first prompts, from 0 to 1."""
    evaluator, models = import_module("lm_eval.evaluator"), import_module("lm_eval.models.huggingface")
    judged = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=length)
    evaluation = evaluator.evaluate(judged, task, limit=prompts, bootstrap_iters=0, log_samples=False)
    return float(evaluation["results"][name][f"{length},none"])


def retention(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Mean scores by length and name, and beside the exact model's."""
    table = pd.DataFrame(rows).pivot_table(index=["length", "name"], columns="task", values="score")
    table["mean"] = table.mean(axis=1)
    exact = table["mean"].xs(EXACT, level="name")
    table["retention"] = table["mean"] / exact.reindex(table.index.get_level_values("length")).to_numpy()
    return table.reset_index()


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens, up to 8,192.")] = "4096,8192",
    methods: Annotated[str, typer.Option(help="Comma-separated names of settings.")] = "calibrated",
    tasks: Annotated[str, typer.Option(help="Comma-separated tasks.")] = ",".join(TASKS),
    prompts: Annotated[int, typer.Option(min=1, help="Of every task.")] = 10,
    output: Path = RESULTS / "ruler.json",
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every task, and print the table."""
    check_names("methods", methods.split(","), METHODS)
    check_names("tasks", tasks.split(","), TASKS)
    model, tokenizer = load()
    kept = KeptRuns(output, {"model": WEIGHTS, "prompts": prompts})
    names = [EXACT, *methods.split(",")]
    runs = [(int(length), task) for length in lengths.split(",") for task in tasks.split(",")]
    for length, task in track(runs, description="tasks"):
        missing = kept.missing([{"length": length, "task": task, "name": name} for name in names])
        if not missing:
            continue
        made = prompts_of(task, length, tokenizer)
        for run in missing:
            settings = METHODS.get(run["name"])
            if settings is not None:
                hf_effattn.patch_attention(model, **settings)
            mean_score = score(model, tokenizer, made, task, length, prompts)
            hf_effattn.unpatch_attention(model)
            kept.add(run | {"score": mean_score})
    print_table(retention(kept.rows))


if __name__ == "__main__":
    run_with_help(main, __doc__)
