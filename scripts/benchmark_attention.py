"""Speed and memory of the attention ops against exact attention, the error beside every speed.

Every row compares with `scaled_dot_product_attention` in the same run, interleaved; clustering is included. Times are
taken on random inputs of `--heads` heads; the error is that of the attention output on the queries, keys and values
which the pretrained BERT of the demo makes of novels at the same length (its positions repeated beyond 512 tokens).

    python scripts/benchmark_attention.py                  # writes scripts/results/benchmark_attention.{json,png}
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from real_attention import attention_inputs
from rich.progress import track

from hf_effattn.patching.methods import MethodSettings, make_settings, run_method
from hf_effattn.reporting.cost import interleaved_rounds, median, median_ratio, peak_memory_added
from hf_effattn.reporting.environment import environment
from hf_effattn.reporting.errors import relative_error

EXACT = "exact (SDPA)"
METHODS: dict[str, MethodSettings] = {
    "clustered C=100": make_settings("clustered", clusters=100, min_length=0),
    "i-clustered C=100 k=32": make_settings("i-clustered", clusters=100, topk=32, min_length=0),
    "i-clustered C=25 k=32": make_settings("i-clustered", clusters=25, topk=32, min_length=0),
    "i-clustered C=256 k=64": make_settings("i-clustered", clusters=256, topk=64, min_length=0),
    "i-clustered C=100 k=32, LSH 10": make_settings(
        "i-clustered", clusters=100, topk=32, clustering="lsh", iterations=10, min_length=0
    ),
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(length: int, heads: int, head_dim: int, dtype: torch.dtype) -> Inputs:
    """Query, key and value in the layout in which transformers hands them over, `(1, H, N, D)`."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(1, length, heads, head_dim, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    return query, key, value


def forward(attend: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
    """Attention without gradients."""
    with torch.no_grad():
        return attend(*inputs)


def forward_backward(attend: Callable[..., torch.Tensor], inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Attention and the gradients of query, key and value."""
    output = attend(*inputs)
    return torch.autograd.grad(output, inputs, torch.ones_like(output))


def attention_error(attend: Callable[..., torch.Tensor], real: list[Inputs]) -> float:
    """Relative L2 error of the attention output, the mean over the layers of the pretrained model."""
    errors = [relative_error(F.scaled_dot_product_attention(*inputs), forward(attend, inputs)) for inputs in real]
    return sum(errors) / len(errors)


def measure_length(length: int, heads: int, head_dim: int, dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """One row for exact attention and one for each method."""
    calls = {EXACT: F.scaled_dot_product_attention} | {
        name: partial(run_method, settings)
        for name, settings in METHODS.items()
        if not settings.is_exact(length, length, "cpu")
    }
    inputs = random_inputs(length, heads, head_dim, dtype)
    rows = {name: {"length": length, "method": name} for name in calls}
    device = torch.device("cpu")
    for part, run in (("forward", forward), ("forward_backward", forward_backward)):
        runs = {name: partial(run, attend, inputs) for name, attend in calls.items()}
        for name, call in runs.items():
            _, rows[name][f"{part}_peak_bytes"] = peak_memory_added(call, device)  # the warm-up round too
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        nothing = dict.fromkeys(runs, lambda: None)
        interleaved_rounds(runs, device, repeats, before=nothing, seconds=seconds, after_call=lambda: None)
        for name, times in seconds.items():
            rows[name] |= {
                f"{part}_ms": 1e3 * (median(times) or 0.0),
                f"{part}_speedup": median_ratio(seconds[EXACT], times),
                f"{part}_rounds": len(times),
            }
    real = attention_inputs(length)
    for name, attend in calls.items():
        rows[name]["real_attention_error"] = 0.0 if name == EXACT else attention_error(attend, real)
    return list(rows.values())


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Speed-up and memory against length, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["method"] for row in rows))
    for number, name in enumerate(names):
        mine = [row for row in rows if row["method"] == name]
        lengths = [row["length"] for row in mine]
        style = {"color": "black", "linestyle": "--"} if name == EXACT else {"color": f"C{number - 1}", "marker": "o"}
        for panel, values in (
            (panels[0], [row["forward_speedup"] for row in mine]),
            (panels[1], [row["forward_backward_speedup"] for row in mine]),
            (panels[2], [row["forward_backward_peak_bytes"] / 2**20 for row in mine]),
        ):
            panel.plot(lengths, values, label=name, markersize=4, **style)
    for panel, label in zip(
        panels,
        ("forward: times faster than exact", "forward + backward: times faster", "peak memory added, MiB (fwd + bwd)"),
        strict=True,
    ):
        panel.set(xscale="log", yscale="log", xlabel="tokens", title=label)
        panel.set_xticks(sorted({row["length"] for row in rows}), minor=False)
        panel.get_xaxis().set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.get_yaxis().set_major_formatter(lambda value, _: f"{value:g}")
        panel.tick_params(axis="x", rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "512,1024,2048,4096,8192,16384",
    heads: int = 12,
    head_dim: int = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 5,
    output: Path = Path(__file__).parent / "results" / "benchmark_attention.json",
) -> None:
    """Measure every length, print the table, and keep it as JSON and as a plot beside it."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    settings = {"batch": 1, "heads": heads, "head_dim": head_dim, "dtype": dtype, "repeats": repeats}
    output.parent.mkdir(parents=True, exist_ok=True)
    for length in track([int(part) for part in lengths.split(",")], description="lengths"):
        rows += measure_length(length, heads, head_dim, getattr(torch, dtype), repeats)
        # After every length: what was measured survives an interruption.
        output.write_text(json.dumps({"environment": environment(), "settings": settings, "rows": rows}, indent=1))
    draw(rows, output.with_suffix(".png"), f"B=1, H={heads}, D={head_dim}, {dtype}, clustering included")
    with pd.option_context("display.width", 200, "display.max_columns", 20, "display.precision", 3):
        print(pd.DataFrame(rows).drop(columns=["forward_rounds", "forward_backward_rounds"]).to_string(index=False))
    print(f"written: {output} and {output.with_suffix('.png')}")


if __name__ == "__main__":
    typer.run(main)
