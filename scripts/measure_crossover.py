"""From which length on each method is faster than exact attention on this machine, for cheap and for dear settings.

The result is what `min_length=None` means on this kind of device; it is written to the package's `crossover.json`,
where the lengths of other kinds of device are kept.

    python scripts/measure_crossover.py
    python scripts/measure_crossover.py --causal
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
from hf_effattn.patching.methods import make_settings, run_method
from hf_effattn.reporting.cost import interleaved_rounds, median_ratio
from hf_effattn.reporting.environment import environment

LENGTHS = (512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 6144, 8192)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 25},
    {"method": "clustered", "clusters": 100},
    {"method": "clustered", "clusters": 256},
    {"method": "clustered", "clusters": 512},
    {"method": "i-clustered", "clusters": 25, "topk": 32},
    {"method": "i-clustered", "clusters": 100, "topk": 32},
    {"method": "i-clustered", "clusters": 100, "topk": 128},
    {"method": "i-clustered", "clusters": 32, "topk": 384},
    {"method": "i-clustered", "clusters": 40, "topk": 192},
    {"method": "i-clustered", "clusters": 256, "topk": 64},
    {"method": "i-clustered", "clusters": 512, "topk": 128},
    {"method": "bi-clustered", "clusters": 25, "topk": 32, "key_clusters": 25},
    {"method": "bi-clustered", "clusters": 32, "topk": 128, "key_clusters": 32},
    {"method": "bi-clustered", "clusters": 40, "topk": 384, "key_clusters": 32},
    {"method": "bi-clustered", "clusters": 64, "topk": 384, "key_clusters": 128},
    {"method": "bi-clustered", "clusters": 100, "topk": 32, "key_clusters": 64},
    {"method": "bi-clustered", "clusters": 100, "topk": 64, "key_clusters": 100},
    {"method": "bi-clustered", "clusters": 100, "topk": 128, "key_clusters": 256},
    {"method": "bi-clustered", "clusters": 256, "topk": 64, "key_clusters": 128},
    {"method": "bi-clustered", "clusters": 512, "topk": 128, "key_clusters": 256},
)
# Of the causal form, whose work per token is larger and grows with the logarithm of the length.
CAUSAL_LENGTHS = (1024, 2048, 4096, 8192, 16384)
CAUSAL_SETTINGS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 25},
    {"method": "clustered", "clusters": 100},
    {"method": "i-clustered", "clusters": 25, "topk": 32},
    {"method": "i-clustered", "clusters": 100, "topk": 32},
    {"method": "bi-clustered", "clusters": 25, "topk": 32, "key_clusters": 64},
    {"method": "bi-clustered", "clusters": 100, "topk": 64, "key_clusters": 100},
)
CROSSOVER = Path(hf_effattn.patching.__file__).parent / "crossover.json"


def speedups(
    length: int,
    heads: int,
    head_dim: int,
    device: torch.device,
    repeats: int,
    *,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
) -> dict[int, float]:
    """Forward time of exact attention over that of each of the settings that fits, clustering included."""
    tried = CAUSAL_SETTINGS if causal else SETTINGS
    torch.manual_seed(length)
    query, key, value = (
        torch.randn(1, length, heads, head_dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)
    )
    calls = {-1: partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)}
    for number, options in enumerate(tried):
        settings = make_settings(**options, min_length=0)
        if not settings.is_exact(length, length, device.type, causal=causal):
            calls[number] = partial(run_method, settings, query, key, value, causal=causal)
    seconds: dict[str, list[float]] = {str(number): [] for number in calls}
    for call in calls.values():
        call()
    named = {str(number): call for number, call in calls.items()}
    nothing = dict.fromkeys(named, lambda: None)
    with torch.no_grad():
        interleaved_rounds(named, device, repeats, before=nothing, seconds=seconds, after_call=lambda: None)
    return {
        number: median_ratio(seconds["-1"], seconds[str(number)]) or 0.0
        for number in range(len(tried))
        if number in calls
    }


def crossover(ratios: dict[int, float]) -> int:
    """The shortest measured length from which on the method is never slower.

    Where it is slower at the longest, a power of two times that: the ratio grows no faster than the length.
    """
    longest = max(ratios)
    shortest = 2 * longest
    while shortest * ratios[longest] < longest:
        shortest *= 2
    for length in sorted(ratios, reverse=True):
        if ratios[length] < 1.0:
            break
        shortest = length
    return shortest


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    heads: int = 12,
    head_dim: int = 64,
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 5,
    causal: Annotated[bool, typer.Option(help="Measure the form of models that mask the future.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, else float32.")] = None,
    output: Path = CROSSOVER,
) -> None:
    """Measure every length, print the ratios and keep them, with the crossover, as JSON."""
    chosen = torch.device(device)
    dtype = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
    tried, prefix = (CAUSAL_SETTINGS, "causal_") if causal else (SETTINGS, "")
    measured: list[dict[int, float]] = [{} for _ in tried]
    for length in track(CAUSAL_LENGTHS if causal else LENGTHS, description="lengths"):
        found_here = speedups(length, heads, head_dim, chosen, repeats, dtype=getattr(torch, dtype), causal=causal)
        for number, ratio in found_here.items():
            measured[number][length] = round(ratio, 3)
    kept: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    kept["measured_by"] = "scripts/measure_crossover.py"
    found = [
        options | {"min_length": crossover(ratios)} for options, ratios in zip(tried, measured, strict=True) if ratios
    ]
    kept.setdefault(f"{prefix}min_length", {})[device] = found
    kept.setdefault(f"{prefix}measurements", {})[device] = {
        "environment": environment(chosen),
        "batch": 1,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "forward_speedup": [options | {"speedup": ratios} for options, ratios in zip(tried, measured, strict=True)],
    }
    output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for options in found:
        print(options)
    print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
