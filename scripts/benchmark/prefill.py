"""How fast and how exact is the attention of a prompt in a model that masks the future, and what does training gain?

Random queries, keys and values, clustering included: on a GPU Llama's shape, where 32 query heads read 8 heads of keys
and values, 128 wide; on a CPU 12 heads of 64, and both passes, too. The error is that of the attention output on the
queries, keys and values of `model_cards/gpt2-books` (mean over its layers) on the novels in the package, its positions
repeated beyond those it was trained with.

    python -m scripts.benchmark.prefill                      # adds to scripts/results/benchmark_prefill.json
    python -m scripts.benchmark.prefill --lengths 32768
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch.nn.attention import SDPBackend

import hf_effattn
from hf_effattn.measuring.bench import Attend, forward_backward
from hf_effattn.measuring.candidate_errors import CAUSAL_CANDIDATES
from hf_effattn.measuring.cost import compare, peak_memory_added
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
    "i-clustered clusters=100 topk=32": {"method": "i-clustered", "clusters": 100, "topk": 32},
    "bi-clustered": PATCHED,
    "bi-clustered clusters=16 topk=256 key_clusters=16": {
        "method": "bi-clustered",
        "clusters": 16,
        "topk": 256,
        "key_clusters": 16,
    },
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
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for layer in layers:
        expected = exact(*layer)
        query, key, value = (tensor.to(dtype) for tensor in layer)
        for name in list(found):
            try:
                actual = causal_clustered_attention(query, key, value, **METHODS[name])
            except torch.OutOfMemoryError:
                del found[name]
                continue
            found[name].append(relative_error(expected, actual))
    return {name: sum(errors) / len(errors) for name, errors in found.items()}


def calibrated_heads(key_heads: int) -> Method:
    """One layer whose heads run the calibrated language model's candidates, in the same shares; some are exact."""
    table = Calibration.load(str(CALIBRATION)).settings
    assert isinstance(table, PerHead)
    every = sorted(candidate for row in table.heads for candidate in row)
    row = tuple(every[(2 * head + 1) * len(every) // (2 * key_heads)] for head in range(key_heads))
    found = replace(table, heads=(row,), calibration=None).for_layers((0,))
    assert found is not None
    return found


def calls_of(inputs: Inputs) -> tuple[dict[str, Attend], dict[str, Attend]]:
    """The exact kernels that take inputs like these, and every method."""
    calls: dict[str, Attend] = {
        name: partial(causal_clustered_attention, **settings) for name, settings in METHODS.items()
    }
    return exact_calls(inputs), calls | {CALIBRATED: partial(calibrated_heads(inputs[1].shape[1]).run, causal=True)}


def without_gradients(attend: Attend, inputs: Inputs) -> torch.Tensor:
    """The output alone."""
    with torch.no_grad():
        return attend(*inputs)


def measure(
    run: dict[str, Any], shape: dict[str, int], device: torch.device, repeats: int, *, training: bool
) -> list[dict[str, Any]]:
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
    kernels, methods = calls_of(inputs)
    attends = kernels | methods
    errors = real_errors(length, device, dtype) if length <= LONGEST_REAL else {}
    rows: dict[str, dict[str, Any]] = {}
    for name, attend in list(attends.items()):
        rows[name] = run | {"method": name, "real_error": errors.get(name)}
        try:  # the warm-up round too
            _, rows[name]["peak_bytes"] = peak_memory_added(partial(without_gradients, attend, inputs), device)
            if training:
                forward_backward(attend, inputs)
            if device.type == "cpu" and name in methods:
                with counted_scores() as count:
                    without_gradients(attend, inputs)
                rows[name]["scored_share"] = count.share(shape["heads"], length)
                if name == CALIBRATED:
                    rows[name]["scored_share"] += exact_share(calibrated_heads(shape["key_heads"]).to_dict())
        except Exception as error:  # no memory, or a kernel that this chip has no room for
            rows[name]["refused"] = str(error).splitlines()[0]
            del attends[name]
    passes: dict[str, Callable[[Attend, Inputs], object]] = {"": without_gradients}
    if training:
        passes["training_"] = forward_backward
    for prefix, one in passes.items():
        calls = {name: partial(one, attend, inputs) for name, attend in attends.items()}
        for name, found in compare(calls, kernels, device, repeats).items():
            rows[name] |= {prefix + what: number for what, number in found.items()}
    return list(rows.values())


def main(
    lengths: Annotated[str | None, typer.Option(help="Comma-separated numbers of tokens.")] = None,
    heads: Annotated[int | None, typer.Option(help="Default: 32 on a GPU, else 12.")] = None,
    key_heads: Annotated[int | None, typer.Option(help="Default: 8 on a GPU, else 12.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Default: 128 on a GPU, else 64.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, else float32.")] = None,
    training: Annotated[bool | None, typer.Option(help="Time both passes, too. Default: on a CPU.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 5,
    output: Path | None = None,
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every length, and print the table."""
    device, dtype, output = device_defaults("benchmark_prefill", dtype, output)
    asked = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    default = dict(zip(asked, DEFAULT_SHAPES[device.type], strict=True))
    shape = {name: default[name] if size is None else size for name, size in asked.items()}
    training = device.type == "cpu" if training is None else training
    kept = KeptRuns(output, shape | {"repeats": repeats, "training": training}, device)
    runs = [{"length": int(length), "dtype": dtype} for length in (lengths or DEFAULT_LENGTHS[device.type]).split(",")]
    for run in track(kept.missing(runs), description="lengths"):
        kept.add(*measure(run, shape, device, repeats, training=training))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
