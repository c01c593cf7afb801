"""Short trainings of the embedder of `scripts/reproduce/long_embedder.py` by other recipes.

    python -m scripts.reproduce.long_embedder_attempts      # writes scripts/results/long_embedder_attempts.json

Every row is a recipe, trained with the default patch: how well vectors of whole texts and means of chunks find the
held-out training meetings after it, all cut at 8,192 tokens. Several processes may share them: `--attempts 0,2`.
"""

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from hf_effattn.samples.model import DEFAULT_NAME
from hf_effattn.settings_parsing import method_of

from ..benchmark.retrieval import CHUNKS
from ..shared.command_line import check_names, run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table, run_folder
from .long_embedder import (
    CACHE,
    METHOD,
    POSITIONS,
    Plan,
    Work,
    base_folder,
    held_out_meetings,
    judgement,
    train,
)
from .long_embedder_data import PATCHED
from .long_embedder_training import Recipe

LAST = 10  # steps, whose mean loss is shown
# Lengths, tokens of a step, learning rate, scale; steps. The first is the model as it is, the last has all lengths.
SHORT, LONG = (512, 1024), (2048, 4096, 8192)
TRIED: tuple[tuple[tuple[tuple[int, ...], int, float, float], int], ...] = (
    ((LONG, 16_384, 2e-4, 20.0), 0),
    ((LONG, 16_384, 2e-4, 20.0), 20),
    (((8192,), 16_384, 2e-4, 20.0), 20),
    ((SHORT, 16_384, 2e-4, 20.0), 20),
    ((SHORT, 16_384, 5e-4, 20.0), 20),
    ((SHORT, 16_384, 2e-4, 50.0), 20),
    (((*SHORT, *LONG), 16_384, 2e-4, 20.0), 20),
)
SHOWN = (
    "lengths",
    "step_tokens",
    "learning_rate",
    "scale",
    "steps",
    "vector",
    "ndcg_at_10",
    "standard_error",
    "last_loss",
)


def attempt(work: Work, run: dict[str, Any], recipe: Recipe) -> list[dict[str, Any]]:
    """The rows of a recipe."""
    folder = base_folder(work, POSITIONS[0])
    made: dict[str, Any] = {}
    name = run_folder(Path(), "attempt", run).name
    if run["steps"]:
        base, folder = folder, work.folder / name
        made = train(work, "meetings", base, folder, recipe, run["steps"], method_of(METHOD))
        made["last_loss"] = statistics.fmean(made["losses"][-LAST:])
    rows = []
    for vector, patch in ((CHUNKS, {}), (PATCHED, method_of(METHOD))):
        cache = work.folder / "vectors" / f"{name}-{vector}".replace(" ", "-")
        rows.append(run | {"vector": vector} | judgement(folder, held_out_meetings(work), vector, patch, cache) | made)
    return rows


def main(
    attempts: Annotated[str | None, typer.Option(help="Numbers, from 0, comma-separated. Default: all.")] = None,
    seed: int = Plan.seed,
    work: Annotated[Path, typer.Option(help="Folder of models, kept steps and vectors.")] = CACHE,
    output: Path = RESULTS / "long_embedder_attempts.json",
) -> None:
    """Train and judge by the recipes that the output file does not hold yet, and keep them as JSON."""
    kept = KeptRuns(output, {"seed": seed, "model": DEFAULT_NAME}, torch.device("cpu"))
    shared = Work(Plan(seed=seed), kept, run_folder(work, "attempts", kept.settings))
    chosen = attempts.split(",") if attempts else [str(number) for number in range(len(TRIED))]
    check_names("attempts", chosen, [str(number) for number in range(len(TRIED))])
    for settings, steps in (TRIED[int(number)] for number in chosen):
        recipe = Recipe(*settings, seed)
        run = asdict(recipe) | {"lengths": list(recipe.lengths), "steps": steps}
        for missing in kept.missing([run]):
            kept.add(*attempt(shared, missing, recipe))
    print_table(pd.DataFrame(kept.rows)[list(SHOWN)], kept.path)


if __name__ == "__main__":
    run_with_help(main, __doc__)
