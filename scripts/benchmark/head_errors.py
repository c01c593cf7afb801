"""What first order saves: the error of every head of a pretrained BERT, beside order zero at the same settings.

Queries, keys and values are those of all-MiniLM-L6-v2 on books that no setting was chosen on, its positions repeated
beyond 512 tokens; query clusters, top keys and key clusters are as many for both, and no head is exact.

    python -m scripts.benchmark.head_errors     # writes scripts/results/head_errors.json
"""

from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from hf_effattn.measuring.bench import exact_output
from hf_effattn.ops import bi_clustered_attention
from hf_effattn.patching.methods.clustered import BiClustered

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table
from ._inputs import HELD_OUT, Inputs, held_out_inputs
from ._other_methods import order_zero
from ._timing import Lengths, Rows, keep_missing, numbers

# Clusters, top keys, key clusters.
SETTINGS = ((32, 16, 32), (64, 32, 64), (100, 32, 64), (128, 64, 128), (128, 128, 128))
SIZES = ("clusters", "topk", "key_clusters")
SUMMARIES = ("first_order", "order_zero")


def errors_of_heads(inputs: Inputs, output: torch.Tensor) -> list[float]:
    """The relative L2 error of every head."""
    exact = exact_output(inputs).double()
    return ((output - exact)[0].norm(dim=(1, 2)) / exact[0].norm(dim=(1, 2))).tolist()


@torch.no_grad()
def measure(run: dict[str, Any]) -> Rows:
    """A row per layer and setting."""
    rows = []
    for layer, inputs in enumerate(held_out_inputs(run["length"], files=(run["book"],))):
        for setting in SETTINGS:
            sizes: dict[str, Any] = dict(zip(SIZES, setting, strict=True))
            labels = BiClustered(**sizes, max_predicted_error=None, min_length=0).group(*inputs[:2], None)
            outputs = bi_clustered_attention(*inputs, *labels, **sizes), order_zero(*inputs, **sizes)
            errors = zip(SUMMARIES, (errors_of_heads(inputs, output) for output in outputs), strict=True)
            rows.append(run | {"layer": layer + 1, **sizes, **dict(errors)})
    return rows


def summary(rows: Rows) -> pd.DataFrame:
    """Medians and means over heads by length and setting, and their ratios to order zero's."""
    keys = ["length", *SIZES]
    table = []
    for key, group in pd.DataFrame(rows).groupby(keys):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        for statistic in ("median", "mean"):
            values = [float(getattr(group[name].explode().astype(float), statistic)()) for name in SUMMARIES]
            row |= {f"{name} {statistic}": value for name, value in zip(SUMMARIES, values, strict=True)}
            row[f"{statistic} ratio"] = values[0] / values[1]
        table.append(row)
    return pd.DataFrame(table)


def main(
    lengths: Lengths = "2048,4096,8192",
    output: Path = RESULTS / "head_errors.json",
) -> None:
    """Measure all heads and print the table."""
    kept = KeptRuns(output, {"model": "all-MiniLM-L6-v2"})
    runs = [{"book": book, "length": length} for book, length in product(HELD_OUT, numbers(lengths))]
    keep_missing(kept, runs, measure, "heads")
    print_table(summary(kept.rows), output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
