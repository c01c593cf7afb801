"""Divides one text among processes by `hf_effattn.parallelize`: peak memory, seconds, and whether the output changes.

The model is a random RoBERTa of base size with bi-clustered attention and a position for every token. Each process is
new. Its peak is the most that it ever held, less what it held after its imports; both are kept. It is read from
`VmHWM`: `ru_maxrss` is the same, or the peak of the process that started this one where that is more. The difference
of the output is the relative L2 distance from one process of one thread, on every 64th token.

    python -m scripts.reliability.tensor_parallel        # writes scripts/results/tensor_parallel.json

Lengths in the output file are not run again. Run nothing else on the machine meanwhile: `load` is the mean number of
busy processes in the minute before.
"""

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel  # what a process holds when idle
import typer
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes
from transformers import RobertaConfig, RobertaModel

import hf_effattn

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from .memory import resident

METHOD = "bi-clustered"
LENGTHS = (32_768, 131_072)
# Processes and the threads of each; the others are compared with the first.
DIVISIONS = ((1, 1), (1, 2), (2, 1))
SAMPLED = 64
LONGEST_WAIT = timedelta(hours=2)


def measure(rank: int, processes: int, threads: int, tokens: int, layers: int, folder: Path) -> None:
    """One pass in one of some processes.

    Args:
        rank (`int`): which of them this is.
        processes (`int`): how many share the text.
        threads (`int`): of each.
        tokens (`int`): of the text.
        layers (`int`): of the model.
        folder (`Path`): gets `{rank}.json` and `{rank}.pt`, some of the output.
    """
    torch.set_num_threads(threads)
    idle = resident("VmRSS")
    torch.manual_seed(0)
    config = RobertaConfig(max_position_embeddings=tokens + 2, num_hidden_layers=layers, type_vocab_size=1)
    model = hf_effattn.patch_attention(RobertaModel(config, add_pooling_layer=False).eval(), METHOD)
    if processes > 1:
        store = (folder / "store").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=LONGEST_WAIT)
        hf_effattn.parallelize(model, init_device_mesh("cpu", (processes,)))
    weights = resident("VmRSS") - idle
    ids = torch.randint(5, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    with torch.no_grad():
        hidden = model(ids).last_hidden_state
    row = {"seconds": time.perf_counter() - start, "idle": idle, "weights": weights, "peak": resident("VmHWM") - idle}
    torch.save(hidden[0, ::SAMPLED].clone(), folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(row), encoding="utf-8")
    if processes > 1:
        dist.destroy_process_group()


def rows_of(tokens: int, layers: int, folder: Path) -> list[dict[str, Any]]:
    """A row for every rank of every division, with bytes, seconds and the difference of its output."""
    rows: list[dict[str, Any]] = []
    expected = torch.empty(0)
    for processes, threads in DIVISIONS:
        place = folder / f"{tokens}-{processes}-{threads}"
        place.mkdir()
        load = os.getloadavg()[0]  # of other programs, and of the division before
        start_processes(measure, (processes, threads, tokens, layers, place), nprocs=processes, start_method="spawn")
        for rank in range(processes):
            hidden = torch.load(place / f"{rank}.pt").double()
            expected = hidden if not rows else expected
            row = {"tokens": tokens, "processes": processes, "threads_each": threads, "rank": rank, "load": load}
            row |= json.loads((place / f"{rank}.json").read_text(encoding="utf-8"))
            rows.append(row | {"difference": float((hidden - expected).norm() / expected.norm())})
    return rows


def main(
    layers: Annotated[int, typer.Option(help="Of the model.")] = 12,
    output: Annotated[Path, typer.Option(help="JSON file of the results; lengths in it are kept.")] = (
        RESULTS / "tensor_parallel.json"
    ),
) -> None:
    kept = KeptRuns(output, {"model": "RoBERTa, base", "layers": layers, "method": METHOD, "sampled": SAMPLED})
    with tempfile.TemporaryDirectory() as folder:
        for run in kept.missing({"tokens": tokens} for tokens in LENGTHS):
            kept.add(*rows_of(run["tokens"], layers, Path(folder)))
    print_rows(kept)
    for tokens in LENGTHS:
        one, *_ = kept.matching({"tokens": tokens})
        share = max(row["peak"] for row in kept.matching({"tokens": tokens, "processes": 2})) / one["peak"]
        print(f"{tokens:,} tokens: each of two processes holds at most {share:.2f} of what one holds at its peak")


if __name__ == "__main__":
    run_with_help(main, __doc__)
