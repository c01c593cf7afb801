"""What does each way of clustering cost, and how large an attention error does it lead to?

Labels are made of the queries and keys of a pretrained BERT on novels (three of its layers); the error is that of
improved clustered attention with those labels. This is what the defaults of `cluster_queries` were chosen by.

    python -m scripts.benchmark.clustering                 # writes scripts/results/benchmark_clustering.json
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from rich.progress import track

from hf_effattn.measuring.cost import interleaved_rounds, median
from hf_effattn.measuring.environment import environment
from hf_effattn.measuring.errors import relative_error
from hf_effattn.ops import cluster_queries, improved_clustered_attention

from ..shared.command_line import run_with_help
from ..shared.runs import print_table
from ._inputs import attention_inputs

EVERY_QUERY = 2**31
# Name: (arguments of cluster_queries, whether the keys' metric is used).
CLUSTERINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "LSH 32 bits, 10 iterations, fitted on all (the paper's)": (
        {"method": "lsh", "iterations": 10, "fit_queries": EVERY_QUERY},
        False,
    ),
    "LSH 32 bits, 10 iterations": ({"method": "lsh", "iterations": 10}, False),
    "K-means on the queries": ({}, False),
    "K-means, keys' metric (default)": ({}, True),
    "keys' metric, seeds only": ({"iterations": 0}, True),
    "keys' metric, 1 iteration": ({"iterations": 1}, True),
    "keys' metric, 10 iterations": ({"iterations": 10}, True),
    "keys' metric, fitted on 1,024": ({"fit_queries": 1024}, True),
    "keys' metric, fitted on all": ({"fit_queries": EVERY_QUERY}, True),
}


def measure(length: int, clusters: int, topk: int, repeats: int) -> list[dict[str, Any]]:
    """One row per clustering: milliseconds of one layer's labels, and the mean error over the layers."""
    layers = attention_inputs(length)
    exact = [F.scaled_dot_product_attention(*inputs) for inputs in layers]
    query, key, _ = layers[1]
    calls = {
        name: partial(cluster_queries, query, clusters, key=key if metric else None, **options)
        for name, (options, metric) in CLUSTERINGS.items()
    }
    for call in calls.values():
        call()
    seconds = interleaved_rounds(calls, torch.device("cpu"), repeats)
    rows = []
    for name, (options, metric) in CLUSTERINGS.items():
        errors = []
        for (query, key, value), expected in zip(layers, exact, strict=True):
            labels = cluster_queries(query, clusters, key=key if metric else None, **options)
            actual = improved_clustered_attention(query, key, value, labels, clusters=clusters, topk=topk)
            errors.append(relative_error(expected, actual))
        rows.append(
            {
                "length": length,
                "clusters": clusters,
                "topk": topk,
                "clustering": name,
                "ms": 1e3 * (median(seconds[name]) or 0.0),
                "attention_error": sum(errors) / len(errors),
            }
        )
    return rows


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "512,2048,8192",
    clusters: int = 100,
    topk: int = 32,
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 5,
    output: Path = Path(__file__).parents[1] / "results" / "benchmark_clustering.json",
) -> None:
    """Measure every clustering at every length, print the table and keep it as JSON."""
    rows: list[dict[str, Any]] = []
    output.parent.mkdir(parents=True, exist_ok=True)
    for length in track([int(part) for part in lengths.split(",")], description="lengths"):
        rows += measure(length, clusters, topk, repeats)
        output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    print_table(pd.DataFrame(rows), output, digits=4)


if __name__ == "__main__":
    run_with_help(main, __doc__)
