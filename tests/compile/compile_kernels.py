"""Compile for one GPU, without a GPU, every kernel that the ops launch on it, and print what each needs as JSON lines.

    python tests/compile/compile_kernels.py sm_90 bfloat16,float32    # writes what fits into compiled.json
    python tests/compile/compile_kernels.py sm_90 bfloat16 --changed  # compiles what is not in it, and writes nothing

The ops run for real on CPU tensors, but a launch only compiles: which kernels, types and configurations are compiled
is decided by the code that launches them, not by a list. It needs a process of its own, in which Triton's interpreter
is off and Triton's driver is one that names the GPU.

All of it takes a processor more than an hour, so `compiled.json` remembers what fitted: a hash of the kernel's source
with all that it calls, its configuration, the GPU and the version of Triton up to its patch release. What has not
changed is not compiled again.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import hf_effattn
from hf_effattn.ops.shared.triton import chips
from hf_effattn.ops.shared.triton.centroids import _centroid_attention_fwd_kernel
from hf_effattn.ops.shared.triton.dropout import dropout_factor
from hf_effattn.ops.shared.triton.softmax import dot_rows
from hf_effattn.ops.shared.triton.tiles import load_rows

KIB = 1024
# Patch releases need the same registers and memory: seen of 3.7.0 and 3.7.1 in machine_code.json.
TRITON = ".".join(triton.__version__.split(".")[:2])
COMMONEST = 64
HEAD_DIMS = (COMMONEST, 128, 32, 256, 16)
RECORD = Path(__file__).with_name("compiled.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Gpu:
    """A target of the compiler and the chip that the launchers are told of."""

    target: GPUTarget
    chip: chips.Chip


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), chips.Chip("cuda", 163 * KIB)),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), chips.Chip("cuda", 227 * KIB)),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), chips.Chip("hip", 64 * KIB)),
}


class NamedGpu(DriverBase):
    """A driver that names a GPU and has none."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError("nothing runs here")


def cuda_resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack and local memory (spilled registers), of a compiled NVIDIA kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    return {"registers": usage["REG"], "spilled": usage["STACK"] + usage["LOCAL"]}


def hip_resources(assembly: str) -> dict[str, int]:
    """The same of a compiled AMD kernel."""
    usage = {name: int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0]) for name in ("vgpr_count", "vgpr_spill_count")}
    scratch = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly)[0])
    return {"registers": usage["vgpr_count"], "spilled": usage["vgpr_spill_count"] + scratch}


def resources(kernel: Any) -> dict[str, int]:
    """What a compiled kernel needs."""
    hip = "amdgcn" in kernel.asm
    used = hip_resources(kernel.asm["amdgcn"]) if hip else cuda_resources(kernel.asm["cubin"])
    return {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, **used}


def settle_hashes() -> None:
    """Keep the place of a kernel in its file, and who called its functions first, out of its hash."""
    functions = [
        function
        for module in list(sys.modules.values())
        if module.__name__.startswith("hf_effattn")
        for function in vars(module).values()
        if isinstance(function, JITFunction)
    ]
    for function in functions:
        function.starting_line_number = 0
    # Triton takes the constants of a called function into a hash only where that function has its own already: always
    # in this order.
    for function in (_centroid_attention_fwd_kernel, dot_rows, load_rows, dropout_factor):
        assert function.cache_key


def fill_outputs() -> None:
    """From now on what no kernel writes is 0: a legal index for what follows."""
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros


class Compiler:
    """Stands in for launches: compiles a kernel once per configuration and prints a JSON line about it.

    Args:
        gpu: name of the GPU, one of `GPUS`.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu, self.chip = gpu, GPUS[gpu].chip
        self.known = set(json.loads(RECORD.read_text())["fitted"]) if RECORD.exists() else set()
        self.head_dim = 0
        self.seen: set[str] = set()
        self.fitted: list[str] = []
        self.compile = JITFunction.run

    def install(self) -> None:
        """From now on a launch compiles its kernel and runs nothing."""
        compiler = self

        def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            compiler.launched(function, args, kwargs, grid)

        JITFunction.run = run  # type: ignore[method-assign]
        fill_outputs()

    def starts(self, row: dict[str, Any]) -> bool:
        """Whether the chip has the registers of all threads: NVIDIA's give each a multiple of 8."""
        of_a_warp = -(-row["registers"] // 8) * 8 * 32
        return self.chip.name != "cuda" or of_a_warp * row["warps"] <= chips.REGISTERS

    def describe(
        self, function: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, dict[str, str]]:
        """A hash of all that a kernel's code depends on, and its constants."""
        bound = function.signature.bind(*args, **{k: x for k, x in kwargs.items() if k in function.arg_names})
        constants = {p.name: str(bound.arguments.get(p.name)) for p in function.params if p.is_constexpr}
        types = [str(getattr(x, "dtype", type(x).__name__)) for x in args]
        options = {name: x for name, x in kwargs.items() if name not in function.arg_names}
        general = [p.name for p in function.params if p.do_not_specialize]
        described = [function.cache_key, constants, types, options, general, self.gpu, TRITON]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16], constants

    def launched(self, function: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
        """Compile what is launched, unless it is known to fit."""
        key, constants = self.describe(function, args, kwargs)
        if key in self.seen:
            return
        self.seen.add(key)
        row: dict[str, Any] = {"kernel": function.__name__, "key": key, "head_dim": self.head_dim}
        if key not in self.known:
            row |= resources(self.compile(function, *args, grid=None, warmup=True, **kwargs))
            row["constants"] = constants
            row["fits"] = row["spilled"] == 0 and row["shared"] <= self.chip.shared_memory and self.starts(row)
            if row["fits"]:
                self.fitted.append(key)
        print(json.dumps(row), flush=True)


def tensors(
    head_dim: int, dtype: torch.dtype, *, length: int, heads: int, key_heads: int, value_dim: int | None = None
) -> tuple[torch.Tensor, ...]:
    """Query, key and value in transformers' layout, with a gradient to come."""
    return tuple(
        torch.zeros(1, length, count, dim, dtype=dtype).transpose(1, 2).requires_grad_()
        for count, dim in ((heads, head_dim), (key_heads, head_dim), (key_heads, value_dim or head_dim))
    )


def attention_calls(head_dim: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of the attention ops that make their launchers choose differently at one head_dim and dtype."""
    clustered, improved, bi_clustered = (
        getattr(import_module(f"hf_effattn.ops.{name}.triton"), name)
        for name in ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
    )
    variants: list[dict[str, Any]] = [
        {"length": 1024, "clusters": 100, "topk": 32},
        {"length": 16384, "clusters": 100, "topk": 128, "masks": True},
        {"length": 16384, "clusters": 100, "topk": 128, "dropout_p": 0.1},
    ]
    if head_dim == COMMONEST:
        variants.append({"length": 32768, "clusters": 4096, "topk": 1024, "key_heads": 1, "dropout_p": 0.1})
        # Rows that end within a block, lengths and strides that are no multiples of 16.
        variants.append({"length": 1001, "clusters": 33, "topk": 20, "head_dim": 60, "value_dim": 36})
    for variant in variants:
        length, clusters, topk = variant["length"], variant["clusters"], variant["topk"]
        heads, key_heads = 2, variant.get("key_heads", 2)
        dropout_p = variant.get("dropout_p", 0.0)
        seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
        mask = torch.ones(1, length, dtype=torch.bool) if variant.get("masks") else None
        labels = torch.zeros(1, heads, length, dtype=torch.int64)
        dims = variant.get("head_dim", head_dim), variant.get("value_dim")
        query, key, value = tensors(dims[0], dtype, length=length, heads=heads, key_heads=key_heads, value_dim=dims[1])
        rest = mask, mask, 0.125, dropout_p, seed
        qkv = query, key, value
        yield partial(clustered, *qkv, labels, clusters, 0, *rest)
        yield partial(improved, *qkv, labels, clusters, topk, *rest)
        if not dropout_p and head_dim != COMMONEST:
            continue  # what takes most registers is left: bi-clustered attention with dropout, masks and exact heads
        exact = torch.ones(1, key_heads, dtype=torch.bool) if dropout_p else None
        mask = torch.ones(1, length, dtype=torch.bool) if dropout_p else mask
        key_labels = torch.zeros(1, key_heads, length, dtype=torch.int64)
        rest = mask, mask, exact, 0.125, dropout_p, seed
        for key_clusters, keys in ((64, topk), (16, 16)):  # walked in blocks, and held as one
            counts = ([count] * key_heads for count in (min(clusters, 128), key_clusters, keys))
            yield partial(bi_clustered, *qkv, labels, key_labels, *counts, *rest)


def clustering_calls(head_dim: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of the clustering ops."""
    cluster_queries = import_module("hf_effattn.ops.cluster_queries.triton").cluster_queries
    residuals = import_module("hf_effattn.ops.bi_clustered_attention.triton.residuals").query_residuals
    for length, clusters, masked in ((1024, 64, False), (4096, 128, False), (16384, 1024, True)):
        query, key, _ = tensors(head_dim, dtype, length=length, heads=2, key_heads=2)
        query, key = query.detach(), key.detach()
        mask = torch.ones(1, length, dtype=torch.bool) if masked else None
        for method, metric, key_mask in (("kmeans", key, mask), ("kmeans", None, None), ("lsh", None, None)):
            yield partial(cluster_queries, query, metric, key_mask, mask, clusters, method, 1, 32, 2048, 0)
        labels = torch.zeros(1, 2, length, dtype=torch.int64)
        yield partial(residuals, query, labels, mask, clusters, 2048)
    # Few clusters; and rows that are loaded number by number.
    query, *_ = tensors(60 if head_dim == COMMONEST else head_dim, dtype, length=1024, heads=2, key_heads=2)
    yield partial(residuals, query.detach(), torch.zeros(1, 2, 1024, dtype=torch.int64), None, 10, 2048)


def clusterformer_calls(head_dim: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of ClusterFormer's ops: plain, and with everything that a kernel can have."""
    clustering, attention = (
        getattr(import_module(f"hf_effattn.ops.{name}.triton"), name)
        for name in ("neural_clustering", "sorted_block_attention")
    )
    length, clusters = 1024, 32
    order, mask = torch.arange(length)[None], torch.ones(1, length, dtype=torch.bool)
    lengths = torch.full((1,), clusters)
    for everything in (False, True):
        query, key, value = tensors(head_dim, dtype, length=length, heads=2, key_heads=1 if everything else 2)
        labels, membership, seed, key_mask = None, None, None, None
        if everything:
            labels, seed, key_mask = torch.zeros_like(order), torch.zeros(1, dtype=torch.int64), mask
            membership = torch.zeros(1, length, clusters, dtype=dtype, requires_grad=True)
        rest = membership, 0.125, 0.1 if everything else 0.0, seed
        yield partial(attention, query, key, value, order, lengths, 2, everything, labels, key_mask, *rest)
        words, centroids = (
            torch.zeros(1, n, 4 * head_dim, dtype=dtype, requires_grad=True) for n in (length, clusters)
        )
        yield partial(clustering, words, centroids, everything, key_mask)


def slice_calls(head_dim: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of slice attention: plain, with everything that a kernel can have, and with slices of several tiles."""
    attention = import_module("hf_effattn.ops.slice_attention.triton").slice_attention

    def total(*arguments: Any) -> torch.Tensor:
        """One number of all outputs, for one backward pass."""
        return torch.stack([output.float().sum() for output in attention(*arguments)]).sum()

    length, heads = 512, 2
    mask, seed = torch.ones(1, length, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    for slice_length, extension, causal, everything in (
        (16, 0, False, False),
        (8, 4, False, True),
        (200, 0, True, False),
    ):
        query, key, value = tensors(head_dim, dtype, length=length, heads=heads, key_heads=1 if everything else heads)
        optional: list[torch.Tensor | None] = [None, None, None]
        if everything:
            sizes = (heads, slice_length), (1, slice_length + 2 * extension)
            terms = [torch.zeros(*size, head_dim, dtype=dtype, requires_grad=True) for size in sizes]
            optional = [*terms, mask]
        dropout = (0.1, seed) if everything else (0.0, None)
        rest = slice_length, extension, causal, mask if everything else None, 0.125, *optional, *dropout
        yield partial(total, query, key, value, *rest)


def causal_calls(head_dim: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of causal clustered attention: with all that a kernel can have, plain, with rows that end in a block."""
    attention = import_module("hf_effattn.ops.causal_clustered_attention.triton").causal_clustered_attention
    variants: list[tuple[Any, ...]] = [
        (head_dim, 4, 1, "bi-clustered", 64, 32, 0.1, True),
        (head_dim, 4, 4, "bi-clustered", 1, 16, 2.0, False),
    ]
    if head_dim == COMMONEST:
        variants += [
            (head_dim, 4, 4, "i-clustered", 16, 1, inf, False),
            (60, 4, 2, "bi-clustered", 10, 7, 0.1, True),
        ]
    for dim, heads, key_heads, method, clusters, key_clusters, max_predicted_error, dropout in variants:
        length = 4096 if dim == head_dim else 3001
        query, key, value = tensors(dim, dtype, length=length, heads=heads, key_heads=key_heads)
        sizes = clusters, 384, key_clusters, 1024, 256, 1, 2048, max_predicted_error, 0
        seed = torch.zeros(1, dtype=torch.int64) if dropout else None
        rest = seed, torch.zeros(heads, dtype=dtype) if dropout else None, method, *sizes, 0.125
        yield partial(attention, query, key, value, None, *rest, 0.1 * dropout, True)


CALLS = (clustering_calls, attention_calls, clusterformer_calls, slice_calls, causal_calls)


def start(gpu: str, named: type[NamedGpu] = NamedGpu) -> None:
    """From now on this process compiles for a GPU, and launchers are told of it."""
    driver.set_active(named(GPUS[gpu].target))
    chips.INTERPRETER = GPUS[gpu].chip
    for path in sorted(Path(hf_effattn.__file__).parent.glob("ops/*/triton/*.py")):
        import_module(f"hf_effattn.ops.{path.parts[-3]}.triton.{path.stem}".removesuffix(".__init__"))
    settle_hashes()


def main(gpu: str, dtypes: str, record: bool) -> None:
    """Run every call on the named GPU; add what fitted to `compiled.json` unless it is compiled as a test."""
    start(gpu)
    compiler = Compiler(gpu)
    compiler.install()
    for dtype, compiler.head_dim in product(dtypes.split(","), HEAD_DIMS):
        for calls in CALLS:
            for call in calls(compiler.head_dim, DTYPES[dtype]):
                output = call()
                for tensor in output if isinstance(output, tuple) else (output,):
                    if tensor.requires_grad:
                        tensor.sum().backward()
        if record:  # after every head_dim: what was compiled survives an interruption
            fitted = json.loads(RECORD.read_text())["fitted"] if RECORD.exists() else []
            RECORD.write_text(json.dumps({"fitted": sorted({*fitted, *compiler.fitted})}, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3], record="--changed" not in sys.argv)
