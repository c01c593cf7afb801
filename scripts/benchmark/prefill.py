"""How fast and how exact is the attention of a prompt in a model that masks the future, and what does training gain?

Random queries, keys and values, clustering included: on a GPU Llama's shape, where 32 query heads read 8 heads of keys
and values, 128 wide; on a CPU 12 heads of 64, and both passes, too. The error is that of the attention output on the
queries, keys and values of `model_cards/gpt2-books` (mean over its layers) on the novels in the package, its positions
repeated beyond those it was trained with.

    python -m scripts.benchmark.prefill                      # adds to scripts/results/benchmark_prefill.json
    python -m scripts.benchmark.prefill --lengths 32768
"""

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch.nn.attention import SDPBackend

import hf_effattn
from hf_effattn.measuring.bench import Attend, forward, forward_backward
from hf_effattn.measuring.candidate_errors import CAUSAL_CANDIDATES
from hf_effattn.measuring.errors import relative_error
from hf_effattn.measuring.exact_kernels import sdpa
from hf_effattn.ops import causal_clustered_attention
from hf_effattn.patching.methods import Method
from hf_effattn.patching.methods.causal import CausalBiClustered
from hf_effattn.patching.methods.per_head import PerHead
from hf_effattn.reporting.calibration import Calibration
from hf_effattn.samples.texts import bundled_books

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns, device_defaults, print_rows
from ._inputs import Inputs, causal_attention_inputs, load_causal_model
from ._scores import counted_scores
from ._timing import Repeats, Rows, keep_missing, numbers, time_calls
from .language_model import CALIBRATION, exact_share

GPT2 = Path(__file__).resolve().parents[2] / "model_cards" / "gpt2-books"
# Its activations take 12 KiB a token; the novels in the package have text for three times as many tokens.
LONGEST_REAL = 32_768
DEFAULT_LENGTHS = {"cpu": "4096,8192,16384", "cuda": "4096,8192,16384,32768,65536,131072"}
DEFAULT_SHAPES = {"cpu": (12, 12, 64), "cuda": (32, 8, 128)}
# What `patch_attention(model, "bi-clustered")` tells the op.
PATCHED: dict[str, Any] = {"method": "bi-clustered"} | CausalBiClustered().of_older_keys
CHEAPEST = CausalBiClustered(**{name: value for name, value in CAUSAL_CANDIDATES[0].items() if name != "method"})
METHODS: dict[str, dict[str, Any]] = {
    "i-clustered clusters=100 exact_keys=32": {"method": "i-clustered", "clusters": 100, "topk": 32},
    "bi-clustered": PATCHED,
    # The one that most heads of a calibrated model run.
    "cheapest candidate": {"method": "bi-clustered"} | CHEAPEST.of_older_keys,
}
CALIBRATED = "calibrated heads"


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """PyTorch's causal attention, by the kernel that it chooses."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def exact_calls(inputs: Inputs) -> dict[str, Callable[..., torch.Tensor]]:
    """The exact kernels that take inputs like these."""
    few: tuple[torch.Tensor, ...] = tuple(tensor[:, :, :16] for tensor in inputs)
    calls: dict[str, Callable[..., torch.Tensor]] = {"SDPA": exact}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if inputs[0].is_cuda else ():
        call = partial(sdpa, backend, is_causal=True, enable_gqa=True)
        try:
            call(*few)
        except RuntimeError:
            continue
        calls[f"SDPA {backend.name.lower()}"] = call
    return calls


def real_errors(length: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative L2 error of every method on a trained model's activations; without those that do not run on them."""
    model, tokenizer = load_causal_model(GPT2)
    hf_effattn.extend_positions(model, max(length, model.config.max_position_embeddings))
    text = "\n\n".join(book.text for book in bundled_books())
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])[:length]
    layers = causal_attention_inputs(model.to(device), tokens[None].to(device))
    expected = [exact(*layer) for layer in layers]
    errors = {}
    for name, settings in METHODS.items():
        with suppress(torch.OutOfMemoryError):
            outputs = (causal_clustered_attention(*(rows.to(dtype) for rows in layer), **settings) for layer in layers)
            errors[name] = statistics.fmean(map(relative_error, expected, outputs))
    return errors


def calibrated_heads(key_heads: int) -> Method:
    """One layer whose heads run the calibrated language model's candidates, in the same shares; some are exact."""
    table = Calibration.load(str(CALIBRATION)).settings
    assert isinstance(table, PerHead)
    every = sorted(candidate for row in table.heads for candidate in row)
    row = tuple(every[(2 * head + 1) * len(every) // (2 * key_heads)] for head in range(key_heads))
    method = replace(table, heads=(row,), calibration=None).for_layers((0,))
    assert method is not None
    return method


def scored_share(attend: Attend, inputs: Inputs) -> float:
    """The part of exact attention's scores that a method computes."""
    with counted_scores() as count:
        forward(attend, inputs)
    return count.share(*inputs[0].shape[1:3])


def measure(run: dict[str, Any], shape: dict[str, int], device: torch.device, repeats: int, *, training: bool) -> Rows:
    """A row for every kernel and method: milliseconds, speed against the fastest exact kernel, memory and error.

    On a CPU also the share of exact attention's scores that is computed. `training`: times of both passes, too. One
    that does not run, for want of memory, says why: `refused`.
    """
    length, dtype = run["length"], getattr(torch, run["dtype"])
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(1, length, heads, shape["head_dim"], generator=generator).to(device, dtype).transpose(1, 2)
        for heads in (shape["heads"], shape["key_heads"], shape["key_heads"])
    )
    inputs = query.requires_grad_(training), key.requires_grad_(training), value.requires_grad_(training)
    heads, kernels = calibrated_heads(shape["key_heads"]), exact_calls(inputs)
    attends: dict[str, Attend] = dict(kernels)
    attends |= {name: partial(causal_clustered_attention, **settings) for name, settings in METHODS.items()}
    attends[CALIBRATED] = partial(heads.run, causal=True)
    errors = real_errors(length, device, dtype) if length <= LONGEST_REAL else {}
    rows = {name: run | {"method": name, "real_error": errors.get(name)} for name in attends}
    passes: dict[str, Callable[[Attend, Inputs], object]] = {"": forward}
    if training:
        passes["training_"] = forward_backward
    for prefix, one_pass in passes.items():
        calls = {name: partial(one_pass, attend, inputs) for name, attend in attends.items()}
        for name, times in time_calls(calls, kernels, device, repeats, prefix).items():
            rows[name] |= times
    for name, row in rows.items():
        if device.type == "cpu" and name not in kernels and "refused" not in row:
            row["scored_share"] = scored_share(attends[name], inputs)
            row["scored_share"] += exact_share(heads.to_dict()) if name == CALIBRATED else 0.0
    return list(rows.values())


def main(
    lengths: Annotated[str | None, typer.Option(help="Comma-separated numbers of tokens.")] = None,
    heads: Annotated[int | None, typer.Option(help="Default: 32 on a GPU, else 12.")] = None,
    key_heads: Annotated[int | None, typer.Option(help="Default: 8 on a GPU, else 12.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Default: 128 on a GPU, else 64.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, else float32.")] = None,
    training: Annotated[bool | None, typer.Option(help="Time both passes, too. Default: on a CPU.")] = None,
    repeats: Repeats = 5,
    output: Path | None = None,
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every length, and print the table."""
    device, dtype, output = device_defaults("benchmark_prefill", dtype, output)
    given = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    default = dict(zip(given, DEFAULT_SHAPES[device.type], strict=True))
    shape = {name: default[name] if size is None else size for name, size in given.items()}
    training = device.type == "cpu" if training is None else training
    kept = KeptRuns(output, shape | {"repeats": repeats, "training": training}, device)
    runs = [{"length": length, "dtype": dtype} for length in numbers(lengths or DEFAULT_LENGTHS[device.type])]
    keep_missing(kept, runs, lambda run: measure(run, shape, device, repeats, training=training), "lengths")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
