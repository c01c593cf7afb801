"""Measures what a rank hands over in sequence-parallel bi-clustered attention, and how far it is from one process.

For 2 and 4 gloo processes and several lengths: the bytes of all messages of a pass, those of the keys and values that
stay where they are, and the largest differences of output and gradients, in float64.

    python -m scripts.trust.parallel               # writes scripts/results/parallel.json
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.utils._python_dispatch import TorchDispatchMode

from hf_effattn.ops import (
    bi_clustered_attention,
    cluster_queries,
    query_offsets,
    sequence_parallel_bi_clustered_attention,
)
from hf_effattn.ops.kmeans.sampling import most_fit_rows
from hf_effattn.ops.sequence_parallel import DEFAULT_KEY_ITERATIONS

from ..kept.command_line import run_with_help
from ..kept.runs import KeptRuns, print_rows
from ._children import Child

RANKS, LENGTHS = (2, 4), (1024, 4096, 16384)
SIZES: dict[str, Any] = {"heads": 2, "key_heads": 1, "head_dim": 64}
SETTINGS: dict[str, Any] = {"clusters": 16, "key_clusters": 16, "topk": 32, "fit_queries": 256}
# Of one process in float64, whose sums are taken in another order.
LARGEST_DIFFERENCE = 1e-10
LONGEST_WAIT_SECONDS = 300


@dataclass(frozen=True)
class Tokens:
    """Queries, keys and values of some tokens, and the gradient that their output gets.

    Attributes:
        query, grad_output: `(B, H, N, D)` and `(B, H, N, Dv)`.
        key, value: `(B, heads, N, D)` and `(B, heads, N, Dv)`.
        query_mask, key_mask: `(B, N)`, or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_output: torch.Tensor
    query_mask: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None

    @property
    def masks(self) -> dict[str, Any]:
        """By the names of the ops' arguments."""
        return {"query_mask": self.query_mask, "key_mask": self.key_mask}

    def leaves(self) -> list[torch.Tensor]:
        """Query, key and value anew, to ask gradients of."""
        return [tensor.detach().clone().requires_grad_() for tensor in (self.query, self.key, self.value)]

    def split(self, ends: list[int]) -> list["Tokens"]:
        """The tokens up to each of `ends`, from the one before."""
        parts = []
        for start, end in pairwise([0, *ends]):
            rows = (tensor[:, :, start:end] for tensor in (self.query, self.key, self.value, self.grad_output))
            masks = (None if mask is None else mask[:, start:end] for mask in (self.query_mask, self.key_mask))
            parts.append(Tokens(*rows, *masks))
        return parts


def random_tokens(
    length: int, *, batch: int = 1, heads: int, key_heads: int, head_dim: int, masked: bool = False, seed: int = 0
) -> Tokens:
    """Normally distributed ones in float64, of which with `masked` a third does not count."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(batch, number, length, head_dim, dtype=torch.float64, generator=generator)
        for number in (heads, key_heads, key_heads, heads)
    ]
    masks = [torch.rand(batch, length, generator=generator) > 1 / 3 if masked else None for _ in range(2)]
    return Tokens(*rows, *masks)


def in_one_process(tokens: Tokens, settings: dict[str, Any], backend: str | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients, by the ops that the sequence-parallel one stands for."""
    query, key, value = tokens.leaves()
    clusters, key_clusters = settings["clusters"], settings["key_clusters"]
    rows = max(most_fit_rows(number, settings["fit_queries"]) for number in (clusters, key_clusters))
    labels = cluster_queries(query, clusters, key=key, fit_queries=rows, **tokens.masks)
    offsets, counted = query_offsets(
        query, labels, clusters, key_heads=key.shape[1], query_mask=tokens.query_mask, rows=rows
    )
    key_labels = cluster_queries(
        key,
        key_clusters,
        key=offsets,
        key_mask=counted,
        query_mask=tokens.key_mask,
        iterations=DEFAULT_KEY_ITERATIONS,
        fit_queries=rows,
    )
    counts = {"clusters": clusters, "key_clusters": key_clusters, "topk": settings["topk"]}
    output = bi_clustered_attention(query, key, value, labels, key_labels, **counts, **tokens.masks, backend=backend)
    return with_gradients(output, tokens, [query, key, value])


def on_a_rank(tokens: Tokens, settings: dict[str, Any]) -> dict[str, Any]:
    """Output and gradients of a rank's tokens, and the numbers that it handed over in either pass."""
    query, key, value = tokens.leaves()
    with Traffic() as forward:
        output = sequence_parallel_bi_clustered_attention(query, key, value, **settings, **tokens.masks)
    with Traffic() as backward:
        found = with_gradients(output, tokens, [query, key, value])
    arrays = {name: tensor.numpy() for name, tensor in found.items()}  # a tensor's memory would end with its process
    return {**arrays, "forward": forward.numbers, "backward": backward.numbers}


def with_gradients(output: torch.Tensor, tokens: Tokens, leaves: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output and the gradients of query, key and value, by name."""
    grads = torch.autograd.grad(output, leaves, tokens.grad_output.to(output.dtype))
    return {"output": output.detach(), **dict(zip(("query", "key", "value"), grads, strict=True))}


def on_ranks(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returns, made by a process of its own in a gloo group of as many.

    Raises:
        RuntimeError: a call raises or does not end; with what every rank says.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            Child(partial(_in_group, call, rank, len(calls), Path(folder) / "store"), Path(folder) / f"said-{rank}")
            for rank, call in enumerate(calls)
        ]
        found, problems = [], []
        for number, rank in enumerate(ranks):
            try:
                found.append(rank.result(LONGEST_WAIT_SECONDS))
            except (RuntimeError, TimeoutError) as error:
                problems.append(f"rank {number}: {error}")
    if problems:
        raise RuntimeError("; ".join(problems))
    return found


def _in_group(call: Callable[[], Any], rank: int, count: int, store: Path) -> Any:
    longest = timedelta(seconds=LONGEST_WAIT_SECONDS)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=count, timeout=longest)
    try:
        return call()
    finally:
        dist.destroy_process_group()


class Traffic(TorchDispatchMode):
    """Counts the numbers that this process hands over to its group while it is entered.

    Attributes:
        numbers: by dtype; of a message to all the others its numbers count once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            handed = {"allreduce_": 0, "allgather_": 1}[func.overloadpacket.__name__]  # which argument it is
            for tensor in args[handed]:
                self.numbers[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        return func(*args, **(kwargs or {}))


def numbers_expected(tokens: Tokens, settings: dict[str, Any]) -> tuple[int, int]:
    """What a rank hands over in the forward and in the backward pass, by the formula of the op's docstring."""
    B, H, _, D = tokens.query.shape
    P, Dv = tokens.key.shape[1], tokens.value.shape[3]
    G, T, g = settings["key_clusters"], settings["topk"], H // P
    C = g * settings["clusters"]
    fitted = max(most_fit_rows(number, settings["fit_queries"]) for number in (settings["clusters"], G))
    sums = C * (D + 1) + G * (D + Dv + 1) + D * D + G * D * Dv + C * T * (D + Dv) + C * G * (D + Dv + 1)
    return B * P * (fitted * (g + 1) * D + sums + C * (T + G)), B * P * sums


def measure(ranks: int, length: int) -> dict[str, Any]:
    """One row, without what identifies it."""
    tokens = random_tokens(length, **SIZES)
    expected = in_one_process(tokens, SETTINGS)
    parts = tokens.split([length * (rank + 1) // ranks for rank in range(ranks)])
    found = on_ranks([partial(on_a_rank, part, SETTINGS) for part in parts])
    differences = {
        name: (torch.cat([torch.from_numpy(rank[name]) for rank in found], dim=2) - tensor).abs().max().item()
        for name, tensor in expected.items()
    }
    width = tokens.key.dtype.itemsize
    handed = [found[0][name]["float64"] for name in ("forward", "backward")]
    as_formula = all(
        (rank["forward"]["float64"], rank["backward"]["float64"]) == numbers_expected(tokens, SETTINGS)
        for rank in found
    )
    return {
        "bytes_forward": width * handed[0],
        "bytes_backward": width * handed[1],
        "bytes_of_keys_and_values": width * (tokens.key.numel() + tokens.value.numel()),
        "as_the_formula": as_formula,
        "differences": differences,
        "held": max(differences.values()) <= LARGEST_DIFFERENCE
        and tuple(handed) == numbers_expected(tokens, SETTINGS),
    }


def main(
    output: Annotated[Path, typer.Option(help="JSON file of the results; rows in it are kept.")] = (
        Path(__file__).parents[1] / "results" / "parallel.json"
    ),
) -> None:
    kept = KeptRuns(output, {"sizes": SIZES, **SETTINGS, "largest_difference": LARGEST_DIFFERENCE})
    for run in kept.missing({"ranks": ranks, "length": length} for ranks in RANKS for length in LENGTHS):
        print(", ".join(f"{name} {value}" for name, value in run.items()), flush=True)
        kept.add(run | measure(**run))
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
