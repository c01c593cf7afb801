"""Late segments over the completed keys, on a GPU: which of them exactly, and tables of summaries for the others.

Sizes as in `layout` and `clusters`; of the late segments some at once, `L`, from the `first` on, whose queries see the
blocks of keys `0 .. first`, and one more each. Places of keys number all blocks through, `n` each. Scores are
exponents of 2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...shared.triton.chips import block_width, chip_of
from ...shared.triton.cluster_table import is_exact, load_sizes, load_top
from ...shared.triton.launch import kernel
from ...shared.triton.softmax import KIND, dot_rows, softmax_step, softmax_weights
from ...shared.triton.sort import SortedRows
from ...shared.triton.tiles import LOG2_E, LOWEST, load_operand, load_rows, load_tile, store_rows, tile_config
from ...shared.triton.topk import select_topk
from .clusters import Clusters
from .layout import Layout, Rows
from .local import forward_config

MOST_CENTROIDS = 64  # that a program compares with keys at once
TABLE_BYTES = 2**30  # of the tables, and the ranks, of the late segments that are worked on at once


class Late(NamedTuple):
    """Some late segments, `L` from the `first` on."""

    first: int
    segments: int  # `L`
    centroids: torch.Tensor  # `(L · P · g, C, D)`
    starts: torch.Tensor  # of the clusters of previous queries, `(L · P · g, C + 2)`
    readers: SortedRows
    exact: torch.Tensor | None  # `(L, P)`
    seed: torch.Tensor | None  # of the dropout on summaries

    @classmethod
    def of(cls, clusters: Clusters, first: int, count: int, heads: int, seed: torch.Tensor | None) -> "Late":
        """`count` of all late segments from the `first` on; `heads` are `P · g`, `seed` that of all dropout."""
        part = slice(first * heads, (first + count) * heads)
        rows = clusters.readers
        readers = SortedRows(rows.order[part], rows.starts[part], rows.tiles[part], rows.clusters, rows.tile)
        exact = None if clusters.exact is None else clusters.exact[first : first + count].contiguous()
        # Queries are numbered from the first of these segments on.
        seed = seed if seed is None or first == 0 else seed + first
        return cls(first, count, clusters.centroids[part], clusters.starts[part], readers, exact, seed)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that belong to these segments, of rows of every query head in every late segment."""
        problems = len(self.centroids)
        return rows[self.first * (problems // self.segments) :][:problems]

    @property
    def blocks(self) -> int:
        """Blocks of keys that the last of them sees."""
        return self.first + self.segments


class Tables(NamedTuple):
    """What stands for the keys of every cluster of all blocks, `(L · P · g · C, blocks · G, ·)`."""

    keys: torch.Tensor  # `K̃` in the dtype of the query; 0 where a summary does not follow the query
    values: torch.Tensor  # `Ṽ`
    bias: torch.Tensor  # `log S - Q̄_j·K̃` float32; `-inf` where nothing is or may be seen
    log_mass: torch.Tensor | None  # `log S`, for a backward pass


@kernel
def _causal_attention_fwd_mass_kernel(
    centroids_ptr, key_ptr, lse_ptr,
    heads, group, rows_of_keys, D, clusters, first_late, segment_length, shift, blocks, row_blocks, scale_log2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of some centroids' scores of the keys of one block; `-inf` where the segment does not see it."""
    i_block = tl.program_id(0) % blocks
    i_p = (tl.program_id(0) // (blocks * row_blocks)).to(tl.int64)
    o_c = tl.program_id(0) // blocks % row_blocks * ROWS + tl.arange(0, ROWS)
    m_c = o_c < clusters
    sees = i_block <= first_late + i_p // heads
    key_ptr += (i_p % heads // group * rows_of_keys + i_block * segment_length) * D
    # [ROWS, BLOCK_D]
    centroid = load_operand(centroids_ptr + (i_p * clusters + o_c) * D, m_c, 1, D, BLOCK_D)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, tl.where(sees, segment_length, 0), COLUMNS):
        o_key = begin + tl.arange(0, COLUMNS)
        m_key = (o_key < segment_length) & (i_block * segment_length + o_key >= shift)
        key = load_operand(key_ptr + o_key.to(tl.int64) * D, m_key, 1, D, BLOCK_D)
        b_scores = dot_rows(centroid, key, D, BY_PARTS, PRECISION)
        b_scores = tl.where(m_key[None, :], b_scores * scale_log2, float("-inf"))
        _, _, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
    b_lse = tl.where(b_total > 0, b_highest + tl.log2(tl.maximum(b_total, 1e-38)), float("-inf"))
    tl.store(lse_ptr + (i_p * clusters + o_c) * blocks + i_block, b_lse, mask=m_c)


@kernel
def _causal_attention_fwd_share_kernel(
    lse_ptr, starts_ptr, log_share_ptr, numbers, clusters, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`log2 n_j` less the log-sum-exp over all blocks, of `ROWS` centroids."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < numbers
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, blocks, COLUMNS):
        o_block = first + tl.arange(0, COLUMNS)
        # [ROWS, COLUMNS]
        m_block = m_row[:, None] & (o_block < blocks)[None, :]
        b_lse = tl.load(lse_ptr + o_row[:, None] * blocks + o_block[None, :], mask=m_block, other=float("-inf"))
        _, _, b_highest, b_total = softmax_weights(b_lse, b_highest, b_total)
    b_size = load_sizes(starts_ptr, 0, o_row, m_row, clusters)
    b_share = tl.log2(tl.maximum(b_size, 1.0)) - b_highest - tl.log2(tl.maximum(b_total, 1e-38))
    tl.store(log_share_ptr + o_row, tl.where(b_size > 0, b_share, float("-inf")), mask=m_row)


@kernel
def _causal_attention_fwd_rank_kernel(
    centroids_ptr, key_ptr, log_share_ptr, log_square_ptr, rank_ptr,
    heads, group, rows_of_keys, D, clusters, first_late, segment_length, shift, blocks, scale_log2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`log2(Σ_j n_j w_jt) + log2 d_t²` of the keys of one block for the query head of a segment, `-inf` without a key.

    `log_share` is what turns a score of a centroid into `log2(n_j w_jt)`; without distances these are 1.
    """
    i_block = tl.program_id(0) % blocks
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    sees = i_block <= first_late + i_p // heads
    i_key_head = i_p % heads // group
    key_ptr += (i_key_head * rows_of_keys + i_block * segment_length) * D
    if log_square_ptr is not None:
        log_square_ptr += (i_block * (heads // group) + i_key_head) * segment_length
    rank_ptr += (i_p * blocks + i_block) * segment_length
    for begin in range(0, segment_length, ROWS):
        o_key = begin + tl.arange(0, ROWS)
        m_place = o_key < segment_length
        m_key = m_place & (i_block * segment_length + o_key >= shift) & sees
        # [ROWS, BLOCK_D]
        key = load_operand(key_ptr + o_key.to(tl.int64) * D, m_key, 1, D, BLOCK_D)
        b_highest = tl.full([ROWS], LOWEST, tl.float32)
        b_total = tl.zeros([ROWS], tl.float32)
        for first in range(0, tl.where(sees, clusters, 0), COLUMNS):
            o_c = first + tl.arange(0, COLUMNS)
            m_c = o_c < clusters
            centroid = load_operand(centroids_ptr + (i_p * clusters + o_c) * D, m_c, 1, D, BLOCK_D)
            b_share = tl.load(log_share_ptr + i_p * clusters + o_c, mask=m_c, other=float("-inf"))
            b_scores = dot_rows(key, centroid, D, BY_PARTS, PRECISION) * scale_log2 + b_share[None, :]
            _, _, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
        b_rank = b_highest + tl.log2(tl.maximum(b_total, 1e-38))
        if log_square_ptr is not None:
            b_rank += tl.load(log_square_ptr + o_key, mask=m_key, other=float("-inf"))
        tl.store(rank_ptr + o_key, tl.where(m_key, b_rank, float("-inf")), mask=m_place)


@triton.jit
def load_bits(taken_ptr, b_place, m_key, o_r, clusters):
    """Whether the query heads of centroids `o_r` have keys as exact ones, by the keys' words: `(keys, centroids)`."""
    b_word = tl.load(taken_ptr + b_place, mask=m_key, other=0)
    # Of centroids that do not exist any bit, but one that a word has.
    return ((b_word[:, None] >> tl.minimum(o_r // clusters, 31)[None, :]) & 1) != 0


@kernel
def _causal_attention_fwd_table_kernel(
    centroids_ptr, key_ptr, value_ptr, taken_ptr, exact_ptr, order_ptr, starts_ptr,
    table_key_ptr, table_value_ptr, bias_ptr, log_mass_ptr,
    key_heads, rows, rows_of_keys, D, Dv, clusters, key_clusters, first_late, segment_length, blocks, row_blocks,
    scale_log2,
    TANGENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`K̃_jc`, `Ṽ_jc` and `b_jc` of one key cluster, for `ROWS` centroids of the query heads that share it.

    Nothing is written where the segment does not see the cluster. Without `TANGENTS` `b` is `log S`, and `K̃` is 0.
    """
    i_rows = tl.program_id(0) % row_blocks
    i_cluster = tl.program_id(0) // row_blocks % (blocks * key_clusters)
    i_p = (tl.program_id(0) // (row_blocks * blocks * key_clusters)).to(tl.int64)
    i_block = i_cluster // key_clusters
    if (i_block > first_late + i_p // key_heads) | is_exact(exact_ptr, i_p):
        return
    i_key_head = i_p % key_heads
    i_sorted = i_block * key_heads + i_key_head
    starts_ptr += i_sorted * (key_clusters + 2) + i_cluster % key_clusters
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    order_ptr += i_sorted * segment_length
    first_key = i_block * segment_length
    key_ptr += (i_key_head * rows_of_keys + first_key) * D
    value_ptr += (i_key_head * rows_of_keys + first_key) * Dv
    o_r = i_rows * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_row = i_p * rows + o_r
    # [ROWS, BLOCK_D]
    centroid = load_operand(centroids_ptr + o_row * D, m_r, 1, D, BLOCK_D)
    b_key_sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_value_sum = tl.zeros([ROWS, BLOCK_V], tl.float32)
    b_highest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for begin in range(first, last, COLUMNS):
        o_place = begin + tl.arange(0, COLUMNS)
        m_key = o_place < last
        b_row = tl.load(order_ptr + o_place, mask=m_key, other=0).to(tl.int64)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(key_ptr + b_row * D, m_key, 1, D, BLOCK_D)
        b_value = load_rows(value_ptr + b_row * Dv, m_key, 1, Dv, BLOCK_V)
        b_scores = dot_rows(centroid, key, D, BY_PARTS, PRECISION)
        m_pair = m_key[None, :]
        if taken_ptr is not None:
            b_place = i_p * blocks * segment_length + first_key + b_row
            m_pair = m_pair & ~tl.trans(load_bits(taken_ptr, b_place, m_key, o_r, clusters))
        b_scores = tl.where(m_pair, b_scores * scale_log2, float("-inf"))
        b_weights, b_kept, b_highest, b_total = softmax_weights(b_scores, b_highest, b_total)
        b_weights = b_weights.to(b_value.dtype)
        if TANGENTS:
            b_key_sum = tl.dot(b_weights, key[0], b_key_sum * b_kept[:, None], input_precision=PRECISION)
        b_value_sum = tl.dot(b_weights, b_value, b_value_sum * b_kept[:, None], input_precision=PRECISION)
    b_divisor = tl.where(b_total > 0, b_total, 1.0)
    o_table = o_row * (blocks * key_clusters) + i_cluster
    b_bias = tl.where(b_total > 0, b_highest + tl.log2(b_divisor), float("-inf"))
    if log_mass_ptr is not None:
        tl.store(log_mass_ptr + o_table, b_bias, mask=m_r)
    b_tilted = (b_key_sum / b_divisor[:, None]).to(table_key_ptr.dtype.element_ty)
    if TANGENTS:
        # Of K̃ as it is stored: the tangent is exact at the centroid.
        b_bias -= tl.sum(centroid[0].to(tl.float32) * b_tilted.to(tl.float32), 1) * scale_log2
    tl.store(bias_ptr + o_table, b_bias, mask=m_r)
    store_rows(table_key_ptr + o_table * D, b_tilted, m_r, 1, D, BLOCK_D)
    store_rows(table_value_ptr + o_table * Dv, b_value_sum / b_divisor[:, None], m_r, 1, Dv, BLOCK_V)


@kernel
def _causal_attention_fwd_older_kernel(
    query_ptr, seed_ptr, exact_ptr, order_ptr, starts_ptr, tiles_ptr, table_key_ptr, table_value_ptr, bias_ptr,
    output_ptr, lse_ptr,
    stride_output_b, stride_output_h, stride_output_n, stride_output_d,
    H, heads, group, N, rows_of_queries, D, Dv, clusters, key_clusters, first_late, first_segment, segment_length,
    columns, tiles, scale_log2, dropout_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BY_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the summaries that a tile of queries of one cluster sees into the softmax whose output is there."""
    i_p = (tl.program_id(0) // tiles).to(tl.int64)
    cluster, _, m_row, b_row = load_tile(
        order_ptr, starts_ptr, tiles_ptr, i_p, tl.program_id(0) % tiles, segment_length, clusters, tiles, ROWS
    )  # fmt: skip
    i_late, i_head = i_p // heads, i_p % heads
    b_token = (first_segment + i_late) * segment_length + b_row
    m_row = m_row & (b_token < N) & (cluster < clusters)
    if (tl.max(m_row.to(tl.int32), 0) == 0) | is_exact(exact_ptr, i_p // group):
        return
    p_output = output_ptr + i_head // H * stride_output_b + i_head % H * stride_output_h + b_token * stride_output_n
    o_row = i_head * rows_of_queries + b_token
    # [ROWS, BLOCK_D], [ROWS, BLOCK_V]
    query = load_operand(query_ptr + o_row * D, m_row, 1, D, BLOCK_D)
    b_output = load_rows(p_output, m_row, stride_output_d, Dv, BLOCK_V).to(tl.float32)
    b_highest = tl.load(lse_ptr + o_row, mask=m_row, other=0.0)
    b_total = tl.full([ROWS], 1.0, tl.float32)
    o_table = (i_p * clusters + tl.minimum(cluster, clusters - 1)) * columns
    seen = (first_late + i_late + 1) * key_clusters
    for first in range(0, seen, COLUMNS):
        o_g = first + tl.arange(0, COLUMNS)
        # [COLUMNS, BLOCK_D], [COLUMNS, BLOCK_V]
        key = load_operand(table_key_ptr + (o_table + o_g) * D, o_g < seen, 1, D, BLOCK_D)
        b_value = load_rows(table_value_ptr + (o_table + o_g) * Dv, o_g < seen, 1, Dv, BLOCK_V)
        b_bias = tl.load(bias_ptr + o_table + o_g, mask=o_g < seen, other=float("-inf"))
        b_output, b_highest, b_total = softmax_step(
            dot_rows(query, key, D, BY_PARTS, PRECISION) * scale_log2 + b_bias[None, :], b_value, b_output, b_highest,
            b_total, seed_ptr, i_p * segment_length + b_row, o_g, columns, dropout_p, KIND, PRECISION,
        )  # fmt: skip
    store_rows(p_output, b_output / b_total[:, None], m_row, stride_output_d, Dv, BLOCK_V)
    tl.store(lse_ptr + o_row, b_highest + tl.log2(b_total), mask=m_row)


def late_segments(layout: Layout, rows: Rows, clusters: Clusters) -> list[Late]:
    """All late segments, as many at once as have room for their tables and ranks: each of all heads, one at least.

    With 32 heads of 128, one cluster and 16 of a segment's keys they are all at once up to 49,152 tokens.
    """
    settings, (B, H, _, D), Dv = layout.settings, rows.query.shape, rows.value.shape[3]
    per_summary = (D + Dv) * rows.query.element_size() + 8
    columns = settings.clusters * settings.key_clusters * per_summary + 4 * settings.segment_length
    step = max(1, TABLE_BYTES // max(1, B * H * layout.late * columns))
    return [
        Late.of(clusters, first, min(step, layout.late - first), B * H, settings.dropout_seed)
        for first in range(0, layout.late, step)
    ]


def choose_keys(layout: Layout, rows: Rows, clusters: Clusters, late: Late, top: torch.Tensor) -> None:
    """Write the places of the exact keys of some late segments, `(L · P · g, topk)` int32, -1 for none."""
    key, settings, n = rows.key, layout.settings, layout.settings.segment_length
    heads, blocks, (problems, C, D) = rows.heads, late.blocks, late.centroids.shape
    masses = torch.empty(problems, C, blocks, dtype=torch.float32, device=key.device)
    log_share = torch.empty(problems, C, dtype=torch.float32, device=key.device)
    ranks = torch.empty(problems, blocks * n, dtype=torch.float32, device=key.device)
    config = tile_config(key, D, D)
    wide, few = config["ROWS"], min(MOST_CENTROIDS, block_width(C), config["ROWS"])
    shared = {name: config[name] for name in ("BLOCK_D", "BY_PARTS", "PRECISION", "num_warps", "num_stages")}
    shared |= chip_of(key).all_registers
    sizes = heads, rows.group, key.shape[2], D, C, late.first, n, layout.shift, blocks
    scale, row_blocks = settings.scale * LOG2_E, -(-C // few)
    _causal_attention_fwd_mass_kernel[(problems * blocks * row_blocks,)](
        late.centroids, key, masses, *sizes, row_blocks, scale, ROWS=few, COLUMNS=config["COLUMNS"], **shared
    )
    _causal_attention_fwd_share_kernel[(-(-problems * C // 16),)](
        masses, late.starts, log_share, problems * C, C, blocks, ROWS=16, COLUMNS=16, num_warps=1
    )
    _causal_attention_fwd_rank_kernel[(problems * blocks,)](
        late.centroids, key, log_share, clusters.log_squares, ranks, *sizes, scale, ROWS=wide,
        COLUMNS=min(few, config["COLUMNS"]), **shared,
    )  # fmt: skip
    select_topk(ranks, settings.topk, (top, torch.empty_like(top, dtype=torch.float32)))


@kernel
def _causal_attention_mark_kernel(top_ptr, marks_ptr, group, places, topk, BLOCK: tl.constexpr):
    """Sets the bit of a query head in the words of its exact keys."""
    i_p = tl.program_id(0).to(tl.int64)
    for first in range(0, topk, BLOCK):
        b_top, m_top = load_top(top_ptr + i_p * topk, first + tl.arange(0, BLOCK), topk)
        b_bit = tl.where(m_top, 1, 0) << (i_p % group).to(tl.int32)
        tl.atomic_or(marks_ptr + i_p // group * places + b_top, b_bit, mask=m_top, sem="relaxed")


def mark_keys(layout: Layout, rows: Rows, late: Late, top: torch.Tensor) -> torch.Tensor | None:
    """A word for every place of the blocks, `(L · P, places)` int32: bit `h` where query head `h` has it in `top`."""
    topk, places = top.shape[1], late.blocks * layout.settings.segment_length
    if not topk:
        return None
    marks = top.new_zeros(len(top) // rows.group, places)
    _causal_attention_mark_kernel[(len(top),)](top, marks, rows.group, places, topk, BLOCK=128, num_warps=1)
    return marks


def make_tables(
    layout: Layout, rows: Rows, clusters: Clusters, late: Late, taken: torch.Tensor | None, *, for_backward: bool
) -> Tables:
    """The tables of some late segments; those that a segment does not see are written `for_backward` only."""
    (_, key, value), settings = rows, layout.settings
    C, G = late.centroids.shape[1], clusters.keys.clusters
    D, Dv, columns, total = key.shape[3], value.shape[3], late.blocks * G, len(late.centroids) * C
    new = key.new_zeros if for_backward else key.new_empty
    bias = key.new_empty(total, columns, dtype=torch.float32)
    if for_backward:
        bias.fill_(-torch.inf)
    log_mass = torch.empty_like(bias) if for_backward else None
    tables = Tables(new(total, columns, D), new(total, columns, Dv), bias, log_mass)
    config = tile_config(key, D, Dv, backward=True, two_sums=True)
    config["ROWS"] = min(config["ROWS"], block_width(rows.group * C))
    row_blocks, key_heads = -(-rows.group * C // config["ROWS"]), rows.heads // rows.group
    _causal_attention_fwd_table_kernel[(late.segments * key_heads * columns * row_blocks,)](
        late.centroids, key, value, taken, late.exact, clusters.keys.order, clusters.keys.starts, *tables,
        key_heads, rows.group * C, key.shape[2], D, Dv, C, G, late.first, settings.segment_length, late.blocks,
        row_blocks, settings.scale * LOG2_E, TANGENTS=settings.linear_summaries, **config,
    )  # fmt: skip
    return tables


def attend_to_summaries(
    layout: Layout, rows: Rows, clusters: Clusters, late: Late, tables: Tables, output: torch.Tensor, lse: torch.Tensor
) -> None:
    """Take what stands for all other distant keys into outputs `(B, H, N, Dv)` and log-sum-exps `(B · H, tokens)`."""
    settings, query, (_, C, D) = layout.settings, rows.query, late.centroids.shape
    config, readers = forward_config(settings, query, output.shape[3]), late.readers
    tiles = readers.tiles.shape[1]
    _causal_attention_fwd_older_kernel[(late.segments * rows.heads * tiles,)](
        query, late.seed, late.exact, readers.order, readers.starts, readers.tiles, *tables[:3], output, lse,
        *output.stride(), query.shape[1], rows.heads, rows.group, layout.length, layout.padded, D, output.shape[3],
        C, clusters.keys.clusters, late.first, layout.first_late + late.first, settings.segment_length,
        tables.bias.shape[1], tiles, settings.scale * LOG2_E, settings.dropout_p, **config,
    )  # fmt: skip
