"""Queries over the keys before their segment's window, for a CPU: by clusters, and a few keys exactly.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `S` segments of a batch, `n` queries of each,
`C` query clusters per query head, `G` clusters of all distant keys of the last segment, `nb` blocks of `L` keys per
head.
"""

import math

import torch
import torch.nn.functional as F

from ..kmeans.batched import nearest, prepare
from ..shared.cluster_blocks import ClusterBlocks
from ..shared.cluster_table import ClusterTable, attend_backward
from ..shared.key_summaries import NO_MASS
from ..shared.precision import LEAST_LOG_WEIGHT
from ..shared.tables import cluster_rows, cluster_sizes, cluster_sums
from ..shared.topk import largest
from .completed_keys import CompletedKeys, labels_of
from .local import LocalPart, PartialOutput, merge_
from .reference import Settings
from .segment_batches import SegmentBatch


class PreviousQueries:
    """Clusters of the previous segments' queries `(P · S, g, n', D)`.

    Attributes:
        labels: `(P · S, g, n')`.
        centroids: `(P · S, g · C, D)`.
        index: `(P · S · g · n',)` row of every previous query in the centroids' table.
        counts: `(P · S, g, C)`.
        of_heads: covariances of the residuals from the centroids, `(P · S, g, D, D)`; their mean is `Σ_η`.
    """

    def __init__(
        self, previous: torch.Tensor, metric: torch.Tensor | None, labels: torch.Tensor | None, settings: Settings
    ) -> None:
        """`metric`: `(P · S, D, D)`, None for one cluster; `labels`: where they are known, `(P · S, g, n')`."""
        heads, g, _, D = previous.shape
        C, points = settings.clusters, previous.flatten(0, 1)
        self.metric = None if metric is None else metric.repeat_interleave(g, dim=0)
        if labels is None:
            labels = labels_of(points, C, settings, self.metric).unflatten(0, (heads, g))
        self.labels = labels
        self.index = cluster_rows(labels.flatten(0, 1), C)
        sizes = cluster_sizes(self.index, heads * g, C)
        self.counts = sizes.view(heads, g, C)
        if C == 1:
            centroids = points.mean(dim=1, keepdim=True)
            residuals = points - centroids
        else:
            centroids = cluster_sums(points, self.index, heads * g, C) / sizes.clamp(min=1)[..., None]
            residuals = points - centroids.flatten(0, 1).index_select(0, self.index).view_as(points)
        self.centroids = centroids.view(heads, g * C, D)
        self.of_heads = (residuals.transpose(1, 2) @ residuals / residuals.shape[1]).view(heads, g, D, D)

    def readers(self, query: torch.Tensor) -> torch.Tensor:
        """The nearest centroid `(P · S, g, n)` of the segments' queries `(P · S, g, n, D)`."""
        heads, g, C = self.counts.shape
        directions, half_norms = prepare(self.centroids.view(heads * g, C, -1), self.metric)
        half_norms = half_norms.masked_fill(self.counts.view(heads * g, C) == 0, torch.inf)
        return nearest(query.flatten(0, 1), directions, half_norms).view(heads, g, -1)

    def gradient(self, grad_centroids: torch.Tensor) -> torch.Tensor:
        """Gradient of the previous queries `(P · S, g, n', D)`, given that of the centroids `(P, S · g · C, D)`."""
        heads, g, _ = self.counts.shape
        of_members = grad_centroids.flatten(0, 1) / self.counts.view(-1, 1).clamp(min=1)
        return of_members.index_select(0, self.index).view(heads, g, -1, grad_centroids.shape[2])


class DistantSummaries:
    """The exact keys of every query head, and a table of summaries of the other distant keys for its clusters.

    A summary is tilted at the centroid: its score is the log-mass there, or the tangent of it. All segments of a batch
    have the completed keys of its last one; those that are not distant for a segment have no mass there.

    Attributes:
        top: `T` `(P, S · g, k)`, places of the exact keys.
        weights: `(P, S · g · C, nb · L)`, `w_jt` of the largest of a cluster; 0 where `t` is in `T`.
        table: rows of keys and values of every query cluster, `(P · S · g · C, G, ·)`.
    """

    def __init__(
        self,
        keys: CompletedKeys,
        previous: PreviousQueries,
        batch: SegmentBatch,
        settings: Settings,
        *,
        in_order: bool,
    ) -> None:
        self.keys, self.tangents, self.S = keys, settings.linear_summaries, batch.count
        self.P, self.g, self.C = len(keys.rows), *previous.counts.shape[1:]
        self.new_clusters = settings.key_clusters
        self.centroids = previous.centroids.view(self.P, -1, keys.D)  # (P, S · g · C, D)
        self.counts = previous.counts.view(self.P, -1, self.C)
        self.rows, self.clusters = keys.rows[:, : keys.places], keys.clusters[:, : keys.places // keys.L]
        self.means = keys.means[:, : keys.G]
        mean_scores = self.centroids @ self.means[..., : keys.D].transpose(1, 2)  # Q̄_j·K̄_c: (P, S · g · C, G)
        self.mean_scores = keys.hide_later(mean_scores, 0.0, self.new_clusters)
        self.weights, self.shift = self._weigh(slice(None), slice(None))
        self.top = self._choose(batch.topk, in_order=in_order)
        self._summarise(self._masses_of_the_rest(settings.segment_length))

    def _by_block(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of every place, `(·, nb · L)`, as `(nb, ·, L)`."""
        return numbers.unflatten(1, (-1, self.keys.L)).transpose(0, 1)

    def _per_block(self, table: torch.Tensor) -> torch.Tensor:
        """Numbers of every cluster `(P, S · g · C, G)` for its blocks: `(P, S · g · C, nb)`."""
        return table.gather(2, self.clusters[:, None].expand(-1, table.shape[1], -1))

    def _weigh(
        self, heads: slice, part: slice, taken: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`exp(Q̄_j·(K_t - K̄_c))` beside the largest of the cluster, and the logarithm of that `(heads, part, G)`.

        `part`: which of the centroids; `taken`: whose weight is 0, `(heads, part, nb · L)`; None: keys that a segment
        does not see, of all centroids.
        """
        keys = self.keys
        scores = torch.bmm(self.centroids[heads, part], self.rows[heads, :, : keys.D].transpose(1, 2))
        # An empty place scores 0. The largest score of a cluster is never below 0, as its scores have mean 0.
        shift = torch.zeros_like(self.mean_scores[heads, part])
        lowest = torch.finfo(shift.dtype).min
        if taken is not None:
            scores.masked_fill_(taken, -torch.inf)
            shift.fill_(lowest)
        by_block = scores.unflatten(2, (-1, keys.L))
        blocks = self.clusters[heads, None].expand(-1, scores.shape[1], -1)
        shift.scatter_reduce_(2, blocks, by_block.amax(dim=3), "amax")
        by_block.sub_(shift.gather(2, blocks)[..., None]).clamp_(min=LEAST_LOG_WEIGHT).exp_()
        scores.mul_(keys.full[heads, None, : keys.places])
        if taken is not None:
            return scores.masked_fill_(taken, 0.0), shift
        return keys.hide_later(scores, 0.0, keys.width), keys.hide_later(shift, lowest, self.new_clusters)

    def _centroids_of(self, segment: int) -> slice:
        """Which of the centroids are a segment's."""
        each = self.g * self.C
        return slice(segment * each, (segment + 1) * each)

    def _masses_of_the_rest(self, most: int) -> torch.Tensor:
        """As `_masses`, without `T`; weighs anew where all of up to `most` keys may lie below `LEAST_LOG_WEIGHT`."""
        mass = self._masses()
        unsure = ((mass > 0) & (mass < most * self._least_sure())).unflatten(1, (self.S, -1)).flatten(2).any(dim=2)
        # One by one: whether a later segment is unsure must change nothing here.
        for p, segment in unsure.nonzero().tolist():
            head, part = slice(p, p + 1), self._centroids_of(segment)
            self.weights[head, part], self.shift[head, part] = self._weigh(head, part, self.weights[head, part] == 0)
        return self._masses() if unsure.any() else mass

    def _least_sure(self) -> float:
        """Mean weight from which on the weights that `LEAST_LOG_WEIGHT` cuts off are below rounding."""
        return math.exp(LEAST_LOG_WEIGHT) / torch.finfo(self.weights.dtype).eps

    def _masses(self) -> torch.Tensor:
        """Sum of the weights of every cluster, `(P, S · g · C, G)`."""
        of_blocks = self.weights.unflatten(2, (-1, self.keys.L)).sum(dim=3)
        member = self.clusters[..., None] == torch.arange(self.keys.G, device=self.clusters.device)
        return of_blocks @ member.to(of_blocks.dtype)

    def _choose(self, topk: int, *, in_order: bool) -> torch.Tensor:
        """Places of the keys with the largest weight of the previous queries, times `d_t²`; their weights get 0."""
        counts, keys, C, S, g = self.counts, self.keys, self.C, self.S, self.g
        if not topk:
            return counts.new_empty(self.P, S * g, 0)
        height = self.shift + self.mean_scores  # (P, S · g · C, G)
        log_sum = (self._masses().log() + height).logsumexp(dim=2, keepdim=True)
        share = (height - log_sum).clamp_(min=LEAST_LOG_WEIGHT).exp_().unflatten(1, (-1, C))
        share = share.mul_(counts[..., None]).flatten(1, 2)
        weights = self.weights.unflatten(2, (-1, keys.L)) * self._per_block(share)[..., None]
        rank = weights.view(self.P, S * g, C, -1).sum(dim=2)  # (P, S · g, nb · L)
        keys.hide_later(rank.mul_(keys.distances[:, None, : keys.places]), -1.0, keys.width)
        top = largest(rank, topk, in_order=in_order)
        sure = counts.sum(dim=2) * keys.farthest.repeat_interleave(g, dim=1) * self._least_sure()
        unsure = ~(rank.gather(2, top).amin(dim=2) > sure)  # NaN, too
        for p, segment in unsure.unflatten(1, (S, g)).any(dim=2).nonzero().tolist():
            heads = slice(segment * g, (segment + 1) * g)
            top[p, heads] = largest(self._log_ranks(p, segment)[None], topk, in_order=in_order)[0]
        self.weights.view(self.P, S * g, C, -1).scatter_(3, top[:, :, None].expand(-1, -1, C, -1), 0.0)
        return top

    def _log_ranks(self, p: int, segment: int) -> torch.Tensor:
        """Logarithms of a segment's ranks `(g, nb · L)`, for which no weight is too small; -inf where it sees no key.

        `p` is the head.
        """
        keys, centroids = self.keys, self._centroids_of(segment)
        unseen = keys.full[p, : keys.places] == 0
        unseen[keys.places - (self.S - 1 - segment) * keys.width :] = True
        scores = self.centroids[p, centroids] @ self.rows[p, :, : keys.D].T
        means = self.mean_scores[p, centroids].index_select(1, self.clusters[p])
        scores.unflatten(1, (-1, keys.L)).add_(means[..., None])
        log_weights = scores.masked_fill_(unseen, -torch.inf).log_softmax(dim=1).unflatten(0, (self.g, self.C))
        counts = self.counts[p].unflatten(0, (self.S, self.g))[segment]
        log_weight = (log_weights + counts.to(scores.dtype).log()[..., None]).logsumexp(dim=1)
        return (log_weight + keys.distances[p, : keys.places].log()).masked_fill_(unseen, -torch.inf)

    def _summarise(self, mass: torch.Tensor) -> None:
        """Tilted sums over the clusters without `T`, of these masses: `log S_jc`, `K̃_jc`, `Ṽ_jc`, the table's rows."""
        keys, D, J = self.keys, self.keys.D, self.centroids.shape[1]
        sums = self.shift.new_zeros(self.P, keys.G, J, self.rows.shape[2])
        for p in range(self.P):
            parts = torch.bmm(self._by_block(self.weights[p]), self.rows[p].unflatten(0, (-1, keys.L)))
            sums[p].index_add_(0, self.clusters[p], parts)
        nobody = mass <= 0
        self.inverse_mass = torch.where(nobody, 0.0, 1 / mass)
        # Without the means; (P, S · g · C, G, D + Dv).
        self.tilted = keys.hide_later(sums.transpose(1, 2) * self.inverse_mass[..., None], 0.0, self.new_clusters)
        log_mass = (mass.log() + self.shift + self.mean_scores).masked_fill_(nobody, NO_MASS)
        tilted = keys.hide_later(self.tilted + self.means[:, None], 0.0, self.new_clusters)
        table_keys = tilted.new_zeros(self.P, J, keys.G, D + 1)
        bias = log_mass
        if self.tangents:  # log S_jc + η·K̃_jc = b_jc + Q_i·K̃_jc
            bias = bias - torch.linalg.vecdot(self.centroids[:, :, None], tilted[..., :D])
            table_keys[..., :D] = tilted[..., :D]
        table_keys[..., D] = bias
        self.table = ClusterTable(table_keys.flatten(0, 1), tilted[..., D:].flatten(0, 1).contiguous())

    def backward(self, grad: ClusterTable) -> torch.Tensor:
        """Gradient of the centroids `(P, S · g · C, D)`; adds to those of the keys' rows. Overwrites the weights."""
        keys, D, J = self.keys, self.keys.D, self.centroids.shape[1]
        grad_keys, grad_values = (rows.unflatten(0, (self.P, J)) for rows in (grad.keys, grad.values))
        grad_log_mass = grad_keys[..., D]
        grad_tilted = torch.cat([grad_keys[..., :D], grad_values], dim=3)  # (P, S · g · C, G, D + Dv)
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
            of_blocks = grad_tilted[p].transpose(0, 1).index_select(0, self.clusters[p])  # (nb, S · g · C, D + Dv)
            weights, rows = self._by_block(self.weights[p]), self.rows[p].unflatten(0, (-1, keys.L))
            of_mass = constant[p].T.index_select(0, self.clusters[p])[..., None]
            grad_scores = torch.baddbmm(of_mass, of_blocks, rows.transpose(1, 2)).mul_(weights)  # (nb, S · g · C, L)
            # Both factors in one product: the rows, the largest tensors here, are read and written once.
            seen = of_blocks.new_empty(len(of_blocks), 2 * J, of_blocks.shape[2])
            seen[:, :J] = of_blocks
            seen[:, J:, :D] = self.centroids[p]
            seen[:, J:, D:] = 0
            target = grad_rows[p, : keys.places].unflatten(0, (-1, keys.L))
            target.baddbmm_(torch.cat([weights, grad_scores], dim=1).transpose(1, 2), seen)
            grad_centroids[p] += torch.bmm(grad_scores, rows[..., :D]).sum(dim=0)
        # Q̄_j·K_t is the score of the key less its cluster's mean, and of that mean.
        return grad_centroids.add_(grad_log_mass @ self.means[..., :D])


class DistantPart:
    """The segments' queries `(P · S, g, n, D)` over the distant keys: a few exactly, the others by clusters.

    `factor`: dropout of these, `(P · S, g, n, topk + clusters)`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: CompletedKeys,
        previous: PreviousQueries,
        batch: SegmentBatch,
        factor: torch.Tensor | None,
        settings: Settings,
    ) -> None:
        heads, g, n, D = query.shape
        self.query, self.shape, self.keys, self.previous, self.batch = query, query.shape, keys, previous, batch
        self.summaries = DistantSummaries(keys, previous, batch, settings, in_order=factor is not None)
        top = self.summaries.top
        first = torch.arange(len(top), device=query.device)[:, None, None] * keys.key.shape[1]
        self.sources = (keys.sources.gather(1, top.flatten(1)).view_as(top) + first).flatten()
        by_head = query.reshape(heads * g, 1, n, D)
        key, value = (
            rows.flatten(0, 1).index_select(0, self.sources).view(heads * g, top.shape[2], rows.shape[2])
            for rows in (keys.key, keys.value)
        )
        exact_factor, self.factor = None, None
        if factor is not None:
            of_heads = factor.flatten(0, 1)[:, None]
            exact_factor = of_heads[..., : top.shape[2]]
            self.factor = of_heads[..., settings.topk : settings.topk + keys.G]
        self.exact = LocalPart(by_head, key, value, False, exact_factor)
        if settings.clusters == 1:
            self.blocks = ClusterBlocks.whole(heads * g, n, query.device)
        else:
            tables = cluster_rows(previous.readers(query).flatten(0, 1), settings.clusters)
            self.blocks = ClusterBlocks.of(tables, cluster_sizes(tables, heads, g * settings.clusters))

    def _packed_query(self) -> torch.Tensor:
        return self.blocks.pack_with_ones(self.query.reshape(self.shape[0], -1, self.shape[3]))

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks.pack(rows.reshape(self.shape[0], -1, rows.shape[3]))

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return self.blocks.unpack(packed, self.shape[0]).view(*self.shape[:3], -1)

    def attend(self) -> PartialOutput:
        """Outputs `(P · S, g, n, Dv)` and log-sum-exp `(P · S, g, n, 1)`."""
        if self.previous.counts.shape[2] == 1:
            return self._by_head(self._together().attend())
        table, factor = self.summaries.table, None if self.factor is None else self._pack(self.factor)[:, None]
        key, value = self.blocks.of_cluster(table.keys), self.blocks.of_cluster(table.values)
        output, log_sum = LocalPart(self._packed_query()[:, None], key, value, False, factor).attend()
        partial = self._unpack(output[:, 0]), self._unpack(log_sum[:, 0])
        if self.exact.key.shape[1]:
            merge_(partial, self._by_head(self.exact.attend()))
        return partial

    def _together(self) -> LocalPart:
        """Exact keys and the summaries at the only centroid, as the keys of one step."""
        exact, table, D = self.exact, self.summaries.table, self.shape[3]
        key, value = torch.cat([exact.key, table.keys[..., :D]], dim=1), torch.cat([exact.value, table.values], dim=1)
        bias = F.pad(table.keys[..., D], (exact.key.shape[1], 0))[:, None, None]
        factor = exact.factor
        if factor is not None and self.factor is not None:
            factor = torch.cat([factor, self.factor], dim=3)
        return LocalPart(exact.query, key, value, False, factor, bias)

    def _by_head(self, partial: PartialOutput) -> PartialOutput:
        return partial[0].view(*self.shape[:3], -1), partial[1].view(*self.shape[:3], 1)

    def backward(
        self, grad: torch.Tensor, whole: PartialOutput, of_key: torch.Tensor, of_value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the queries and of the previous ones; adds to those of keys and values `(P, N, ·)`.

        `whole` is the softmax that this is a part of.
        """
        heads, g, n, D = self.shape
        delta = torch.linalg.vecdot(grad, whole[0])[..., None]
        grad_packed, of_table = attend_backward(
            self.summaries.table, self.blocks, self._packed_query(),
            None if self.factor is None else self._pack(self.factor), self._pack(grad),
            (self._pack(whole[1]), self._pack(delta)),
        )  # fmt: skip
        of_previous = self.previous.gradient(self.summaries.backward(of_table))
        grad_query = self._unpack(grad_packed[..., :D].contiguous())
        if self.exact.key.shape[1]:
            by_head = (part.reshape(heads * g, 1, n, -1) for part in (grad, *whole))
            gradients = self.exact.backward(*by_head)
            grad_query = grad_query + gradients[0].view_as(grad_query)
            for target, more in ((of_key, gradients[1]), (of_value, gradients[2])):
                target.view(-1, target.shape[2]).index_add_(0, self.sources, more.flatten(0, 1))
        return grad_query, of_previous
