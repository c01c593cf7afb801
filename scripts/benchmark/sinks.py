"""How much faster than eager attention, and smaller, are layers with attention sinks, exact and approximated?

Random inputs in the shape of gpt-oss: 64 query heads read 8 heads of keys, 64 wide; its layers see all earlier tokens
and windows of 128 in turn. Transformers runs them eagerly, as its SDPA path has no sinks: all scores of a layer are in
memory. All calls of a length are interleaved, masks included. Where its scores would not fit it is left out.

    python -m scripts.benchmark.sinks       # writes scripts/results/benchmark_sinks.json; minutes on two cores

What the output file holds is not measured again.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from transformers.masking_utils import causal_mask_function, eager_mask, sliding_window_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from hf_effattn.measuring.errors import relative_error
from hf_effattn.patching.exact.reference import exact_attention
from hf_effattn.patching.exact.windows import attend_in_blocks, mask_of_blocks
from hf_effattn.patching.methods import make_method

from ..shared.command_line import run_with_help
from ._timing import Lengths, Repeats, Rows, measure_dtypes, numbers, time_calls

EAGER, EXACT = "eager", "exact"
WINDOW = 128
MOST_SCORE_BYTES = 3 * 2**30  # eager attention holds about four times as much
HEADS, KEY_HEADS, HEAD_DIM = 64, 8, 64


def eagerly(function: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any) -> Any:
    """As transformers runs it, `(B, N, H, D)`."""
    B, H, N, D = query.shape
    mask = eager_mask(B, N, N, mask_function=function, dtype=query.dtype)
    module: Any = SimpleNamespace(num_key_value_groups=H // key.shape[1], sinks=sinks, training=False)
    return eager_attention_forward(module, query, key, value, mask, scaling=D**-0.5)[0]


def exactly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """As a patched model runs what it does not approximate."""
    output = exact_attention(query, key, value, None, scale=None, dropout_p=0.0, causal=True, attention_sinks=sinks)
    return output.transpose(1, 2).contiguous()


def in_blocks(
    function: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """As a patched model runs a layer with windows."""
    batch, _, length, _ = query.shape
    mask = mask_of_blocks(function, None, causal=True, batch_size=batch, length=length, device=query.device)
    assert mask is not None
    return attend_in_blocks(query, key, value, mask, causal=True, dropout=0.0, scale=None, attention_sinks=sinks)


def approximately(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """As a patched model runs the other layers."""
    method = make_method("bi-clustered", causal=True, min_length=0)
    return method.run(query, key, value, causal=True, attention_sinks=sinks).transpose(1, 2).contiguous()


def measure(run: dict[str, Any], device: torch.device, repeats: int) -> Rows:
    """A row for each way: seconds, the speed beside eager attention's, memory, and the distance from it."""
    torch.manual_seed(0)
    dtype, length = getattr(torch, run["dtype"]), run["length"]
    query, key, value = (
        torch.randn(1, length, heads, HEAD_DIM).to(device, dtype).transpose(1, 2)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    inputs = query, key, value, torch.randn(HEADS).to(device, dtype)
    windowed = run["layer"] == "window"
    function = sliding_window_causal_mask_function(WINDOW) if windowed else causal_mask_function
    ways: dict[str, Callable[..., torch.Tensor]] = {EAGER: partial(eagerly, function)}
    if HEADS * length**2 * dtype.itemsize > MOST_SCORE_BYTES:
        del ways[EAGER]
    ways |= {EXACT: partial(in_blocks, function)} if windowed else {EXACT: exactly, "bi-clustered": approximately}
    calls = {name: partial(way, *inputs) for name, way in ways.items()}
    with torch.no_grad():
        rows = time_calls(calls, [EAGER], device, repeats)
        if EAGER in calls:  # of random queries an approximation's error says nothing
            rows[EXACT]["error"] = relative_error(calls[EAGER](), calls[EXACT]())
    return [run | {"way": name} | row for name, row in rows.items()]


def main(
    lengths: Lengths = "1024,4096,16384",
    dtypes: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16.")] = "bfloat16",
    repeats: Repeats = 3,
    output: Path | None = None,
) -> None:
    """Measure both kinds of layers at every length and dtype, and keep it as JSON."""
    settings = {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": HEAD_DIM, "window": WINDOW}
    cases = [{"layer": layer, "length": length} for layer in ("full", "window") for length in numbers(lengths)]
    measure_dtypes("sinks", settings, cases, dtypes, output, partial(measure, repeats=repeats))


if __name__ == "__main__":
    run_with_help(main, __doc__)
