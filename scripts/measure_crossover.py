"""From which length on each method, with its default settings, is faster than exact attention on this machine.

The result is what `min_length=None` means on this kind of device; it is written to the package's `crossover.json`,
where the lengths of other kinds of device are kept.

    python scripts/measure_crossover.py
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import track

import hf_effattn.patching
from hf_effattn import list_methods
from hf_effattn.patching.methods import make_settings, run_method
from hf_effattn.reporting.cost import interleaved_rounds, median_ratio
from hf_effattn.reporting.environment import environment

LENGTHS = (512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096)
CROSSOVER = Path(hf_effattn.patching.__file__).parent / "crossover.json"


def speedups(length: int, heads: int, head_dim: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Forward time of exact attention over that of each method, clustering included."""
    torch.manual_seed(length)
    query, key, value = (torch.randn(1, length, heads, head_dim, device=device).transpose(1, 2) for _ in range(3))
    calls = {"exact": partial(F.scaled_dot_product_attention, query, key, value)} | {
        method: partial(run_method, make_settings(method, min_length=0), query, key, value)
        for method in list_methods()
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    nothing = dict.fromkeys(calls, lambda: None)
    with torch.no_grad():
        interleaved_rounds(calls, device, repeats, before=nothing, seconds=seconds, after_call=lambda: None)
    return {method: median_ratio(seconds["exact"], seconds[method]) or 0.0 for method in list_methods()}


def crossover(ratios: dict[int, float]) -> int:
    """The shortest measured length from which on the method is never slower; twice the longest where there is none."""
    shortest = 2 * max(ratios)
    for length in sorted(ratios, reverse=True):
        if ratios[length] < 1.0:
            break
        shortest = length
    return shortest


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    heads: int = 12,
    head_dim: int = 64,
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 7,
    output: Path = CROSSOVER,
) -> None:
    """Measure every length, print the ratios and keep them, with the crossover, as JSON."""
    chosen = torch.device(device)
    measured: dict[str, dict[int, float]] = {method: {} for method in list_methods()}
    for length in track(LENGTHS, description="lengths"):
        for method, ratio in speedups(length, heads, head_dim, chosen, repeats).items():
            measured[method][length] = round(ratio, 3)
    kept: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    kept["measured_by"] = "scripts/measure_crossover.py"
    kept.setdefault("min_length", {})[device] = {method: crossover(ratios) for method, ratios in measured.items()}
    kept.setdefault("measurements", {})[device] = {
        "environment": environment(chosen),
        "batch": 1,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": "float32",
        "forward_speedup": measured,
    }
    output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for method, ratios in measured.items():
        print(f"{method}: faster from {kept['min_length'][device][method]:,} tokens on; {ratios}")
    print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
