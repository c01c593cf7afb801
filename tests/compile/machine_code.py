"""What the hot kernels became: registers, blocks side by side, tensor-core and vector instructions, as JSON.

    python tests/compile/machine_code.py          # writes machine_code.json
    python tests/compile/machine_code.py --check  # prints it

One line for each launch of a layer on an H100 in bfloat16: a loop that no longer uses its tensor cores, a row that is
loaded number by number, or a kernel of which fewer run side by side shows here without a GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from compile_kernels import DTYPES, KIB, Compiler, resources, start, tensors

GPU, DTYPE, LENGTH, HEAD_DIM, HEADS = "sm_90", "bfloat16", 16384, 64, 16
RECORD = Path(__file__).with_name("machine_code.json")
# Name in the record: how the instruction begins in the disassembly.
INSTRUCTIONS = {
    "instructions": r"\w",
    "wgmma": r"HGMMA",
    "mma": r"HMMA",
    "vector_loads": r"LDG\.E\S*\.128|LDGSTS\.E\S*\.128",
    "other_loads": r"LDG(?!\.E\S*\.128)|LDGSTS(?!\.E\S*\.128)",
    "barriers": r"BAR\.",
    "shuffles": r"SHFL",
    "branches": r"BRA",
}


def blocks_side_by_side(registers: int, shared: int, warps: int) -> int:
    """How many programs an H100's multiprocessor holds: by registers, shared memory and warps."""
    of_a_warp = -(-registers // 8) * 8 * 32
    by_memory = 228 * KIB // (shared + KIB)
    return min(65536 // (of_a_warp * warps), by_memory, 64 // warps, 32)


def instructions(cubin: bytes) -> dict[str, int]:
    """How often each kind of instruction stands in the code; loops are not unrolled, so not how often it runs."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^\s+(?:/\*\w+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", code, flags=re.MULTILINE)
    return {name: sum(re.match(pattern, op) is not None for op in names) for name, pattern in INSTRUCTIONS.items()}


class Recorder(Compiler):
    """Notes every launch with the code of its kernel."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.launches: list[dict[str, Any]] = []
        self.known_rows: dict[str, dict[str, Any]] = {}

    def launched(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
        """Compile what is launched once; note each launch."""
        key, _ = self.describe(function, args, kwargs)
        if key not in self.known_rows:
            kernel = self.compile(function, *args, grid=None, warmup=True, **kwargs)
            row = resources(kernel)
            side_by_side = blocks_side_by_side(row["registers"], row["shared"], row["warps"])
            self.known_rows[key] = row | {"blocks_per_sm": side_by_side} | instructions(kernel.asm["cubin"])
        self.launches.append({"kernel": function.__name__, "programs": grid[0], **self.known_rows[key]})


def layers(length: int = LENGTH) -> dict[str, Callable[[], Any]]:
    """A forward pass of the layers that a GPU is for, at the length where they are to gain."""
    names = "cluster_queries", "improved_clustered_attention", "bi_clustered_attention", "slice_attention"
    cluster_queries, improved, bi_clustered_attention, slices = (
        getattr(import_module(f"hf_effattn.ops.{name}.triton"), name) for name in names
    )
    residuals = import_module("hf_effattn.ops.bi_clustered_attention.triton.residuals").query_residuals
    query, key, value = tensors(HEAD_DIM, DTYPES[DTYPE], length=length, heads=HEADS, key_heads=HEADS)
    labels = torch.zeros(1, HEADS, length, dtype=torch.int64)
    plain = None, None, HEAD_DIM**-0.5, 0.0, None

    def i_clustered() -> torch.Tensor:
        cluster_queries(query.detach(), key.detach(), None, None, 100, "kmeans", 3, 32, 2048, 0)
        return improved(query, key, value, labels, 100, 32, *plain)

    def bi_clustered() -> torch.Tensor:
        rows = query.detach(), key.detach()
        cluster_queries(*rows, None, None, 64, "kmeans", 3, 32, 2048, 0)
        within = residuals(rows[0], labels, None, 64, 2048)
        cluster_queries(rows[1], within, None, None, 32, "kmeans", 2, 32, 2048, 0)
        rest = HEAD_DIM**-0.5, 0.0, None
        counts = ([count] * key.shape[1] for count in (64, 32, 64))
        return bi_clustered_attention(query, key, value, labels, labels, *counts, None, None, None, *rest)

    causal_attention = import_module("hf_effattn.ops.causal_clustered_attention.triton").causal_clustered_attention
    sizes = 1, 384, 16, 1024, 256, 1, 512, 2.0, 0  # as models are patched
    causal = partial(causal_attention, query, key, value, *[None] * 3, "bi-clustered", *sizes, 0.125, 0.0, True)
    slice_length, extension = 32, 32
    sinks = torch.ones(1, length, dtype=torch.bool)
    cst = partial(
        slices, query, key, value, slice_length, extension, False, None, HEAD_DIM**-0.5, None, None, sinks, 0.0, None
    )
    return {"i-clustered": i_clustered, "bi-clustered": bi_clustered, "cst": lambda: cst()[0], "causal": causal}


def record() -> dict[str, Any]:
    """The launches of every layer: forward, and backward."""
    start(GPU)
    recorder = Recorder()
    recorder.install()
    launches = {}
    for name, call in layers().items():
        output = call()
        launches[name], recorder.launches = recorder.launches, []
        output.sum().backward()
        launches[f"{name}, backward"], recorder.launches = recorder.launches, []
    settings = {"gpu": GPU, "dtype": DTYPE, "length": LENGTH, "heads": HEADS, "head_dim": HEAD_DIM}
    return settings | {"triton": triton.__version__, "layers": launches}


if __name__ == "__main__":
    text = json.dumps(record(), indent=1)
    text = re.sub(r"\n {3}}", "}", re.sub(r"\n {4,}", " ", text)).replace("{ ", "{") + "\n"  # a launch on a line
    if "--check" in sys.argv:
        print(text)
    else:
        RECORD.write_text(text)
