r"""What perplexity does a causal model reach with each method, exactly, and with less context? On held-out text.

A row's loss is the mean over all tokens of texts of one length; `last_quarter_loss` that of their last quarter, for
which the context counts most. In the rows that end in "prompt" the first three quarters are a prompt, run by the
method, and the last quarter is read exactly over the cache, as when generating; `causal="prefill"` is measured so
only, as clusters of all queries make the losses of a prompt itself meaningless. "shorter context" cuts a text into
four. Beyond the trained length positions are repeated, for exact attention too.

    python -m scripts.benchmark.perplexity --model runs/gpt2      # writes scripts/results/perplexity.json and .png
    python -m scripts.benchmark.perplexity --model runs/gpt2 --files wikitext-2/wiki.test.tokens.gz \
        --lengths 512,1024,2048 --tokens 65536 --output scripts/results/perplexity_wikitext2.json
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from transformers import DynamicCache

import hf_effattn
from hf_effattn.measuring.environment import environment

from ..kept.command_line import run_with_help
from ..kept.runs import print_table
from ._inputs import HELD_OUT, held_out_tokens, load_causal_model
from .causal_schemes import EXACT, SKIPPED, scored

SHORTER = "shorter context"
PARTS = 4
BI_CLUSTERED = {"clusters": 16, "topk": 32, "keys_per_cluster": 8, "key_clusters": 128}
# Name: (method, settings, whether the text is read as a prompt and what follows it).
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "i-clustered": ("i-clustered", {"clusters": 25, "topk": 64}, False),
    "bi-clustered": ("bi-clustered", BI_CLUSTERED, False),
    "bi-clustered, prompt": ("bi-clustered", BI_CLUSTERED, True),
    "bi-clustered, prefill, prompt": ("bi-clustered", BI_CLUSTERED | {"causal": "prefill"}, True),
}

Losses = Callable[[Any, torch.Tensor], torch.Tensor]


def token_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of every token but the first, `(N - 1,)`, of a text `(1, N)`."""
    logits = model(ids, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[0, 1:], reduction="none")


def losses_in_parts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same where each of the parts of a text is read alone; the first token of a part has no context."""
    parts = ids.view(PARTS, -1)
    logits = model(parts, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), parts[:, 1:].flatten(), reduction="none")


def losses_after_prompt(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The losses of the last quarter, read over the cache of the prompt before it."""
    prompt = ids.shape[1] - ids.shape[1] // PARTS
    cache = DynamicCache(config=model.config)
    model(ids[:, : prompt - 1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = model(ids[:, prompt - 1 : -1], past_key_values=cache, use_cache=True).logits[0]
    return F.cross_entropy(logits.float(), ids[0, prompt:], reduction="none")


def summary(losses: list[torch.Tensor], length: int, *, last_only: bool) -> dict[str, float | None]:
    """The mean loss over all texts, and that of their last quarters."""
    # Without the first token of the quarter, for which the shorter context is empty.
    last = torch.cat([part[1 - length // PARTS :] for part in losses]).mean().item()
    return {"loss": None if last_only else torch.cat(losses).mean().item(), "last_quarter_loss": last}


@torch.no_grad()
def measure(model: Any, texts: list[torch.Tensor], window: int, segment_length: int) -> list[dict[str, Any]]:
    """One row per way of reading texts of one length."""
    length = texts[0].shape[1]
    rows: list[dict[str, Any]] = []

    def add(name: str, run: Losses, share: float, settings: dict[str, Any], *, last_only: bool = False) -> None:
        losses = [run(model, ids) for ids in track(texts, description=f"{length} tokens, {name}")]
        found = summary(losses, length, last_only=last_only)
        rows.append({"length": length, "run": name, "scored_share": share, "settings": settings, **found})

    add(EXACT, token_losses, 1.0, {})
    add(SHORTER, losses_in_parts, 1 / PARTS, {})
    for name, (method, chosen, is_prompt) in RUNS.items():
        settings = chosen | {"window": window, "segment_length": segment_length}
        hf_effattn.patch_attention(model, method, **settings, min_length=0)
        count = scored(method, length, window, chosen["clusters"], chosen["topk"], chosen.get("keys_per_cluster", 8))
        run = losses_after_prompt if is_prompt else token_losses
        add(name, run, count / ((length + 1) / 2), {"method": method, **settings}, last_only=is_prompt)
        hf_effattn.unpatch_attention(model)
    exact: dict[str, Any] = rows[0]
    for row in rows:
        for loss in ("loss", "last_quarter_loss"):
            if row[loss] is not None:
                row[loss.replace("loss", "perplexity_change")] = float(
                    torch.tensor(row[loss] - exact[loss], dtype=torch.float64).exp() - 1
                )
    return rows


def plot(rows: list[dict[str, Any]], trained: int, path: Path) -> None:
    """The loss of the last quarter against the length, a line per way of reading."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == name]
        axes.plot([row["length"] for row in own], [row["last_quarter_loss"] for row in own], "o-", label=name)
    axes.axvline(trained, color="grey", linestyle=":", label="trained length")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("loss per token of its last quarter, nats")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(
    model: Annotated[Path, typer.Option(help="Folder of the causal model that scripts/train/clm.py trained.")],
    lengths: Annotated[
        str, typer.Option(help="Comma-separated numbers of tokens, multiples of 4.")
    ] = "512,1024,2048,4096,8192",
    files: Annotated[str, typer.Option(help="Held-out text among the data sets, comma-separated.")] = ",".join(
        HELD_OUT
    ),
    tokens: Annotated[int, typer.Option(help="Tokens of it read at every length, in equal parts.")] = 16_384,
    window: int = 64,
    segment_length: int = 64,
    output: Path = Path(__file__).parents[1] / "results" / "perplexity.json",
) -> None:
    """Measure every length, print the table and keep it as JSON and picture."""
    loaded, tokenizer = load_causal_model(model)
    trained = loaded.config.max_position_embeddings
    chosen = [int(part) for part in lengths.split(",")]
    if max(chosen) > trained:
        hf_effattn.extend_positions(loaded, max(chosen))
    held_out = held_out_tokens(tokenizer, tuple(files.split(",")))
    rows: list[dict[str, Any]] = []
    output.parent.mkdir(parents=True, exist_ok=True)
    for length in chosen:
        per_file = max(1, tokens // length // len(held_out))
        if SKIPPED + per_file * length > min(map(len, held_out)):
            raise typer.BadParameter(f"a file has {min(map(len, held_out)):,} tokens, too few for {tokens:,} in all")
        texts = [
            text[None, SKIPPED + number * length : SKIPPED + (number + 1) * length]
            for text in held_out
            for number in range(per_file)
        ]
        rows += measure(loaded, texts, window, segment_length)
        kept = {
            "environment": environment(),
            "trained_length": trained,
            "files": files,
            "tokens": tokens,
            "rows": rows,
        }
        output.write_text(json.dumps(kept, indent=1) + "\n")
    plot(rows, trained, output.with_suffix(".png"))
    print_table(pd.DataFrame(rows).drop(columns=["settings"]), output, digits=4)


if __name__ == "__main__":
    run_with_help(main, __doc__)
