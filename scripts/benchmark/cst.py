"""Is a layer of composite slice attention faster than the same layer with SDPA, and what does a conversion keep?

Layers have random weights; both are timed in the same run, interleaved, forward and backward, on a GPU with each of
SDPA's kernels, of which the fastest is what speeds are against. The conversion is that
of all-MiniLM-L6-v2 before any fine-tuning: cosine of its sentence embeddings with those of the exact model.

    python -m scripts.benchmark.cst                     # writes scripts/results/benchmark_cst.json
    python -m scripts.benchmark.cst --lengths "" --cosines   # the conversion alone

What the output file already holds, from this machine, is not measured again: an interrupted run goes on.
"""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch import nn

from hf_effattn import CSTConfig, patch_attention, unpatch_attention
from hf_effattn.measuring.cost import compare, peak_memory_added
from hf_effattn.measuring.environment import environment
from hf_effattn.measuring.exact_kernels import CHOSEN_BY_TORCH, exact_contexts, run_in
from hf_effattn.models.cst.modeling_cst import CSTLayer, CSTPositions
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Passages, bundled_books

from ..shared.command_line import run_with_help
from ..shared.runs import print_table
from .embeddings import embed

EXACT = CHOSEN_BY_TORCH
SLICE = "slices"
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


def measure_layers(
    length: int,
    width: int,
    heads: int,
    slice_length: int,
    extension_ratio: float,
    repeats: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Rows of the layer and of its attention alone: one with slices, one with each kernel of SDPA."""
    torch.manual_seed(0)
    config = CSTConfig(
        hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, slice_length=slice_length,
        extension_ratio=extension_ratio, max_position_embeddings=length, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer, positions = CSTLayer(config).to(device, dtype), CSTPositions(config).to(device, dtype)
    exact = copy.deepcopy(layer)
    exact.attention = ExactAttention(exact.attention)
    hidden = torch.randn(1, length, width).to(device, dtype).requires_grad_()
    tables = {level: table.detach() for level, table in (positions() or {}).items()}
    rows: list[dict[str, Any]] = []
    one = torch.empty(1, heads, length, width // heads, device=device, dtype=dtype)
    kernels = exact_contexts(one, one, one)
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {
        "layer": (layer, exact),
        "attention": (layer.attention, exact.attention),
    }
    for part, (with_slices, with_sdpa) in pairs.items():
        found: dict[str, dict[str, Any]] = {
            name: {"length": length, "part": part, "attention": name} for name in (SLICE, *kernels)
        }
        runs: dict[str, Callable[..., None]] = {"forward": forward, "forward_backward": forward_backward}
        for kind, run in runs.items():
            calls: dict[str, Callable[[], None]] = {SLICE: partial(run, with_slices, hidden, tables)}
            sdpa = partial(run, with_sdpa, hidden, tables)
            calls |= {name: partial(run_in, context, sdpa) for name, context in kernels.items()}
            for name in list(calls):
                try:  # the warm-up round too
                    _, found[name][f"{kind}_peak_bytes"] = peak_memory_added(calls[name], device)
                except Exception as error:  # no memory, or a kernel that this chip has no room for
                    found[name][f"{kind}_refused"] = str(error).splitlines()[0]
                    del calls[name]
            for name, values in compare(calls, kernels, device, repeats).items():
                found[name] |= {f"{kind}_{field}": value for field, value in values.items()}
        rows += found.values()
    return rows


def measure_conversions(model: Any, passages: Passages, length: int, per_book: int) -> list[dict[str, Any]]:
    """A row per conversion and kind of slices: the cosine with the exact model's embeddings."""
    tokens, _, books = passages.pairs(length, per_book=per_book)
    exact = embed(model, tokens)
    rows = []
    for name, options in CONVERSIONS.items():
        for slice_length, extension_ratio in SLICES:
            patch_attention(model, "cst", slice_length=slice_length, extension_ratio=extension_ratio, **options)
            cosine = (embed(model, tokens) * exact).sum(dim=-1)
            unpatch_attention(model)
            rows.append(
                {
                    "length": length,
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
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens; empty: no layers.")] = (
        "2048,4096,8192,16384"
    ),
    width: int = 256,
    heads: int = 4,
    slice_length: int = 16,
    extension_ratio: float = 1.0,
    dtype: Annotated[str, typer.Option(help="Of the layers: float32, bfloat16 or float16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 5,
    cosines: Annotated[bool, typer.Option(help="Measure the conversion of the pretrained BERT.")] = True,
    texts_per_book: int = 4,
    output: Path = Path(__file__).parents[1] / "results" / "benchmark_cst.json",
) -> None:
    """Measure layers and conversions, print both tables and keep them as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = environment(device)
    settings = {
        "width": width,
        "heads": heads,
        "slice_length": slice_length,
        "extension_ratio": extension_ratio,
        "dtype": dtype,
    }
    kept: dict[str, Any] = {"layers": [], "conversions": []}
    if output.exists():
        earlier = json.loads(output.read_text(encoding="utf-8"))
        if earlier["settings"] == settings and earlier["environment"]["device_name"] == machine["device_name"]:
            kept = {name: earlier[name] for name in kept}
    output.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        output.write_text(json.dumps({"environment": machine, "settings": settings, **kept}, indent=1) + "\n")

    done = {row["length"] for row in kept["layers"]}
    wanted = [int(length) for length in lengths.split(",") if length and int(length) not in done]
    for length in track(wanted, description="layers"):
        shape = length, width, heads, slice_length, extension_ratio
        kept["layers"] += measure_layers(*shape, repeats, device, getattr(torch, dtype))
        keep()
    if cosines:
        model, tokenizer, kept["model"] = load_model(None)
        passages = Passages(tokenizer, bundled_books())
        kept["conversions"] = []
        for length in track(COSINE_LENGTHS, description="conversions"):
            kept["conversions"] += measure_conversions(model, passages, length, texts_per_book)
        keep()
    for name in ("layers", "conversions"):
        if kept[name]:
            print_table(pd.DataFrame(kept[name]), output, digits=4)


if __name__ == "__main__":
    run_with_help(main, __doc__)
