"""How close do the sentence embeddings of a patched pretrained BERT stay to those of the exact model?

All layers of all-MiniLM-L6-v2 are patched; texts are passages of novels, embeddings the normalised masked means of the
last hidden state. With `--books` the texts come from a folder of the large data sets instead of the bundled excerpts.

    python -m scripts.benchmark.embeddings                 # writes scripts/results/benchmark_embeddings.json
    python -m scripts.benchmark.embeddings --books books
"""

import gzip
import json
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track

from hf_effattn import patch_attention, unpatch_attention
from hf_effattn.measuring.environment import environment
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Book, Passages, bundled_books

from ..shared.command_line import run_with_help
from ..shared.data import dataset_path
from ..shared.runs import print_table

# Tokens, clusters, topk, key clusters.
SIZES = ((128, 25, 32, 50), (256, 25, 32, 50), (256, 100, 64, 200), (512, 100, 64, 200))
CLUSTERINGS: dict[str, dict[str, Any]] = {
    "K-means, keys' metric (default)": {},
    "K-means on the queries": {"metric": "queries"},
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


def measure(
    model: Any, passages: Passages, length: int, clusters: int, topk: int, key_clusters: int
) -> list[dict[str, Any]]:
    """One row per method and clustering: the cosine with the exact model's embeddings."""
    tokens, _, books = passages.pairs(length, per_book=4)
    exact = embed(model, tokens)
    counts = {"clusters": clusters, "topk": topk, "key_clusters": key_clusters}
    rows = []
    for method, used in COUNTS.items():
        for name, options in CLUSTERINGS.items():
            own: dict[str, Any] = {count: counts[count] for count in used}
            patch_attention(model, method, min_length=0, **own, **options)
            cosine = (embed(model, tokens) * exact).sum(dim=-1)
            unpatch_attention(model)
            rows.append(
                {
                    "length": length,
                    "method": method,
                    **{count: own.get(count) for count in counts},
                    "clustering": name,
                    "texts": len(books),
                    "books": len(set(books)),
                    "cosine_mean": cosine.mean().item(),
                    "cosine_min": cosine.min().item(),
                }
            )
    return rows


def read_books(folder: str | None) -> list[Book]:
    """The bundled excerpts, or every gzipped text of a folder of the large data sets."""
    if folder is None:
        return bundled_books()
    return [
        # The first tenth is licence and front matter; a tenth more is plenty of text.
        Book(path.name, text[len(text) // 10 : len(text) // 5])
        for path in sorted(dataset_path(folder).glob("*.txt.gz"))
        for text in [gzip.decompress(path.read_bytes()).decode("utf-8")]
    ]


def main(
    books: Annotated[str | None, typer.Option(help="Folder of the large data sets with *.txt.gz.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; the default says which books.")] = None,
) -> None:
    """Measure every size, print the table and keep it as JSON."""
    model, tokenizer, name = load_model(None)
    passages = Passages(tokenizer, read_books(books))
    suffix = "" if books is None else f"_{Path(books).name}"
    output = output or Path(__file__).parents[1] / "results" / f"benchmark_embeddings{suffix}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for size in track(SIZES, description="sizes"):
        rows += measure(model, passages, *size)
        output.write_text(json.dumps({"environment": environment(), "model": name, "rows": rows}, indent=1) + "\n")
    print_table(pd.DataFrame(rows), output, digits=5)


if __name__ == "__main__":
    run_with_help(main, __doc__)
