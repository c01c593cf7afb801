"""Clusters of a sequence that is spread over ranks: fitted on evenly spread tokens of all, the same on every rank.

Sizes: `B` batch, `H` query heads, `P` key/value heads, `n` tokens of a rank, `F` tokens that are fitted on.
"""

from dataclasses import dataclass

import torch

from ..bi_clustered_attention.offsets import query_offsets
from ..cluster_queries.batched import keys_metric
from ..kmeans.batched import find_seeds, lloyd, nearest, prepare
from ..kmeans.sampling import fit_rows, most_fit_rows, strided_rows
from ..shared.precision import accumulation_dtype
from .ranks import Ranks


@dataclass(frozen=True)
class Part:
    """The rows of one batch item that a rank holds, of those that count."""

    rows: torch.Tensor  # `(heads, n, D)`
    own: torch.Tensor  # `(m,)`, which of them count
    before: int  # how many count on the ranks before
    total: int  # how many count on all ranks

    def spread(self, count: int) -> torch.Tensor:
        """This rank's rows among `count` evenly spread ones of all ranks: `(heads, count, D)`, 0 at the others'."""
        chosen = strided_rows(self.total, count).to(self.rows.device) - self.before
        places = ((chosen >= 0) & (chosen < len(self.own))).nonzero()[:, 0]
        found = self.rows.new_zeros(len(self.rows), count, self.rows.shape[2])
        found[:, places] = self.rows[:, self.own[chosen[places]]]
        return found


def parts_of(ranks: Ranks, rows: torch.Tensor, mask: torch.Tensor | None) -> list[Part]:
    """The part of every item of the rows `(B, heads, n, D)`, of which those count that are True in `mask` `(B, n)`."""
    counts = torch.ones(len(rows), rows.shape[2], dtype=torch.bool, device=rows.device) if mask is None else mask
    of_ranks = ranks.gather(counts.sum(dim=1))  # (ranks, B)
    before, totals = of_ranks[: ranks.rank].sum(dim=0).tolist(), of_ranks.sum(dim=0).tolist()
    rows = rows.detach().to(accumulation_dtype(rows.dtype))
    return [Part(rows[b], counts[b].nonzero()[:, 0], before[b], totals[b]) for b in range(len(rows))]


@torch.no_grad()
def cluster_parts(
    ranks: Ranks,
    query: torch.Tensor,
    key: torch.Tensor,
    masks: tuple[torch.Tensor | None, torch.Tensor | None],
    counts: tuple[int, int],
    iterations: tuple[int, int],
    fit_queries: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels `(B, H, n)` and `(B, P, n)` of a rank's queries and keys; masks, clusters and rounds are of both.

    Queries are clustered in the metric of the keys, then keys in that of the queries' offsets. In one process the same
    labels come from `cluster_queries`, `query_offsets` and `cluster_queries`, given `fit_queries` (at least 4 per
    cluster), as `fit_queries` and as `rows`.
    """
    clusters, key_clusters = counts
    count = max(most_fit_rows(most, fit_queries) for most in counts)
    query_parts, key_parts = (parts_of(ranks, *both) for both in zip((query, key), masks, strict=True))
    # Each place is filled by one rank, so that the sum is the evenly spread rows of the whole sequence.
    of_queries, of_keys = ranks.sum(
        torch.stack([part.spread(count) for part in query_parts]),
        torch.stack([part.spread(count) for part in key_parts]),
    )
    labels = query.new_zeros(query.shape[:3], dtype=torch.int64)
    key_labels = key.new_zeros(key.shape[:3], dtype=torch.int64)
    group = query.shape[1] // key.shape[1]
    for b, (queries, keys) in enumerate(zip(query_parts, key_parts, strict=True)):
        fitted, fitted_keys = of_queries[b, :, : queries.total], of_keys[b, :, : keys.total]
        metric = keys_metric(fitted_keys).repeat_interleave(group, dim=0) if keys.total else None
        labels[b, :, queries.own], fitted_labels = _cluster(queries, fitted, clusters, iterations[0], seed, metric)
        key_metric = None
        if queries.total:
            (offsets,), _ = query_offsets(
                fitted[None], fitted_labels[None], clusters, key_heads=len(fitted_keys), rows=count
            )
            key_metric = keys_metric(offsets[:, fit_rows(offsets.shape[1], key_clusters, count)])
        key_labels[b, :, keys.own], _ = _cluster(keys, fitted_keys, key_clusters, iterations[1], seed, key_metric)
    return labels, key_labels


def _cluster(
    part: Part, fitted: torch.Tensor, clusters: int, iterations: int, seed: int, metric: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of a rank's rows that count, `(heads, m)`, and of the fitted rows `(heads, F, D)`, `(heads, F)`."""
    if part.total <= clusters:  # a cluster for each
        everyone = torch.arange(part.total, device=fitted.device).expand(len(fitted), -1)
        return everyone[:, part.before : part.before + len(part.own)], everyone
    seeds = find_seeds(fitted, clusters, seed, metric)
    compared = prepare(lloyd(fitted, seeds, iterations, metric, binary=False), metric)
    return nearest(part.rows[:, part.own], *compared), nearest(fitted, *compared)
