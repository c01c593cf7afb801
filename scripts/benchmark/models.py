"""How much faster is a whole patched model? RoBERTa-shaped, against exact attention, forward and training step.

The weights are random: time and memory don't depend on them, errors would, and are measured elsewhere
(`hf_effattn.report`, `scripts/benchmark/attention.py`). All calls of a length are interleaved in one run.

    python -m scripts.benchmark.models                # writes scripts/results/benchmark_models.json
    python -m scripts.benchmark.models --shapes base --lengths 1024,4096 --repeats 3    # what a CPU does in minutes

What the output file holds is not measured again.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, RobertaConfig, RobertaModel

from hf_effattn import patch_attention
from hf_effattn.settings_parsing import method_of

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._timing import Lengths, Repeats, Rows, keep_missing, numbers, time_models
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


def random_tokens(length: int, device: torch.device) -> torch.Tensor:
    """One text, `(1, length)`."""
    return torch.randint(3, TOKENS, (1, length), device=device, generator=torch.Generator(device).manual_seed(0))


def last_hidden_state(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Of one text."""
    return model(input_ids=tokens).last_hidden_state


def random_models(
    sizes: dict[str, int], length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, PreTrainedModel]:
    """A model of `length` positions with random weights, exact, and by every method."""
    torch.manual_seed(0)
    config = RobertaConfig(**sizes, vocab_size=TOKENS, max_position_embeddings=length + 2)
    exact = RobertaModel(config, add_pooling_layer=False).to(device, dtype)
    models = {EXACT: exact}
    for name, settings in METHODS.items():
        models[name] = patch_attention(copy.deepcopy(exact), **settings, min_length=0)
    return models


def measure(case: dict[str, Any], dtype: torch.dtype, device: torch.device, repeats: int) -> Rows:
    """A row for the exact model and one for every method."""
    models = random_models(SHAPES[case["shape"]], case["length"], dtype, device)
    run = partial(last_hidden_state, tokens=random_tokens(case["length"], device))
    rows = time_models(models, run, device, repeats, trains=True)
    return [case | {"dtype": str(dtype).removeprefix("torch."), "method": name} | row for name, row in rows.items()]


def main(
    shapes: Annotated[str, typer.Option(help="Comma-separated: base, large.")] = "base,large",
    lengths: Lengths = "4096,16384,65536",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    repeats: Repeats = 10,
    output: Path = RESULTS / "benchmark_models.json",
) -> None:
    """Measure every shape and length, print the table, and keep it as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = KeptRuns(output, {"dtype": dtype, "repeats": repeats}, device)
    cases = [{"shape": shape, "length": length} for shape in shapes.split(",") for length in numbers(lengths)]
    chosen = getattr(torch, dtype)
    keep_missing(kept, cases, lambda case: measure(case, chosen, device, repeats), "models")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
