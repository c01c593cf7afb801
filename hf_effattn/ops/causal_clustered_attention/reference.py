"""Causal attention over clusters as its definition reads, segment by segment. Plain PyTorch, any device."""

from dataclasses import dataclass, fields
from itertools import product

import torch
import torch.nn.functional as F

from ..cluster_queries.reference import cluster_head, keys_metric
from ..kmeans.reference import cluster_points, nearest
from ..kmeans.sampling import fit_rows
from ..shared.dropout import TOPK_AND_SUMMARY_WEIGHTS, dropout_factor
from ..shared.masking import for_every_head
from .layout import Layout


@dataclass(frozen=True)
class Settings:
    """What both forms are told, see the public op; `topk` is 0 for clustered attention."""

    method: str
    clusters: int
    topk: int
    keys_per_cluster: int
    key_clusters: int
    segment_length: int
    window: int
    iterations: int
    fit_queries: int
    seed: int
    prefill: bool
    scale: float
    dropout_p: float

    def values(self) -> tuple[str | int | float | bool, ...]:
        """The fields in their order, as an op takes them."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def layout(self, length: int) -> Layout:
        return Layout(length, self.segment_length, self.window, self.keys_per_cluster, self.key_clusters, self.prefill)

    def columns(self, layout: Layout) -> int:
        """Weights of a query that dropout can drop: of local keys, top keys, and key clusters or the remainder."""
        rest = layout.first_cluster_columns[-1] if self.method == "bi-clustered" else 1
        return layout.local_keys + self.topk + rest


# Of the registered ops, as `torch.library` reads them: the inputs, then the fields of `Settings`.
ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? dropout_seed, "
ARGUMENTS += ", ".join(f"{field.type.__name__} {field.name}" for field in fields(Settings))  # type: ignore[union-attr]


def without_special(value: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values `(B, heads, N, Dv)` with 0 for NaN and infinities, and what these add to every output of their head.

    A product gives a later value the weight 0, and 0 times NaN would be NaN in outputs before it. None, and the values
    themselves, where all are finite.
    """
    special = ~value.isfinite()
    if key_mask is not None:
        special = special & key_mask[:, None, :, None]
    if not special.any():
        return value, None
    return value.masked_fill(special, 0.0), value.detach().masked_fill(~special, 0.0).cumsum(dim=2)


def add_special(output: torch.Tensor, special: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
    """Outputs `(B, H, N, Dv)` with what `without_special` took out; those of masked rows stay 0."""
    if key_mask is not None:
        special = special.masked_fill(~key_mask[:, None, :, None], 0.0)
    return output + for_every_head(special, output)


@torch.no_grad()
def cluster_keys(key: torch.Tensor, clusters: int, settings: Settings) -> torch.Tensor:
    """Labels `(M,)` of the keys `(M, D)` of a block, by K-means."""
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    return cluster_points(key, clusters, settings.iterations, settings.fit_queries, settings.seed)[0]


def query_clusters(
    query: torch.Tensor, key: torch.Tensor, readers: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids `(C, D)` of past queries `(n, D)`, and the nearest of them to `readers` in the keys' metric."""
    with torch.no_grad():
        points, keys, readers = (
            rows.to(torch.promote_types(rows.dtype, torch.float32)) for rows in (query, key, readers)
        )
        arguments = settings.clusters, "kmeans", settings.iterations, 1, settings.fit_queries, settings.seed
        labels = cluster_head(points, keys, *arguments).unique(return_inverse=True)[1]  # no empty cluster
        metric = keys_metric(keys[fit_rows(len(keys), settings.clusters, settings.fit_queries)])
    member = F.one_hot(labels).to(query.dtype)  # (n, C)
    centroids = member.T @ query / member.sum(dim=0)[:, None]
    with torch.no_grad():
        return centroids, nearest(readers, centroids.to(readers.dtype), metric)


def attend_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment: int,
    layout: Layout,
    settings: Settings,
    clustered: tuple[torch.Tensor, torch.Tensor] | None,
    factor: torch.Tensor | None,
) -> torch.Tensor:
    """Output of one segment of one head.

    `query` are all (scaled) ones, `clustered` the centroids of past queries and the segment's labels, None where no
    key is older than the window, `factor` the segment's dropout factors.
    """
    S = layout.segment_length
    own = slice(segment * S, (segment + 1) * S)
    old = layout.older(segment) * S
    rows = query[own]
    position = torch.arange(len(query), device=query.device)
    local_keys, local_values = key[old : own.stop], value[old : own.stop]
    visible = position[old : own.stop] <= position[own, None]
    scores = [(rows @ local_keys.T).masked_fill(~visible, -torch.inf)]
    values = [local_values.expand(len(rows), -1, -1)]
    # Of every column, its place among the columns that dropout draws for.
    columns = [position[old : own.stop] - (segment - layout.window_segments) * S]
    if clustered is not None:
        centroids, labels = clustered
        centroid_scores = centroids @ key[:old].T
        top = centroid_scores.detach().topk(min(settings.topk, old), dim=-1).indices  # T_j: (C, T)
        chosen = top[labels]  # (S, T)
        scores.append((rows[:, None] @ key[chosen].transpose(1, 2))[:, 0])
        values.append(value[chosen])
        columns.append(layout.local_keys + torch.arange(chosen.shape[1], device=query.device))
        first_rest = layout.local_keys + settings.topk
        if settings.method == "bi-clustered":
            for level, index in layout.blocks(segment):
                block = slice(index * layout.block_keys(level), (index + 1) * layout.block_keys(level))
                G = layout.clusters_of_block(level)
                member = F.one_hot(cluster_keys(key[block], G, settings), G)  # (keys, G)
                sizes = member.sum(dim=0)
                means, mean_values = (
                    member.to(key.dtype).T @ part[block] / sizes.clamp(min=1)[:, None] for part in (key, value)
                )
                is_top = torch.zeros(len(top), old, device=key.device).scatter(1, top, 1.0)[:, block]
                rest = sizes - (is_top @ member.to(is_top.dtype)).long()  # n_jc: (C, G)
                scores.append(rows @ means.T + rest.double().log().to(key.dtype)[labels])
                values.append(mean_values.expand(len(rows), -1, -1))
                start = first_rest + layout.first_cluster_columns[level]
                columns.append(start + torch.arange(G, device=query.device))
        else:
            rest_scores = centroid_scores.scatter(1, top, -torch.inf)
            scores.append(rest_scores[labels])
            values.append(value[:old].expand(len(rows), -1, -1))
            columns.append(torch.full((old,), first_rest, device=query.device))
    weights = torch.cat(scores, dim=1).softmax(dim=1)
    if factor is not None:
        weights = weights * factor[:, torch.cat(columns)]
    return (weights[:, None] @ torch.cat(values, dim=1))[:, 0]


def attend_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: Settings, factor: torch.Tensor | None
) -> torch.Tensor:
    """Output `(N, Dv)` of one head of valid rows; `query` is scaled."""
    layout = settings.layout(len(query))
    S = layout.segment_length
    readers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for first, end, past in layout.epochs():
        found = query_clusters(query[:past], key[:past], query[first * S : end * S], settings)
        for segment in range(first, end):
            readers[segment] = found[0], found[1][(segment - first) * S :][:S]
    outputs = []
    for segment in range(layout.segments):
        own = slice(segment * S, (segment + 1) * S)
        drawn = None if factor is None else factor[own]
        outputs.append(attend_segment(query, key, value, segment, layout, settings, readers.get(segment), drawn))
    return torch.cat(outputs)


def causal_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    settings: Settings,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """One softmax over the local keys, the top keys of the nearest past centroid, and what stands for the others."""
    B, H, N, _ = query.shape
    value, special = without_special(value, key_mask)
    key, value = for_every_head(key, query), for_every_head(value, query)
    query = query * settings.scale
    output = query.new_zeros(B, H, N, value.shape[3])
    for b, h in product(range(B), range(H)):
        rows = torch.arange(N, device=query.device) if key_mask is None else key_mask[b].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        factor = None
        if dropout_seed is not None:
            shape = N, settings.columns(settings.layout(N))
            drawn = dropout_factor(
                shape, query, settings.dropout_p, int(dropout_seed), b * H + h, TOPK_AND_SUMMARY_WEIGHTS
            )
            factor = drawn[rows]
        output[b, h, rows] = attend_head(query[b, h, rows], key[b, h, rows], value[b, h, rows], settings, factor)
    return output if special is None else add_special(output, special, key_mask)
