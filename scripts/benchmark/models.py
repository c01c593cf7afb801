"""How much faster is a whole patched model? RoBERTa-shaped, against exact attention, forward and training step.

The weights are random: time and memory don't depend on them, errors would, and are measured elsewhere
(`hf_effattn.report`, `scripts/benchmark/attention.py`). All calls of a length are interleaved in one run.

    python -m scripts.benchmark.models                # writes scripts/results/benchmark_models.json
    python -m scripts.benchmark.models --shapes base --lengths 1024,4096 --repeats 3    # what a CPU does in minutes

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
from transformers import PreTrainedModel, RobertaConfig, RobertaModel

from hf_effattn import patch_attention
from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio, peak_memory_added
from hf_effattn.settings_parsing import method_of

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns, print_rows
from .attention import EXACT

SHAPES: dict[str, dict[str, int]] = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
METHODS: dict[str, dict[str, Any]] = {
    text: method_of(text)
    for text in ("i-clustered clusters=100 topk=32", "bi-clustered clusters=64 topk=64 key_clusters=32")
}
TOKENS = 1000


def random_model(shape: str, length: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A RoBERTa encoder with positions for `length` tokens and random weights."""
    torch.manual_seed(0)
    config = RobertaConfig(**SHAPES[shape], vocab_size=TOKENS, max_position_embeddings=length + 2)
    return RobertaModel(config, add_pooling_layer=False).to(device, dtype).eval()


def forward(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The last hidden state, without gradients."""
    with torch.no_grad():
        return model(input_ids=tokens).last_hidden_state


def training_step(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Forward and backward pass, gradients thrown away."""
    model(input_ids=tokens).last_hidden_state.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def measure(shape: str, length: int, dtype: torch.dtype, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """A row for the exact model and one for every method."""
    exact = random_model(shape, length, dtype, device)
    models = {EXACT: exact}
    for name, settings in METHODS.items():
        models[name] = patch_attention(copy.deepcopy(exact), **settings, min_length=0)
    tokens = torch.randint(3, TOKENS, (1, length), device=device, generator=torch.Generator(device).manual_seed(0))
    rows: dict[str, dict[str, Any]] = {
        name: {"shape": shape, "length": length, "dtype": str(dtype).removeprefix("torch."), "method": name}
        for name in models
    }
    parts: tuple[tuple[str, Callable[..., Any]], ...] = (("forward", forward), ("training_step", training_step))
    for part, run in parts:
        calls = {}
        for name, model in models.items():
            try:
                _, rows[name][f"{part}_peak_bytes"] = peak_memory_added(partial(run, model, tokens), device)
            except torch.OutOfMemoryError as error:
                rows[name][f"{part}_error"] = str(error).splitlines()[0]
                continue
            calls[name] = partial(run, model, tokens)
        seconds = interleaved_rounds(calls, device, repeats)
        for name, times in seconds.items():
            rows[name][f"{part}_tokens_per_second"] = length / (median(times) or float("nan"))
            rows[name][f"{part}_speedup"] = median_ratio(seconds[EXACT], times) if EXACT in seconds else None
            rows[name][f"{part}_rounds"] = len(times)
    return list(rows.values())


def main(
    shapes: Annotated[str, typer.Option(help="Comma-separated: base, large.")] = "base,large",
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "4096,16384,65536",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Rounds of timing.")] = 10,
    output: Path = Path(__file__).parents[1] / "results" / "benchmark_models.json",
) -> None:
    """Measure every shape and length, print the table, and keep it as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = KeptRuns(output, {"dtype": dtype, "repeats": repeats}, device)
    cases = [{"shape": shape, "length": int(length)} for shape in shapes.split(",") for length in lengths.split(",")]
    for case in track(kept.missing(cases), description="models"):
        kept.add(*measure(case["shape"], case["length"], getattr(torch, dtype), device, repeats))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
