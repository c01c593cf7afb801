"""Rows sorted by cluster, and the means of the clusters, without synchronising with the host."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import kernel

MOST_ROWS = 1024  # that one program counts or places
MOST_BINS = 1024  # clusters that a program counts at once


@dataclass(frozen=True)
class SortedRows:
    """Rows of `P` problems in the order of their clusters.

    Rows in no cluster, those that are masked or have a label outside `0 .. C - 1`, stand last, as cluster `C`. With
    `j` the cluster of a tile, `tiles[p, s]`, the tile holds the sorted rows from
    `starts[p, j] + (s - starts[p, j] // tile - j) · tile` on, up to `tile` of them and none of the next cluster.
    """

    order: torch.Tensor  # `(P, N)` int32, the row that stands at each place
    # `(P, C + 2)` int32, the first place of each cluster; at `C` the rows in none, at `C + 1` their end
    starts: torch.Tensor
    tiles: torch.Tensor  # `(P, N // tile + C + 1)` int32, the cluster of each tile of rows
    clusters: int  # `C`
    tile: int  # rows that a tile can hold


@triton.jit
def _load_part(
    labels_ptr, mask_ptr, H, N, clusters, other_labels_ptr, other_mask_ptr, other_H, other_N, other_clusters,
    others, splits, blocks, HAS_MASK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program's problem and part: whether of the other set, which, of how many parts; `N`, `C`, and the clusters.

    The first `splits` of `blocks` programs are for a problem of one set, the rest for that of the other one, which has
    `others`. The cluster of a row is `C` for a row in none, `C + 1` behind the last row.
    """
    i_p, i_split = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    is_other = i_split >= splits
    labels_ptr = tl.where(is_other, other_labels_ptr, labels_ptr)
    H, N = tl.where(is_other, other_H, H), tl.where(is_other, other_N, N)
    clusters = tl.where(is_other, other_clusters, clusters)
    i_split -= tl.where(is_other, splits, 0)
    rows = i_split * ROWS + tl.arange(0, ROWS)
    m_rows = rows < tl.where(is_other & (i_p >= others), 0, N)
    # [ROWS]
    b_labels = tl.load(labels_ptr + i_p * N + rows, mask=m_rows, other=0)
    m_member = (b_labels >= 0) & (b_labels < clusters)
    if HAS_MASK:
        mask_ptr = tl.where(is_other, other_mask_ptr, mask_ptr)
        m_member &= tl.load(mask_ptr + i_p // H * N + rows, mask=m_rows, other=0) != 0
    b_cluster = tl.where(m_rows, tl.where(m_member, b_labels, clusters), clusters + 1).to(tl.int32)
    return is_other, i_p, i_split, tl.where(is_other, blocks - splits, splits), N, clusters, b_cluster


@kernel
def _count_by_cluster_kernel(
    labels_ptr, mask_ptr, H, N, clusters, other_labels_ptr, other_mask_ptr, other_H, other_N, other_clusters,
    others, splits, blocks, counts_ptr, columns,
    HAS_MASK: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """How many rows of one part of a problem are in each cluster."""
    _, _, _, _, _, clusters, b_cluster = _load_part(
        labels_ptr, mask_ptr, H, N, clusters, other_labels_ptr, other_mask_ptr, other_H, other_N, other_clusters,
        others, splits, blocks, HAS_MASK, ROWS,
    )  # fmt: skip
    counts_ptr += tl.program_id(0).to(tl.int64) * columns
    for first in range(0, clusters + 1, BINS):
        o_c = first + tl.arange(0, BINS)
        m_bin = (b_cluster >= first) & (b_cluster < first + BINS)
        b_counts = tl.histogram(tl.where(m_bin, b_cluster - first, 0), BINS, mask=m_bin)
        tl.store(counts_ptr + o_c, b_counts, mask=o_c <= clusters)


@kernel
def _sort_by_cluster_kernel(
    labels_ptr, mask_ptr, H, N, clusters, other_labels_ptr, other_mask_ptr, other_H, other_N, other_clusters,
    others, splits, blocks, counts_ptr, columns, order_ptr, starts_ptr, tiles_ptr, other_order_ptr, other_starts_ptr,
    other_tiles_ptr,
    TILE: tl.constexpr, OTHER_TILE: tl.constexpr, HAS_MASK: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Stable counting sort: a program sorts one part of a problem; its clusters go behind those of the parts before.

    The parts share the writing of the clusters' tiles; the first one writes where clusters begin.
    """
    is_other, i_p, i_split, parts, N, clusters, b_cluster = _load_part(
        labels_ptr, mask_ptr, H, N, clusters, other_labels_ptr, other_mask_ptr, other_H, other_N, other_clusters,
        others, splits, blocks, HAS_MASK, ROWS,
    )  # fmt: skip
    if is_other & (i_p >= others):
        return
    tile_rows = tl.where(is_other, OTHER_TILE, TILE)
    o_n = tl.arange(0, ROWS)
    # A row's number in its part makes all sorted numbers different: the sort is stable.
    b_sorted = tl.sort(b_cluster * ROWS + o_n)
    b_cluster, rows = b_sorted // ROWS, i_split * ROWS + b_sorted % ROWS
    b_place = o_n
    counts_ptr += (tl.program_id(0) - i_split).to(tl.int64) * columns
    order_ptr = tl.where(is_other, other_order_ptr, order_ptr) + i_p * N
    starts_ptr = tl.where(is_other, other_starts_ptr, starts_ptr) + i_p * (clusters + 2)
    tiles_ptr = tl.where(is_other, other_tiles_ptr, tiles_ptr) + i_p * (N // tile_rows + clusters + 1)
    smaller, own_smaller = 0, 0  # rows in clusters before these, in the problem and in this part
    for first in range(0, clusters + 1, BINS):
        o_c = first + tl.arange(0, BINS)
        m_c = o_c <= clusters
        b_sizes, b_before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
        for split in range(0, parts, SPLITS):
            o_split = split + tl.arange(0, SPLITS)
            p_counts = counts_ptr + o_split.to(tl.int64)[:, None] * columns + o_c[None, :]
            # [SPLITS, BINS]
            b_counts = tl.load(p_counts, mask=(o_split < parts)[:, None] & m_c[None, :], other=0)
            b_sizes += tl.sum(b_counts, 0)
            b_before += tl.sum(tl.where((o_split < i_split)[:, None], b_counts, 0), 0)
        b_own = tl.load(counts_ptr + i_split.to(tl.int64) * columns + o_c, mask=m_c, other=0)
        b_starts = smaller + tl.cumsum(b_sizes, 0) - b_sizes
        b_first = b_starts + b_before - (own_smaller + tl.cumsum(b_own, 0) - b_own)
        smaller += tl.sum(b_sizes, 0)
        own_smaller += tl.sum(b_own, 0)
        m_bin = (b_cluster >= first) & (b_cluster < first + BINS)
        b_place += tl.where(m_bin, tl.gather(b_first, tl.where(m_bin, b_cluster - first, 0), 0), 0)
        if i_split == 0:
            tl.store(starts_ptr + o_c, b_starts, mask=m_c)
            tl.store(starts_ptr + o_c + 1, b_starts + b_sizes, mask=o_c == clusters)
        b_slot = b_starts // tile_rows + o_c
        b_tiles = (b_starts + b_sizes) // tile_rows + 1 - b_starts // tile_rows
        for tile in range(i_split, tl.max(tl.where(m_c, b_tiles, 0), 0), parts):
            tl.store(tiles_ptr + b_slot + tile, o_c, mask=m_c & (tile < b_tiles))
    tl.store(order_ptr + b_place, rows, mask=rows < N)


Labelled = tuple[torch.Tensor, torch.Tensor | None, int, int]


def empty_sorted(labels: torch.Tensor, clusters: int, tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for `order`, `starts` and `tiles` of rows with labels `(B, H, N)`."""
    B, H, N = labels.shape
    sizes = N, clusters + 2, N // tile + clusters + 1
    order, starts, tiles = (labels.new_empty(B * H, size, dtype=torch.int32) for size in sizes)
    return order, starts, tiles


def sort_by_cluster(labels: torch.Tensor, mask: torch.Tensor | None, clusters: int, tile: int) -> SortedRows:
    """Rows with integer labels `(B, H, N)`, any strides, sorted by cluster; stable, for rows where `mask` `(B, N)`."""
    return sort_both_by_cluster((labels, mask, clusters, tile))[0]


def sort_both_by_cluster(first: Labelled, second: Labelled | None = None) -> list[SortedRows]:
    """One or two sets of rows, as `sort_by_cluster` takes them, in the same two launches; no more heads in the second.

    Labels and masks that are not contiguous are copied.
    """
    both = [first] if second is None else [first, second]
    rows = min(MOST_ROWS, max(32, 1 << (max(labels.shape[2] for labels, *_ in both) - 1).bit_length()))
    has_mask = any(mask is not None for _, mask, *_ in both)
    row_sets, given, splits = [], [], []
    for labels, mask, clusters, tile in both:
        B, H, N = labels.shape
        row_sets.append(SortedRows(*empty_sorted(labels, clusters, tile), clusters, tile))
        if has_mask:
            mask = labels.new_ones(B, N, dtype=torch.bool) if mask is None else mask.contiguous()
        given.append((labels.to(first[0].dtype).contiguous(), mask, H, N, clusters))
        splits.append(max(1, -(-N // rows)))
    columns = 1 + max(members.clusters for members in row_sets)
    counts = first[0].new_empty(len(row_sets[0].order) * sum(splits), columns, dtype=torch.int32)
    bins = min(MOST_BINS, max(16, 1 << (columns - 1).bit_length()))
    sizes = {"HAS_MASK": has_mask, "BINS": bins, "ROWS": rows}
    inputs = *given[0], *given[-1], len(row_sets[-1].order), splits[0], sum(splits), counts, columns
    outputs = (
        tensor for members in (row_sets[0], row_sets[-1]) for tensor in (members.order, members.starts, members.tiles)
    )
    _count_by_cluster_kernel[(len(counts),)](*inputs, **sizes)
    _sort_by_cluster_kernel[(len(counts),)](
        *inputs, *outputs, TILE=row_sets[0].tile, OTHER_TILE=row_sets[-1].tile, SPLITS=max(1, min(8, 2048 // bins)),
        **sizes,
    )  # fmt: skip
    return row_sets


@kernel
def _cluster_means_kernel(
    rows_ptr, order_ptr, starts_ptr, means_ptr,
    stride_rows_b, stride_rows_h, stride_rows_n, stride_rows_d,
    H, N, D, clusters,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`(1 / n_j) Σ_{i∈j} x_i` in float32, one cluster a program; the order of the sum is that of the rows."""
    i_row = tl.program_id(0).to(tl.int64)
    i_p = i_row // clusters
    starts_ptr += i_p * (clusters + 2) + i_row % clusters
    rows_ptr += i_p // H * stride_rows_b + i_p % H * stride_rows_h
    order_ptr += i_p * N
    first, last = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    o_d = tl.arange(0, BLOCK_D)
    o_place = first + tl.arange(0, BLOCK_N)
    b_row = tl.load(order_ptr + o_place, mask=o_place < last, other=0)
    b_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for _ in range(first, last, BLOCK_N):
        m_rows = (o_place < last)[:, None] & (o_d < D)[None, :]
        p_rows = rows_ptr + b_row.to(tl.int64)[:, None] * stride_rows_n + o_d[None, :] * stride_rows_d
        # [BLOCK_N, BLOCK_D]
        b_rows = tl.load(p_rows, mask=m_rows, other=0.0)
        # Which rows are next is on its way while these are.
        o_place += BLOCK_N
        b_row = tl.load(order_ptr + o_place, mask=o_place < last, other=0)
        b_sum += b_rows.to(tl.float32)
    b_mean = tl.sum(b_sum, 0) / tl.maximum(last - first, 1)
    tl.store(means_ptr + i_row * D + o_d, b_mean, mask=o_d < D)


def cluster_means(rows: torch.Tensor, members: SortedRows) -> torch.Tensor:
    """Mean of the rows `(B, H, N, D)`, any strides, of each cluster: `(B · H, C, D)` float32, 0 for an empty one."""
    B, H, N, D = rows.shape
    means = rows.new_empty(B * H, members.clusters, D, dtype=torch.float32)
    block_d = 1 << (D - 1).bit_length()
    _cluster_means_kernel[(B * H * members.clusters,)](
        rows, members.order, members.starts, means, *rows.stride(), H, N, D, members.clusters,
        BLOCK_N=max(8, min(64, 4096 // block_d)), BLOCK_D=block_d,
    )  # fmt: skip
    return means
