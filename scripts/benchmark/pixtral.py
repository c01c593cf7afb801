"""How much faster does Pixtral see several images, each attended to by itself, than with transformers' mask of pairs?

In the published size, with fewer layers, as all are alike; random weights and images, square, of one size. Both ways
are timed in one run, interleaved, forward and, of the smaller, a step of training, and their memory is taken.

    python -m scripts.benchmark.pixtral     # writes scripts/results/benchmark_pixtral.json; minutes on two cores

What the output file holds is not measured again.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PixtralVisionConfig, PixtralVisionModel, PreTrainedModel

from ..shared.command_line import run_with_help
from ._exact import Dtypes, Repeats, beside_own_code, measure_all

LAYERS = 2
# Images, the patches of a side of each, and whether a step of training is timed. 64 are 1,024 pixels, what the model
# was made for; 16 a small picture, of which a prompt may have many; 110 what Mistral Small 3.1 reads.
CASES: list[tuple[int, int, bool]] = [
    (1, 64, True),
    (4, 64, False),
    (16, 16, True),
    (64, 16, False),
    (1, 110, False),
]


def run(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    """The last hidden state of all images."""
    return model(pixels.to(model.dtype)).last_hidden_state


def measure(case: dict[str, Any], device: torch.device, repeats: int, *, trains: bool) -> list[dict[str, Any]]:
    """The rows of so many images."""
    torch.manual_seed(0)
    model = PixtralVisionModel(PixtralVisionConfig(num_hidden_layers=LAYERS))
    pixels = round(case["length"] ** 0.5) * model.config.patch_size
    images = torch.randn(case["texts"], 3, pixels, pixels, generator=torch.Generator().manual_seed(0)).to(device)
    return beside_own_code(case, model, partial(run, pixels=images), device, repeats, trains=trains)


def main(dtypes: Dtypes = None, repeats: Repeats = 3, output: Path | None = None) -> None:
    """Measure each number and size of images; keep it as JSON."""
    trained = {(images, side**2): trains for images, side, trains in CASES}
    cases = [{"model": "Pixtral-12B", "texts": images, "length": patches} for images, patches in trained]

    def rows(case: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
        return measure(case, device, repeats, trains=trained[case["texts"], case["length"]])

    measure_all("pixtral", {"layers": LAYERS}, cases, dtypes, output, rows)


if __name__ == "__main__":
    run_with_help(main, __doc__)
