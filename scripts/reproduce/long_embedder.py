"""Train an embedder for long texts on a CPU, and judge it on whole meetings, before and after: QMSum, nDCG@10.

The model is all-MiniLM-L6-v2 with positions for 8,192 tokens. A step has up to 32,768 tokens, in parts of meetings of
one length from 512 to 8,192 and, in every second step, of one kind; all queries that a part answers, and their
answers, have to tell it from the other parts, and the part them from the queries of other meetings, so that each long
text that was embedded teaches much. Long parts are what the model shall learn to read, and short ones are many to be
told apart. Books come first, whose parts are told by the passages before and after them. The attention is patched in
training with calibrated settings.

    python -m scripts.reproduce.long_embedder                # writes scripts/results/long_embedder.json; hours
    python -m scripts.reproduce.long_embedder --phases positions,calibration,training

A step takes 12 GB of memory. A stopped run goes on where it was: trainings at the last step, judgements at the next
meeting. All that is no result lies in `.cache/long_embedder`, with the trained model in its folder `meetings`.

- **positions**: repeated or interpolated, before and after a few steps, by training meetings that are held out.
- **calibration**: the settings of the heads, at a given error.
- **training**: on books, and then on meetings.
- **retrieval**: the judged meetings, by four kinds of vectors, and the gains of whole texts by the trained, patched
  model, query by query. Seconds are the processor's. What needs no patch before the training is read from the results
  of `scripts/benchmark/retrieval.py`.
- **mteb**: the same by its own evaluator, where mteb is installed.
- **errors**: of the settings in the README's table, on the attention of the model before and after.
- **heads**: whether calibrated heads of the trained model keep their budget, on books and meetings it has not seen.
- **steps**: steps of 8,192 tokens on the longest meetings, exact and patched in turns.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from filelock import FileLock
from rich.progress import track
from sentence_transformers import SentenceTransformer
from torch.nn.functional import interpolate

from hf_effattn import calibrate, extend_positions, patch_attention, unpatch_attention
from hf_effattn.embedding.encoder import Encoder
from hf_effattn.embedding.pooling import stored_pooling
from hf_effattn.embedding.tokens import Tokens
from hf_effattn.measuring.bench import exact_output
from hf_effattn.measuring.choosing import errors_of
from hf_effattn.patching.model_types.stacks import longest_input
from hf_effattn.samples.model import DEFAULT_NAME, installed_model_folder
from hf_effattn.settings_parsing import method_of

from ..benchmark import budget
from ..benchmark._inputs import held_out_inputs
from ..benchmark.other_methods import errors_of_layers, few_calls
from ..benchmark.retrieval import (
    CUT,
    EXACT,
    TRAINED_LENGTH,
    Meeting,
    kept_vector,
    read_meetings,
    scores_of,
    standard_error,
)
from ..shared.command_line import check_names, run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table, run_folder
from .long_embedder_data import (
    AFTER,
    BEFORE,
    COMPARED,
    JUDGED,
    JUDGEMENTS,
    PATCHED,
    SPECIAL,
    Source,
    book_sources,
    described,
    held_out_meeting,
    meeting_sources,
    read_training_meetings,
    training_books,
)
from .long_embedder_mteb import mteb_score
from .long_embedder_training import NEGATIVES, Recipe, Training, features_of, run_in_turns, run_to_the_end

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "long_embedder"
RETRIEVAL = RESULTS / "retrieval.json"  # of the model before the training, but for the calibrated patch
BY_MTEB = ((BEFORE, CUT), (AFTER, CUT), (AFTER, PATCHED))
POSITIONS = ("repeated", "interpolated")
METHOD = "bi-clustered"  # of the comparison of positions, with its defaults
PARTS_OF_BOOK = 24
CALIBRATION_TEXTS = 8
ERROR_LENGTHS = (4096, 8192)
SHOWN = ("phase", "stage", "positions", "model", "vector", "steps", "ndcg_at_10", "standard_error", "seconds", "gain")


@dataclass(frozen=True)
class Plan:
    """What decides the results.

    Args:
        seed (`int`): of the order of the texts, their parts and the dropout.
        max_length (`int`): tokens of the longest parts to train on; others have a half of them, a quarter, and so on.
        step_tokens (`int`): of a step.
        learning_rate (`float`): at its highest.
        scale (`float`): factor of the cosines in the loss.
        position_steps, book_steps, meeting_steps, compared_steps (`int`): of each training.
        max_error (`float`): allowed to the layers' outputs, in their mean.
    """

    seed: int = 0
    max_length: int = 8192
    step_tokens: int = 32_768
    learning_rate: float = 2e-4
    scale: float = 20.0
    position_steps: int = 4
    book_steps: int = 12
    meeting_steps: int = 80
    compared_steps: int = 100
    max_error: float = 0.1

    @property
    def recipe(self) -> Recipe:
        """Of the trainings whose models are judged."""
        lengths = tuple(self.max_length // part for part in (16, 8, 4, 2, 1))
        return Recipe(lengths, self.step_tokens, self.learning_rate, self.scale, self.seed)

    @property
    def long_recipe(self) -> Recipe:
        """Of what is compared on the longer parts alone."""
        return replace(self.recipe, lengths=self.recipe.lengths[2:])


@dataclass
class Work:
    """What the phases share: the plan, the rows so far, and a folder for all that is no result."""

    plan: Plan
    kept: KeptRuns
    folder: Path

    def missing(self, *runs: dict[str, Any]) -> list[dict[str, Any]]:
        """Those of the runs that have no row yet."""
        return self.kept.missing(runs)

    def only(self, **run: Any) -> dict[str, Any]:
        """The row of a run.

        Raises:
            typer.BadParameter: an earlier phase has not made it.
        """
        rows = self.kept.matching(run)
        if not rows:
            raise typer.BadParameter(f"the phase {run['phase']!r} has to run first")
        return rows[0]

    @property
    def chosen(self) -> str:
        """The positions that find more once they are trained a little."""
        steps = self.plan.position_steps
        rows = [self.only(phase="positions", positions=positions, steps=steps) for positions in POSITIONS]
        return str(max(rows, key=lambda row: row["ndcg_at_10"])["positions"])

    @property
    def settings(self) -> Path:
        """The file of the calibration."""
        return self.folder / "effattn.json"

    def judged_folder(self, name: str) -> Path:
        """Where the model before or after the training lies."""
        return base_folder(self, POSITIONS[0]) if name == BEFORE else self.folder / "meetings"


def base_folder(work: Work, positions: str) -> Path:
    """The model to start from, in a folder: made where it is not there.

    Attention has no dropout: on a CPU it takes longer to draw than attention takes.
    """
    folder = work.folder / positions
    work.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            _save_base(folder, positions, work.plan.max_length)
    return folder


def _save_base(folder: Path, positions: str, max_length: int) -> None:
    model = SentenceTransformer(str(installed_model_folder()), device="cpu")
    inside = model[0].auto_model
    inside.config.attention_probs_dropout_prob = 0.0
    table = inside.embeddings.position_embeddings.weight.detach().clone()
    extend_positions(model, max_length)
    if positions == "interpolated":
        between = interpolate(table.T[None], size=max_length, mode="linear", align_corners=True)
        inside.embeddings.position_embeddings.weight.data.copy_(between[0].T)
    written = folder.with_name(f"{folder.name}.part")
    model.save_pretrained(str(written))
    written.rename(folder)


def sources_of(stage: str, work: Work, tokenizer: Any) -> list[Source]:
    """What a stage of the training learns from."""
    if stage == "books":
        return list(book_sources(training_books(), tokenizer, PARTS_OF_BOOK, work.plan.max_length))
    rows, _ = read_training_meetings()
    return list(meeting_sources(rows, tokenizer))


def train(
    work: Work, stage: str, base: Path, folder: Path, recipe: Recipe, steps: int, patch: dict[str, Any]
) -> dict[str, Any]:
    """Train on the texts of a stage, from the last step that was kept, and save the model; returns a row."""
    model = SentenceTransformer(str(base), device="cpu")
    if patch:
        patch_attention(model, **patch)
    sources = sources_of(stage, work, model.tokenizer)
    training = Training(model, sources, recipe, steps)
    run_to_the_end(training, folder.with_suffix(".pt"), folder.name)
    model.save_pretrained(str(folder))
    return {"texts": described(sources)} | training.summary()


def reader_of(folder: Path, longest: int) -> tuple[SentenceTransformer, Encoder, Tokens]:
    """A saved model with exact attention and positions for so many tokens, and what embeds tokens by it."""
    around = unpatch_attention(SentenceTransformer(str(folder), device="cpu")).eval()
    inside = around[0].auto_model
    if (longest_input(inside) or longest) < longest:
        extend_positions(around, longest)
    encoder = Encoder(inside, around.tokenizer, stored_pooling(folder), batch_tokens=TRAINED_LENGTH)
    return around, encoder, Tokens(around.tokenizer)


def judgement(
    folder: Path, meetings: list[Meeting], vector: str, patch: dict[str, Any], cache: Path
) -> dict[str, Any]:
    """How well a model's vectors of one kind find the meetings, patched where that is asked for."""
    _, encoder, tokens = reader_of(folder, longest_of(meetings, folder))
    if patch:
        patch_attention(encoder.model, **patch)
    embedded = [
        kept_vector(encoder, tokens, meeting.text, vector, cache / f"{meeting.name}.npz")
        for meeting in track(meetings, description=f"{folder.name}, {vector}")
    ]
    row = scores_of(encoder, tokens, meetings, embedded)
    return row | {"standard_error": standard_error(np.array(row["ndcg_of_queries"]), meetings)}


def longest_of(meetings: list[Meeting], folder: Path) -> int:
    """Tokens of the longest meeting."""
    tokens = Tokens(SentenceTransformer(str(folder), device="cpu").tokenizer)
    return max(len(tokens.sequence([meeting.text])[0]) for meeting in meetings)


def held_out_meetings(work: Work) -> list[Meeting]:
    """The training meetings that are held out, cut at the longest length."""
    tokenizer = SentenceTransformer(str(base_folder(work, POSITIONS[0])), device="cpu").tokenizer
    _, held_out = read_training_meetings()
    return [held_out_meeting(row, tokenizer, work.plan.max_length) for row in held_out]


def compare_positions(work: Work) -> None:
    """Rows of the held-out training meetings, before and after a few steps."""
    steps = work.plan.position_steps
    runs = [
        {"phase": "positions", "positions": name, "steps": done}
        for name in POSITIONS
        for done in dict.fromkeys((0, steps))
    ]
    for run in work.missing(*runs):
        folder = base = base_folder(work, run["positions"])
        trained: dict[str, Any] = {}
        if run["steps"]:
            folder = work.folder / f"few-steps-{run['positions']}"
            trained = train(work, "meetings", base, folder, work.plan.long_recipe, steps, method_of(METHOD))
        cache = work.folder / "vectors" / f"{run['positions']}-{run['steps']}"
        work.kept.add(run | judgement(folder, held_out_meetings(work), PATCHED, method_of(METHOD), cache) | trained)


def calibrate_heads(work: Work) -> None:
    """The settings of the heads, on the longest texts to train on, half of them of meetings."""
    run = {"phase": "calibration", "positions": work.chosen}
    for _ in work.missing(run):
        model = SentenceTransformer(str(base_folder(work, work.chosen)), device="cpu")
        texts = []
        for stage in ("meetings", "books"):
            sources = sorted(sources_of(stage, work, model.tokenizer), key=lambda source: source.name)
            longest = sorted(sources, key=lambda source: -min(len(source.tokens), work.plan.max_length))
            texts += [source.tokens[: work.plan.max_length - SPECIAL] for source in longest[: CALIBRATION_TEXTS // 2]]
        inputs = [features_of(model, [text]) for text in texts]
        found = calibrate(model, inputs, work.plan.max_error, error_of="layer", training=True)
        found.save(work.settings)
        made = found.settings.calibration or {}
        kept = ("max_error", "error_of", "texts", "lengths", "margin", "held_out", "speed")
        work.kept.add(run | {name: made[name] for name in kept} | {"settings": str(found).splitlines()})


def train_stages(work: Work) -> None:
    """The trainings, of which the second begins with the model of the first."""
    work.only(phase="calibration", positions=work.chosen)
    base = base_folder(work, work.chosen)
    for stage, steps in (("books", work.plan.book_steps), ("meetings", work.plan.meeting_steps)):
        folder = work.folder / stage
        run = {"phase": "training", "stage": stage, "steps": steps, "positions": work.chosen}
        for missing in work.missing(run):
            patch = {"settings": work.settings}
            work.kept.add(missing | train(work, stage, base, folder, work.plan.recipe, steps, patch))
        base = folder


def judge(work: Work) -> None:
    """The judged meetings after the training, patched also before it, and the gains of the trained, patched model."""
    work.only(phase="training", stage="meetings")
    meetings = read_meetings(JUDGED)
    runs = [{"phase": "retrieval", "model": name, "vector": kind} for name, kind in JUDGEMENTS]
    for run in work.missing(*runs):
        patch = {"settings": work.settings} if run["vector"] == PATCHED else {}
        cache = work.folder / "vectors" / f"{run['model']}-{run['vector']}".replace(" ", "-")
        work.kept.add(run | judgement(work.judged_folder(run["model"]), meetings, run["vector"], patch, cache))
    trained = np.array(judged(work, AFTER, PATCHED)["ndcg_of_queries"])
    gains = [{"phase": "gains", "model": name, "vector": kind} for name, kind in COMPARED]
    for gain in work.missing(*gains):
        differences = trained - np.array(judged(work, gain["model"], gain["vector"])["ndcg_of_queries"])
        found = {"gain": float(differences.mean()), "standard_error": standard_error(differences, meetings)}
        work.kept.add(gain | found)


def judged(work: Work, model: str, vector: str) -> dict[str, Any]:
    """The row of a model's vectors of one kind: of `judge`, or of the benchmark of retrieval by exact attention."""
    if (model, vector) in JUDGEMENTS:
        return work.only(phase="retrieval", model=model, vector=vector)
    kept = json.loads(RETRIEVAL.read_text(encoding="utf-8"))
    found = [row for row in kept["rows"] if row.get("method") == vector]
    wanted = {"model": DEFAULT_NAME, "splits": ",".join(JUDGED)}
    if not found or not wanted.items() <= kept["settings"].items():
        raise typer.BadParameter(
            f"{RETRIEVAL} has no row of {vector!r} with {wanted}: run scripts.benchmark.retrieval"
        )
    return dict(found[0])


def judge_by_mteb(work: Work) -> None:
    """The same by mteb's evaluator, beside what it was by `judge`."""
    if find_spec("mteb") is None:
        print("mteb is not installed, so its evaluator judges nothing: pip install mteb")
        return
    meetings = read_meetings(JUDGED)
    runs = [{"phase": "mteb", "model": name, "vector": kind} for name, kind in BY_MTEB]
    for run in work.missing(*runs):
        ours = judged(work, run["model"], run["vector"])["ndcg_at_10"]
        folder = work.judged_folder(run["model"])
        longest = longest_of(meetings, folder)
        around, _, _ = reader_of(folder, longest)
        around.max_seq_length = TRAINED_LENGTH if run["vector"] == CUT else longest
        if run["vector"] == PATCHED:
            patch_attention(around, settings=work.settings)
        work.kept.add(run | {"ndcg_at_10": mteb_score(around, meetings), "by_retrieval": ours})


@torch.no_grad()
def measure_errors(work: Work) -> None:
    """Relative errors of the attention output on held-out books, by settings: of each layer, and their mean."""
    runs = [
        {"phase": "errors", "model": name, "length": length}
        for name, length in product((BEFORE, AFTER), ERROR_LENGTHS)
    ]
    for run in work.missing(*runs):
        layers = held_out_inputs(run["length"], model_folder=work.judged_folder(run["model"]))
        exact = [exact_output(inputs) for inputs in layers]
        rows = []
        for (method, settings), attends in few_calls(len(layers)).items():
            errors = errors_of_layers(attends, layers, exact)
            named = {"method": method, "name": settings, "error": statistics.fmean(errors), "layer_errors": errors}
            rows.append(run | named)
        work.kept.add(*rows)


def measure_heads(work: Work) -> None:
    """How many held-out heads keep a budget of the trained model, calibrated as `scripts/benchmark/budget.py` does.

    And the errors of all heads, by layer, on the texts held out, with the candidates that the budget gives them.
    """
    folder = str(work.judged_folder(AFTER))
    runs = [{"phase": "heads", "length": length} for length in ERROR_LENGTHS]
    for run in work.missing(*runs):
        trained_on = {path.name for path in training_books()}
        texts = [
            text | {"length": run["length"]}
            for text in budget.texts(run["length"])
            if text["part"] != "books" or f"{text['text']}.txt.gz" not in trained_on
        ]
        shown = track(texts, description=f"heads, {run['length']:,} tokens")
        measured = [budget.measure_errors(text, folder=folder) for text in shown]
        held = budget.stacked([row for row in measured if row["part"] != "calibrated"], "errors")
        rows = []
        for kept in budget.coverage(measured).to_dict("records"):
            heads, _, _ = budget.calibrated(measured, run["length"], kept["budget"])
            errors = errors_of(heads, held).mean(dim=0)
            rows.append(run | kept | {"head_errors": [[round(error, 3) for error in row] for row in errors.tolist()]})
        work.kept.add(*rows)


def compare_steps(work: Work) -> None:
    """Steps on the longest meetings, each of as many tokens as the longest part, exact and patched in turns."""
    work.only(phase="calibration", positions=work.chosen)
    runs = [{"phase": "steps", "attention": name} for name in (EXACT, PATCHED)]
    if not work.missing(*runs):
        return
    plan = work.plan
    trainings = []
    for run in runs:
        model = SentenceTransformer(str(base_folder(work, work.chosen)), device="cpu")
        if run["attention"] == PATCHED:
            patch_attention(model, settings=work.settings)
        sources = [
            source for source in sources_of("meetings", work, model.tokenizer) if len(source.tokens) >= plan.max_length
        ]
        recipe = replace(plan.long_recipe, step_tokens=plan.max_length)
        trainings.append(Training(model, sources, recipe, plan.compared_steps))
    run_in_turns(trainings, [work.folder / f"steps-{run['attention']}.pt" for run in runs])
    exact = np.array(trainings[0].seconds)
    for run, training in zip(runs, trainings, strict=True):
        lengths, seconds = np.array(training.lengths), np.array(training.seconds)
        by_length = {
            str(length): {
                "steps": int((lengths == length).sum()),
                "seconds": float(np.median(seconds[lengths == length])),
                "speedup": float(np.median((exact / seconds)[lengths == length])),
            }
            for length in sorted(set(lengths.tolist()))
        }
        work.kept.add(run | training.summary() | {"steps": plan.compared_steps, "by_length": by_length})


RUN: dict[str, Callable[[Work], None]] = {
    "positions": compare_positions,
    "calibration": calibrate_heads,
    "training": train_stages,
    "retrieval": judge,
    "mteb": judge_by_mteb,
    "errors": measure_errors,
    "heads": measure_heads,
    "steps": compare_steps,
}


def main(
    phases: Annotated[str, typer.Option(help="Comma-separated, in this order.")] = ",".join(RUN),
    seed: int = Plan.seed,
    max_length: Annotated[int, typer.Option(help="Tokens of the longest parts to train on.")] = Plan.max_length,
    step_tokens: Annotated[int, typer.Option(help="Tokens of a step, in parts of one length.")] = Plan.step_tokens,
    learning_rate: float = Plan.learning_rate,
    scale: Annotated[float, typer.Option(help="Factor of the cosines in the loss.")] = Plan.scale,
    position_steps: Annotated[int, typer.Option(help="To compare the positions.")] = Plan.position_steps,
    book_steps: Annotated[int, typer.Option(help="On books.")] = Plan.book_steps,
    meeting_steps: Annotated[int, typer.Option(help="On meetings.")] = Plan.meeting_steps,
    compared_steps: Annotated[int, typer.Option(help="Exact and patched, to compare them.")] = Plan.compared_steps,
    max_error: Annotated[float, typer.Option(help="Of the calibration: the layers' mean.")] = Plan.max_error,
    work: Annotated[Path, typer.Option(help="Folder of models, kept steps and vectors.")] = CACHE,
    output: Path = RESULTS / "long_embedder.json",
) -> None:
    """Run the phases that the output file does not hold yet, and keep them as JSON."""
    chosen = phases.split(",")
    check_names("phases", chosen, RUN)
    steps = (position_steps, book_steps, meeting_steps, compared_steps)
    plan = Plan(seed, max_length, step_tokens, learning_rate, scale, *steps, max_error)
    fixed = {"lengths": plan.recipe.lengths, "parts_of_book": PARTS_OF_BOOK, "negatives": NEGATIVES}
    kept = KeptRuns(output, asdict(plan) | fixed | {"model": DEFAULT_NAME}, torch.device("cpu"))
    shared = Work(plan, kept, run_folder(work, "run", kept.settings))
    for phase, run in RUN.items():
        if phase in chosen:
            run(shared)
    table = pd.DataFrame(kept.rows)
    print_table(table[[name for name in SHOWN if name in table]], kept.path)


if __name__ == "__main__":
    run_with_help(main, __doc__)
