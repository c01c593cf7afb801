"""How much faster is attention within a sliding window by blocks than by SDPA with a dense mask, and how far off?

Random inputs; transformers' mask functions say who sees whom. Windows are those of ModernBERT (64 tokens to each
side), EmbeddingGemma 2 (512) and Gemma 3 (512 and 1,024 backwards); every one also at the shortest length that runs in
blocks. In decoders several query heads may share keys, which transformers repeats before SDPA with a mask. Both are
timed in one run, interleaved, the mask included, forward and with the backward pass.

    python -m scripts.benchmark.windows     # writes scripts/results/benchmark_windows.json; minutes on two cores

What the output file holds is not measured again.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import (
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from hf_effattn.measuring.bench import Inputs, forward
from hf_effattn.patching.exact.windows import (
    Window,
    attend_in_blocks,
    mask_of_blocks,
    shortest_length,
    window_of,
)

from ..shared.command_line import run_with_help
from ..shared.runs import device_defaults
from ._timing import Repeats, Rows, measure_dtypes, time_calls

WINDOWS: tuple[Window, ...] = (Window(64, 64), Window(512, 512), Window(511, 0), Window(1023, 0))
BATCHES = (1, 8)
SHORTEST = "shortest"


def mask_function(window: Window) -> Callable:
    """transformers' own of a window."""
    if window.after:
        return sliding_window_bidirectional_mask_function(window.after)
    return sliding_window_causal_mask_function(window.before + 1)


def by_dense_mask(function: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As transformers runs it, `(B, N, H, D)`."""
    batch, _, length, _ = query.shape
    mask = sdpa_mask(batch, length, length, mask_function=function, allow_is_causal_skip=False, device=query.device)
    key, value = (repeat_kv(rows, query.shape[1] // rows.shape[1]) for rows in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def by_blocks(function: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same in blocks."""
    window, (batch, _, length, _) = window_of(function), query.shape
    causal = window is not None and not window.after
    mask = mask_of_blocks(function, None, causal=causal, batch_size=batch, length=length, device=query.device)
    assert mask is not None
    return attend_in_blocks(query, key, value, mask, causal=causal, dropout=0.0, scale=None)


def training(attend: Callable, inputs: Inputs) -> None:
    """Both passes."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    torch.autograd.grad(output, leaves, torch.ones_like(output))


def measure(run: dict[str, Any], device: torch.device, *, heads: int, head_dim: int, repeats: int) -> Rows:
    """A row: what both passes cost in blocks, and the relative L2 distance of the outputs."""
    torch.manual_seed(0)
    function, dtype = mask_function(Window(run["before"], run["after"])), getattr(torch, run["dtype"])
    query, key, value = (
        torch.randn(run["batch"], run["length"], count, head_dim).to(device, dtype).transpose(1, 2)
        for count in (heads, heads // run["sharing"], heads // run["sharing"])
    )
    ways = {"dense": partial(by_dense_mask, function), "blocks": partial(by_blocks, function)}
    dense, blocks = (forward(attend, (query, key, value)).double() for attend in ways.values())
    row = run | {"error": float((blocks - dense).norm() / dense.norm())}
    for name, one_pass in {"forward": forward, "training": training}.items():
        calls = {way: partial(one_pass, attend, (query, key, value)) for way, attend in ways.items()}
        row |= time_calls(calls, ["dense"], device, repeats, f"{name}_")["blocks"]
    return [row]


def main(
    lengths: Annotated[
        str, typer.Option(help="Comma-separated numbers of tokens, or the shortest.")
    ] = f"{SHORTEST},8192",
    dtypes: Annotated[
        str | None, typer.Option(help="Comma-separated. Default: bfloat16, on a CPU float32, too.")
    ] = None,
    heads: int = 12,
    sharing: Annotated[str, typer.Option(help="In decoders: query heads that share keys, comma-separated.")] = "1,6",
    head_dim: int = 64,
    repeats: Repeats = 3,
    output: Path | None = None,
) -> None:
    """Measure every window, length and dtype, and batches at the shortest length; keep it as JSON."""
    _, dtype, _ = device_defaults("benchmark_windows", None, output)
    runs: list[dict[str, Any]] = [
        {"before": window.before, "after": window.after, "sharing": int(group), "length": tokens, "batch": batch}
        for window in WINDOWS
        for group in (sharing.split(",") if not window.after else "1")
        for length in lengths.split(",")
        for batch in (BATCHES if length == SHORTEST else (1,))
        for tokens in (shortest_length(window, batch) if length == SHORTEST else int(length),)
    ]
    if any(run["length"] < shortest_length(Window(run["before"], run["after"]), run["batch"]) for run in runs):
        least = max(shortest_length(window, batch_size=1) for window in WINDOWS)
        raise typer.BadParameter(f"lengths must be at least {least:,}: in fewer tokens not all windows run in blocks")
    if any(heads % run["sharing"] for run in runs):
        raise typer.BadParameter(f"sharing must divide the {heads} heads, got {sharing}")
    dtypes = dtypes or ",".join(dict.fromkeys((dtype, "bfloat16")))
    sizes = {"heads": heads, "head_dim": head_dim}
    measured = partial(measure, heads=heads, head_dim=head_dim, repeats=repeats)
    measure_dtypes("windows", sizes, runs, dtypes, output, measured)


if __name__ == "__main__":
    run_with_help(main, __doc__)
