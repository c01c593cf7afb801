"""What causal attention over clusters decides without gradient, for all heads of a chunk at once.

All shapes depend on positions alone.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `S` tokens of a segment, `U` segments that have
older ones, `C` query clusters, `T` top keys.
"""

from dataclasses import dataclass

import torch

from ...cluster_queries import cluster_queries
from ...cluster_queries.batched import keys_metric
from ...kmeans import kmeans
from ...kmeans.batched import nearest, prepare
from ...kmeans.sampling import fit_rows
from ...shared.centroids import centroid_scores
from ...shared.precision import accumulation_dtype
from ...shared.tables import cluster_rows, cluster_sizes, cluster_sums
from ..layout import Layout
from ..reference import Settings


@dataclass(frozen=True)
class Epoch:
    """Query clusters of some segments.

    Attributes:
        first, end: the segments `first .. end - 1` that read them.
        past_rows: `(P · g · past,)` place of every past query in the centroids' table.
        sizes: `(P, g · C)` members of every cluster.
        centroids: `(P, g · C, D)` means of past queries, in float32 or float64.
        scores: `(P, g · C, keys)`, their products with the keys older than the last segment's window.
    """

    first: int
    end: int
    past_rows: torch.Tensor
    sizes: torch.Tensor
    centroids: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class Grouping:
    """Attributes:
    epochs: the query clusters.
    labels: `(P, g, U, S)` nearest centroid of every query.
    top: `(P, g, U, C, T)` top keys; of segments with fewer older keys than `T` the first columns count.
    """

    epochs: list[Epoch]
    labels: torch.Tensor
    top: torch.Tensor


def fit_epoch(
    query: torch.Tensor, key: torch.Tensor, epoch: tuple[int, int, int], layout: Layout, settings: Settings
) -> tuple[Epoch, torch.Tensor]:
    """The clusters of an epoch, and the labels `(P, g, segments, S)` of its segments; `query` `(P, g, all, S, D)`."""
    first, end, past = epoch
    P, g, _, S, D = query.shape
    C = min(settings.clusters, past)
    rows = query.flatten(2, 3)[:, :, :past].flatten(0, 1)  # (P · g, past, D)
    labels = cluster_queries(
        rows[None],
        C,
        key=key[None, :, :past],
        iterations=settings.iterations,
        fit_queries=settings.fit_queries,
        seed=settings.seed,
        backend="batched",
    )[0]
    index = cluster_rows(labels, C)
    sizes = cluster_sizes(index, P * g, C)
    centroids = cluster_sums(rows, index, P * g, C) / sizes.clamp(min=1)[..., None]
    fitted = key.index_select(1, fit_rows(past, settings.clusters, settings.fit_queries).to(key.device))
    metric = keys_metric(fitted.to(accumulation_dtype(key.dtype))).repeat_interleave(g, dim=0)
    directions, half_norms = prepare(centroids, metric)
    readers = query[:, :, first:end].reshape(P * g, -1, D).to(centroids.dtype)
    chosen = nearest(readers, directions, half_norms.masked_fill(sizes == 0, torch.inf))
    keys = layout.older(end - 1) * S
    scores = centroid_scores(centroids.view(P, g * C, D), key[:, :keys], 1.0)
    tables = index, sizes.view(P, g * C), centroids.view(P, g * C, D)
    return Epoch(first, end, *tables, scores), chosen.view(P, g, end - first, S)


def top_keys(epoch: Epoch, layout: Layout, target: torch.Tensor) -> None:
    """Write the top keys of an epoch's segments to `(P, g, segments, C, T)`: those of a segment, and the next's keys.

    Keys join as they leave the window, so that finding the best of all older ones again costs no pass over them.
    """
    P, g, _, _, T = target.shape
    scores, best = epoch.scores, None
    seen = 0
    for segment in range(epoch.first, epoch.end):
        keys = layout.older(segment) * layout.segment_length
        new = scores[:, :, seen:keys]
        position = torch.arange(seen, keys, device=scores.device).expand(new.shape)
        if best is not None:
            new, position = torch.cat([best[0], new], dim=2), torch.cat([best[1], position], dim=2)
        values, place = new.topk(min(T, keys), dim=2)
        best = values, position.gather(2, place)
        found = best[1].view(P, g, -1, place.shape[2])
        target[:, :, segment - epoch.first, : found.shape[2], : found.shape[3]] = found
        seen = keys


@torch.no_grad()
def group(query: torch.Tensor, key: torch.Tensor, layout: Layout, settings: Settings) -> Grouping:
    """Group the queries `(P, g, segments, S, D)`, which are scaled, over the keys `(P, segments · S, D)`."""
    P, g, _, S, _ = query.shape
    U = layout.served
    labels = torch.zeros(P, g, U, S, dtype=torch.int64, device=query.device)
    top = labels.new_zeros(P, g, U, min(settings.clusters, layout.length), settings.topk)
    epochs = []
    for bounds in layout.epochs():
        epoch, chosen = fit_epoch(query, key, bounds, layout, settings)
        part = slice(epoch.first - layout.first_served, epoch.end - layout.first_served)
        labels[:, :, part] = chosen
        if settings.topk:
            top_keys(epoch, layout, top[:, :, part])
        epochs.append(epoch)
    return Grouping(epochs, labels, top)


@torch.no_grad()
def cluster_keys(blocks: torch.Tensor, clusters: int, settings: Settings) -> torch.Tensor:
    """Labels `(blocks, keys)` of the keys `(blocks, keys, D)`, every block by K-means of its own."""
    return kmeans(
        blocks,
        clusters,
        iterations=settings.iterations,
        fit_points=settings.fit_queries,
        seed=settings.seed,
        backend="batched",
    )[0]
