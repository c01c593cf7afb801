"""What query clusters see of the keys, for a CPU: a few exact keys, and the summary of every cluster of the others.

A summary is tilted at the query cluster's centroid: it is exact for a query at the centroid. Its score is the tangent
of the log-mass there, so it follows the query.

Sizes: `P` key/value heads of a chunk, `M` keys, `T` exact keys, `C` query clusters of all the query heads that share a
key/value head, `G` key clusters, `nb` blocks of `L` keys per head.
"""

import torch

from .arguments import check_label_range
from .cluster_blocks import ClusterBlocks
from .cluster_table import ClusterTable
from .precision import LEAST_LOG_WEIGHT, SMALLEST, accumulation_dtype
from .tables import cluster_rows, cluster_sizes
from .topk import largest

# Log-mass of a cluster without keys: no weight, but finite, as empty places of a block multiply it by 0.
NO_MASS = -1e30
# The largest weight of a cluster is 1. Less mass than this remains only where all of its keys are exact.
LEAST_MASS = 1e-20


class KeyClusters:
    """The keys and values of a chunk, sorted by key cluster: their means, and what remains of every row.

    In bfloat16 the rows stay so, less means that are rounded alike: what remains is small, and so is what it loses.

    Attributes:
        rows: `(P, nb, L, D + Dv + 1)`: key and value less the means of their cluster, and 1; 0 in empty places.
        clusters: `(P, nb)` cluster of a block, `0 .. G - 1`.
        sizes: `(P · G, 1)`, at least 1.
        means: `(P · G, D + Dv)`, in float32 or float64.
        empty: `(P, 1, nb · L)`, where no key is.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, labels: torch.Tensor, clusters: int) -> None:
        self.P, self.M, self.D = key.shape
        self.G, self.Dv = clusters, value.shape[2]
        check_label_range(labels, clusters, of="key")
        index = cluster_rows(labels, clusters)
        sizes = cluster_sizes(index, self.P, clusters)
        self.blocks = ClusterBlocks.of(index, sizes, aligned=True)
        self.clusters = self.blocks.clusters.view(self.P, -1) % clusters
        self.sizes = sizes.view(-1, 1).clamp(min=1)
        packed = self.blocks.pack_with_ones(key, value)
        dtype = accumulation_dtype(key.dtype)
        sums = self.blocks.sum(packed.sum(dim=1, dtype=dtype), self.P * clusters)
        means = (sums[:, :-1] / self.sizes).to(key.dtype)
        self.means = means.to(dtype)
        full = packed[..., -1:]
        packed[..., :-1].addcmul_(full, self.blocks.of_cluster(means)[:, None], value=-1)
        self.empty = (full == 0).view(self.P, 1, -1)
        self.rows = packed.view(self.P, -1, self.blocks.length, self.D + self.Dv + 1)

    def per_block(self, table: torch.Tensor) -> torch.Tensor:
        """Numbers of every cluster `(P, C, G)` for its blocks: `(P, C, nb)`."""
        return table.gather(2, self.clusters[:, None].expand(-1, table.shape[1], -1))

    def keys(self) -> torch.Tensor:
        """`K_t - K̄_g(t)` `(P, nb · L, D)`."""
        return self.rows[..., : self.D].flatten(1, 2)

    def mean_keys(self) -> torch.Tensor:
        """`K̄_c` `(P, G, D)`."""
        return self.means[:, : self.D].view(self.P, self.G, -1)

    def by_block(self, scores: torch.Tensor, head: int) -> torch.Tensor:
        """A head's scores, of `(P, C, nb · L)`: `(nb, C, L)`, in the dtype of the rows."""
        return scores[head].to(self.rows.dtype).unflatten(1, (-1, self.blocks.length)).transpose(0, 1)


class Summaries:
    """The exact keys and the summaries of query clusters, as a table to attend to, and its way back.

    Attributes:
        centroids: `Q̄` `(P, C, D)`, of scaled queries.
        scores: `(P, C, nb · L)`, the tilted weights `w_jt` of the largest of a cluster.
        log_mass: `log S_jc` `(P, C, G)`.
        table: the exact keys without bias, then the summaries.
    """

    def __init__(
        self,
        keys: KeyClusters,
        centroids: torch.Tensor,
        topk: int,
        covariance: torch.Tensor,
        *,
        largest_correction: float,
        in_order: bool,
        top: torch.Tensor | None,
    ) -> None:
        """`covariance` `Σ_η` `(P, D, D)`: exact keys by weight times squared distance.

        `largest_correction`: of the variance corrections, half a squared distance each, of the logarithms of tilted
        weights; `top`: places of the exact keys `(P, C, T)`, where they have been found before.
        """
        self.keys, self.centroids, self.T = keys, centroids, min(topk, keys.M)
        self.P, self.C, self.G = keys.P, centroids.shape[1], keys.G
        self._choose_keys(covariance, largest_correction, top, in_order)
        self._summarise()
        self._make_table()

    def _choose_keys(
        self, covariance: torch.Tensor, largest_correction: float, top: torch.Tensor | None, in_order: bool
    ) -> None:
        """Exact keys `T_j`; scores `Q̄_j·(K_t - K̄_g(t))`; variance corrections `b_t`, `-inf` where no key is."""
        keys, spread = self.keys, self.keys.keys()
        distances = (spread @ covariance.to(spread.dtype)).to(covariance.dtype)
        distances = torch.linalg.vecdot(distances, spread.to(covariance.dtype)).clamp_(min=SMALLEST)
        self.variance_correction = (distances / 2).clamp_(max=largest_correction)
        preference = distances.log_()
        for of_keys in (preference, self.variance_correction):
            of_keys.masked_fill_(keys.empty[:, 0], -torch.inf)
        scores = torch.bmm(self.centroids.to(spread.dtype), spread.transpose(1, 2))  # (P, C, nb · L)
        self.scores = scores.to(self.centroids.dtype)
        self.mean_scores = self.centroids @ keys.mean_keys().transpose(1, 2)  # Q̄_j·K̄_c: (P, C, G)
        if top is None:
            biased = self.scores.unflatten(2, (-1, keys.blocks.length)) + keys.per_block(self.mean_scores)[..., None]
            biased = biased.flatten(2).add_(preference[:, None])
            # Without exact keys no place is looked for.
            top = largest(biased, self.T, in_order=in_order) if self.T else biased[..., :0].long()
        self.top = top[..., : self.T]  # (P, C, T)
        rows = torch.arange(self.P, device=self.top.device)[:, None, None] * self.scores.shape[2]
        self.top_places = (self.top + rows).flatten()

    def _summarise(self) -> None:
        """Tilted weights `w_jt / S_jc` and sums over `c∖T_j`: `log S_jc`, `K̃_jc`, `Ṽ_jc`."""
        keys, scores = self.keys, self.scores
        scores.add_(self.variance_correction[:, None]).scatter_(2, self.top, -torch.inf)
        by_block = scores.unflatten(2, (-1, keys.blocks.length))
        lowest = torch.finfo(scores.dtype).min
        shift = scores.new_full((self.P, self.C, self.G), lowest)
        index = keys.clusters[:, None].expand(-1, self.C, -1)
        shift.scatter_reduce_(2, index, by_block.amax(dim=3), "amax")
        by_block.sub_(keys.per_block(shift)[..., None]).clamp_(min=LEAST_LOG_WEIGHT).exp_()
        self.weights = scores  # w_jt over the largest of its cluster
        width = keys.rows.shape[3]
        parts = keys.rows.new_empty(self.P, keys.clusters.shape[1], self.C, width)
        for p in range(self.P):
            torch.bmm(keys.by_block(self.weights, p), keys.rows[p], out=parts[p])
        sums = keys.blocks.sum(parts.flatten(0, 1).to(scores.dtype), self.P * self.G)
        sums = sums.view(self.P, self.G, self.C, width)
        sums = sums.transpose(1, 2)  # (P, C, G, D + Dv + 1)
        mass = sums[..., -1]
        nobody = mass < LEAST_MASS
        self.inverse_mass = torch.where(nobody, 0.0, 1 / mass)
        self.tilted = sums[..., :-1] * self.inverse_mass[..., None]  # without the means
        log_mass = mass.log() + shift + self.mean_scores
        self.log_mass = log_mass.masked_fill_(nobody, NO_MASS)

    def _make_table(self) -> None:
        """Rows: exact keys without bias, then the tangents `log S_jc + η·K̃_jc = b_jc + Q_i·K̃_jc`."""
        keys, D, T = self.keys, self.keys.D, self.T
        tilted = self.tilted + keys.means.view(self.P, 1, self.G, -1)
        tilted_keys, tilted_values = tilted.split([D, keys.Dv], dim=3)
        exact = keys.rows.flatten(0, 2).index_select(0, self.top_places).to(tilted.dtype)
        clusters_of_top = keys.blocks.clusters.index_select(0, self.top_places // keys.blocks.length)
        exact[:, :-1] += keys.means.index_select(0, clusters_of_top)
        exact_rows = exact.view(self.P * self.C, T, exact.shape[1])
        table_keys = exact.new_zeros(self.P * self.C, T + self.G, D + 1)
        table_keys[:, :T, :D] = exact_rows[..., :D]
        bias = self.log_mass - torch.linalg.vecdot(self.centroids[:, :, None], tilted_keys)
        table_keys[:, T:, :D] = tilted_keys.flatten(0, 1)
        table_keys[:, T:, D] = bias.flatten(0, 1)
        values = torch.cat([exact_rows[..., D:-1], tilted_values.flatten(0, 1)], dim=1)
        self.table = ClusterTable(table_keys.to(keys.rows.dtype), values.to(keys.rows.dtype))

    def backward(self, grad: ClusterTable, grad_log_mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the centroids `(P · C, D)` and of the rows of every block `(P · nb, L, D + Dv)`.

        `grad` are those of the table, `grad_log_mass` `(P, C, G)` what else uses `log S_jc`.
        """
        keys, D, T = self.keys, self.keys.D, self.T
        dtype = self.centroids.dtype
        grad_bias = grad.keys[:, T:, D]
        grad_exact = torch.cat([grad.keys[:, :T, :D], grad.values[:, :T]], dim=2)
        grad_tilted = torch.cat([grad.keys[:, T:, :D], grad.values[:, T:]], dim=2)
        # b_jc = log S_jc - Q̄_j·K̃_jc
        grad_tilted[..., :D] -= grad_bias[..., None] * self.centroids.flatten(0, 1)[:, None]
        grad_centroids = -(grad_bias[:, None] @ self.table.keys[:, T:, :D].to(dtype))[:, 0]
        grad_log_mass = grad_log_mass + grad_bias.reshape(self.P, self.C, self.G)

        # Tilted sums: of the clusters' means, and of what remains of every key, weighed by w_jt / S_jc.
        grad_tilted = grad_tilted.view(self.P, self.C, self.G, -1)
        # K̃ - K̄ and Ṽ - V̄ are weighted means of the rows; those rows' own means are 0.
        constant = grad_log_mass - torch.linalg.vecdot(grad_tilted, self.tilted)
        grad_rows = torch.cat([grad_tilted, constant[..., None]], dim=3).to(keys.rows.dtype)
        inverse_mass = keys.per_block(self.inverse_mass)[..., None]
        all_weights = (self.weights.unflatten(2, (-1, keys.blocks.length)) * inverse_mass).flatten(2)
        grad_packed = torch.empty_like(keys.rows, dtype=dtype)[..., :-1]
        grad_scores = torch.empty_like(all_weights)
        for p in range(self.P):
            table = grad_rows[p].index_select(1, keys.clusters[p]).transpose(0, 1)  # (nb, C, D + Dv + 1)
            weights = keys.by_block(all_weights, p)
            block_scores = torch.bmm(table, keys.rows[p].transpose(1, 2)).mul_(weights)  # (nb, C, L)
            grad_scores[p] = block_scores.transpose(0, 1).flatten(1)
            grad_packed[p] = torch.bmm(weights.transpose(1, 2), table[..., :-1])
        grad_packed[..., :D] += (grad_scores.transpose(1, 2) @ self.centroids).view_as(grad_packed[..., :D])
        # Q̄_j·K_t is the score of the key less its cluster's mean, and of that mean.
        of_means = grad_log_mass @ keys.mean_keys()
        grad_centroids += (torch.bmm(grad_scores, keys.keys().to(dtype)) + of_means).flatten(0, 1)
        flat = grad_packed.reshape(-1, D + keys.Dv).index_add_(0, self.top_places, grad_exact.flatten(0, 1))
        return grad_centroids, flat.view(-1, keys.blocks.length, D + keys.Dv)
