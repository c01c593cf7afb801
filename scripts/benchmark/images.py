"""How much faster are large images seen, patched? The image encoders of Qwen-VL, against exact attention, forward.

In the sizes of the published models, with fewer layers, as all that see whole images are alike. The weights and images
are random: heads so smooth never run exactly, which costs time with trained ones, and errors would say nothing. All
calls of a size are interleaved in one run.

    python -m scripts.benchmark.images     # writes scripts/results/benchmark_images.json; minutes on two cores

What the output file holds is not measured again.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionConfig,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

from hf_effattn import patch_attention
from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns, print_rows
from .attention import EXACT

# What builds each, and in how few layers it is timed: one of eight of Qwen2.5-VL's sees whole images.
ENCODERS: dict[str, tuple[type[PreTrainedModel], Callable[..., Any], dict[str, Any]]] = {
    "Qwen2-VL": (Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig, {"depth": 2}),
    "Qwen2.5-VL": (
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLVisionConfig,
        {"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "fullatt_block_indexes": [7]},
    ),
    "Qwen3-VL": (Qwen3VLVisionModel, Qwen3VLVisionConfig, {"depth": 2, "deepstack_visual_indexes": []}),
}
METHODS = "i-clustered", "bi-clustered"  # as they are by default


def forward(model: PreTrainedModel, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The last hidden state, without gradients."""
    with torch.no_grad():
        return model(pixels, grid_thw=grid).last_hidden_state


def measure(name: str, side: int, repeats: int, **sizes: Any) -> list[dict[str, Any]]:
    """A row for the exact encoder and one for every method, of a square image of `side` patches a side."""
    torch.manual_seed(0)
    kind, config_class, fewer = ENCODERS[name]
    exact = kind._from_config(config_class(**fewer | sizes)).eval()
    models = {EXACT: exact}
    models |= {method: patch_attention(copy.deepcopy(exact), method, min_length=0) for method in METHODS}
    config: Any = exact.config
    pixels = torch.randn(side**2, config.in_channels * config.temporal_patch_size * config.patch_size**2)
    grid = torch.tensor([[1, side, side]])
    calls = {method: partial(forward, model, pixels, grid) for method, model in models.items()}
    calls[METHODS[0]]()
    seconds = interleaved_rounds(calls, torch.device("cpu"), repeats)
    return [
        {
            "encoder": name,
            "patches": side**2,
            "method": method,
            "seconds": median(seconds[method]),
            "speed": median_ratio(seconds[EXACT], seconds[method]),
        }
        for method in models
    ]


def main(
    sides: Annotated[str, typer.Option(help="Comma-separated: patches of a side of the image.")] = "64,96,128",
    encoders: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(ENCODERS),
    repeats: Annotated[int, typer.Option(help="Rounds of timing.")] = 3,
    output: Path = Path(__file__).parents[1] / "results" / "benchmark_images.json",
) -> None:
    """Measure every encoder and size; keep it as JSON."""
    unknown = set(encoders.split(",")) - ENCODERS.keys()
    if unknown:
        raise typer.BadParameter(f"encoders must be of {', '.join(ENCODERS)}, got {', '.join(sorted(unknown))}")
    kept = KeptRuns(output, {})
    runs = [{"encoder": name, "patches": int(side) ** 2} for name in encoders.split(",") for side in sides.split(",")]
    for run in track(kept.missing(runs), description="images"):
        kept.add(*measure(run["encoder"], round(run["patches"] ** 0.5), repeats))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
