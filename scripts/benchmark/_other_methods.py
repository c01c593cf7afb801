"""Other approximations of bidirectional attention, as their papers define them, for one comparison on a CPU.

Each takes query, key and value `(B, H, N, D)`, clusters, hashes or picks what it needs, and returns `(B, H, N, Dv)`.
All run as the package's own methods do: some heads at a time on every thread (`by_heads`), in batched products.
Forward only, without masks.

Sizes: `P` heads of a chunk, `N` queries and keys, `D` and `Dv` numbers of a key and a value.
"""

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F

from hf_effattn.ops import cluster_queries
from hf_effattn.ops.shared.cluster_blocks import ClusterBlocks, stable_order
from hf_effattn.ops.shared.cluster_table import ClusterTable, Dipole, attend
from hf_effattn.ops.shared.head_threads import for_every_chunk
from hf_effattn.ops.shared.row_chunks import RowChunk
from hf_effattn.ops.shared.tables import chunks_of, cluster_rows, cluster_sizes, cluster_sums, empty_output
from hf_effattn.ops.shared.topk import largest

# Logarithm of the mass of what holds no key: no weight, and finite, as empty places of a block multiply it by 0.
NO_MASS = -1e30
# Of a tilted weight beside its query cluster's largest: smaller ones are denormal numbers, which are slow.
LEAST_LOG_WEIGHT = -60.0
# Numbers of the scores that are computed at once: what the second product reads is still in the cache.
SCORES_AT_ONCE = 2**19


def by_heads(
    attend_chunk: Callable[[RowChunk], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers_per_head: int,
) -> torch.Tensor:
    """The outputs `(P, N, Dv)` of every chunk of heads, `(B, H, N, Dv)`; `numbers_per_head`: of the largest buffer."""
    output = empty_output(query, value)

    def run(chunk: RowChunk) -> None:
        chunk.store_queries(output, attend_chunk(chunk))

    for_every_chunk(run, chunks_of(query, key, None, None, numbers_per_head), query.device)
    return output


def softmax_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`softmax(Q K^T + bias) V` of problems `(X, N, D)`, `(X, R, D)`, `(X, R, Dv)`, `(X, 1, R)`.

    By SDPA, whose kernel wants `D` = `Dv`, otherwise in pieces.
    """
    if query.shape[2] == value.shape[2]:
        mask = None if bias is None else bias[None].expand(-1, -1, query.shape[1], -1)
        return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=1.0)[0]
    output = query.new_empty(*query.shape[:2], value.shape[2])
    step = max(1, SCORES_AT_ONCE // key.shape[1])
    for p, start in product(range(len(key)), range(0, query.shape[1], step)):
        part = slice(start, start + step)
        scores = query[p, part] @ key[p].T
        if bias is not None:
            scores += bias[p]
        output[p, part] = torch.softmax(scores, dim=1, out=scores) @ value[p]
    return output


class _QueryClusters:
    """The scaled queries of a chunk in blocks of their clusters, and the centroids `Q̄` `(P, C, D)`."""

    def __init__(self, queries: torch.Tensor, labels: torch.Tensor, clusters: int) -> None:
        self.P, self.C = len(queries), clusters
        index = cluster_rows(labels, clusters)
        sizes = cluster_sizes(index, self.P, clusters)
        self.blocks = ClusterBlocks.of(index, sizes)
        # Behind the query a 1, for the biases of the table.
        ones = queries.new_ones(1, 1, 1).expand(*queries.shape[:2], 1)
        self.packed = self.blocks.pack(queries, ones)
        sums = self.blocks.sum(self.packed[..., :-1].sum(dim=1), self.P * clusters)
        self.centroids = sums.view(self.P, clusters, -1) / sizes.clamp(min=1)[..., None]

    def attend(self, table: ClusterTable) -> torch.Tensor:
        """Every query to the table of its cluster: `(P, N, Dv)`."""
        return self.blocks.unpack(attend(table, self.blocks, self.packed, None), self.P)


def order_zero(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, clusters: int, topk: int, key_clusters: int
) -> torch.Tensor:
    """Bi-clustered attention to order zero: the centroid's top keys, and the plain means of clusters of keys.

    One softmax over `[Q_i·K_t, t in T_j | Q_i·K̄_c + log n_jc]`, `T_j` the `topk` keys that score most at the centroid
    of the query's cluster `j`, `n_jc` the keys of cluster `c` outside `T_j`. Without exact keys it is the centroids of
    Multipole Attention (arXiv 2506.13059); exact with `topk` = `N` or `key_clusters` = `N`.
    """
    N, D = key.shape[2:]
    topk, labels = min(topk, N), cluster_queries(query, clusters, key=key)
    key_labels = cluster_queries(key, key_clusters)

    def attend_chunk(chunk: RowChunk) -> torch.Tensor:
        keys, values, own_labels = chunk.keys(key), chunk.keys(value), chunk.keys(key_labels)
        queries = _QueryClusters(chunk.queries(query) * D**-0.5, chunk.queries(labels[..., None])[..., 0], clusters)
        P, C, G = queries.P, clusters, key_clusters
        top = largest(queries.centroids @ keys.transpose(1, 2), topk, in_order=False)  # (P, C, T)
        key_index = cluster_rows(own_labels, G)
        sizes = cluster_sizes(key_index, P, G)
        rows = torch.cat([keys, values], dim=2)
        means = cluster_sums(rows, key_index, P, G) / sizes.clamp(min=1)[..., None]
        chosen = own_labels[:, None].expand(-1, C, -1).gather(2, top)
        in_top = torch.zeros(P, C, G).scatter_add_(2, chosen, torch.ones(1).expand(P, C, topk))
        log_rest = (sizes[:, None] - in_top).log_().clamp_(min=NO_MASS)
        heads = torch.arange(P)[:, None, None] * N
        table = rows.new_empty(P, C, topk + G, D + 1 + value.shape[3])  # key, bias, value
        exact = rows.flatten(0, 1).index_select(0, (top + heads).flatten()).view(P, C, topk, -1)
        for part, sources in ((slice(topk), exact), (slice(topk, None), means[:, None])):
            table[:, :, part, :D], table[:, :, part, D + 1 :] = sources[..., :D], sources[..., D:]
        table[:, :, :topk, D], table[:, :, topk:, D] = 0, log_rest
        table = table.flatten(0, 1)
        return queries.attend(ClusterTable(table[..., : D + 1], table[..., D + 1 :]))

    columns = topk + key_clusters
    return by_heads(attend_chunk, query, key, value, max(clusters * N, 2 * clusters * columns * D, N * columns))


def tilted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    clusters: int,
    key_clusters: int,
    dipole: bool = False,
) -> torch.Tensor:
    """Tilted summaries of clusters of keys alone, as MuSe has them (arXiv 2509.10406): no exact keys.

    With `w_jt = exp(Q̄_j·K_t)` at the centroid of the query's cluster `j`: `S_jc = Σ_{t∈c} w`, `K̃_jc = Σ w K / S`,
    `Ṽ_jc = Σ w V / S`, and one softmax over `log S_jc + (Q_i - Q̄_j)·K̃_jc` weighs the `Ṽ_jc`. `dipole` adds
    `(Q_i - Q̄_j)^T Σ_c p̄_jc Cov_c(K, V)`, one matrix for each cluster of queries: the covariances are those of the
    clusters of keys without tilt, which costs the least. Exact with `clusters` = `N` or `key_clusters` = `N`.
    """
    N, D = key.shape[2:]
    Dv = value.shape[3]
    labels, key_labels = cluster_queries(query, clusters, key=key), cluster_queries(key, key_clusters)

    def attend_chunk(chunk: RowChunk) -> torch.Tensor:
        keys, values = chunk.keys(key), chunk.keys(value)
        # Without their mean, which no softmax sees, some score is at least 0, so empty places shift nothing.
        keys = keys - keys.mean(dim=1, keepdim=True)
        queries = _QueryClusters(chunk.queries(query) * D**-0.5, chunk.queries(labels[..., None])[..., 0], clusters)
        P, C, G, centroids = queries.P, clusters, key_clusters, queries.centroids
        key_index = cluster_rows(chunk.keys(key_labels), G)
        blocks = ClusterBlocks.of(key_index, cluster_sizes(key_index, P, G), aligned=True)
        packed = blocks.pack(keys, values, keys.new_ones(1, 1, 1).expand(P, N, 1))  # (P · nb, L, D + Dv + 1)
        rows = packed.view(P, -1, blocks.length, D + Dv + 1)
        weights = torch.bmm(centroids, rows[..., :D].flatten(1, 2).transpose(1, 2))  # (P, C, nb · L)
        weights.sub_(weights.amax(dim=2, keepdim=True)).clamp_(min=LEAST_LOG_WEIGHT).exp_()
        parts = rows.new_empty(P, rows.shape[1], C, D + Dv + 1)
        for p in range(P):
            torch.bmm(weights[p].unflatten(1, (-1, blocks.length)).transpose(0, 1), rows[p], out=parts[p])
        sums = blocks.sum(parts.flatten(0, 1), P * G).view(P, G, C, -1).transpose(1, 2)
        mass = sums[..., -1:]
        means = sums[..., :-1] / mass.clamp(min=torch.finfo(mass.dtype).tiny)
        log_mass = mass.log().clamp_(min=NO_MASS)
        bias = log_mass - (means[..., :D] @ centroids[..., None])
        table = torch.cat([means[..., :D], bias], dim=3).flatten(0, 1)
        summaries = ClusterTable(table, means[..., D:].flatten(0, 1))
        if dipole:
            products = torch.bmm(packed.transpose(1, 2)[:, :D], packed[..., D:])  # of keys and [values, 1]
            products = blocks.sum(products, P * G)
            plain = blocks.sum(packed.sum(dim=1), P * G)
            sizes = plain[:, -1, None, None].clamp(min=1)
            covariances = products[..., :-1] / sizes - plain[:, :D, None] * plain[:, None, D:-1] / sizes**2
            share = log_mass[..., 0].softmax(dim=2)  # p̄_jc
            matrices = share @ covariances.view(P, G, -1)
            summaries.dipole = Dipole(centroids.flatten(0, 1), matrices.view(P * C, D, Dv), 0)
        return queries.attend(summaries)

    largest_buffer = max(clusters * N, 2 * clusters * key_clusters * (D + Dv), N * key_clusters)
    return by_heads(attend_chunk, query, key, value, largest_buffer)


def wildcat(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    coreset: int,
    bins: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
) -> torch.Tensor:
    """WildCat (arXiv 2602.10056): attention to a weighted coreset of keys, chosen by randomly pivoted Cholesky.

    With the kernel `h(x, y) = exp(x·y / (√D τ²))` of the keys without their mean, `τ² = temperature`: pivots `S` are
    drawn by the residual's diagonal, the weights are Nyström's, `W = h(K_S, K_S)^-1 h(K_S, K)`, and the output is
    `exp(Q K_S^T / √D) W V` over `exp(Q K_S^T / √D) W 1`, clipped to the range of the values. Pivots are drawn in
    `bins` neighbouring parts of the keys on their own, `coreset / bins` in each. Pivots have to follow each other, so
    that loop is over the coreset's size. The paper has one `τ` for given largest norms; here it is a setting. Exact
    with `coreset` = `N`.
    """
    N, D = key.shape[2:]
    size = coreset // bins
    if N % bins:
        raise ValueError(f"{N} keys cannot be divided into {bins} bins")

    def attend_chunk(chunk: RowChunk) -> torch.Tensor:
        keys, values = chunk.keys(key), chunk.keys(value)
        P = len(keys)
        keys = keys - keys.mean(dim=1, keepdim=True)
        parts, part_values = keys.view(P * bins, -1, D), values.view(P * bins, N // bins, -1)
        if size >= N // bins:
            core, weighted = keys, torch.cat([values, values.new_ones(P, N, 1)], dim=2)
        else:
            generator = torch.Generator().manual_seed(seed)
            core, weighted = weighted_coreset(parts, part_values, size, D**-0.5 / temperature, generator)
            core, weighted = (rows.reshape(P, size * bins, -1) for rows in (core, weighted))
        # The weights may be negative, so they are no bias of the scores.
        sums = softmax_attention(chunk.queries(query) * D**-0.5, core, weighted)
        output = sums[..., :-1] / sums[..., -1:]
        return output.clamp_(values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)).nan_to_num_()

    return by_heads(attend_chunk, query, key, value, size * N)


def weighted_coreset(
    keys: torch.Tensor, values: torch.Tensor, size: int, scale: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coreset keys `(P, size, D)` and `W [V, 1]` `(P, size, Dv + 1)` of keys `(P, n, D)`.

    In the Gaussian kernel `g(x, y) = exp(-scale |x - y|² / 2)`, which is the exponential one with other weights and
    has no large numbers. `F^T F` is its Cholesky factorisation, `F` `(P, size, n)`.
    """
    P, n, _ = keys.shape
    points = keys * scale**0.5
    half_norms = torch.linalg.vecdot(points, points) / 2
    tilt = (2 * (half_norms - half_norms.amax(dim=1, keepdim=True))).exp_()  # of the exponential kernel's diagonal
    least = 10 * torch.finfo(keys.dtype).eps
    draws = torch.rand(size, P, 1, generator=generator, dtype=keys.dtype)
    factor = keys.new_empty(P, size, n)
    residual = keys.new_ones(P, n)
    pivots = torch.empty(P, size, dtype=torch.int64)
    diagonal = keys.new_empty(P, size)
    heads = torch.arange(P)
    for i in range(size):
        summed = (residual * tilt).cumsum(dim=1)
        pivot = torch.searchsorted(summed, draws[i] * summed[:, -1:]).clamp_(max=n - 1)[:, 0]
        row = torch.bmm(points[heads, pivot, None], points.transpose(1, 2))
        row.sub_(half_norms[:, None]).sub_(half_norms[heads, pivot, None, None]).exp_()
        if i:
            row.baddbmm_(factor[heads, :i, pivot][:, None], factor[:, :i], alpha=-1)
        pivots[:, i] = pivot
        diagonal[:, i] = residual[heads, pivot].clamp(min=least).sqrt()
        factor[:, i] = row[:, 0] / diagonal[:, i, None]
        residual.addcmul_(factor[:, i], factor[:, i], value=-1).clamp_(min=0)
        residual[heads, pivot] = 0
    # g(S, S)^-1 g(S, K) = U^-1 F, U the columns of F at the pivots.
    upper = factor.gather(2, pivots[:, None].expand(-1, size, -1))
    upper.diagonal(dim1=1, dim2=2).copy_(diagonal)
    shift = half_norms.amax(dim=1, keepdim=True)
    scaled = torch.cat([values, values.new_ones(P, n, 1)], dim=2) * (half_norms - shift).exp_()[..., None]
    solved = torch.linalg.solve_triangular(upper, torch.bmm(factor, scaled), upper=True)
    solved *= (shift - half_norms.gather(1, pivots)).exp_()[..., None]
    return keys.gather(1, pivots[..., None].expand(-1, -1, keys.shape[2])), solved


def hyper_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block: int,
    samples: int,
    bits: int = 7,
    seed: int = 0,
) -> torch.Tensor:
    """HyperAttention (arXiv 2310.05869) without a causal mask: hashed blocks and sampled keys.

    Queries and keys are sorted by the signs of `bits` random projections, in the order of a Gray code, where
    neighbours differ in one sign (sortLSH). A block of sorted queries attends to the block of keys at its place, and
    to `samples` keys drawn evenly, those outside of its block, which stand for all others: one softmax with
    `log((N - block) / samples outside)` added. `bits` and even draws are those of the authors' code; the paper draws
    by the norms of the values. Exact with `block` = `N`.
    """
    N, D = key.shape[2:]
    if N % block:
        raise ValueError(f"{N} tokens cannot be divided into blocks of {block}")
    blocks = N // block
    generator = torch.Generator().manual_seed(seed)
    projections = torch.randn(D, bits, generator=generator, dtype=key.dtype)
    drawn = torch.randperm(N, generator=generator)[:samples].sort().values

    def attend_chunk(chunk: RowChunk) -> torch.Tensor:
        queries, keys, values = chunk.queries(query) * D**-0.5, chunk.keys(key), chunk.keys(value)
        P = len(keys)
        query_order, key_order = (gray_order(rows, projections) for rows in (queries, keys))
        rows = torch.cat([keys, values], dim=2).flatten(0, 1).index_select(0, key_order)  # sorted
        queries = queries.flatten(0, 1).index_select(0, query_order).view(P * blocks, block, D)
        block_rows = rows.view(P, blocks, block, -1)
        # Evenly drawn places of the sorted keys are evenly drawn keys.
        sampled = rows.view(P, N, -1).index_select(1, drawn)[:, None].expand(-1, blocks, -1, -1)
        table = torch.cat([block_rows, sampled], dim=2).flatten(0, 1)
        inside = drawn // block == torch.arange(blocks)[:, None]  # (blocks, samples)
        outside = (len(drawn) - inside.sum(dim=1, keepdim=True)).clamp(min=1)
        bias = ((N - block) / outside).log().expand(-1, len(drawn)).masked_fill(inside, NO_MASS)
        bias = torch.cat([torch.zeros(blocks, block), bias], dim=1).to(keys.dtype).repeat(P, 1)
        output = softmax_attention(queries, table[..., :D], table[..., D:], bias[:, None]).flatten(0, 1)
        return torch.empty_like(output).index_copy_(0, query_order, output).view(P, N, -1)

    return by_heads(attend_chunk, query, key, value, blocks * (block + samples) * 2 * D)


def gray_order(rows: torch.Tensor, projections: torch.Tensor) -> torch.Tensor:
    """Rows `(P, N, D)` sorted by the place of their signs in the Gray code: flat row numbers `(P · N,)`."""
    bits = projections.shape[1]
    signs = (rows @ projections > 0).long()
    # The place of a Gray code has as its bits the parities of the code's leading bits.
    places = (signs.cumsum(dim=2) % 2) @ (2 ** torch.arange(bits - 1, -1, -1))
    return stable_order(cluster_rows(places, 2**bits), len(rows) * 2**bits)


def nystromformer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, landmarks: int, iterations: int = 6
) -> torch.Tensor:
    """Nyströmformer (arXiv 2102.03902), without its trained convolution of the values.

    `softmax(Q K̄^T) · softmax(Q̄ K̄^T)⁺ · softmax(Q̄ K^T) V`, `Q̄` and `K̄` the means of `landmarks` segments of
    neighbouring tokens; the pseudo-inverse by `iterations` steps of the paper's third-order iteration. Exact with
    `landmarks` = `N`, once the iteration has converged.
    """
    N, D = key.shape[2:]

    def attend_chunk(chunk: RowChunk) -> torch.Tensor:
        queries, keys, values = chunk.queries(query) * D**-0.5, chunk.keys(key), chunk.keys(value)
        P = len(keys)
        index = cluster_rows((torch.arange(N) * landmarks // N).expand(P, -1), landmarks)
        sizes = cluster_sizes(index, P, landmarks)[..., None]
        mean_queries, mean_keys = (
            cluster_sums(rows, index, P, landmarks).div_(sizes).to(rows.dtype) for rows in (queries, keys)
        )
        between = (mean_queries @ mean_keys.transpose(1, 2)).softmax(dim=2)
        seen = softmax_attention(mean_queries, keys, values)  # softmax(Q̄ K^T) V: (P, landmarks, Dv)
        return softmax_attention(queries, mean_keys, pseudo_inverse(between, iterations) @ seen)

    return by_heads(attend_chunk, query, key, value, N * landmarks)


def pseudo_inverse(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Of matrices `(P, m, m)`: `Z ← Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4` (Nyströmformer)."""
    norms = matrix.abs().sum(dim=1).amax(dim=1) * matrix.abs().sum(dim=2).amax(dim=1)
    inverse = matrix.transpose(1, 2) / norms[:, None, None]
    identity = torch.eye(matrix.shape[1], dtype=matrix.dtype)
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


def top_keys(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, topk: int) -> torch.Tensor:
    """An oracle: every query attends to the `topk` keys that score most with it, found among all its scores.

    What any choice of `topk` keys with nothing for the rest is measured against; it costs more than exact attention.
    Queries may be fewer than keys.
    """

    def attend_chunk(chunk: RowChunk) -> torch.Tensor:
        queries, keys, values = chunk.queries(query) * key.shape[3] ** -0.5, chunk.keys(key), chunk.keys(value)
        outputs = []
        for rows in queries.split(max(1, SCORES_AT_ONCE // (len(keys) * keys.shape[1])), dim=1):
            scores = rows @ keys.transpose(1, 2)
            least = scores.topk(min(topk, keys.shape[1]), dim=2, sorted=True).values[..., -1:]
            outputs.append(scores.masked_fill_(scores < least, -torch.inf).softmax(dim=2) @ values)
        return torch.cat(outputs, dim=1)

    return by_heads(attend_chunk, query, key, value, key.shape[2])
