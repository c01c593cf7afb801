"""How fast would the kernels be on an H100? Predicted from what their programs do; too well, as an H200 has shown.

`hf_effattn/ops/README.md` has these beside what was measured: no layer was as fast. They compare two kernels.

The ops run under Triton's interpreter with the block sizes of an H100; of every launch the programs of the first head
are run, and counted: bytes, products, arithmetic, and how many steps of a program wait for each other. A launch takes
the longest of

- bytes / bandwidth: of memory for each tensor once, of the L2 cache for all that is loaded and stored,
- products / the rate of the tensor cores, and arithmetic / the lanes of the chip,
- waves × latency of a program: how many run at once is read from `tests/compile/machine_code.json`,

and a gap. Single kernels may be off by half, sums by less. What torch itself launches counts too.

    python -m scripts.benchmark.predictions      # writes scripts/results/predictions.json
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import numpy as np
import torch
import typer
from rich.progress import track
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from hf_effattn import ops
from hf_effattn.ops.bi_clustered_attention import query_offsets
from hf_effattn.ops.shared.triton import chips
from hf_effattn.patching.methods.clustered import KEY_ITERATIONS

from ..kept.command_line import run_with_help
from ..kept.runs import KeptRuns

ROOT = Path(__file__).resolve().parents[2]
MACHINE_CODE = ROOT / "tests" / "compile" / "machine_code.json"
HEADS, HEAD_DIM = 16, 64
DTYPE = torch.float16  # block sizes are those of bfloat16, which NumPy does not know
H100 = chips.Chip("cuda", 227 * chips.KIB)
# Seconds, bytes and operations a second of an H100 SXM, what well-tuned kernels reach of its rates.
MULTIPROCESSORS, CLOCK = 132, 1.75e9
MEMORY, CACHE = 3.35e12, 5.5e12
RATES = {2: 600e12, 4: 150e12}  # products of 16-bit numbers; of float32 in parts
FLOAT32 = 50e12  # matrix products by torch, TF32 off
LANES = MULTIPROCESSORS * 128 * CLOCK * 0.6  # instructions of a lane that are issued in a second
GAP, SHORTEST = 1e-6, 2e-6  # between two launches of a CUDA graph; of a launch that does nothing
# Cycles until a program goes on.
LOAD, DOT, REDUCTION, INSTRUCTION = 280, 120, 60, 2
FIRST_LOADS = 6  # before a loop, where nothing is loaded ahead
SIDE_BY_SIDE = 2  # programs of a multiprocessor, where machine_code.json does not have the kernel
# Exact attention: products a second, forward and backward, of FlashAttention 3 at this head_dim.
EXACT_FORWARD, EXACT_BACKWARD = 475e12, 400e12


@dataclass
class Launch:
    """What the counted programs of a launch did; `programs` are all, of all heads.

    Attributes:
        kernel: its name; `torch: ` and the op for what torch launches.
        programs, counted: how many there are, how many were run.
        tensors: bytes of all arguments.
        moved: bytes loaded and stored.
        products: operations of matrix products, by the bytes of a number.
        lanes: numbers that were computed one by one.
        chain, longest: cycles of all programs together if each runs alone; of the longest.
    """

    kernel: str
    programs: int = 1
    counted: int = 1
    tensors: int = 0
    moved: int = 0
    products_2: int = 0
    products_4: int = 0
    lanes: int = 0
    chain: float = 0.0
    longest: float = 0.0

    def seconds(self, side_by_side: int) -> float:
        """Its predicted time with the gap behind it."""
        share = self.programs / self.counted
        places = MULTIPROCESSORS * side_by_side
        by_latency = max(self.longest, self.chain * share / min(places, self.programs)) / CLOCK
        by_cores = (self.products_2 / RATES[2] + self.products_4 / RATES[4] + self.lanes / LANES) * share
        by_memory = max(min(self.tensors, self.moved * share) / MEMORY, self.moved * share / CACHE)
        return max(SHORTEST, by_latency, by_cores, by_memory) + GAP


class Counting(TorchDispatchMode):
    """Runs kernels on the interpreter, and notes what each launch, and each op of torch between them, does."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.current: Launch | None = None
        self.program = 0.0  # cycles of the running program
        self.loads = 0
        self.warps, self.stages = 4, 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An op of this package is looked into; any other that computes something is a launch."""
        kwargs = kwargs or {}
        if func.namespace == "hf_effattn":
            name = func._schema.name
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        output = func(*args, **kwargs)
        name = str(func.overloadpacket).removeprefix("aten.")
        outputs = [one for one in torch.utils._pytree.tree_leaves(output) if isinstance(one, torch.Tensor)]
        inputs = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        storages = {one.untyped_storage().data_ptr() for one in inputs}
        fills = name.removesuffix("_") in ("zeros", "zero", "fill", "new_zeros", "zeros_like", "arange")
        is_view = all(one.untyped_storage().data_ptr() in storages for one in outputs) and not name.endswith("_")
        on_host = kwargs.get("generator") is not None  # the host's, from which K-means draws a number
        nothing = is_view or on_host or name.startswith(("empty", "new_empty", "detach"))
        if self.current is None and outputs and not nothing:
            moved = sum(one.nbytes for one in ([] if fills else inputs) + outputs)
            launch = Launch(f"torch: {name}", tensors=moved, moved=moved)
            if name in ("bmm", "mm"):
                launch.lanes = int(2 * outputs[0].numel() * inputs[0].shape[-1] * LANES / FLOAT32)
            self.launches.append(launch)
        return output

    def launch(self, original: Callable[..., None], executor: Any, arguments: Any, options: Any) -> None:
        """One launch, of which the programs of the first head are run."""
        kernel, grid = executor.fn.__name__, executor.grid
        axis = 1 if len(grid) > 1 and grid[1] == HEADS else 0
        programs = math.prod(grid)
        if grid[axis] % HEADS == 0:
            executor.grid = tuple(size // HEADS if i == axis else size for i, size in enumerate(grid))
        tensors = [one for one in (*arguments, *options.values()) if torch.is_tensor(one)]
        used = {one.untyped_storage().data_ptr(): one.nbytes for one in tensors}
        self.current = Launch(kernel, programs, math.prod(executor.grid), sum(used.values()))
        self.warps, self.stages = options.get("num_warps", 4), options.get("num_stages", 3)
        try:
            original(executor, *arguments, **options)
        finally:
            self.end_of_program()
            self.launches.append(self.current)
            self.current = None

    def end_of_program(self) -> None:
        """Another program begins, or none."""
        if self.current is not None:
            waits = min(self.loads, FIRST_LOADS) + max(0, self.loads - FIRST_LOADS) / self.stages
            cycles = self.program + waits * LOAD
            self.current.chain += cycles
            self.current.longest = max(self.current.longest, cycles)
        self.program, self.loads = 0.0, 0

    def access(self, mask: Any, itemsize: int, *, loads: bool) -> None:
        """One load, store or atomic operation."""
        if self.current is not None:
            self.current.moved += int(np.count_nonzero(mask)) * itemsize
            self.loads += loads

    def arithmetic(self, data: Any, cycles: float = 0.0) -> None:
        """An operation on every number of a block."""
        if self.current is not None and data.size > 1:
            self.current.lanes += data.size
            self.program += cycles + INSTRUCTION * max(1.0, data.size / (32 * self.warps))

    def product(self, a: Any, b: Any) -> None:
        """A product of blocks `(m, k)` and `(k, n)`."""
        if self.current is not None:
            operations = 2 * a.shape[0] * a.shape[1] * b.shape[1]
            if a.dtype.itemsize == 2:
                self.current.products_2 += operations
            else:
                self.current.products_4 += operations
            self.program += DOT + operations / (RATES[a.dtype.itemsize] / MULTIPROCESSORS / CLOCK)


@contextmanager
def counting() -> Iterator[Counting]:
    """Everything that is launched inside is counted, with block sizes of an H100."""
    counts = Counting()
    builder, reductions, scans = InterpreterBuilder, interpreter.ReduceOps, interpreter.ScanOps
    kept = [
        (owner, name, getattr(owner, name))
        for owner, names in (
            (GridExecutor, ("__call__",)),
            (reductions, ("apply_impl",)),
            (scans, ("apply_impl",)),
            (chips, ("INTERPRETER",)),
            (
                builder,
                (
                    *("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_dot"),
                    *("binary_op", "ternary_op", "unary_op", "set_grid_idx"),
                ),
            ),
        )
        for name in names
    ]
    original = {(owner, name): value for owner, name, value in kept}

    def of_builder(name: str, note: Callable[..., None]) -> None:
        run = original[builder, name]

        def wrapped(self: Any, *arguments: Any) -> Any:
            result = run(self, *arguments)
            note(result, *arguments)
            return result

        setattr(builder, name, wrapped)

    def loaded(result: Any, pointers: Any, mask: Any, *_: Any) -> None:
        counts.access(mask.data, result.data.itemsize, loads=True)

    def stored(_: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        counts.access(mask.data, value.data.itemsize, loads=False)

    def added(_: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        counts.access(mask.data, 2 * value.data.itemsize, loads=False)

    def computed(result: Any, *_: Any) -> None:
        # Addresses, of 64 bits, are mostly made ahead.
        if getattr(result.dtype.scalar, "primitive_bitwidth", 64) == 32:
            counts.arithmetic(result.data)

    def reduced(owner: Any) -> None:
        run = original[owner, "apply_impl"]

        def wrapped(self: Any, inputs: Any) -> Any:
            counts.arithmetic(inputs[0].handle.data, REDUCTION)
            current, counts.current = counts.current, None  # what it is made of is counted once
            try:
                return run(self, inputs)
            finally:
                counts.current = current

        owner.apply_impl = wrapped

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        counts.product(a.data, b.data)
        product = np.matmul(a.data.astype(np.float32), b.data.astype(np.float32))  # NumPy's of float16 is slow
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def started(self: Any, *index: int) -> None:
        counts.end_of_program()
        original[builder, "set_grid_idx"](self, *index)

    def called(self: Any, *arguments: Any, **options: Any) -> None:
        counts.launch(original[GridExecutor, "__call__"], self, arguments, options)

    try:
        chips.INTERPRETER = H100
        for owner, name, replacement in (
            (GridExecutor, "__call__", called),
            (builder, "create_dot", dot),
            (builder, "set_grid_idx", started),
        ):
            setattr(owner, name, replacement)
        of_builder("create_masked_load", loaded)
        of_builder("create_masked_store", stored)
        of_builder("create_atomic_rmw", added)
        for name in ("binary_op", "ternary_op", "unary_op"):
            of_builder(name, computed)
        reduced(reductions)
        reduced(scans)
        with counts:
            yield counts
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(length: int) -> Inputs:
    """Random query, key and value."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, length, HEAD_DIM).to(DTYPE).requires_grad_() for _ in range(3))
    return query, key, value


def of_every_head(labels: torch.Tensor) -> torch.Tensor:
    """The first head's for all: no other head's programs have run. NumPy's copy is no launch."""
    in_place = labels.numpy()
    in_place[:] = in_place[:, :1]
    return labels


def i_clustered(inputs: Inputs, clusters: int, topk: int) -> torch.Tensor:
    """A layer by i-clustered attention, the clustering included."""
    labels = ops.cluster_queries(inputs[0].detach(), clusters, key=inputs[1].detach(), iterations=3, backend="triton")
    labels = of_every_head(labels)
    return ops.improved_clustered_attention(*inputs, labels, clusters=clusters, topk=topk, backend="triton")


def bi_clustered(inputs: Inputs, clusters: int, topk: int, key_clusters: int) -> torch.Tensor:
    """A layer by first-order bi-clustered attention, both clusterings included."""
    query, key = inputs[0].detach(), inputs[1].detach()
    labels = of_every_head(ops.cluster_queries(query, clusters, key=key, iterations=3, backend="triton"))
    offsets, mask = query_offsets(query, labels, clusters, key_heads=HEADS, rows=2048, backend="triton")
    rest: dict[str, Any] = {"iterations": KEY_ITERATIONS, "backend": "triton"}
    key_labels = of_every_head(ops.cluster_queries(key, key_clusters, key=offsets, key_mask=mask, **rest))
    counts: dict[str, Any] = {"clusters": clusters, "key_clusters": key_clusters, "topk": topk}
    return ops.bi_clustered_attention(*inputs, labels, key_labels, **counts, backend="triton")


def slices(inputs: Inputs, slice_length: int, extension_ratio: int) -> torch.Tensor:
    """The slices of Composite Slice attention, with first and last token seen by all."""
    sinks = torch.zeros(1, inputs[0].shape[2], dtype=torch.bool)
    sinks[:, [0, -1]] = True
    how: dict[str, Any] = {"slice_length": slice_length, "extension_ratio": extension_ratio, "sink_mask": sinks}
    return ops.slice_attention(*inputs, **how, backend="triton")[0]


LAYERS: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "i-clustered C=100 k=32": partial(i_clustered, clusters=100, topk=32),
    "bi-clustered C=64 k=64 G=32": partial(bi_clustered, clusters=64, topk=64, key_clusters=32),
    "bi-clustered C=128 k=128 G=64": partial(bi_clustered, clusters=128, topk=128, key_clusters=64),
    "cst L=32 α=3": partial(slices, slice_length=32, extension_ratio=3),
}
BACKWARD_LENGTHS = (4096, 16384)


def side_by_side(method: str) -> dict[str, int]:
    """How many programs of each kernel a multiprocessor holds, as this layer launches it or else another one."""
    layers = json.loads(MACHINE_CODE.read_text(encoding="utf-8"))["layers"]
    own_last = sorted(layers, key=lambda layer: layer.split(",")[0] == method.split()[0])
    return {one["kernel"]: one["blocks_per_sm"] for layer in own_last for one in layers[layer]}


def exact_seconds(length: int, *, backward: bool) -> float:
    """Exact attention, or its backward pass."""
    operations = 4 * length**2 * HEAD_DIM * HEADS
    return operations * 2.5 / EXACT_BACKWARD if backward else operations / EXACT_FORWARD


def summed(launches: list[Launch], places: dict[str, int]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of a pass, and what it is made of: equal launches together, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for one in launches:
        seconds = one.seconds(places.get(one.kernel, SIDE_BY_SIDE))
        row = found.setdefault(one.kernel, {"kernel": one.kernel, "launches": 0, "microseconds": 0.0})
        row["launches"] += 1
        row["microseconds"] += 1e6 * seconds
    rows = sorted(found.values(), key=lambda row: -row["microseconds"])
    total = sum(row["microseconds"] for row in rows) / 1e6
    return total, [row | {"microseconds": round(row["microseconds"], 1)} for row in rows]


def predict(method: str, length: int) -> dict[str, Any]:
    """A row: microseconds of the passes, the ratio to exact attention, and the launches."""
    inputs, places = drawn(length), side_by_side(method)
    grad_output = torch.ones_like(inputs[2])
    with counting() as counts:
        output = LAYERS[method](inputs)
        forward, counts.launches = counts.launches, []
        if length in BACKWARD_LENGTHS:
            torch.autograd.grad(output, inputs, grad_output)
        backward = counts.launches
    seconds, made_of = summed(forward, places)
    exact = exact_seconds(length, backward=False)
    row: dict[str, Any] = {
        "forward_launches": sum(one["launches"] for one in made_of),
        "forward_us": round(1e6 * seconds, 1),
        "exact_forward_us": round(1e6 * exact, 1),
        "forward_speedup": exact / seconds,
        "forward": made_of,
    }
    if length in BACKWARD_LENGTHS:
        more, made_of = summed(backward, places)
        exact += exact_seconds(length, backward=True)
        row |= {
            "backward_launches": sum(one["launches"] for one in made_of),
            "backward_us": round(1e6 * more, 1),
            "forward_backward_speedup": exact / (seconds + more),
            "backward": made_of,
        }
    return row


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "4096,16384,65536",
    output: Path = ROOT / "scripts" / "results" / "predictions.json",
) -> None:
    """Predict every layer at every length and keep it as JSON; a run that was stopped goes on where it was."""
    settings = {"heads": HEADS, "head_dim": HEAD_DIM, "batch": 1, "gpu": "H100 SXM", "prediction": True}
    kept = KeptRuns(output, settings)
    runs = [{"method": name, "length": int(length)} for length in lengths.split(",") for name in LAYERS]
    for run in track(kept.missing(runs), description="layers"):
        kept.add(run | predict(**run))
        row = kept.rows[-1]
        print(f"{run['method']}, {run['length']:,}: {row['forward_us']:.0f} µs, {row['forward_speedup']:.1f}×")


if __name__ == "__main__":
    run_with_help(main, __doc__)
