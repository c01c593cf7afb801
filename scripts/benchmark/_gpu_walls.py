"""What a user of a GPU gets: exact attention, layers and models beside it, their errors, and where they gain."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton

from hf_effattn.measuring.bench import Inputs, forward, random_inputs
from hf_effattn.measuring.cost import captured, interleaved_rounds, median, median_ratio
from hf_effattn.measuring.environment import environment
from hf_effattn.measuring.errors import relative_error
from hf_effattn.measuring.exact_kernels import exact_kernels
from hf_effattn.ops import causal_clustered_attention
from hf_effattn.ops.causal_clustered_attention import DEFAULT_SEGMENT_LENGTH

from ._budgets import Found
from ._gpu_layers import (
    CAUSAL,
    ENCODER,
    FAMILIES,
    Call,
    Family,
    Setup,
    approximates,
    crossover_inputs,
    default_methods,
    default_task,
    on_inputs,
    runs,
)
from ._timing import forward as forward_model
from ._timing import time_calls, time_models
from .attention import EXACT, METHODS
from .crossover import crossover
from .models import last_hidden_state, random_models, random_tokens
from .prefill import PATCHED

CHECKED_HEADS = 2
ROWS = 1024  # queries whose scores in float64 are held at once
CENTRES, NOISE = 48, 0.5
NVIDIA_SMI = (
    "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu,"
    "persistence_mode,clocks_throttle_reasons.active"
)
PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn_3", "xformers", "transformer_engine")


def machine(setup: Setup, found: Found) -> None:
    """The machine, its versions and clocks, and which tools it has."""
    found |= environment(setup.device) | {"triton": triton.__version__, "processors": os.cpu_count()}
    found["load"] = [round(load, 1) for load in os.getloadavg()]
    found["packages"] = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    found["nvidia_smi"] = nvidia_smi()
    if setup.on_gpu:
        properties = torch.cuda.get_device_properties(setup.device)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["free_bytes"], found["bytes"] = torch.cuda.mem_get_info(setup.device)


def nvidia_smi() -> dict[str, str] | str:
    """Clocks, power and driver at this moment, or why they are not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "absent"
    command = [tool, f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    values = done.stdout.strip().splitlines()[:1]
    return dict(zip(NVIDIA_SMI.split(","), values[0].split(", "), strict=False)) if values else done.stderr.strip()


def exact(setup: Setup, found: Found) -> None:
    """The bandwidth of a copy, the rate of a large product, and every kernel of SDPA, with and without a graph."""
    copied = torch.zeros(2, setup.copied_bytes, dtype=torch.uint8, device=setup.device)
    matrices = torch.randn(2, setup.matrix, setup.matrix, device=setup.device).to(setup.dtype)
    calls: dict[str, Call] = {"copy": lambda: copied[0].copy_(copied[1]), "product": lambda: torch.mm(*matrices)}
    for call in calls.values():
        call()
    times = {name: median(s) or 0.0 for name, s in interleaved_rounds(calls, setup.device, setup.repeats).items()}
    found["copy_gb_a_second"] = round(2 * setup.copied_bytes / times["copy"] / 1e9, 1)
    found["product_tflops"] = round(2 * setup.matrix**3 / times["product"] / 1e12, 2)
    found["nvidia_smi_after"] = nvidia_smi()
    rows: Found = found.setdefault("sdpa", {})
    for length in setup.exact_lengths:
        inputs = random_inputs(1, length, setup.heads, setup.head_dim, setup.dtype, setup.device)
        kernels, refused = exact_kernels(*inputs)
        rows[str(length)] = time_calls(on_inputs(kernels, inputs), kernels, setup.device, setup.repeats)
        rows[str(length)] |= {name: {"refused": why} for name, why in refused.items()}


def layers(setup: Setup, found: Found) -> None:
    """Layers of encoders beside exact attention, and the errors of the methods."""
    for length in setup.lengths:
        for name in ("encoder", "cst"):
            family = FAMILIES[name](setup, length)
            found.setdefault(str(length), {})[name] = walls(running(setup, family), setup)
        found[str(length)]["errors"] = errors(setup, length)


def running(setup: Setup, family: Family) -> Family:
    """Without the methods that did not run when they were compiled."""
    return Family(family.exact, {name: call for name, call in family.methods.items() if runs(setup, name)})


def walls(family: Family, setup: Setup) -> Found:
    """Milliseconds a call, and how many times as fast as the fastest exact kernel, timed in turns in three ways.

    `waiting` for the device after each call, `streaming`, many calls before it waits once, and streaming replays of a
    `graph`.
    """
    calls = family.exact | family.methods
    for call in calls.values():
        call()
    ways: dict[str, Mapping[str, Call]] = {"waiting": calls, "streaming": calls}
    if setup.on_gpu:
        graphs = {name: captured(call) for name, call in calls.items()}
        ways["graph"] = {name: graph.replay for name, graph in graphs.items() if graph is not None}
    rows: Found = {name: {} for name in calls}
    for way, timed in ways.items():
        count = 1 if way == "waiting" else setup.calls
        repeated = {name: partial(repeat, call, count) for name, call in timed.items()}
        seconds = interleaved_rounds(repeated, setup.device, setup.repeats)
        exact_names = [name for name in family.exact if name in seconds]
        fastest = min(exact_names, key=lambda name, s=seconds: median(s[name]) or 0.0)  # type: ignore[misc]
        for name, taken in seconds.items():
            rows[name][f"{way}_ms"] = 1e3 * (median(taken) or 0.0) / count
            rows[name][f"{way}_speedup"] = median_ratio(seconds[fastest], taken)
    return rows


def repeat(call: Call, count: int) -> None:
    """Call some times."""
    for _ in range(count):
        call()


def errors(setup: Setup, length: int) -> Found:
    """Relative L2 errors of two heads against exact attention in float64, by method: of the kernels, and in float64.

    On queries and keys that lie around centres, as those of models do. `float64` is the same method by PyTorch, which
    the kernels must come near; both are 0 of no method that approximates something.
    """
    inputs = grouped_inputs(setup, (setup.heads, setup.heads, setup.head_dim), length)
    query, key, value = (tensor[:, :CHECKED_HEADS].double() for tensor in inputs)
    expected = exact_in_float64(query, key, value)
    found: Found = {}
    for name in ENCODER:
        method = METHODS[name]
        if approximates(method, length) and runs(setup, name):
            output = forward(method.run, inputs)[:, :CHECKED_HEADS]
            alone = forward(method.run, (query, key, value))
            found[name] = {"error": relative_error(expected, output), "float64": relative_error(expected, alone)}
    return found


def grouped_inputs(setup: Setup, shape: tuple[int, int, int], length: int) -> Inputs:
    """Queries and keys around centres of their head, random values; `shape`: heads, those of keys, head_dim."""
    heads, key_heads, head_dim = shape
    generator = torch.Generator().manual_seed(length)

    def points(count: int) -> torch.Tensor:
        centres = torch.randn(count, CENTRES, head_dim, generator=generator)
        labels = torch.randint(CENTRES, (count, length), generator=generator)
        chosen = centres.gather(1, labels[..., None].expand(-1, -1, head_dim))
        return chosen + NOISE * torch.randn(count, length, head_dim, generator=generator)

    value = torch.randn(key_heads, length, head_dim, generator=generator)
    query, key, value = (
        tensor[None].to(setup.device, setup.dtype) for tensor in (points(heads), points(key_heads), value)
    )
    return query, key, value


def exact_in_float64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False
) -> torch.Tensor:
    """Exact attention `(1, H, N, D)` of float64 tensors with as many heads, some queries at a time."""
    outputs = []
    for first in range(0, query.shape[2], ROWS):
        rows = query[:, :, first : first + ROWS]
        keys = first + rows.shape[2] if is_causal else key.shape[2]
        mask = None
        if is_causal:
            mask = torch.ones(rows.shape[2], keys, dtype=torch.bool, device=query.device).tril(first)
        outputs.append(F.scaled_dot_product_attention(rows, key[:, :, :keys], value[:, :, :keys], attn_mask=mask))
    return torch.cat(outputs, dim=2)


def models(setup: Setup, found: Found) -> None:
    """A random BERT, exact and patched: milliseconds of a forward pass, and how far the last hidden state moves."""
    for length in setup.lengths:
        built = random_models(setup.model, length, setup.dtype, setup.device)
        built = {name: model for name, model in built.items() if runs(setup, name)}
        run = partial(last_hidden_state, tokens=random_tokens(length, setup.device))
        rows = time_models(built, run, setup.device, setup.repeats, trains=False)
        expected = forward_model(built[EXACT], run)
        for name, row in rows.items():
            if "forward_refused" not in row:
                row["moved"] = relative_error(expected, forward_model(built[name], run))
        found[str(length)] = rows


def causal(setup: Setup, found: Found) -> None:
    """The kernels of the causal form: against its definition, no output by a later token, then their time."""
    if not runs(setup, CAUSAL):
        found["left_out"] = "it did not run in the step before"
        return
    length, (heads, key_heads, _) = setup.checked_length, setup.causal_shape
    inputs = grouped_inputs(setup, setup.causal_shape, length)
    attend = partial(causal_clustered_attention, **PATCHED)
    output = forward(attend, inputs)
    group = heads // key_heads  # the query heads of the first head of keys
    query, key, value = (x[:, :count].double() for x, count in zip(inputs, (group, 1, 1), strict=True))
    expected = exact_in_float64(query, *(x.expand(-1, group, -1, -1) for x in (key, value)), is_causal=True)
    alone = forward(partial(attend, backend="reference"), (query, key, value))
    near, place = DEFAULT_SEGMENT_LENGTH, 3 * length // 4
    for tensor in inputs:
        tensor[:, :, place:] += 3.0
    found["check"] = {
        "error": relative_error(expected, output[:, :group]),
        "float64": relative_error(expected, alone),
        "error_of_first_segment": relative_error(expected[:, :, :near], output[:, :group, :near]),
        "sees_no_later_token": bool(torch.equal(forward(attend, inputs)[:, :, :place], output[:, :, :place])),
    }
    for length in setup.kernel_lengths:
        found[str(length)] = walls(FAMILIES["causal"](setup, length), setup)


def crossovers(setup: Setup, found: Found) -> None:
    """How many times as fast as exact attention the default settings are, and from which length on they gain."""
    speedups: dict[str, dict[str, dict[int, float]]] = {}
    for length in setup.crossover_lengths:
        inputs = crossover_inputs(setup, length)
        kernels, _ = exact_kernels(*inputs)
        methods = {name: m.run for name, m in default_methods(length).items() if runs(setup, default_task(name))}
        attends: dict[str, Any] = kernels | methods
        rows = time_calls(on_inputs(attends, inputs), kernels, setup.device, setup.repeats)
        found.setdefault("lengths", {})[str(length)] = rows
        for name in attends:
            for field in ("speedup", "graph_speedup") if name not in kernels else ():
                if rows[name].get(field):
                    speedups.setdefault(name, {}).setdefault(field, {})[length] = rows[name][field]
        found["crossover"] = {
            name: {field: crossover(ratios) for field, ratios in fields.items()} for name, fields in speedups.items()
        }
