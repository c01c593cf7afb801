"""Does a patched causal model write the same text as the exact one? Greedy continuations of held-out prompts.

python -m scripts.benchmark.causal_generation --model runs/gpt2    # writes scripts/results/causal_generation.json
"""

import json
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track

import hf_effattn
from hf_effattn.measuring.environment import environment

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, print_table
from ._inputs import SKIPPED, held_out_tokens, load_causal_model
from ._scores import counted_scores

# Segments that a prompt of some hundred tokens has several of.
SHORT = {"segment_length": 128, "window": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "i-clustered": {"method": "i-clustered", "clusters": 25, "exact_keys": 384} | SHORT,
    "bi-clustered": {"method": "bi-clustered", "exact_keys": 192} | SHORT,
    "bi-clustered, finer": {"method": "bi-clustered", "exact_keys": 384, "window": 256, "segment_length": 128},
}


def same_tokens(exact: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens two continuations share from the beginning on."""
    shorter = min(len(exact), len(other))
    different = (exact[:shorter] != other[:shorter]).nonzero()
    return int(different[0]) if len(different) else shorter


@torch.no_grad()
def main(
    model: Annotated[Path, typer.Option(help="Folder of the causal model that scripts/train/clm.py trained.")],
    prompts: int = 10,
    prompt_length: int = 900,
    new_tokens: int = 200,
    output: Path = RESULTS / "causal_generation.json",
) -> None:
    """Write every continuation, count the equal ones, print the table and keep it as JSON."""
    loaded, tokenizer = load_causal_model(model)
    if prompt_length + new_tokens > loaded.config.max_position_embeddings:
        hf_effattn.extend_positions(loaded, prompt_length + new_tokens)
    books = held_out_tokens(tokenizer)
    chosen = []
    for number in range(prompts):
        start = SKIPPED + number // len(books) * 2 * prompt_length
        chosen.append(books[number % len(books)][None, start : start + prompt_length])

    def write(ids: torch.Tensor) -> torch.Tensor:
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        return loaded.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)[0, ids.shape[1] :]

    exact = [write(ids) for ids in track(chosen, description="exact")]
    rows = []
    for name, settings in SETTINGS.items():
        hf_effattn.patch_attention(loaded, **settings, min_length=0)
        with counted_scores() as count:
            written = [write(ids) for ids in track(chosen, description=name)]
        heads = prompts * loaded.config.num_hidden_layers * loaded.config.num_attention_heads
        hf_effattn.unpatch_attention(loaded)
        same = [same_tokens(*both) for both in zip(exact, written, strict=True)]
        equal = sum(number == new_tokens for number in same)
        share = count.share(heads, prompt_length)
        row = {"run": name, "settings": settings, "scored_share": share, "equal_texts": equal, "prompts": prompts}
        rows.append(row | {"same_tokens": same})
        kept = {"environment": environment(), "prompt_length": prompt_length, "new_tokens": new_tokens, "rows": rows}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(kept, indent=1) + "\n")
    print_table(pd.DataFrame(rows).drop(columns=["settings"]), output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
