"""What does each way of clustering cost, and how large an attention error does it lead to?

Labels are made of the queries and keys of a pretrained BERT on novels (three of its layers); the error is that of
improved clustered attention with those labels. This is what the defaults of `cluster_queries` were chosen by.

    python -m scripts.benchmark.clustering                 # writes scripts/results/benchmark_clustering.json
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from hf_effattn.measuring.cost import interleaved_rounds, median
from hf_effattn.measuring.errors import relative_error
from hf_effattn.ops import cluster_queries, improved_clustered_attention

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._inputs import attention_inputs
from ._timing import CPU, Lengths, Repeats, Rows, keep_missing, numbers

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


def measure(run: dict[str, Any], clusters: int, topk: int, repeats: int) -> Rows:
    """One row per clustering: milliseconds of one layer's labels, and the mean error over the layers."""
    layers = attention_inputs(run["length"])
    exact = [F.scaled_dot_product_attention(*inputs) for inputs in layers]
    query, key, _ = layers[1]
    calls = {
        name: partial(cluster_queries, query, clusters, key=key if metric else None, **options)
        for name, (options, metric) in CLUSTERINGS.items()
    }
    for call in calls.values():
        call()
    seconds = interleaved_rounds(calls, CPU, repeats)
    rows = []
    for name, (options, metric) in CLUSTERINGS.items():
        errors = []
        for (query, key, value), expected in zip(layers, exact, strict=True):
            labels = cluster_queries(query, clusters, key=key if metric else None, **options)
            actual = improved_clustered_attention(query, key, value, labels, clusters=clusters, topk=topk)
            errors.append(relative_error(expected, actual))
        scores = {"ms": 1e3 * (median(seconds[name]) or 0.0), "attention_error": sum(errors) / len(errors)}
        rows.append(run | {"clustering": name} | scores)
    return rows


def main(
    lengths: Lengths = "512,2048,8192",
    clusters: int = 100,
    topk: int = 32,
    repeats: Repeats = 5,
    output: Path = RESULTS / "benchmark_clustering.json",
) -> None:
    """Measure every clustering at every length, print the table and keep it as JSON."""
    kept = KeptRuns(output, {"clusters": clusters, "topk": topk})
    cases = [{"length": length} for length in numbers(lengths)]
    keep_missing(kept, cases, partial(measure, clusters=clusters, topk=topk, repeats=repeats), "lengths")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
