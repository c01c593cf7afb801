"""From which length on is each method faster than exact attention on this machine? With cheap and dear settings.

The result is what `min_length=None` means on this kind of device: the longest of all machines of the kind, and of all
dtypes, that were measured. It is written to the package's `crossover.json`, where those of other machines are kept.
What was measured is kept after every length: interrupted and called again, it goes on; finished and called again, it
measures anew.

    python -m scripts.benchmark.crossover
    python -m scripts.benchmark.crossover --dtype bfloat16
    python -m scripts.benchmark.crossover --causal
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import hf_effattn.patching
from hf_effattn.measuring.bench import forward, random_inputs
from hf_effattn.measuring.cost import compare
from hf_effattn.measuring.environment import environment
from hf_effattn.measuring.exact_kernels import exact_kernels
from hf_effattn.patching.methods import make_method

from ..shared.command_line import run_with_help

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
    {"method": "bi-clustered", "clusters": 25, "topk": 32, "key_clusters": 50},
    {"method": "bi-clustered", "clusters": 32, "topk": 32, "key_clusters": 32},
    {"method": "bi-clustered", "clusters": 32, "topk": 64, "key_clusters": 32},
    {"method": "bi-clustered", "clusters": 64, "topk": 32, "key_clusters": 64},
    {"method": "bi-clustered", "clusters": 64, "topk": 64, "key_clusters": 32},
    {"method": "bi-clustered", "clusters": 64, "topk": 128, "key_clusters": 64},
    {"method": "bi-clustered", "clusters": 128, "topk": 128, "key_clusters": 64},
    {"method": "bi-clustered", "clusters": 256, "topk": 128, "key_clusters": 128},
)
# Of the causal form, which is overtaken later: every segment makes tables of all older keys.
CAUSAL_LENGTHS = (1024, 2048, 4096, 6144, 8192, 16384)
# Three key/value heads on two threads, and heads that run exactly, leave about so much less.
LEAST_CAUSAL_SPEEDUP = 1.1
# A GPU's exact attention is overtaken later.
LONGER: dict[str, tuple[int, ...]] = {"cpu": (), "cuda": (16384, 32768)}
LONGER_CAUSAL: dict[str, tuple[int, ...]] = {"cpu": (), "cuda": (32768, 65536)}
CAUSAL_SETTINGS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 25},
    {"method": "clustered", "clusters": 100},
    {"method": "i-clustered", "clusters": 25, "exact_keys": 192},
    {"method": "i-clustered", "clusters": 100, "exact_keys": 192},
    {"method": "bi-clustered", "exact_keys": 96, "key_clusters": 4},  # of most heads, calibrated
    {"method": "bi-clustered", "exact_keys": 384, "key_clusters": 16},
    {"method": "bi-clustered", "exact_keys": 768, "key_clusters": 64},
)
CROSSOVER = Path(hf_effattn.patching.__file__).parent / "methods" / "crossover.json"


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
    inputs = random_inputs(1, length, heads, head_dim, dtype, device)
    exact, _ = exact_kernels(*inputs, causal=causal)
    attends = {f"exact: {name}": attend for name, attend in exact.items()}
    for number, options in enumerate(tried):
        settings = make_method(**options, causal=causal, min_length=0)
        if not settings.is_exact(length, device.type):
            attends[str(number)] = partial(settings.run, causal=causal)
    calls = {name: partial(forward, attend, inputs) for name, attend in attends.items()}
    for name in list(calls):
        try:
            calls[name]()
        except Exception as error:  # no memory, or a kernel that this chip has no room for
            print(f"{name} does not run at {length} tokens: {error}")
            del calls[name]
    measured = compare(calls, [name for name in calls if name.startswith("exact")], device, repeats)
    return {number: measured[str(number)]["speedup"] or 0.0 for number in range(len(tried)) if str(number) in measured}


def crossover(ratios: dict[int, float], least: float = 1.0) -> int:
    """The shortest measured length from which on the method is never slower than exact attention, `least` times.

    Where it is slower at the longest, a power of two times that: the ratio grows no faster than the length.
    """
    longest = max(ratios)
    shortest = 2 * longest
    while shortest * ratios[longest] < longest * least:
        shortest *= 2
    for length in sorted(ratios, reverse=True):
        if ratios[length] < least:
            break
        shortest = length
    return shortest


def crossovers(options: dict[str, Any], machines: list[dict[str, Any]], least: float = 1.0) -> list[int]:
    """Where a setting overtakes exact attention, on each of the machines that it was measured on."""
    rows = (row for machine in machines for row in machine["forward_speedup"])
    matches = (row["speedup"] for row in rows if options | {"speedup": row["speedup"]} == row)
    by_length = ({int(length): ratio for length, ratio in speedup.items()} for speedup in matches)
    return [crossover(ratios, least) for ratios in by_length if ratios]


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
    default = "bfloat16" if chosen.type == "cuda" else "float32"
    dtype = dtype or default
    tried, prefix = (CAUSAL_SETTINGS, "causal_") if causal else (SETTINGS, "")
    lengths = CAUSAL_LENGTHS + LONGER_CAUSAL[chosen.type] if causal else LENGTHS + LONGER[chosen.type]
    machine = environment(chosen)
    settings = {"batch": 1, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    kept: dict[str, Any] = json.loads((output if output.exists() else CROSSOVER).read_text(encoding="utf-8"))
    kept["measured_by"] = "scripts/benchmark/crossover.py"
    measured = unfinished(kept, f"{prefix}{device}", machine, settings)
    for length in track([length for length in lengths if length not in measured], description="lengths"):
        ratios = speedups(length, heads, head_dim, chosen, repeats, dtype=getattr(torch, dtype), causal=causal)
        measured[length] = {number: max(round(ratio, 3), 0.001) for number, ratio in ratios.items()}
        so_far = {"environment": machine, "settings": settings, "forward_speedup": measured}
        kept.setdefault("unfinished", {})[f"{prefix}{device}"] = so_far
        write(kept, output)
    machines = kept.setdefault(f"{prefix}measurements", {}).setdefault(device, {})
    machines[machine["device_name"] + ("" if dtype == default else f", {dtype}")] = {
        "environment": machine,
        **settings,
        "forward_speedup": [
            options | {"speedup": {length: measured[length][i] for length in lengths if i in measured[length]}}
            for i, options in enumerate(tried)
        ],
    }
    shortest = [
        options | {"min_length": max(of_machines)}
        for options in tried
        if (of_machines := crossovers(options, list(machines.values()), LEAST_CAUSAL_SPEEDUP if causal else 1.0))
    ]
    kept.setdefault(f"{prefix}min_length", {})[device] = shortest
    del kept["unfinished"][f"{prefix}{device}"]
    if not kept["unfinished"]:
        del kept["unfinished"]
    write(kept, output)
    for options in shortest:
        print(options)
    print(f"written: {output}")


def unfinished(
    kept: dict[str, Any], name: str, machine: dict[str, Any], settings: dict[str, Any]
) -> dict[int, dict[int, float]]:
    """What an interrupted run on this machine with these settings measured: ratios by length and setting's number."""
    earlier = kept.get("unfinished", {}).get(name)
    same = (
        earlier is not None
        and earlier["settings"] == settings
        and all(earlier["environment"][field] == machine[field] for field in ("device_name", "threads", "versions"))
    )
    rows = earlier["forward_speedup"].items() if same else ()
    return {int(length): {int(number): ratio for number, ratio in ratios.items()} for length, ratios in rows}


def write(kept: dict[str, Any], output: Path) -> None:
    """Replace the file as a whole: a run that is stopped while writing leaves it as it was."""
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_suffix(".part")
    part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    part.replace(output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
