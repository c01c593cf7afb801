"""Does the clustering bring together the words that need each other? Every word must say its partner's value.

A text has every id twice, in random places, each with a value drawn at random. A word's answer is the value of the
other word with its id: nothing but attention to that one word helps. What differs between the runs is what a word may
attend to. Sharing of blocks by chance gives the random and the identity order some right answers too; what a learned
routing has above them is its own.

    python -m scripts.reproduce.partner_recall                   # writes scripts/results/partner_recall.json
    python -m scripts.reproduce.partner_recall --lengths 256 --windows 2 --routings "gated,random order"
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track

from hf_effattn.models.clusterformer import ClusterFormerConfig, ClusterFormerForTokenClassification
from hf_effattn.models.clusterformer.sorting import SortedWords, WordSorting

from ..shared.command_line import check_names, run_with_help
from ..shared.runs import RESULTS, KeptRuns, mean_and_deviation, print_table

VALUES = 8
DEFAULT, RANDOM, GATE_ON_RANDOM_ORDER = "gated with centroids", "random order", "gate on a random order"
LOSSES = {"cluster_loss_weight": 0.01, "sorting_loss_weight": 0.01}
NO_LOSSES = dict.fromkeys(LOSSES, 0.0)
GATE = {"gated": True, "attend_centroids": False}
ROUTINGS: dict[str, dict[str, Any]] = {
    "full attention": {"assignment": "full"},
    "neural": NO_LOSSES | {"gated": False},
    "neural with losses": LOSSES | {"gated": False},
    "gated": NO_LOSSES | GATE,
    "gated with losses": LOSSES | GATE,
    DEFAULT: NO_LOSSES | GATE | {"attend_centroids": True},
    "gated with weighted centroids": NO_LOSSES | GATE | {"attend_centroids": "weighted"},
    GATE_ON_RANDOM_ORDER: NO_LOSSES | GATE,
    "K-means": {"assignment": "kmeans"},
    "LSH": {"assignment": "lsh"},
    RANDOM: {"assignment": "random"},
    "identity order": {"assignment": "identity"},
}
TEST_SEED = 2**20
TEST_BATCHES = 8


@dataclass(frozen=True)
class Sizes:
    """What all runs share; `words` are those of a batch, however long its texts are."""

    hidden_size: int
    steps: int
    words: int
    learning_rate: float
    dtype: str

    def batch(self, run: dict[str, Any]) -> int:
        """Texts of a batch."""
        return max(1, self.words // run["length"])


def recall_texts(batch: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Ids, values and answers, each `(batch, length)`."""
    ids = torch.arange(length // 2).repeat(2)[torch.rand(batch, length, generator=generator).argsort(dim=1)]
    values = torch.randint(VALUES, (batch, length), generator=generator)
    return ids, values, values.gather(1, partners(ids))


def partners(ids: torch.Tensor) -> torch.Tensor:
    """The place of the other word with the same id, `(batch, length)`."""
    pairs = ids.argsort(dim=1, stable=True)
    return torch.empty_like(pairs).scatter_(1, pairs, pairs.unflatten(1, (-1, 2)).flip(2).flatten(1))


def make_model(run: dict[str, Any], sizes: Sizes) -> ClusterFormerForTokenClassification:
    """A model of two layers; a word's value is its token type."""
    config = ClusterFormerConfig(
        vocab_size=run["length"] // 2,
        type_vocab_size=VALUES,
        max_position_embeddings=run["length"],
        hidden_size=sizes.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * sizes.hidden_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=VALUES,
        pad_token_id=None,
        clusters=run["clusters"],
        window_blocks=run["window_blocks"],
        assignment_seed=run["seed"],
        **ROUTINGS[run["routing"]],
    )
    torch.manual_seed(run["seed"])
    return ClusterFormerForTokenClassification(config)


def sortings(model: ClusterFormerForTokenClassification) -> Iterator[tuple[int, WordSorting]]:
    """The sorting steps and their layers; full attention has none."""
    for number, layer in enumerate(model.clusterformer.layers):
        if isinstance(layer.sorting, WordSorting):
            yield number, layer.sorting


def give_random_order(model: ClusterFormerForTokenClassification, seed: int) -> None:
    """Leave the gate to a model but not its order: one random order per layer, as in the control of that name."""
    for number, sorting in sortings(model):
        length = model.config.max_position_embeddings
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + number))

        def shuffled(module: Any, inputs: Any, output: SortedWords, order: torch.Tensor = order) -> SortedWords:
            return replace(output, order=order.to(output.order.device).expand_as(output.order))

        sorting.register_forward_hook(shuffled)


def share_of_partners_seen(clustered: SortedWords, ids: torch.Tensor, window_blocks: int) -> float:
    """Share of words in whose window their partner is."""
    assert isinstance(clustered.block_length, int)
    block = clustered.order.argsort(dim=1) // clustered.block_length
    used = -(-ids.shape[1] // clustered.block_length)
    steps = (block - block.gather(1, partners(ids).to(block.device))) % used
    return (steps < window_blocks).float().mean().item()


def train(model: ClusterFormerForTokenClassification, run: dict[str, Any], sizes: Sizes, device: torch.device) -> None:
    """Adam with a warm-up of a tenth of the steps, then a cosine to 0; new texts at every step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=sizes.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, sizes.learning_rate, total_steps=sizes.steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(run["seed"])
    model.train()
    for _ in range(sizes.steps):
        ids, values, answers = (part.to(device) for part in recall_texts(sizes.batch(run), run["length"], generator))
        with autocast(device, sizes.dtype):
            loss = model(ids, token_type_ids=values, labels=answers).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def autocast(device: torch.device, dtype: str) -> Any:
    """Autocast to a low precision; nothing for float32."""
    return nullcontext() if dtype == "float32" else torch.autocast(device.type, getattr(torch, dtype))


@torch.no_grad()
def evaluate(
    model: ClusterFormerForTokenClassification, run: dict[str, Any], sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    """Accuracy in percent on texts that were not trained on, and what share of partners each layer could see."""
    model.eval()
    seen: dict[int, list[float]] = {}
    ids = torch.empty(0)

    def look(number: int, clustered: SortedWords) -> None:
        seen.setdefault(number, []).append(share_of_partners_seen(clustered, ids, run["window_blocks"]))

    hooks = [
        sorting.register_forward_hook(lambda module, inputs, output, number=number: look(number, output))
        for number, sorting in sortings(model)
    ]
    generator = torch.Generator().manual_seed(TEST_SEED)
    right = []
    for _ in range(TEST_BATCHES):
        ids, values, answers = recall_texts(sizes.batch(run), run["length"], generator)
        with autocast(device, sizes.dtype):
            logits = model(ids.to(device), token_type_ids=values.to(device)).logits
        right.append((logits.argmax(dim=-1).cpu() == answers).float().mean().item())
    for hook in hooks:
        hook.remove()
    shares = [sum(layer) / len(layer) for layer in seen.values()]
    return {"accuracy": 100 * sum(right) / len(right), "partners_seen": shares}


def measure(run: dict[str, Any], sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Train a model and say how well it does."""
    model = make_model(run, sizes).to(device)
    if run["routing"] == GATE_ON_RANDOM_ORDER:
        give_random_order(model, run["seed"])
    start = perf_counter()
    train(model, run, sizes, device)
    return run | evaluate(model, run, sizes, device) | {"seconds": perf_counter() - start}


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Accuracy of every routing by length and window."""
    frame = pd.DataFrame(rows)
    groups = frame.groupby(["routing", "length", "window_blocks"])["accuracy"].apply(mean_and_deviation)
    shown = groups.unstack(["length", "window_blocks"]).sort_index(axis=1)
    return shown.reindex([name for name in ROUTINGS if name in shown.index]).fillna("")


def main(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of words; √N clusters each.")] = "64,256",
    windows: Annotated[str, typer.Option(help="Comma-separated numbers of blocks that a word sees.")] = "2,3",
    routings: Annotated[str | None, typer.Option(help="Comma-separated; default: all.")] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0,1,2",
    hidden_size: int = 64,
    steps: int = 2000,
    words: Annotated[int, typer.Option(help="Words of a batch.")] = 4096,
    learning_rate: float = 5e-4,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16: autocast.")] = "float32",
    output: Path = RESULTS / "partner_recall.json",
) -> None:
    """Run what the output file does not hold yet, keep it as JSON after every run, and print the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = routings.split(",") if routings else list(ROUTINGS)
    check_names("routings", chosen, ROUTINGS)
    odd = [length for length in lengths.split(",") if int(length) % 2]
    if odd:
        raise typer.BadParameter(f"lengths {', '.join(odd)} are odd: every word has a partner")
    sizes = Sizes(hidden_size, steps, words, learning_rate, dtype)
    kept = KeptRuns(output, vars(sizes), device)
    runs = [
        {"length": length, "clusters": isqrt(length), "window_blocks": int(window), "routing": name, "seed": int(seed)}
        for length in map(int, lengths.split(","))
        for window in windows.split(",")
        for seed in seeds.split(",")
        for name in chosen
        # Full attention has no blocks: the window changes nothing.
        if ROUTINGS[name].get("assignment") != "full" or window == windows.split(",")[0]
    ]
    for run in track(kept.missing(runs), description="runs"):
        kept.add(measure(run, sizes, device))
    print(f"by chance: {100 / VALUES}")
    print_table(table(kept.rows), output, index=True)


if __name__ == "__main__":
    run_with_help(main, __doc__)
