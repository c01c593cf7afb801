"""Forward pass of bi-clustered attention on a GPU: the tables of the query clusters, then one tile kernel.

Sizes: `P = B · Hk` key heads, `R = H / Hk · C` query clusters of the query heads that share one, numbered through,
`G` key clusters, `T` exact keys. Scores are exponents of 2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...shared.triton.centroids import centroid_pass
from ...shared.triton.chips import block_width, chip_of
from ...shared.triton.cluster_table import dipole_part, is_exact
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import dot_rows, softmax_weights
from ...shared.triton.sort import SortedRows
from ...shared.triton.tiles import LOG2_E, LOWEST, load_operand, load_rows, load_tile, store_rows, tile_config
from ..reference import LARGEST_VARIANCE_CORRECTION, SMALLEST, Inputs
from .products import cluster_products

TILES = 4  # of keys: one program keeps the covariance for so many
SUM_PROGRAMS = 512  # that add up products of queries: few of them leave few sums, many are each done sooner
SMALLEST_SQUARE = tl.constexpr(SMALLEST)
# Of the largest variance correction, as an exponent of 2.
LIFT_LIMIT = tl.constexpr(LARGEST_VARIANCE_CORRECTION * LOG2_E)
LIFT_PER_SQUARE = tl.constexpr(LOG2_E / 2)


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs and its output."""

    # The next three: the queries sorted by cluster, see `SortedRows`
    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    # The next three: the keys sorted by cluster
    key_order: torch.Tensor
    key_starts: torch.Tensor
    key_tiles: torch.Tensor
    centroids: torch.Tensor  # `(B · H, C, D)` in the dtype of the query: the points at which it is expanded
    # The next two: `(P, G, ·)` float32
    mean_keys: torch.Tensor
    mean_values: torch.Tensor
    log_squares: torch.Tensor  # `log2 d_t²` `(P, M)`, of which the variance corrections `b_t` are made
    top: torch.Tensor  # `(B · H, C, T)` int32, the sets `T_j`
    taken: torch.Tensor  # `(P, M, R / 32)` int32, a bit for every query cluster that has the key in its `T_j`
    # The next two: `K̃` and `Ṽ`, `(P · R, G, ·)` in the dtype of the query
    table_keys: torch.Tensor
    table_values: torch.Tensor
    # The next two: `log S_jc` and `log S_jc - Q̄_j·K̃_jc` as exponents of 2, `(P · R, G)`; `-inf` for no key
    log_mass: torch.Tensor
    bias: torch.Tensor
    at_centroid: torch.Tensor  # `p̄_jc`, `(P · R, G)`, the softmax of `log S_j`
    covariances: torch.Tensor  # `Cov_c(K, V)`, `(P · G, D, Dv)` float32
    dipoles: torch.Tensor  # `M_j`, `(P · R, D, Dv)` in the dtype of the query
    lse: torch.Tensor  # base-2 log-sum-exp of each query's scores, `(B · H, N)`
    share: torch.Tensor  # `s_i`, each query's weight on key clusters, `(B · H, N)`


@kernel
def _bi_clustered_attention_fwd_covariance_kernel(
    products_ptr, starts_ptr, covariance_ptr, sizes_ptr,
    group, parts, D, clusters, scale_squared,
    BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of `scale² Σ_η` of the query heads that share keys, each over the largest of its numbers."""
    blocks = tl.cdiv(D, COLUMNS)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    o_e, o_d = tl.arange(0, BLOCK_D), tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    queries = 0  # that are in a cluster
    for i_g in range(0, group):
        queries += tl.load(starts_ptr + (i_p * group + i_g) * (clusters + 2) + clusters)
    # [BLOCK_D, COLUMNS]
    m_ed = (o_e < D)[:, None] & (o_d < D)[None, :]
    b_sum = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    for part in range(0, parts):
        p_products = products_ptr + ((i_p * parts + part) * D + o_e[:, None]) * D + o_d[None, :]
        b_sum += tl.load(p_products, mask=m_ed, other=0.0)
    b_size = tl.maximum(tl.max(tl.abs(b_sum), 0), SMALLEST_SQUARE)
    # Of numbers up to 1, the products are in range in any dtype.
    tl.store(covariance_ptr + (i_p * D + o_e[:, None]) * D + o_d[None, :], b_sum / b_size[None, :], mask=m_ed)
    tl.store(sizes_ptr + i_p * D + o_d, b_size * (scale_squared / tl.maximum(queries, 1)), mask=o_d < D)


@kernel
def _bi_clustered_attention_fwd_distance_kernel(
    key_ptr, mean_key_ptr, covariance_ptr, sizes_ptr, exact_heads_ptr, order_ptr, starts_ptr, tiles_ptr,
    log_square_ptr, taken_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    key_heads, M, D, key_clusters, tiles, words, blocks,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`log2 d_t²` of some tiles of sorted keys, `d_t² = (K_t - K̄_c)^T Σ_η (K_t - K̄_c)`; `-inf` in no cluster.

    Also writes 0 to the keys' words of `taken`.
    """
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    key_ptr += i_p // key_heads * stride_key_b + i_p % key_heads * stride_key_h
    covariance_ptr += i_p * D * D
    exact = is_exact(exact_heads_ptr, i_p)
    sizes_ptr += i_p * D
    if PART == BLOCK_D:
        o_d = tl.arange(0, PART)
        b_covariance = load_covariance(covariance_ptr, o_d, o_d, D)
        b_size = tl.load(sizes_ptr + o_d, mask=o_d < D, other=0.0)
    first_tile = tl.program_id(0) % blocks * TILES
    for i_tile in range(first_tile, tl.minimum(tiles, first_tile + TILES)):
        cluster, _, m_row, b_row = load_tile(
            order_ptr, starts_ptr, tiles_ptr, i_p, i_tile, M, key_clusters, tiles, ROWS
        )  # fmt: skip
        nowhere = (cluster >= key_clusters) | exact
        p_key = key_ptr + b_row * stride_key_m
        p_mean = mean_key_ptr + (i_p * key_clusters + tl.where(nowhere, 0, cluster)) * D
        width = tl.where(nowhere, 0, D)
        b_square = tl.zeros([ROWS], tl.float32)
        for first in range(0, width, PART):
            o_d = first + tl.arange(0, PART)
            # [ROWS, PART]
            b_part = load_spread(p_key, m_row, stride_key_d, p_mean, o_d, D)
            if PART == BLOCK_D:
                b_turned = tl.dot(b_part.to(b_covariance.dtype), b_covariance, input_precision=PRECISION)
            else:
                b_size = tl.load(sizes_ptr + o_d, mask=o_d < D, other=0.0)
                b_turned = tl.zeros([ROWS, PART], tl.float32)
                for start in range(0, D, BLOCK_K):
                    o_e = start + tl.arange(0, BLOCK_K)
                    b_rows = load_covariance(covariance_ptr, o_e, o_d, D)
                    b_spread = load_spread(p_key, m_row, stride_key_d, p_mean, o_e, D).to(b_rows.dtype)
                    b_turned = tl.dot(b_spread, b_rows, b_turned, input_precision=PRECISION)
            b_square += tl.sum(b_turned * b_part * b_size[None, :], 1)
        for word in range(0, words):
            tl.store(taken_ptr + (i_p * M + b_row) * words + word, 0, mask=m_row)
        b_log_square = tl.log2(tl.maximum(b_square, SMALLEST_SQUARE))
        tl.store(log_square_ptr + i_p * M + b_row, tl.where(nowhere, float("-inf"), b_log_square), mask=m_row)


@triton.jit
def load_covariance(covariance_ptr, o_e, o_d, D):
    """Some columns of some rows of a covariance."""
    m_covariance = (o_e < D)[:, None] & (o_d < D)[None, :]
    return tl.load(covariance_ptr + o_e[:, None] * D + o_d[None, :], mask=m_covariance, other=0.0)


@triton.jit
def load_spread(p_row, m_row, stride_d, mean_ptr, o_d, D):
    """Some columns of rows less the mean of their cluster, in float32."""
    m_d = o_d < D
    b_rows = tl.load(p_row[:, None] + o_d[None, :] * stride_d, mask=m_row[:, None] & m_d[None, :], other=0.0)
    b_mean = tl.load(mean_ptr + o_d, mask=m_d, other=0.0)
    return tl.where(m_row[:, None], b_rows.to(tl.float32) - b_mean[None, :], 0.0)


@triton.jit
def load_taken(taken_ptr, b_row, m_row, first, words, ROWS: tl.constexpr):
    """Whether query clusters from `first` on have keys `b_row` as exact ones, or no key is there: `(ROWS, keys)`."""
    BITS: tl.constexpr = ROWS if ROWS < 32 else 32
    o_word = first // 32 + tl.arange(0, ROWS // BITS)
    p_words = taken_ptr + b_row[None, :] * words + o_word[:, None]
    # [ROWS / BITS, keys], [ROWS / BITS, BITS, keys]
    b_words = tl.load(p_words, mask=m_row[None, :] & (o_word < words)[:, None], other=-1)
    b_bits = b_words[:, None, :] & (1 << (first % 32 + tl.arange(0, BITS)))[None, :, None]
    return tl.reshape(b_bits, [ROWS, b_row.shape[0]]) != 0


@triton.jit
def load_lift(log_square_ptr, b_row, m_row):
    """`b_t = min(d_t² / 2, 1/2)` of keys, as an exponent of 2."""
    b_log_square = tl.load(log_square_ptr + b_row, mask=m_row, other=float("-inf"))
    return tl.minimum(tl.exp2(b_log_square) * LIFT_PER_SQUARE, LIFT_LIMIT)


@kernel
def _bi_clustered_attention_fwd_table_kernel(
    centroids_ptr, key_ptr, value_ptr, log_square_ptr, taken_ptr, exact_heads_ptr, order_ptr, starts_ptr,
    table_key_ptr, table_value_ptr, log_mass_ptr, bias_ptr,
    stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    stride_value_b, stride_value_h, stride_value_m, stride_value_d,
    key_heads, rows, M, D, Dv, key_clusters, words, blocks, scale_log2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`log S_jc`, `K̃_jc`, `Ṽ_jc` and `b_jc = log S_jc - Q̄_j·K̃_jc` of one key cluster, for `ROWS` query clusters."""
    i_block = tl.program_id(0) % blocks
    i_c = tl.program_id(0) // blocks % key_clusters
    i_p = (tl.program_id(0) // (blocks * key_clusters)).to(tl.int64)
    if is_exact(exact_heads_ptr, i_p):
        return
    starts_ptr += i_p * (key_clusters + 2) + i_c
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    key_ptr += i_p // key_heads * stride_key_b + i_p % key_heads * stride_key_h
    value_ptr += i_p // key_heads * stride_value_b + i_p % key_heads * stride_value_h
    o_r = i_block * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_row = i_p * rows + o_r
    # [ROWS, BLOCK_D]
    centroid = load_operand(centroids_ptr + o_row * D, m_r, 1, D, BLOCK_D)
    b_key_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_value_sum = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for place in range(first, last, COLUMNS):
        o_place = place + tl.arange(0, COLUMNS)
        m_key = o_place < last
        b_row = tl.load(order_ptr + i_p * M + o_place, mask=m_key, other=0).to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + b_row * stride_key_m, m_key, stride_key_d, D, BLOCK_D)
        b_value = load_rows(value_ptr + b_row * stride_value_m, m_key, stride_value_d, Dv, BLOCK_V)
        b_scores = dot_rows(centroid, key, D, BY_PARTS, PRECISION)
        m_taken = load_taken(taken_ptr + i_p * M * words, b_row, m_key, i_block * ROWS, words, ROWS)
        b_scores = b_scores * scale_log2 + load_lift(log_square_ptr + i_p * M, b_row, m_key)[None, :]
        b_scores = tl.where(m_taken, float("-inf"), b_scores)
        b_weights, b_kept, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
        b_weights = b_weights.to(b_value.dtype)
        b_key_sum = tl.dot(b_weights, key[0], b_key_sum * b_kept[:, None], input_precision=PRECISION)
        b_value_sum = tl.dot(b_weights, b_value, b_value_sum * b_kept[:, None], input_precision=PRECISION)
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    o_table = o_row * key_clusters + i_c
    b_tilted = (b_key_sum / b_divisor[:, None]).to(table_key_ptr.dtype.element_ty)
    store_rows(table_key_ptr + o_table * D, b_tilted, m_r, 1, D, BLOCK_D)
    store_rows(table_value_ptr + o_table * Dv, b_value_sum / b_divisor[:, None], m_r, 1, Dv, BLOCK_V)
    b_log_mass = tl.where(b_total > 0, b_highest + tl.log2(b_divisor), float("-inf"))
    # Of K̃ as it is stored: the tangent is exact at the centroid.
    b_at_centroid = tl.sum(centroid[0].to(tl.float32) * b_tilted.to(tl.float32), 1) * scale_log2
    tl.store(log_mass_ptr + o_table, b_log_mass, mask=m_r)
    tl.store(bias_ptr + o_table, b_log_mass - b_at_centroid, mask=m_r)


@kernel
def _bi_clustered_attention_fwd_dipole_kernel(
    log_mass_ptr, covariance_ptr, exact_heads_ptr, at_centroid_ptr, dipole_ptr,
    rows, columns, key_clusters, blocks, row_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_G: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`M_j = Σ_c p̄_jc Cov_c` of some query clusters, `COLUMNS` of its `D · Dv` numbers, `p̄_j = softmax(log S_j)`."""
    i_block = tl.program_id(0) % blocks
    i_p = (tl.program_id(0) // (blocks * row_blocks)).to(tl.int64)
    if is_exact(exact_heads_ptr, i_p):
        return
    o_r = tl.program_id(0) // blocks % row_blocks * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_row = i_p * rows + o_r
    o_n = i_block * COLUMNS + tl.arange(0, COLUMNS)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, key_clusters, BLOCK_G):
        b_mass = _load_log_mass(log_mass_ptr, o_row, m_r, first + tl.arange(0, BLOCK_G), key_clusters)
        _, _, b_highest, b_total = softmax_weights(b_mass, b_highest, b_total)
    b_lse = b_highest + tl.log2(tl.where(b_total > 0, b_total, 1.0))
    b_dipole = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, key_clusters, BLOCK_G):
        o_g = first + tl.arange(0, BLOCK_G)
        m_g = o_g < key_clusters
        # [ROWS, BLOCK_G], [BLOCK_G, COLUMNS]
        b_weights = tl.exp2(_load_log_mass(log_mass_ptr, o_row, m_r, o_g, key_clusters) - b_lse[:, None])
        p_covariance = covariance_ptr + (i_p * key_clusters + o_g)[:, None] * columns + o_n[None, :]
        b_covariance = tl.load(p_covariance, mask=m_g[:, None] & (o_n < columns)[None, :], other=0.0)
        b_dipole = tl.dot(b_weights, b_covariance, b_dipole, input_precision=PRECISION)
        p_weights = at_centroid_ptr + o_row[:, None] * key_clusters + o_g[None, :]
        tl.store(p_weights, b_weights, mask=m_r[:, None] & m_g[None, :] & (i_block == 0))
    if dipole_ptr.dtype.element_ty == tl.float16:
        b_dipole = tl.clamp(b_dipole, -65504.0, 65504.0)
    p_dipole = dipole_ptr + o_row[:, None] * columns + o_n[None, :]
    tl.store(p_dipole, b_dipole, mask=m_r[:, None] & (o_n < columns)[None, :])


@triton.jit
def _load_log_mass(log_mass_ptr, o_row, m_r, o_g, key_clusters):
    """`log S_jc` of some query clusters and key clusters, `-inf` where there is none."""
    m_mass = m_r[:, None] & (o_g < key_clusters)[None, :]
    return tl.load(log_mass_ptr + o_row[:, None] * key_clusters + o_g[None, :], mask=m_mass, other=float("-inf"))


def distances_of(
    key: torch.Tensor, keys: SortedRows, mean_keys: torch.Tensor, products: torch.Tensor, queries: SortedRows,
    group: int, scale: float, *, words: int = 0, exact_heads: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`log2 d_t²` `(P, M)` of keys `(B, Hk, M, D)` by cluster, and that many words of 0 for each, `(P, M, words)`.

    `products` are sums of products of residuals, some of each of `group` query heads that share keys, `(.., D, D)`
    float32, and `queries` the clusters that these are residuals from.
    """
    B, Hk, M, D = key.shape
    P = B * Hk
    covariance, sizes = key.new_empty(P, D, D), key.new_empty(P, D, dtype=torch.float32)
    log_squares = key.new_empty(P, M, dtype=torch.float32)
    taken = key.new_empty(P, M, words, dtype=torch.int32)
    tiles, chip, block_d = keys.tiles.shape[1], chip_of(key), block_width(D)
    _bi_clustered_attention_fwd_covariance_kernel[(P * -(-D // 16),)](
        products, queries.starts, covariance, sizes, group, len(products) // P, D, queries.clusters,
        scale**2, BLOCK_D=block_d, COLUMNS=16, **chip.all_registers,
    )  # fmt: skip
    blocks = -(-tiles // TILES)
    _bi_clustered_attention_fwd_distance_kernel[(P * blocks,)](
        key, mean_keys, covariance, sizes, exact_heads, keys.order, keys.starts, keys.tiles, log_squares,
        taken, *key.stride(), Hk, M, D, keys.clusters, tiles, words, blocks,
        TILES=TILES, ROWS=keys.tile, BLOCK_D=block_d,
        BLOCK_K=min(block_d, 32) if key.element_size() == 4 else block_d, PART=dipole_part(key, block_d),
        PRECISION=chip.dot_precision(key.dtype), **chip.all_registers,
    )  # fmt: skip
    return log_squares, taken


def choose_keys(
    x: Inputs, exact_heads: torch.Tensor | None, queries: SortedRows, keys: SortedRows, mean_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Q̄_j` `(B · H, C, D)`, `log2 d_t²` `(P, M)`, `taken`, and `T_j` `(B · H, C, T)` int32, -1 for no key."""
    query, key, topk, scale = x.query, x.key, x.topk[0], x.scale
    (B, H), (Hk, _, D) = query.shape[:2], key.shape[1:]
    centroids = query.new_empty(B * H, queries.clusters, D)
    parts = max(1, min(queries.clusters, SUM_PROGRAMS // (B * H)))
    products, _ = cluster_products(query, query, queries, centroids, parts=parts)
    words = -(-(H // Hk * queries.clusters) // 32)
    log_squares, taken = distances_of(
        key, keys, mean_keys, products, queries, H // Hk, scale, words=words, exact_heads=exact_heads
    )
    centroid_rows = centroid_pass(centroids, key, None, x.key_mask, scale, topk, bias=log_squares, marks=taken)
    return centroids, log_squares, taken, centroid_rows.top.view(B * H, queries.clusters, topk)


def make_tables(
    x: Inputs, exact_heads: torch.Tensor | None, keys: SortedRows, centroids: torch.Tensor, log_squares: torch.Tensor,
    taken: torch.Tensor, covariances: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The tables `K̃`, `Ṽ`, `log S`, `b`, `p̄`, `M`, see `Saved`."""
    key, value = x.key, x.value
    B, Hk, M, D = key.shape
    Dv, P, G = value.shape[3], B * Hk, keys.clusters
    rows, words = len(centroids) * centroids.shape[1] // P, taken.shape[2]
    table_keys, table_values = key.new_empty(P * rows, G, D), key.new_empty(P * rows, G, Dv)
    log_mass, bias, at_centroid = (key.new_empty(P * rows, G, dtype=torch.float32) for _ in range(3))
    dipoles = key.new_empty(P * rows, D, Dv)
    config = tile_config(key, D, Dv, backward=True, two_sums=True)
    if config["COLUMNS"] == 32 and config["ROWS"] == 64 and max(D, Dv) <= 64:
        config["COLUMNS"] = 64  # half as many steps: each waits for the one before
    blocks = -(-rows // config["ROWS"])
    _bi_clustered_attention_fwd_table_kernel[(P * G * blocks,)](
        centroids, key, value, log_squares, taken, exact_heads, keys.order, keys.starts, table_keys, table_values,
        log_mass, bias, *key.stride(), *value.stride(), Hk, rows, M, D, Dv, G, words, blocks, x.scale * LOG2_E,
        **config,
    )  # fmt: skip
    tile = 64 if key.element_size() == 2 else 32
    row_blocks, blocks = -(-rows // tile), -(-(D * Dv) // 128)
    _bi_clustered_attention_fwd_dipole_kernel[(P * blocks * row_blocks,)](
        log_mass, covariances, exact_heads, at_centroid, dipoles, rows, D * Dv, G, blocks, row_blocks,
        ROWS=tile, COLUMNS=128, BLOCK_G=32, PRECISION=config["PRECISION"], num_warps=8,
        num_stages=1, **chip_of(key).all_registers,
    )  # fmt: skip
    return table_keys, table_values, log_mass, bias, at_centroid, dipoles
