"""Compile for one GPU, without a GPU, every kernel that the ops launch on it, and print what each needs as JSON lines.

    python tests/compile/compile_kernels.py sm_90 bfloat16

The ops run for real on CPU tensors, but a launch only compiles: which kernels, types and configurations are compiled
is decided by the code that launches them, not by a list. It needs a process of its own, in which Triton's interpreter
is off and Triton's driver is one that names the GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hf_effattn.ops import chips

KIB = 1024
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
        found = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", found)}
    return {"registers": usage["REG"], "spilled": usage["STACK"] + usage["LOCAL"]}


def hip_resources(assembly: str) -> dict[str, int]:
    """The same of a compiled AMD kernel."""
    usage = {name: int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0]) for name in ("vgpr_count", "vgpr_spill_count")}
    scratch = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly)[0])
    return {"registers": usage["vgpr_count"], "spilled": usage["vgpr_spill_count"] + scratch}


def print_resources(kernel: Any, name: str, constants: dict[str, Any]) -> None:
    """One JSON line of a compiled kernel."""
    hip = "amdgcn" in kernel.asm
    used = hip_resources(kernel.asm["amdgcn"]) if hip else cuda_resources(kernel.asm["cubin"])
    row = {"kernel": name, "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, **used}
    print(json.dumps(row | {"constants": {name: str(value) for name, value in constants.items()}}), flush=True)


def compile_instead_of_launching() -> None:
    """From now on a launch compiles its kernel, prints what it needs, and runs nothing."""
    run = JITFunction.run
    seen = set()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            bound = self.signature.bind(*args, **{name: x for name, x in kwargs.items() if name in self.arg_names})
            constants = {p.name: bound.arguments.get(p.name) for p in self.params if p.is_constexpr}
            print_resources(kernel, self.__name__, constants)
        return kernel

    JITFunction.run = compile_only
    # Outputs that no kernel writes must be legal indices for what follows.
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros


def tensors(head_dim: int, dtype: torch.dtype, *, length: int, heads: int, key_heads: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value in transformers' layout, with a gradient to come."""
    return tuple(
        torch.zeros(1, length, count, head_dim, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    )


def attention_calls(head_dim: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of the attention ops that make their launchers choose differently at one head_dim and dtype."""
    clustered, improved, bi_clustered = (
        getattr(import_module(f"hf_effattn.ops.{name}.triton"), name)
        for name in ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
    )
    variants: list[dict[str, Any]] = [
        {"length": 1024, "clusters": 100, "topk": 32},
        {"length": 16384, "clusters": 512, "topk": 128, "masks": True},
        {"length": 32768, "clusters": 4096, "topk": 1024, "key_heads": 1, "dropout_p": 0.1},
    ]
    # A head_dim that fills its tile is compiled with everything, the others as most models call them.
    for variant in variants:
        length, clusters, topk = variant["length"], variant["clusters"], variant["topk"]
        heads, key_heads = 2, variant.get("key_heads", 2)
        dropout_p = variant.get("dropout_p", 0.0)
        seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
        mask = torch.ones(1, length, dtype=torch.bool) if variant.get("masks") else None
        labels, key_labels = (torch.zeros(1, count, length, dtype=torch.int64) for count in (heads, key_heads))
        query, key, value = tensors(head_dim, dtype, length=length, heads=heads, key_heads=key_heads)
        rest = mask, mask, 0.125, dropout_p, seed
        qkv = query, key, value
        yield partial(clustered, *qkv, labels, clusters, *rest)
        yield partial(improved, *qkv, labels, clusters, topk, *rest)
        yield partial(bi_clustered, *qkv, labels, key_labels, clusters, 2 * clusters, topk, *rest)


def clustering_calls(head_dim: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of the clustering ops."""
    cluster_queries = import_module("hf_effattn.ops.cluster_queries.triton").cluster_queries
    for length, clusters, masked in ((1024, 100, False), (16384, 1024, True)):
        query, key, _ = tensors(head_dim, dtype, length=length, heads=2, key_heads=2)
        query, key = query.detach(), key.detach()
        mask = torch.ones(1, length, dtype=torch.bool) if masked else None
        for method, metric, key_mask in (("kmeans", key, mask), ("kmeans", None, None), ("lsh", None, None)):
            yield partial(cluster_queries, query, metric, key_mask, mask, clusters, method, 1, 32, 2048, 0)


def main(gpu: str, dtype: str) -> None:
    """Run every call on the named GPU."""
    chosen = GPUS[gpu]
    driver.set_active(NamedGpu(chosen.target))
    chips.INTERPRETER = chosen.chip
    compile_instead_of_launching()
    for head_dim in (16, 32, 64, 128, 256):
        for call in (*clustering_calls(head_dim, DTYPES[dtype]), *attention_calls(head_dim, DTYPES[dtype])):
            output = call()
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor.requires_grad:
                    tensor.sum().backward()


if __name__ == "__main__":
    main(*sys.argv[1:])
