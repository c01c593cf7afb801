"""Is a layer of composite slice attention faster than the same layer with SDPA, and what does a conversion keep?

Layers have random weights; both are timed in the same run, interleaved, forward and backward, on a GPU with each of
SDPA's kernels, of which the fastest is what speeds are against. The conversion is that
of all-MiniLM-L6-v2 before any fine-tuning: cosine of its sentence embeddings with those of the exact model.

    python -m scripts.benchmark.cst                     # writes scripts/results/benchmark_cst.json

What the output file already holds is not measured again: an interrupted run goes on.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from torch import nn

from hf_effattn import CSTConfig, patch_attention, unpatch_attention
from hf_effattn.measuring.exact_kernels import CHOSEN_BY_TORCH, exact_contexts, run_in
from hf_effattn.models.cst.modeling_cst import CSTLayer, CSTPositions
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Passages, bundled_books

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table
from ._timing import Lengths, Repeats, Rows, keep_missing, numbers, time_calls
from .embeddings import embed

EXACT = CHOSEN_BY_TORCH
SLICE = "slices"
LAYER, CONVERSION = "layer", "conversion"  # what a row is about
COSINE_LENGTHS = (128, 256, 512)
CONVERSIONS: dict[str, dict[str, Any]] = {
    "merged": {},
    "merged, attend_ends=False": {"attend_ends": False},
    "the paper's sum": {"composition": "local-global"},
    "the paper's sum, attend_ends=True": {"composition": "local-global", "attend_ends": True},
}
SLICES = ((8, 1), (16, 1), (16, 3), (32, 1), (64, 1))


class ExactAttention(nn.Module):
    """Attention of every token to every token by SDPA, with the projections of a layer of slices.

    Args:
        attention (`CSTAttention`): whose weights it takes.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.projections, self.output, self.num_heads = attention.projections, attention.output, attention.num_heads

    def forward(self, hidden: torch.Tensor, *ignored: Any) -> tuple[torch.Tensor, None]:
        """Args:
            hidden (`torch.Tensor`): `(B, N, d)`.
            ignored: what composite slice attention takes beside it.

        Returns: the output `(B, N, d)` and no state.
        """
        to = self.projections
        query, key, value = (
            project(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (to.query, to.key, to.value)
        )
        output = F.scaled_dot_product_attention(query, key, value)
        return self.output(output.transpose(1, 2).flatten(2)), None


def forward_backward(module: nn.Module, hidden: torch.Tensor, tables: Any) -> None:
    """One call of a layer or an attention, and the gradients of its weights and its input."""
    output = module(hidden, tables, None)[0]
    output.backward(torch.ones_like(output))
    hidden.grad = None
    module.zero_grad(set_to_none=True)


def forward(module: nn.Module, hidden: torch.Tensor, tables: Any) -> None:
    """One call of a layer or an attention, without gradients."""
    with torch.no_grad():
        module(hidden, tables, None)


def make_layer(
    length: int, settings: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """A layer with random weights, a text's hidden states `(1, length, width)` and the tables of its positions."""
    torch.manual_seed(0)
    width, heads = settings["width"], settings["heads"]
    config = CSTConfig(
        hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        slice_length=settings["slice_length"], extension_ratio=settings["extension_ratio"],
        max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer, positions = CSTLayer(config).to(device, dtype), CSTPositions(config).to(device, dtype)
    hidden = torch.randn(1, length, width).to(device, dtype).requires_grad_()
    return layer, hidden, {level: table.detach() for level, table in (positions() or {}).items()}


def measure_layers(run: dict[str, Any], settings: dict[str, Any], device: torch.device, repeats: int) -> Rows:
    """Rows of the layer and of its attention alone: one with slices, one with each kernel of SDPA."""
    length, heads, dtype = run["length"], settings["heads"], getattr(torch, settings["dtype"])
    layer, hidden, tables = make_layer(length, settings, dtype, device)
    exact = copy.deepcopy(layer)
    exact.attention = ExactAttention(exact.attention)
    by_head = torch.empty(1, heads, length, settings["width"] // heads, device=device, dtype=dtype)
    kernels = exact_contexts(by_head, by_head, by_head)
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {
        "layer": (layer, exact),
        "attention": (layer.attention, exact.attention),
    }
    passes: dict[str, Callable[..., None]] = {"forward": forward, "forward_backward": forward_backward}
    rows = {(part, name): run | {"part": part, "attention": name} for part in pairs for name in (SLICE, *kernels)}
    for part, (with_slices, with_sdpa) in pairs.items():
        for kind, one_pass in passes.items():
            calls: dict[str, Callable[[], None]] = {SLICE: partial(one_pass, with_slices, hidden, tables)}
            sdpa = partial(one_pass, with_sdpa, hidden, tables)
            calls |= {name: partial(run_in, context, sdpa) for name, context in kernels.items()}
            for name, times in time_calls(calls, kernels, device, repeats, f"{kind}_").items():
                rows[part, name] |= times
    return list(rows.values())


def measure_conversions(run: dict[str, Any], per_book: int) -> Rows:
    """A row per conversion and kind of slices: the cosine with the exact model's embeddings."""
    model, tokenizer, _ = load_model(None)
    tokens, _, books = Passages(tokenizer, bundled_books()).pairs(run["length"], per_book=per_book)
    exact = embed(model, tokens)
    rows = []
    for name, options in CONVERSIONS.items():
        for slice_length, extension_ratio in SLICES:
            patch_attention(model, "cst", slice_length=slice_length, extension_ratio=extension_ratio, **options)
            cosine = (embed(model, tokens) * exact).sum(dim=-1)
            unpatch_attention(model)
            rows.append(
                run
                | {
                    "conversion": name,
                    "slice_length": slice_length,
                    "extension_ratio": extension_ratio,
                    "texts": len(books),
                    "cosine_mean": cosine.mean().item(),
                    "cosine_min": cosine.min().item(),
                }
            )
    return rows


def main(
    lengths: Lengths = "2048,4096,8192,16384",
    width: int = 256,
    heads: int = 4,
    slice_length: int = 16,
    extension_ratio: float = 1.0,
    dtype: Annotated[str, typer.Option(help="Of the layers: float32, bfloat16 or float16.")] = "float32",
    repeats: Repeats = 5,
    cosines: Annotated[bool, typer.Option(help="Measure the conversion of the pretrained BERT.")] = True,
    texts_per_book: int = 4,
    output: Path = RESULTS / "benchmark_cst.json",
) -> None:
    """Measure layers and conversions, print both tables and keep them as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings: dict[str, Any] = {"width": width, "heads": heads, "slice_length": slice_length}
    settings |= {"extension_ratio": extension_ratio, "dtype": dtype}
    kept = KeptRuns(output, settings, device)
    layers = [{"measured": LAYER, "length": length} for length in numbers(lengths)]
    keep_missing(kept, layers, lambda run: measure_layers(run, settings, device, repeats), "layers")
    if cosines:
        conversions = [{"measured": CONVERSION, "length": length} for length in COSINE_LENGTHS]
        keep_missing(kept, conversions, partial(measure_conversions, per_book=texts_per_book), "conversions")
    for kind in (LAYER, CONVERSION):
        shown = pd.DataFrame(kept.matching({"measured": kind})).dropna(axis=1, how="all")
        print_table(shown.drop(columns=list(kept.machine), errors="ignore"), output, digits=4)


if __name__ == "__main__":
    run_with_help(main, __doc__)
