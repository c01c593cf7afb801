"""How close do the sentence embeddings of a patched pretrained BERT stay to those of the exact model?

All layers of all-MiniLM-L6-v2 are patched; texts are passages of novels, embeddings the normalised masked means of the
last hidden state.

    python -m scripts.benchmark.embeddings                 # writes scripts/results/benchmark_embeddings.json
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_effattn import patch_attention, unpatch_attention
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Passages, bundled_books

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._timing import Rows, keep_missing

FEW = {"clusters": 25, "topk": 32, "key_clusters": 50}
MANY = {"clusters": 100, "topk": 64, "key_clusters": 200}
SIZES = ((128, FEW), (256, FEW), (256, MANY), (512, MANY))
CLUSTERINGS: dict[str, dict[str, Any]] = {
    "K-means, keys' metric (default)": {},
    "K-means on the queries": {"distance": "vectors"},
    "LSH 32 bits, 10 iterations": {"clustering": "lsh", "iterations": 10},
}
COUNTS = {
    "bi-clustered": ("clusters", "topk", "key_clusters"),
    "i-clustered": ("clusters", "topk"),
    "clustered": ("clusters",),
}


def embed(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Normalised mean of the last hidden state, `(texts, hidden_size)`."""
    with torch.no_grad():
        hidden = torch.cat([model(input_ids=part).last_hidden_state for part in tokens.split(8)])
    return torch.nn.functional.normalize(hidden.mean(dim=1), dim=-1)


def measure(run: dict[str, Any], model: Any, passages: Passages) -> Rows:
    """One row per clustering: the cosine with the exact model's embeddings."""
    tokens, _, books = passages.pairs(run["length"], per_book=4)
    exact = embed(model, tokens)
    counts = {name: run[name] for name in ("clusters", "topk", "key_clusters") if run[name] is not None}
    rows = []
    for name, options in CLUSTERINGS.items():
        patch_attention(model, run["method"], min_length=0, **counts, **options)
        cosine = (embed(model, tokens) * exact).sum(dim=-1)
        unpatch_attention(model)
        cosines = {"cosine_mean": cosine.mean().item(), "cosine_min": cosine.min().item()}
        rows.append(run | {"clustering": name, "texts": len(books), "books": len(set(books))} | cosines)
    return rows


def main(output: Path = RESULTS / "benchmark_embeddings.json") -> None:
    """Measure every size, print the table and keep it as JSON."""
    model, tokenizer, name = load_model(None)
    kept = KeptRuns(output, {"model": name})
    runs = [
        {"length": length, "method": method}
        | {count: sizes[count] if count in used else None for count in ("clusters", "topk", "key_clusters")}
        for length, sizes in SIZES
        for method, used in COUNTS.items()
    ]
    passages = Passages(tokenizer, bundled_books())
    keep_missing(kept, runs, partial(measure, model=model, passages=passages), "sizes")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
