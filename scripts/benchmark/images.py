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
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionConfig,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

from hf_effattn import patch_attention

from ..shared.command_line import check_names, run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._timing import CPU, Repeats, Rows, keep_missing, numbers, time_models
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


def last_hidden_state(model: PreTrainedModel, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Of one image."""
    return model(pixels, grid_thw=grid).last_hidden_state


def measure(case: dict[str, Any], repeats: int, **sizes: Any) -> Rows:
    """A row for the exact encoder and one for every method, of a square image."""
    torch.manual_seed(0)
    kind, config_class, fewer = ENCODERS[case["encoder"]]
    exact = kind._from_config(config_class(**fewer | sizes))
    models = {EXACT: exact}
    models |= {method: patch_attention(copy.deepcopy(exact), method, min_length=0) for method in METHODS}
    config: Any = exact.config
    pixels = torch.randn(case["patches"], config.in_channels * config.temporal_patch_size * config.patch_size**2)
    side = round(case["patches"] ** 0.5)
    run = partial(last_hidden_state, pixels=pixels, grid=torch.tensor([[1, side, side]]))
    rows = time_models(models, run, CPU, repeats, trains=False)
    return [case | {"method": method} | row for method, row in rows.items()]


def main(
    sides: Annotated[str, typer.Option(help="Comma-separated: patches of a side of the image.")] = "64,96,128",
    encoders: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(ENCODERS),
    repeats: Repeats = 3,
    output: Path = RESULTS / "benchmark_images.json",
) -> None:
    """Measure every encoder and size; keep it as JSON."""
    check_names("encoders", encoders.split(","), ENCODERS)
    kept = KeptRuns(output, {})
    cases = [{"encoder": name, "patches": side**2} for name in encoders.split(",") for side in numbers(sides)]
    keep_missing(kept, cases, partial(measure, repeats=repeats), "images")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
