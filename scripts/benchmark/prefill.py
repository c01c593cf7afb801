"""How fast and how exact is the attention of a prompt in a model that masks the future? Llama's shape.

32 query heads read 8 heads of keys and values, 128 wide, random; clustering is timed too. The error is that of the
attention output on the queries, keys and values of `model_cards/gpt2-books` (mean over its layers) on the novels in
the package, its positions repeated beyond those it was trained with.

    python -m scripts.benchmark.prefill                      # adds to scripts/results/benchmark_prefill.json
    python -m scripts.benchmark.prefill --lengths 32768,131072
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch.nn.attention import SDPBackend

import hf_effattn
from hf_effattn.measuring.cost import compare, peak_memory_added
from hf_effattn.measuring.errors import relative_error
from hf_effattn.measuring.exact_kernels import sdpa
from hf_effattn.ops import causal_clustered_attention
from hf_effattn.patching.methods.clustered import BiClustered
from hf_effattn.samples.texts import bundled_books

from ..kept.command_line import run_with_help
from ..kept.runs import KeptRuns, device_defaults, print_rows
from ._inputs import Inputs, causal_attention_inputs, load_causal_model

GPT2 = Path(__file__).resolve().parents[2] / "model_cards" / "gpt2-books"
# Its activations take 12 KiB a token; the novels in the package have text for three times as many tokens.
LONGEST_REAL = 32_768
DEFAULT_LENGTHS = {"cpu": "2048,4096", "cuda": "4096,8192,16384,32768,65536,131072"}
# What `patch_attention(model, "bi-clustered")` tells the op.
PATCHED: dict[str, Any] = {"method": "bi-clustered"} | BiClustered().causal_options()
METHODS: dict[str, dict[str, Any]] = {
    "i-clustered C=100 k=32": {"method": "i-clustered", "clusters": 100, "topk": 32},
    "bi-clustered": PATCHED,
    "bi-clustered C=16 k=256 G=16": {"method": "bi-clustered", "clusters": 16, "topk": 256, "key_clusters": 16},
    # Clusters of the whole prompt, as `causal="prefill"`: later tokens change earlier outputs.
    "bi-clustered, prefill": PATCHED | {"prefill": True},
}


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


@torch.no_grad()
def measure(run: dict[str, Any], shape: dict[str, int], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """A row for every kernel and method: milliseconds, speed against the fastest exact kernel, memory and error.

    One that does not run, for want of memory, says why: `refused`.
    """
    length, dtype = run["length"], getattr(torch, run["dtype"])
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(1, length, heads, shape["head_dim"], generator=generator).to(device, dtype).transpose(1, 2)
        for heads in (shape["heads"], shape["key_heads"], shape["key_heads"])
    )
    kernels = exact_calls((query, key, value))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(call, query, key, value) for name, call in kernels.items()
    }
    calls |= {
        name: partial(causal_clustered_attention, query, key, value, **settings) for name, settings in METHODS.items()
    }
    errors = real_errors(length, device, dtype) if length <= LONGEST_REAL else {}
    rows: dict[str, dict[str, Any]] = {}
    for name in list(calls):
        rows[name] = run | {"method": name, "real_error": errors.get(name)}
        try:  # the warm-up round too
            _, rows[name]["peak_bytes"] = peak_memory_added(calls[name], device)
        except Exception as error:  # no memory, or a kernel that this chip has no room for
            rows[name]["refused"] = str(error).splitlines()[0]
            del calls[name]
    for name, found in compare(calls, kernels, device, repeats).items():
        rows[name] |= found
    return list(rows.values())


def main(
    lengths: Annotated[str | None, typer.Option(help="Comma-separated numbers of tokens.")] = None,
    heads: int = 32,
    key_heads: int = 8,
    head_dim: int = 128,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, else float32.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 5,
    output: Path | None = None,
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every length, and print the table."""
    device, dtype, output = device_defaults("benchmark_prefill", dtype, output)
    shape = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    kept = KeptRuns(output, shape | {"repeats": repeats}, device)
    runs = [{"length": int(length), "dtype": dtype} for length in (lengths or DEFAULT_LENGTHS[device.type]).split(",")]
    for run in track(kept.missing(runs), description="lengths"):
        kept.add(*measure(run, shape, device, repeats))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
