"""What first order saves: the error of every head of a pretrained BERT, beside order zero at the same settings.

Queries, keys and values are those of all-MiniLM-L6-v2 on books that no setting was chosen on, its positions repeated
beyond 512 tokens; query clusters, top keys and key clusters are as many for both. Of every layer: the errors of its
heads, and of all heads together with the 0, 1, 2 and 3 heads exact whose predicted error is largest. Then the whole
model with all layers replaced and no head exact: its last hidden state.

    python -m scripts.benchmark.head_errors     # writes scripts/results/head_errors.json
"""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track

from hf_effattn import extend_positions, patch_attention, unpatch_attention
from hf_effattn.measuring.bench import exact_output
from hf_effattn.measuring.errors import relative_error, run_model
from hf_effattn.ops import bi_clustered_attention, predicted_error, query_residuals
from hf_effattn.patching.methods.clustered import BiClustered
from hf_effattn.samples.model import load_model

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns, print_table
from ._inputs import HELD_OUT, Inputs, held_out_inputs, held_out_tokens
from ._other_methods import order_zero

LENGTHS = (2048, 4096, 8192)
# Clusters, top keys, key clusters.
SETTINGS = ((32, 16, 32), (64, 32, 64), (100, 32, 64), (128, 64, 128), (128, 128, 128))
HIDDEN_STATES = ((512, 25, 32, 50), (512, 100, 64, 200), (4096, 64, 32, 64), (4096, 128, 64, 128))
MOST_EXACT = 3


def heads_of(inputs: Inputs, output: torch.Tensor) -> tuple[list[float], list[float]]:
    """Squared error, and squared length of the exact output, of every head."""
    exact = exact_output(inputs).double()
    return (output - exact)[0].square().sum(dim=(1, 2)).tolist(), exact[0].square().sum(dim=(1, 2)).tolist()


@torch.no_grad()
def measure_heads(book: str, length: int) -> list[dict[str, Any]]:
    """A row per layer and setting."""
    rows = []
    for layer, inputs in enumerate(held_out_inputs(length, files=(book,))):
        for clusters, topk, key_clusters in SETTINGS:
            sizes: dict[str, Any] = {"clusters": clusters, "topk": topk, "key_clusters": key_clusters}
            query, key, value = inputs
            method = BiClustered(**sizes, max_predicted_error=None, min_length=0)
            labels, key_labels = method.group(query, key, None)
            residuals, _ = query_residuals(query, labels, clusters)
            predicted = predicted_error(residuals, None, key, key_labels, key_clusters)
            output = bi_clustered_attention(query, key, value, labels, key_labels, **sizes)
            squared, exact = heads_of(inputs, output)
            zero, _ = heads_of(inputs, order_zero(*inputs, **sizes))
            worst = predicted[0].argsort(descending=True).tolist()
            left = {
                str(count): (sum(squared[head] for head in worst[count:]) / sum(exact)) ** 0.5
                for count in range(MOST_EXACT + 1)
            }
            rows.append(
                {"kind": "heads", "book": book, "length": length, "layer": layer + 1, **sizes}
                | {
                    "first_order": [(error / size) ** 0.5 for error, size in zip(squared, exact, strict=True)],
                    "order_zero": [(error / size) ** 0.5 for error, size in zip(zero, exact, strict=True)],
                    "order_zero_together": (sum(zero) / sum(exact)) ** 0.5,
                    "together_with_exact_heads": left,
                    "predicted": predicted[0].tolist(),
                }
            )
    return rows


def measure_hidden_state(book: str, length: int, clusters: int, topk: int, key_clusters: int) -> dict[str, Any]:
    """The change of the last hidden state, all layers replaced and no head exact."""
    model, tokenizer, _ = load_model(None)
    (tokens,) = held_out_tokens(tokenizer, (book,))
    if length > model.config.max_position_embeddings:
        extend_positions(model, length)
    batch = {"input_ids": tokens[None, :length]}
    exact = run_model(model, batch).hidden
    sizes: dict[str, Any] = {"clusters": clusters, "topk": topk, "key_clusters": key_clusters}
    patch_attention(model, "bi-clustered", **sizes, max_predicted_error=None, min_length=0)
    changed = run_model(model, batch).hidden
    unpatch_attention(model)
    assert exact is not None
    assert changed is not None
    pooled = torch.cosine_similarity(exact.mean(dim=1), changed.mean(dim=1)).item()
    run = {"kind": "hidden state", "book": book, "length": length, **sizes}
    return run | {"error": relative_error(exact, changed), "cosine": pooled}


def summary(rows: list[dict[str, Any]]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Ratios to order zero by length and setting; errors of whole layers by layer; hidden states."""
    sizes = ["length", "clusters", "topk", "key_clusters"]
    heads = pd.DataFrame([row for row in rows if row["kind"] == "heads"])
    ratios = []
    for key, group in heads.groupby(sizes):
        both = {name: pd.Series([error for errors in group[name] for error in errors]) for name in METHODS}
        row = dict(zip(sizes, key, strict=True))
        for statistic in ("median", "mean"):
            values = {name: float(getattr(errors, statistic)()) for name, errors in both.items()}
            row |= {f"{name} {statistic}": value for name, value in values.items()}
            row[f"{statistic} ratio"] = values["first_order"] / values["order_zero"]
        ratios.append(row)
    exact = pd.json_normalize(heads["together_with_exact_heads"].tolist()).add_suffix(" exact")
    layers = pd.concat([heads[[*sizes, "layer", "order_zero_together"]], exact], axis=1)
    hidden = pd.DataFrame([row for row in rows if row["kind"] == "hidden state"])
    return (
        pd.DataFrame(ratios),
        layers.groupby([*sizes, "layer"]).mean().reset_index(),
        hidden.groupby(sizes)[["error", "cosine"]].agg(["min", "max"]).reset_index(),
    )


METHODS = ("first_order", "order_zero")


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = ",".join(map(str, LENGTHS)),
    output: Path = Path(__file__).parents[1] / "results" / "head_errors.json",
) -> None:
    """Measure all heads, then the hidden states, and print three tables."""
    kept = KeptRuns(output, {"model": "all-MiniLM-L6-v2"})
    wanted = [int(part) for part in lengths.split(",")]
    runs = [{"kind": "heads", "book": book, "length": length} for book, length in product(HELD_OUT, wanted)]
    for run in track(kept.missing(runs), description="heads"):
        kept.add(*measure_heads(run["book"], run["length"]))
    names = ("length", "clusters", "topk", "key_clusters")
    hidden = [
        {"kind": "hidden state", "book": book, **dict(zip(names, sizes, strict=True))}
        for book, sizes in product(HELD_OUT, HIDDEN_STATES)
    ]
    for run in track(kept.missing(hidden), description="hidden states"):
        kept.add(measure_hidden_state(run["book"], *(run[name] for name in names)))
    for table in summary(kept.rows):
        print_table(table, output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
