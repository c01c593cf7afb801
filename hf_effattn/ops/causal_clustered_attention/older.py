"""A segment's queries over the keys older than its window, for a CPU: by clusters, and a few keys exactly.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `n` queries of a segment, `C` query clusters per
query head, `M` older keys, `G` clusters of those finished with one segment, `nb` blocks of `L` keys per head.
"""

from copy import copy
from itertools import groupby
from math import inf

import torch

from ..bi_clustered_attention.offsets import ERROR_PER_VARIANCE
from ..cluster_queries.batched import as_metric
from ..kmeans.batched import find_seeds, lloyd, nearest, prepare
from ..kmeans.sampling import fit_rows
from ..shared.cluster_blocks import ClusterBlocks, block_length
from ..shared.cluster_table import ClusterTable, attend_backward, attend_in_part
from ..shared.key_summaries import LEAST_LOG_WEIGHT, NO_MASS
from ..shared.precision import SMALLEST
from ..shared.tables import cluster_rows, cluster_sizes, cluster_sums
from ..shared.topk import largest
from .local import Attended, LocalPart
from .reference import Settings

# Of the rows that are clustered at once: 2 MiB in float32.
RUN_NUMBERS = 2**19


def labels_of(points: torch.Tensor, clusters: int, settings: Settings, metric: torch.Tensor) -> torch.Tensor:
    """Labels `(heads, n)` by K-means of points `(heads, n, D)`; of fewer points, each is a cluster."""
    n = points.shape[1]
    if n <= clusters:
        return torch.arange(n, device=points.device).expand(len(points), n)
    fitted = points.index_select(1, fit_rows(n, clusters, settings.fit_queries).to(points.device))
    seeds = find_seeds(fitted, clusters, settings.seed, metric)
    return nearest(points, *prepare(lloyd(fitted, seeds, settings.rounds, metric, binary=False), metric))


def runs_of_equal(ranges: list[slice], rows: torch.Tensor) -> list[list[slice]]:
    """The ranges of rows `(..., N, D)` in runs of neighbours of the same length, so that each run is one batch.

    On a CPU of no more than its cache holds: the steps of a clustering go over their rows again and again.
    """
    most, found = len(ranges), list[list[slice]]()
    if rows.device.type == "cpu" and ranges:
        most = max(1, RUN_NUMBERS // (rows[..., ranges[0], :].numel()))
    for _, run in groupby(ranges, key=lambda own: own.stop - own.start):
        equal = list(run)
        found += [equal[i : i + most] for i in range(0, len(equal), most)]
    return found


class PastQueries:
    """Clusters of the past queries `(P, g, n', D)` that a segment reads.

    Attributes:
        labels: `(P, g, n')`.
        centroids: `(P, g · C, D)`.
        index: `(P · g · n',)` row of every past query in the centroids' table.
        counts: `(P, g, C)`.
        of_heads: covariances of the offsets from the centroids, `(P, g, D, D)`; their mean is `Σ_η`.
    """

    def __init__(
        self, past: torch.Tensor, metric: torch.Tensor, labels: torch.Tensor | None, settings: Settings
    ) -> None:
        """`labels`: where they are known, `(P, g, n')`."""
        P, g, _, D = past.shape
        C, points = settings.clusters, past.flatten(0, 1)
        self.metric = metric
        if labels is None:
            labels = labels_of(points, C, settings, metric.repeat_interleave(g, dim=0)).unflatten(0, (P, g))
        self.labels = labels
        self.index = cluster_rows(labels.flatten(0, 1), C)
        sizes = cluster_sizes(self.index, P * g, C)
        self.counts = sizes.view(P, g, C)
        centroids = cluster_sums(points, self.index, P * g, C) / sizes.clamp(min=1)[..., None]
        self.centroids = centroids.view(P, g * C, D)
        offsets = points - centroids.flatten(0, 1).index_select(0, self.index).view_as(points)
        self.of_heads = (offsets.transpose(1, 2) @ offsets / offsets.shape[1]).view(P, g, D, D)

    @staticmethod
    def of_segments(
        query: torch.Tensor,
        fitted: list[slice],
        metrics: list[torch.Tensor],
        labels: torch.Tensor | None,
        settings: Settings,
    ) -> list["PastQueries"]:
        """Of several segments, whose past queries are those rows of `(P, g, N, D)`: as many as are equal at once.

        `labels`: where they are known, `(P, g, N)`.
        """
        found: list[PastQueries] = []
        for run in runs_of_equal(fitted, query):
            own = metrics[len(found) : len(found) + len(run)]
            known = None if labels is None else torch.cat([labels[:, :, rows] for rows in run])
            together = PastQueries(torch.cat([query[:, :, rows] for rows in run]), torch.cat(own), known, settings)
            found += [together._part(i, len(query)) for i in range(len(run))]
        return found

    def _part(self, segment: int, heads: int) -> "PastQueries":
        """Of one segment, where those of several stand behind each other."""
        part, own = copy(self), slice(segment * heads, (segment + 1) * heads)
        part.metric, part.centroids, part.counts = self.metric[own], self.centroids[own], self.counts[own]
        part.of_heads, part.labels = self.of_heads[own], self.labels[own]
        tables = heads * self.centroids.shape[1]
        part.index = self.index.view(len(self.counts), -1)[own].flatten() - segment * tables
        return part

    def readers(self, query: torch.Tensor) -> torch.Tensor:
        """The nearest centroid `(P, g, n)` of a segment's queries `(P, g, n, D)`."""
        P, g, C = self.counts.shape
        directions, half_norms = prepare(self.centroids.view(P * g, C, -1), self.metric.repeat_interleave(g, dim=0))
        half_norms = half_norms.masked_fill(self.counts.view(P * g, C) == 0, torch.inf)
        return nearest(query.flatten(0, 1), directions, half_norms).view(P, g, -1)

    def gradient(self, grad_centroids: torch.Tensor) -> torch.Tensor:
        """Of the past queries `(P, g, n', D)`, for that of the centroids."""
        P, g, _ = self.counts.shape
        of_members = grad_centroids.flatten(0, 1) / self.counts.view(-1, 1).clamp(min=1)
        return of_members.index_select(0, self.index).view(P, g, -1, grad_centroids.shape[2])


class FinishedKeys:
    """The keys and values of a chunk `(P, N, ·)` that segments have seen over clusters, and the clusters.

    Of every segment its clusters and places stand behind those of the segments before, and stay.

    Attributes:
        keys: how many there are.
        places: `nb · L`, of the rows in use.
        rows: `(P, most, D + Dv)`: key and value less the means of their cluster; 0 in empty places.
        full: `(P, most)`, 1 where a key is, else 0.
        sources: `(P, most)` number of the key, 0 in empty places.
        distances: `d_t²` `(P, most)`; -1 in empty places.
        clusters: `(P, most / L)` cluster of a block.
        means: `(P, ·, D + Dv)`.
        grad: gradients of `rows`; None before there are any.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, settings: Settings) -> None:
        self.key, self.value, self.settings = key, value, settings
        P, N, self.D = key.shape
        self.Dv = value.shape[2]
        segments = -(-N // settings.segment_length)
        self.L = block_length(settings.segment_length / settings.key_clusters)
        most = segments * (settings.segment_length // self.L + settings.key_clusters) * self.L
        self.keys, self.places, self.G = 0, 0, 0
        self.rows = key.new_empty(P, most, self.D + self.Dv)
        self.full = key.new_empty(P, most)
        self.sources = torch.zeros(P, most, dtype=torch.int64, device=key.device)
        self.distances = key.new_empty(P, most)
        self.clusters = torch.empty(P, most // self.L, dtype=torch.int64, device=key.device)
        self.means = key.new_empty(P, segments * settings.key_clusters, self.D + self.Dv)
        self.within = key.new_zeros(P, self.D, self.D)
        self.grad: torch.Tensor | None = None
        self.blocks: list[tuple[slice, slice, ClusterBlocks]] = []

    def metrics(self, blocks: list[slice]) -> list[torch.Tensor]:
        """Of every block of keys the metric of all keys up to its last, `(P, D, D)`."""
        first_mean = self.key[:, blocks[0]].mean(dim=1, keepdim=True)
        total, gram = torch.zeros_like(first_mean), self.key.new_zeros(len(self.key), self.D, self.D)
        found = []
        for rows in blocks:
            centered = self.key[:, rows] - first_mean
            total += centered.sum(dim=1, keepdim=True)
            gram += centered.transpose(1, 2) @ centered
            mean = total / rows.stop
            found.append(as_metric(gram / rows.stop - mean.transpose(1, 2) * mean))
        return found

    def labels_of_blocks(self, blocks: list[slice], covariances: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of every block of keys its clusters `(P, m)`, by `Σ_η` `(P, D, D)` of the segment that first sees it so."""
        P, settings, found = len(self.key), self.settings, list[torch.Tensor]()
        for run in runs_of_equal(blocks, self.key):
            keys = torch.cat([self.key[:, rows] for rows in run])
            if settings.first_order:
                metric = as_metric(torch.cat(covariances[len(found) : len(found) + len(run)]))
                labels = labels_of(keys, settings.key_clusters, settings, metric)
            else:
                labels = torch.zeros(keys.shape[:2], dtype=torch.int64, device=keys.device)
            found += labels.split(P)
        return found

    def add(self, own: slice, labels: torch.Tensor, covariance: torch.Tensor) -> None:
        """The next keys, of their labels and of the covariance `Σ_η` `(P, D, D)`."""
        settings, D, end = self.settings, self.D, own.stop
        key, G = self.key[:, own], settings.key_clusters
        P = len(key)
        index = cluster_rows(labels, G)
        sizes = cluster_sizes(index, P, G)
        blocks = ClusterBlocks.of(index, sizes, aligned=True, length=self.L)
        packed = blocks.pack(key, self.value[:, own])  # (P · nb, L, D + Dv)
        means = blocks.sum(packed.sum(dim=1), P * G) / sizes.view(-1, 1).clamp(min=1)
        empty = (blocks.sources == index.numel()).view(P, -1)
        places = slice(self.places, self.places + empty.shape[1])
        rows = self.rows[:, places]
        full = self.full[:, places].copy_(~empty)
        by_block = (packed, full.reshape(-1, self.L, 1), blocks.of_cluster(means)[:, None])
        torch.addcmul(
            *(numbers.unflatten(0, (P, -1)) for numbers in by_block), value=-1, out=rows.unflatten(1, (-1, self.L))
        )
        first = torch.arange(P, device=key.device)[:, None] * key.shape[1] - own.start
        self.sources[:, places] = (blocks.sources.view(P, -1) - first).masked_fill_(empty, 0)
        self.clusters[:, places.start // self.L : places.stop // self.L] = blocks.clusters.view(P, -1) % G + self.G
        self.means[:, self.G : self.G + G] = means.view(P, G, -1)
        distances = self.distances[:, places].fill_(1.0)
        if settings.first_order:
            spread = rows[..., :D]
            distances.copy_(torch.linalg.vecdot(spread @ covariance, spread).clamp_(min=SMALLEST))
            if settings.exact_above < inf:
                self.within += spread.transpose(1, 2) @ spread
        distances.masked_fill_(empty, -1.0)
        self.blocks.append((own, places, blocks))
        self.keys, self.places, self.G = end, places.stop, self.G + G

    def predicted(self, past: PastQueries) -> torch.Tensor:
        """The error that they will make, `(P,)`."""
        variances = (past.of_heads * (self.within / self.keys)[:, None]).sum(dim=(2, 3))
        return variances.amax(dim=1) * ERROR_PER_VARIANCE

    def grad_rows(self) -> torch.Tensor:
        """Memory for the gradients of the rows, to be added to."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.rows)
        return self.grad

    def store_gradients(self, of_key: torch.Tensor, of_value: torch.Tensor) -> None:
        """Add what the rows got to the gradients of keys and values `(P, N, ·)`."""
        if self.grad is None:
            return
        for own, places, blocks in self.blocks:
            both = blocks.unpack(self.grad[:, places].reshape(-1, blocks.length, self.grad.shape[2]), len(self.rows))
            of_key[:, own] += both[..., : self.D]
            of_value[:, own] += both[..., self.D :]


class OlderSummaries:
    """The exact keys of every query head, and what its clusters see of the others: a table of summaries.

    A summary is tilted at the centroid: its score is the log-mass there, to first order the tangent of it.

    Attributes:
        top: `T` `(P, g, k)`, places of the exact keys.
        weights: `(P, g · C, nb · L)`, `w_jt` of the largest of a cluster; 0 where `t` is in `T`.
        table: rows of keys and values of every query cluster, `(P · g · C, G, ·)`.
    """

    def __init__(self, keys: FinishedKeys, past: PastQueries, settings: Settings, *, in_order: bool) -> None:
        self.keys, self.centroids, self.tangents = keys, past.centroids, settings.first_order
        self.P, self.g, self.C = past.counts.shape
        self.rows, self.clusters = keys.rows[:, : keys.places], keys.clusters[:, : keys.places // keys.L]
        self.means = keys.means[:, : keys.G]
        self._weigh()
        self.top = self._choose(past.counts, min(settings.topk, keys.keys), in_order=in_order)
        self._summarise()

    def _by_block(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of every place, `(·, nb · L)`, as `(nb, ·, L)`."""
        return numbers.unflatten(1, (-1, self.keys.L)).transpose(0, 1)

    def _per_block(self, table: torch.Tensor) -> torch.Tensor:
        """Numbers of every cluster `(P, g · C, G)` for its blocks: `(P, g · C, nb)`."""
        return table.gather(2, self.clusters[:, None].expand(-1, table.shape[1], -1))

    def _weigh(self) -> None:
        """`exp(Q̄_j·(K_t - K̄_c))` beside the largest of the cluster, and `Q̄_j·K̄_c` `(P, g · C, G)`."""
        keys, D = self.keys, self.keys.D
        scores = torch.bmm(self.centroids, self.rows[..., :D].transpose(1, 2))  # (P, g · C, nb · L)
        self.mean_scores = self.centroids @ self.means[..., :D].transpose(1, 2)
        by_block = scores.unflatten(2, (-1, keys.L))
        # An empty place scores 0, which the largest of a cluster never is below: their mean is 0.
        index = self.clusters[:, None].expand(-1, scores.shape[1], -1)
        self.shift = torch.zeros_like(self.mean_scores).scatter_reduce_(2, index, by_block.amax(dim=3), "amax")
        by_block.sub_(self._per_block(self.shift)[..., None]).clamp_(min=LEAST_LOG_WEIGHT).exp_()
        self.weights = scores.mul_(keys.full[:, None, : keys.places])

    def _masses(self) -> torch.Tensor:
        """Sum of the weights of every cluster, `(P, g · C, G)`."""
        of_blocks = self.weights.unflatten(2, (-1, self.keys.L)).sum(dim=3)
        member = self.clusters[..., None] == torch.arange(self.keys.G, device=self.clusters.device)
        return of_blocks @ member.to(of_blocks.dtype)

    def _choose(self, counts: torch.Tensor, topk: int, *, in_order: bool) -> torch.Tensor:
        """Places of the keys with the largest weight of the past queries, times `d_t²`; their weights get 0."""
        P, g, C = counts.shape
        if not topk:
            return counts.new_empty(P, g, 0)
        height = self.shift + self.mean_scores  # (P, g · C, G)
        log_sum = (self._masses().log() + height).logsumexp(dim=2, keepdim=True)
        share = (height - log_sum).exp_().view(P, g, C, -1).mul_(counts[..., None]).flatten(1, 2)
        weights = self.weights.unflatten(2, (-1, self.keys.L)) * self._per_block(share)[..., None]
        weight = weights.view(P, g, C, -1).sum(dim=2)  # (P, g, nb · L)
        weight.mul_(self.keys.distances[:, None, : self.keys.places])
        top = largest(weight, topk, in_order=in_order)
        self.weights.view(P, g, C, -1).scatter_(3, top[:, :, None].expand(-1, -1, C, -1), 0.0)
        return top

    def _summarise(self) -> None:
        """Tilted sums over the clusters without `T`: `log S_jc`, `K̃_jc`, `Ṽ_jc`, as rows of the table."""
        keys, D, J = self.keys, self.keys.D, self.centroids.shape[1]
        sums = self.shift.new_zeros(self.P, keys.G, J, self.rows.shape[2])
        for p in range(self.P):
            parts = torch.bmm(self._by_block(self.weights[p]), self.rows[p].unflatten(0, (-1, keys.L)))
            sums[p].index_add_(0, self.clusters[p], parts)
        mass = self._masses()
        nobody = mass <= 0
        self.inverse_mass = torch.where(nobody, 0.0, 1 / mass)
        # Without the means; (P, g · C, G, D + Dv).
        self.tilted = sums.transpose(1, 2) * self.inverse_mass[..., None]
        log_mass = (mass.log() + self.shift + self.mean_scores).masked_fill_(nobody, NO_MASS)
        tilted = self.tilted + self.means[:, None]
        table_keys = tilted.new_zeros(self.P, J, keys.G, D + 1)
        bias = log_mass
        if self.tangents:  # log S_jc + η·K̃_jc = b_jc + Q_i·K̃_jc
            bias = bias - torch.linalg.vecdot(self.centroids[:, :, None], tilted[..., :D])
            table_keys[..., :D] = tilted[..., :D]
        table_keys[..., D] = bias
        self.table = ClusterTable(table_keys.flatten(0, 1), tilted[..., D:].flatten(0, 1).contiguous())

    def backward(self, grad: ClusterTable) -> torch.Tensor:
        """Gradient of the centroids `(P, g · C, D)`; adds to those of the keys' rows. Spoils the weights."""
        keys, D, J = self.keys, self.keys.D, self.centroids.shape[1]
        grad_keys, grad_values = (rows.unflatten(0, (self.P, J)) for rows in (grad.keys, grad.values))
        grad_log_mass = grad_keys[..., D]
        grad_tilted = torch.cat([grad_keys[..., :D], grad_values], dim=3)  # (P, g · C, G, D + Dv)
        grad_centroids = torch.zeros_like(self.centroids)
        if self.tangents:  # b_jc = log S_jc - Q̄_j·K̃_jc
            grad_tilted[..., :D] -= grad_log_mass[..., None] * self.centroids[:, :, None]
            tilted_keys = self.table.keys[..., :D].unflatten(0, (self.P, J))
            grad_centroids -= (grad_log_mass[:, :, None] @ tilted_keys)[:, :, 0]
        else:
            grad_tilted[..., :D] = 0
        # K̃ - K̄ and Ṽ - V̄ are means of the rows, weighed by w_jt / S_jc; the rows' own means are 0.
        constant = grad_log_mass - torch.linalg.vecdot(grad_tilted, self.tilted)
        self.weights.unflatten(2, (-1, keys.L)).mul_(self._per_block(self.inverse_mass)[..., None])
        grad_rows = keys.grad_rows()
        for p in range(self.P):
            of_blocks = grad_tilted[p].transpose(0, 1).index_select(0, self.clusters[p])  # (nb, g · C, D + Dv)
            weights, rows = self._by_block(self.weights[p]), self.rows[p].unflatten(0, (-1, keys.L))
            of_mass = constant[p].T.index_select(0, self.clusters[p])[..., None]
            grad_scores = torch.baddbmm(of_mass, of_blocks, rows.transpose(1, 2)).mul_(weights)  # (nb, g · C, L)
            # Of both factors of the rows at once: they are the largest numbers here, and read and written once.
            seen = of_blocks.new_zeros(len(of_blocks), 2 * J, of_blocks.shape[2])
            seen[:, :J] = of_blocks
            seen[:, J:, :D] = self.centroids[p]
            target = grad_rows[p, : keys.places].unflatten(0, (-1, keys.L))
            target.baddbmm_(torch.cat([weights, grad_scores], dim=1).transpose(1, 2), seen)
            grad_centroids[p] += torch.bmm(grad_scores, rows[..., :D]).sum(dim=0)
        # Q̄_j·K_t is the score of what remains of the key, and of its cluster's mean.
        return grad_centroids.add_(grad_log_mass @ self.means[..., :D])


class OlderPart:
    """A segment's queries `(P, g, n, D)` over the older keys: a few exactly, the others by clusters.

    `factor`: dropout of these, `(P, g, n, topk + clusters)`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: FinishedKeys,
        past: PastQueries,
        factor: torch.Tensor | None,
        settings: Settings,
    ) -> None:
        P, g, n, D = query.shape
        self.shape, self.keys, self.past = query.shape, keys, past
        self.summaries = OlderSummaries(keys, past, settings, in_order=factor is not None)
        top = self.summaries.top
        heads = torch.arange(P, device=query.device)[:, None, None]
        sources = keys.sources.gather(1, top.flatten(1)).view_as(top)
        self.sources = (sources + heads * keys.key.shape[1]).flatten()
        exact_factor = None if factor is None else factor[..., : top.shape[2]].flatten(0, 1)[:, None]
        self.exact: LocalPart | None = None
        if top.shape[2]:
            key, value = (
                rows.flatten(0, 1).index_select(0, self.sources).view(P * g, top.shape[2], -1)
                for rows in (keys.key, keys.value)
            )
            self.exact = LocalPart(query.reshape(P * g, 1, n, D), key, value, False, exact_factor)
        tables = cluster_rows(past.readers(query).flatten(0, 1), settings.clusters)
        self.blocks = ClusterBlocks.of(tables, cluster_sizes(tables, P, g * settings.clusters))
        # Behind the scaled query a 1, for the biases of the table.
        rows = query.reshape(P, g * n, D)
        self.packed = self.blocks.pack(rows, rows.new_ones(1, 1, 1).expand(P, g * n, 1))
        self.factor = None
        if factor is not None:
            self.factor = self.blocks.pack(factor[..., settings.topk : settings.topk + keys.G].flatten(1, 2))

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks.pack(rows.reshape(self.shape[0], -1, rows.shape[3]))

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return self.blocks.unpack(packed, self.shape[0]).view(*self.shape[:3], -1)

    def attend(self) -> Attended:
        """Outputs `(P, g, n, Dv)` and log-sum-exp `(P, g, n, 1)`, over the clusters."""
        output, log_sum = attend_in_part(self.summaries.table, self.blocks, self.packed, self.factor)
        return self._unpack(output), self._unpack(log_sum)

    def attend_exactly(self) -> list[Attended]:
        """As `attend`, over the exact keys; empty where there are none."""
        if self.exact is None:
            return []
        output, log_sum = self.exact.attend()
        return [(output.view(*self.shape[:3], -1), log_sum.view(*self.shape[:3], 1))]

    def backward(
        self,
        grad: torch.Tensor,
        rest: Attended,
        log_sum: torch.Tensor,
        whole: Attended,
        of_key: torch.Tensor,
        of_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the queries and of the past ones; adds to those of keys and values `(P, N, ·)`.

        `log_sum` is that of `attend`, `rest` all but the clusters, `whole` the softmax.
        """
        P, g, n, D = self.shape
        output, other_sum = rest
        share, remaining = torch.sigmoid(log_sum - other_sum), torch.sigmoid(other_sum - log_sum)
        other_dot = torch.linalg.vecdot(grad, output)[..., None]
        other = self._pack(share), self._pack(remaining), self._pack(other_dot)
        grad_packed, of_table = attend_backward(
            self.summaries.table, self.blocks, self.packed, self.factor, self._pack(grad), other
        )
        of_past = self.past.gradient(self.summaries.backward(of_table))
        grad_query = self._unpack(grad_packed[..., :D].contiguous())
        if self.exact is not None:
            by_head = (part.reshape(P * g, 1, n, -1) for part in (grad, *whole))
            found = self.exact.backward(*by_head)
            grad_query = grad_query + found[0].view_as(grad_query)
            for target, more in ((of_key, found[1]), (of_value, found[2])):
                target.view(-1, target.shape[2]).index_add_(0, self.sources, more.flatten(0, 1))
        return grad_query, of_past
