"""How fast is each method, how much memory does it take, how large is its error? Against the fastest exact attention.

Every call of a length is timed in the same run, interleaved, clustering included. Times are taken on random inputs of
`--heads` heads; the errors are those of the attention output on these, and on the queries, keys and values which the
pretrained BERT of the demo makes of novels at the same length (its positions repeated beyond 512 tokens); null where
that is not at hand (`scripts/benchmark/_inputs.py`). Heads of those run exactly where they ask for it, and none of the
random ones does: `scripts.benchmark.other_methods` has times and errors of the same calls.

    python -m scripts.benchmark.attention      # writes scripts/results/benchmark_attention.json

Where there is a GPU it runs there, in bfloat16 with 16 heads, and writes benchmark_attention_gpu.json. What the
output file already holds is not measured again: an interrupted run goes on.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from hf_effattn.measuring.bench import exact_output, forward, measure_shape, random_inputs
from hf_effattn.measuring.errors import relative_error
from hf_effattn.patching.methods import Method, make_method
from hf_effattn.settings_parsing import method_of

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns, device_defaults, print_table
from ._inputs import Inputs, attention_inputs
from ._timing import Dtypes, Repeats, Rows, keep_missing, numbers

EXACT = "exact"
METHODS: dict[str, Method] = {
    text: make_method(**method_of(text), min_length=0)
    for text in (
        "clustered clusters=100",
        "i-clustered clusters=100 topk=32",
        "i-clustered clusters=25 topk=32",
        "i-clustered clusters=256 topk=64",
        "i-clustered clusters=100 clustering=lsh iterations=10 topk=32",
        "bi-clustered clusters=32 topk=32 key_clusters=32",
        "bi-clustered clusters=64 topk=64 key_clusters=32",
        "bi-clustered clusters=128 topk=128 key_clusters=64",
    )
}
DEFAULT_LENGTHS = {"cpu": "512,1024,2048,4096,8192,16384", "cuda": "512,1024,2048,4096,8192,16384,32768,65536,131072"}
DEFAULT_HEADS = {"cpu": 12, "cuda": 16}
LONGEST_REAL = {"cpu": 16384, "cuda": 65536}
LONG = 16384  # from here on, on a CPU, a third of the rounds has to do for forward and backward pass


def attention_error(
    attend: Callable[..., torch.Tensor], seen: list[Inputs], expected: list[torch.Tensor]
) -> float | None:
    """Relative L2 error of the attention output, the mean over the inputs; None without any."""
    errors = [relative_error(exact, forward(attend, inputs)) for inputs, exact in zip(seen, expected, strict=True)]
    return sum(errors) / len(errors) if errors else None


def measure(shape: dict[str, Any], heads: int, head_dim: int, device: torch.device, repeats: int) -> Rows:
    """One row for every exact kernel and one for each method; speeds are against the fastest of the exact ones."""
    batch, length, dtype = shape["batch"], shape["length"], getattr(torch, shape["dtype"])
    inputs = random_inputs(batch, length, heads, head_dim, dtype, device)
    few = device.type == "cpu" and length >= LONG
    rounds = {"forward": repeats, "forward_backward": max(3, repeats // 3) if few else repeats}
    measured, calls = measure_shape(METHODS, inputs, rounds)
    rows = [shape | row for row in measured]
    real = attention_inputs(length, device, dtype) if length <= LONGEST_REAL[device.type] else []
    expected = {
        "real_error": (real, [exact_output(sample) for sample in real]),
        "random_error": ([inputs], [exact_output(inputs)]),
    }
    for row in rows:
        name, ran = str(row["method"]), "forward_ms" in row
        row |= {field: attention_error(calls[name], *of) if ran else None for field, of in expected.items()}
    return rows


def table(kept: KeptRuns) -> pd.DataFrame:
    """What a reader wants to see of the rows."""
    shown = [
        {name: value for name, value in row.items() if not isinstance(value, list | dict) and "rounds" not in name}
        for row in kept.rows
    ]
    hidden = ["exact", "forward_fastest_exact", "forward_backward_fastest_exact", *kept.machine]
    return pd.DataFrame(shown).drop(columns=hidden, errors="ignore")


def main(
    lengths: Annotated[str | None, typer.Option(help="Comma-separated numbers of tokens.")] = None,
    dtypes: Dtypes = None,
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1",
    heads: int | None = None,
    head_dim: int = 64,
    repeats: Repeats = 10,
    output: Path | None = None,
) -> None:
    """Measure every shape, print the table, and keep it as JSON."""
    device, dtypes, output = device_defaults("benchmark_attention", dtypes, output)
    heads = heads or DEFAULT_HEADS[device.type]
    methods = {name: {"method": method.method} | method.to_dict() for name, method in METHODS.items()}
    settings = {"heads": heads, "head_dim": head_dim, "repeats": repeats, "methods": methods}
    kept = KeptRuns(output, settings, device)
    chosen = product(dtypes.split(","), numbers(batches), numbers(lengths or DEFAULT_LENGTHS[device.type]))
    shapes = [{"dtype": dtype, "batch": batch, "length": length} for dtype, batch, length in chosen]
    keep_missing(
        kept, shapes, partial(measure, heads=heads, head_dim=head_dim, device=device, repeats=repeats), "shapes"
    )
    print_table(table(kept), output)
    for row in kept.rows:
        for name, reason in row.get("refused", {}).items():
            print(f"{row['dtype']}, batch {row['batch']}, {row['length']:,} tokens: no {name}: {reason}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
