"""Is a ClusterFormer layer faster and smaller than the same layer with exact attention? (Source: Wang 2022, Table 7)

The layers have the same size and differ in what they attend to: PyTorch's attention to all words, neural clustering,
the gate, the gate with the centroids, and the rivals K-means (Routing Transformer) and LSH (Reformer). All are timed
in the same run, interleaved, sorting included; on a GPU PyTorch's attention with each of its kernels, of which the
fastest is what speeds are against. What has no kernels there, K-means of words wider than 256, is refused: it would
take most of the time. The training step has the clustering losses that its layer has. `attention` is the part that the
methods replace: sorting, projections and attention; `layer` adds norms and the feed-forward part, which all share.

    python -m scripts.benchmark.clusterformer            # writes scripts/results/benchmark_clusterformer.json
    python -m scripts.benchmark.clusterformer --dtypes bfloat16     # runs on the GPU where there is one

What the output file already holds is not measured again: an interrupted run goes on.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_effattn.measuring.environment import environment
from hf_effattn.measuring.exact_kernels import CHOSEN_BY_TORCH, exact_contexts, run_in
from hf_effattn.models.clusterformer import ClusterFormerConfig
from hf_effattn.models.clusterformer.modeling_clusterformer import ClusterFormerLayer
from hf_effattn.models.clusterformer.sorting import SortedWords

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._timing import Repeats, Rows, keep_missing, numbers, time_calls

EXACT = f"exact ({CHOSEN_BY_TORCH})"
ROUTINGS: dict[str, dict[str, Any]] = {
    EXACT: {"assignment": "full"},
    "neural": {"gated": False},
    "gated": {"gated": True, "attend_centroids": False},
    "gated, centroids": {"gated": True, "attend_centroids": True},
    "K-means": {"assignment": "kmeans"},
    "LSH": {"assignment": "lsh"},
}
DEFAULT_LENGTHS = {
    "cpu": "512,1000,2048,4096,8192,16384",
    "cuda": "512,1000,2000,4096,10000,16384,25000,35000,55000,65536",
}
SLOWER_FORM = "attention on a GPU runs the slower PyTorch form"
PARTS = ("attention", "layer")
PASSES = ("forward", "forward_backward")


class TimedLayer:
    """A layer on random words, as the parts and passes that are timed."""

    def __init__(self, settings: dict[str, Any], sizes: dict[str, Any], words: torch.Tensor, clusters: int) -> None:
        config = ClusterFormerConfig(
            **sizes,
            **settings,
            clusters=clusters,
            max_position_embeddings=words.shape[1],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        torch.manual_seed(0)
        self.config = config
        self.layer = ClusterFormerLayer(config, 0).to(words.device, words.dtype)
        self.words = words
        rows = torch.randn(clusters, words.shape[2], generator=torch.Generator().manual_seed(1)) / sqrt(words.shape[2])
        self.centroids = rows.to(words.device, words.dtype).requires_grad_(config.trains_centroids)

    def run(self, part: str, with_losses: bool) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Output `(B, N, d)` and what the clustering reports, `L1` and `L2` first where they are trained."""
        centroids = self.centroids.expand(len(self.words), -1, -1) if self.config.assignment == "neural" else None
        report: tuple[torch.Tensor, ...] = ()
        if part == "layer":
            output, _, report = self.layer(self.words, centroids, None, None, None, None, with_losses)
            return output, report
        clustered: SortedWords | None = None
        if self.layer.sorting is not None:
            clustered = self.layer.sorting(self.words, centroids, None, with_losses)
            if with_losses:
                report = self.layer.report(self.words, self.layer.sorting, clustered, None)
        return self.layer.attention(self.words, clustered, None, None), report

    def forward(self, part: str) -> torch.Tensor:
        """Inference."""
        with torch.no_grad():
            return self.run(part, False)[0]

    def forward_backward(self, part: str) -> None:
        """What a training step does in this layer: the pass, its losses, and all gradients."""
        output, report = self.run(part, True)
        total = output.float().square().mean()
        if self.config.assignment == "neural":
            total = total + self.config.cluster_loss_weight * report[0] + self.config.sorting_loss_weight * report[1]
        total.backward()
        self.layer.zero_grad(set_to_none=True)
        self.words.grad = self.centroids.grad = None


def by_kernels(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, which raises where an op would run on a GPU without its kernels."""

    def checked() -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=SLOWER_FORM)
            return call()

    return checked


def measure(case: dict[str, Any], sizes: dict[str, int], factor: float, device: torch.device, repeats: int) -> Rows:
    """A row for every routing: milliseconds, times faster than exact, and peak memory of all parts and passes."""
    length = case["length"]
    clusters = max(1, round(sqrt(factor * length)))
    generator = torch.Generator().manual_seed(length)
    words = torch.randn(case["batch"], length, sizes["hidden_size"], generator=generator)
    words = words.to(device, getattr(torch, case["dtype"])).requires_grad_()
    layers = {name: TimedLayer(settings, sizes, words, clusters) for name, settings in ROUTINGS.items()}
    heads = sizes["num_attention_heads"]
    by_head = words.detach().unflatten(-1, (heads, -1)).transpose(1, 2)
    contexts = exact_contexts(by_head, by_head, by_head)
    kernels = {f"exact ({name})": context for name, context in contexts.items()}
    rows: dict[str, dict[str, Any]] = {
        name: case | {"routing": name, "clusters": clusters} for name in dict.fromkeys([*layers, *kernels])
    }
    for part, one_pass in product(PARTS, PASSES):
        calls = {}
        for name in rows:
            layer_call = partial(getattr(layers.get(name, layers[EXACT]), one_pass), part)
            calls[name] = by_kernels(partial(run_in, kernels.get(name, nullcontext), layer_call))
        for name, times in time_calls(calls, kernels, device, repeats, f"{part}_{one_pass}_").items():
            rows[name] |= times
    return list(rows.values())


def main(
    lengths: Annotated[str | None, typer.Option(help="Comma-separated numbers of words.")] = None,
    dtypes: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16, float16.")] = "float32",
    batches: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1",
    hidden_size: int = 300,
    heads: int = 4,
    factor: Annotated[float, typer.Option(help="Clusters are the root of this times the length; paper: 1.")] = 2.0,
    repeats: Repeats = 5,
    output: Path = RESULTS / "benchmark_clusterformer.json",
) -> None:
    """Measure what the output file does not hold yet, keep it as JSON after every length, and print the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "intermediate_size": 4 * hidden_size}
    machine = environment(device)
    settings = {"sizes": sizes, "factor": factor, "repeats": repeats}
    kept = KeptRuns(output, settings | {name: machine[name] for name in ("device_name", "threads")}, device)
    shapes = product(dtypes.split(","), numbers(batches), numbers(lengths or DEFAULT_LENGTHS[device.type]))
    cases = [{"dtype": dtype, "batch": batch, "length": length} for dtype, batch, length in shapes]
    keep_missing(kept, cases, lambda case: measure(case, sizes, factor, device, repeats), "lengths")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
