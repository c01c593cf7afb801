"""Which strictly causal scheme serves the keys older than the local window? Error, time and keys scored per query.

Queries, keys and values are those of every layer of a trained causal language model on held-out books. Each scheme
attends exactly in the same window; what differs is what stands for the older keys. Schemes that are not in
`causal_clustered_attention` are written out here, segment by segment. Rotary positions are applied to the same queries
and keys (the model was not trained with them), to see what rotation does to clusters of keys that are far apart.

    python -m scripts.benchmark.causal_schemes --model runs/gpt2      # writes scripts/results/causal_schemes.json
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import track

from hf_effattn import extend_positions
from hf_effattn.measuring.environment import environment
from hf_effattn.measuring.errors import relative_error
from hf_effattn.ops import causal_clustered_attention, cluster_queries
from hf_effattn.ops.causal_clustered_attention.layout import Layout
from hf_effattn.ops.kmeans import kmeans

from ..kept.command_line import run_with_help
from ._inputs import Inputs, causal_attention_inputs, held_out_tokens, load_causal_model

EXACT = "exact"
SEGMENT = 64
KEYS_PER_CLUSTER = 8
KEY_CLUSTERS = 128
# Window, query clusters, top keys, keys per cluster. Schemes that are not in the op run with the first only.
SETTINGS = ((64, 25, 32, 8), (64, 16, 32, 8), (64, 8, 16, 6), (64, 25, 64, 8), (128, 25, 32, 8), (128, 25, 64, 4))
LONGEST_BY_SEGMENT = 2048  # clustering all older keys at every segment is quadratic
SKIPPED = 5_000  # tokens at the beginning of a book: titles and contents

Scheme = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Columns that stand for older keys: scores (heads, S, columns) and values (heads, columns or S, columns, D).
Columns = tuple[torch.Tensor, torch.Tensor]


def means_of(rows: torch.Tensor, labels: torch.Tensor, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Means `(P, C, D)` of rows `(P, n, D)` and the sizes of the clusters `(P, C)`."""
    member = F.one_hot(labels, clusters).to(rows.dtype)
    sizes = member.sum(dim=1)
    return member.transpose(1, 2) @ rows / sizes.clamp(min=1)[..., None], sizes


def summaries(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, labels: torch.Tensor, clusters: int
) -> Columns:
    """One column per key cluster, weighed by its size."""
    (keys, sizes), (values, _) = means_of(key, labels, clusters), means_of(value, labels, clusters)
    return query @ keys.transpose(1, 2) + sizes.log()[:, None], values


def segment_labels(labels_of: dict[int, torch.Tensor], key: torch.Tensor, segments: int) -> tuple[torch.Tensor, int]:
    """Labels of keys that are clustered once per segment, side by side."""
    clusters = SEGMENT // KEYS_PER_CLUSTER
    for segment in range(len(labels_of), segments):
        own = key[:, segment * SEGMENT : (segment + 1) * SEGMENT]
        labels_of[segment] = kmeans(own, clusters, iterations=3)[0] + segment * clusters
    return torch.cat([labels_of[segment] for segment in range(segments)], dim=1), segments * clusters


def by_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int, clusters: int, topk: int, old: str
) -> torch.Tensor:
    """Causal attention whose older keys are served as `old` says, `(B, H, N, D)`."""
    B, H, N, D = query.shape
    query, key, value = query.flatten(0, 1) * D**-0.5, key.flatten(0, 1), value.flatten(0, 1)
    output = torch.empty_like(query)
    labels_of: dict[int, torch.Tensor] = {}
    for start in range(0, N, SEGMENT):
        rows, before = query[:, start : start + SEGMENT], max(0, start - window)
        local = rows @ key[:, before : start + SEGMENT].transpose(1, 2)
        position = torch.arange(before, start + SEGMENT)
        local = local.masked_fill(position > torch.arange(start, start + SEGMENT)[:, None], -torch.inf)
        scores, values = [local], [value[:, None, before : start + SEGMENT].expand(-1, SEGMENT, -1, -1)]
        if before and old != "none":
            extra = older_columns(query, key, value, start, before, clusters, topk, old, labels_of)
            scores.append(extra[0])
            values.append(extra[1] if extra[1].ndim == 4 else extra[1][:, None].expand(-1, SEGMENT, -1, -1))
        weights = torch.cat(scores, dim=2).softmax(dim=2)
        output[:, start : start + SEGMENT] = (weights[:, :, None] @ torch.cat(values, dim=2))[:, :, 0]
    return output.view(B, H, N, -1)


def older_columns(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    before: int,
    clusters: int,
    topk: int,
    old: str,
    labels_of: dict[int, torch.Tensor],
) -> Columns:
    """What stands for the keys `0 .. before - 1`, for the queries of the segment that begins at `start`."""
    rows, old_keys, old_values = query[:, start : start + SEGMENT], key[:, :before], value[:, :before]
    if old == "bi-clustered, per segment":
        labels, count = segment_labels(labels_of, key, before // SEGMENT)
    else:
        count = before // KEYS_PER_CLUSTER
        labels = kmeans(old_keys, count, iterations=3)[0]
    if old == "key clusters only":
        return summaries(rows, old_keys, old_values, labels, count)
    past = query[:, :start]
    query_labels = cluster_queries(past[None], clusters, key=key[None, :, :start])[0]
    centroids, sizes = means_of(past, query_labels, clusters)
    centroid_scores = (centroids @ old_keys.transpose(1, 2)).masked_fill(sizes[..., None] == 0, -torch.inf)
    if old == "shared top keys":
        # Every past query votes with its centroid's weights; the whole segment attends to the elected keys.
        votes = (centroid_scores.softmax(dim=2).nan_to_num(0.0) * sizes[..., None]).sum(dim=1)
        top = votes.topk(min(topk, before), dim=1).indices[:, None].expand(-1, SEGMENT, -1)
    else:
        distance = torch.cdist(rows, centroids).masked_fill(sizes[:, None] == 0, torch.inf)
        own = distance.argmin(dim=2)
        top = centroid_scores.topk(min(topk, before), dim=2).indices
        top = top.gather(1, own[..., None].expand(-1, -1, top.shape[2]))
    chosen = torch.zeros(*top.shape[:2], before).scatter_(2, top, 1.0)
    (mean_keys, sizes), (mean_values, _) = (means_of(part, labels, count) for part in (old_keys, old_values))
    rest = sizes[:, None] - chosen @ F.one_hot(labels, count).to(chosen.dtype)
    heads = torch.arange(len(key))[:, None, None]
    scores = [(rows[:, :, None] @ old_keys[heads, top].transpose(2, 3))[:, :, 0]]
    scores.append(rows @ mean_keys.transpose(1, 2) + rest.log())
    values = [old_values[heads, top], mean_values[:, None].expand(-1, SEGMENT, -1, -1)]
    return torch.cat(scores, dim=2), torch.cat(values, dim=2)


def scored(method: str, length: int, window: int, clusters: int, topk: int, keys_per_cluster: int) -> float:
    """Keys, key clusters and centroids' keys that are scored per query, on average; exact attention: all before it."""
    if method == EXACT:
        return (length + 1) / 2
    layout = Layout(length, SEGMENT, window, keys_per_cluster, KEY_CLUSTERS, prefill=False)
    dyadic = method in ("clustered", "i-clustered", "bi-clustered")
    total = 0.0
    for segment in range(layout.segments):
        older = layout.older(segment) * SEGMENT
        rows = min(SEGMENT, length - segment * SEGMENT)
        total += rows * (segment * SEGMENT - older + (rows + 1) / 2)
        if not older or method == "none":
            continue
        if method not in ("clustered", "key clusters only"):
            total += rows * min(topk, older)
        if method == "bi-clustered":
            total += rows * sum(layout.clusters_of_block(level) for level, _ in layout.blocks(segment))
        elif method not in ("clustered", "i-clustered"):
            total += rows * (older // KEYS_PER_CLUSTER)
        if method != "key clusters only" and not dyadic:
            total += min(clusters, segment * SEGMENT) * older  # centroids anew, and all older keys for them
    if dyadic:
        total += sum(min(clusters, past) * layout.older(end - 1) * SEGMENT for _, end, past in layout.epochs())
    return total / length


def schemes(
    window: int, clusters: int, topk: int, keys_per_cluster: int, *, by_segment_too: bool
) -> dict[str, tuple[str, Scheme]]:
    """Name: (how its scores are counted, the scheme)."""
    settings: dict[str, Any] = {"window": window, "clusters": clusters, "topk": topk}
    ours = partial(causal_clustered_attention, segment_length=SEGMENT, keys_per_cluster=keys_per_cluster, **settings)
    found: dict[str, tuple[str, Scheme]] = {
        name: (name, partial(ours, method=name)) for name in ("clustered", "i-clustered", "bi-clustered")
    }
    found[EXACT] = EXACT, partial(F.scaled_dot_product_attention, is_causal=True)
    if by_segment_too:
        for old in (
            "none",
            "key clusters only",
            "bi-clustered, all again",
            "bi-clustered, per segment",
            "shared top keys",
        ):
            found[old] = old, partial(by_segment, old=old, **settings)
    return found


def rotated(tensor: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """Rotary positions, as Llama applies them, on `(B, H, N, D)`."""
    half = tensor.shape[3] // 2
    angles = torch.arange(tensor.shape[2])[:, None] * base ** (-torch.arange(half) / half)
    first, second = tensor.split(half, dim=3)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=3
    )


def measure(layers: list[Inputs], name: str, how: str, scheme: Scheme, row: dict[str, Any]) -> dict[str, Any]:
    """One row: the error per layer over the last three quarters of the positions, and the time of one call."""
    errors, seconds = [], []
    for query, key, value in layers:
        exact = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        before = perf_counter()
        actual = scheme(query, key, value)
        seconds.append(perf_counter() - before)
        first = query.shape[2] // 4
        errors.append(relative_error(exact[:, :, first:], actual[:, :, first:]))
    length, settings = row["length"], (row["window"], row["clusters"], row["topk"], row["keys_per_cluster"])
    count = scored(how, length, *settings)
    return {
        "scheme": name,
        **row,
        "error": sum(errors) / len(errors),
        "errors": errors,
        "scored_keys": count,
        "scored_share": count / ((length + 1) / 2),
        "ms": 1e3 * sorted(seconds)[len(seconds) // 2],
    }


@torch.no_grad()
def main(
    model: Annotated[Path, typer.Option(help="Folder of the causal model that scripts/train/clm.py trained.")],
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "1024,2048,4096",
    output: Path = Path(__file__).parents[1] / "results" / "causal_schemes.json",
) -> None:
    """Measure every scheme, print the table and keep it as JSON."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    output.parent.mkdir(parents=True, exist_ok=True)
    for length in [int(part) for part in lengths.split(",")]:
        loaded, tokenizer = load_causal_model(model)
        trained = loaded.config.n_positions
        if length > trained:
            extend_positions(loaded, length)
        tokens = torch.stack([book[SKIPPED : SKIPPED + length] for book in held_out_tokens(tokenizer)])
        layers = causal_attention_inputs(loaded, tokens)
        turned = [(rotated(query), rotated(key), value) for query, key, value in layers]
        for settings in track(SETTINGS, description=f"{length} tokens"):
            window, clusters, topk, per = settings
            is_first = settings == SETTINGS[0]
            found = schemes(*settings, by_segment_too=is_first and length <= LONGEST_BY_SEGMENT)
            row = {"length": length, "window": window, "clusters": clusters, "topk": topk, "keys_per_cluster": per}
            for name, (how, scheme) in found.items():
                rows.append(measure(layers, name, how, scheme, row | {"rotary": False}))
                if is_first:
                    rows.append(measure(turned, name, how, scheme, row | {"rotary": True}))
                kept = {"environment": environment(), "trained_length": trained, "rows": rows}
                output.write_text(json.dumps(kept, indent=1) + "\n")
    table = pd.DataFrame(rows).drop(columns=["errors"])
    print(table.round({"error": 4, "scored_keys": 0, "scored_share": 3, "ms": 1}).to_string(index=False))
    print(f"written: {output}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
