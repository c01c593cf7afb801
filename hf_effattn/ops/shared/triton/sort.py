"""Rows sorted by cluster, and the means of the clusters, without synchronising with the host."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .chips import LENGTHS, on_device_of

ROWS_OF_A_SPLIT = 1024  # rows that one program counts or places, more where there would be too many parts
LARGEST_SPLIT = 64


@dataclass(frozen=True)
class SortedRows:
    """Rows of `P` problems in the order of their clusters.

    Rows in no cluster, those that are masked or have a label outside `0 .. C - 1`, stand last, as cluster `C`. With
    `j` the cluster of a tile, `tiles[p, s]`, the tile holds the sorted rows from
    `starts[p, j] + (s - starts[p, j] // tile - j) · tile` on, up to `tile` of them and none of the next cluster.

    Attributes:
        order: `(P, N)` int32, the row that stands at each place.
        starts: `(P, C + 2)` int32, the first place of each cluster; at `C` the rows in none, at `C + 1` their end.
        tiles: `(P, N // tile + C + 1)` int32, the cluster of each tile of rows.
        clusters: `C`.
        tile: rows that a tile can hold.
    """

    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    clusters: int
    tile: int


@triton.jit
def load_clusters(
    labels_ptr, mask_ptr, rows, N, clusters, stride_labels_n, stride_mask_n, HAS_MASK: tl.constexpr
):  # fmt: skip
    """The cluster of each row: `clusters` for a row in none, a number past every cluster behind the last row."""
    m_rows = rows < N
    # [BLOCK_N]
    b_labels = tl.load(labels_ptr + rows.to(tl.int64) * stride_labels_n, mask=m_rows, other=0)
    m_member = (b_labels >= 0) & (b_labels < clusters)
    if HAS_MASK:
        m_member &= tl.load(mask_ptr + rows.to(tl.int64) * stride_mask_n, mask=m_rows, other=0) != 0
    return tl.where(m_rows, tl.where(m_member, b_labels, clusters).to(tl.int32), 2147483647)


@triton.jit(do_not_specialize=LENGTHS)
def _count_by_cluster_kernel(
    labels_ptr, mask_ptr, below_ptr,
    stride_labels_b, stride_labels_h, stride_labels_n, stride_mask_b, stride_mask_n,
    H, N, clusters, blocks, splits, split_rows,
    HAS_MASK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How many rows of one part of a problem are in clusters below each of `BLOCK_C` clusters."""
    i_p = (tl.program_id(0) // (blocks * splits)).to(tl.int64)
    i_split = tl.program_id(0) // blocks % splits
    first = tl.program_id(0) % blocks * BLOCK_C
    labels_ptr += i_p // H * stride_labels_b + i_p % H * stride_labels_h
    if HAS_MASK:
        mask_ptr += i_p // H * stride_mask_b
    o_c = first + tl.arange(0, BLOCK_C)
    o_n = tl.arange(0, BLOCK_N)
    b_counts = tl.zeros([BLOCK_N, BLOCK_C], tl.int32)
    b_below = tl.zeros([BLOCK_N], tl.int32)
    for start in range(i_split * split_rows, tl.minimum(N, (i_split + 1) * split_rows), BLOCK_N):
        b_cluster = load_clusters(
            labels_ptr, mask_ptr, start + o_n, N, clusters, stride_labels_n, stride_mask_n, HAS_MASK
        )
        b_counts += (b_cluster[:, None] == o_c[None, :]).to(tl.int32)
        b_below += (b_cluster < first).to(tl.int32)
    b_sizes = tl.sum(b_counts, 0)
    below_ptr += (i_p * splits + i_split) * (clusters + 2)
    tl.store(below_ptr + o_c, tl.sum(b_below, 0) + tl.cumsum(b_sizes, 0) - b_sizes, mask=o_c < clusters + 2)


@triton.jit(do_not_specialize=LENGTHS)
def _sort_by_cluster_kernel(
    labels_ptr, mask_ptr, below_ptr, order_ptr, starts_ptr, tiles_ptr,
    stride_labels_b, stride_labels_h, stride_labels_n, stride_mask_b, stride_mask_n,
    H, N, clusters, slots, blocks, splits, split_rows,
    TILE: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Stable counting sort: a program places the members of `BLOCK_C` clusters in one part of a problem.

    Theirs stand behind those of the parts before. The first part's programs write down where clusters and tiles begin.
    """
    i_p = (tl.program_id(0) // (blocks * splits)).to(tl.int64)
    i_split = tl.program_id(0) // blocks % splits
    first = tl.program_id(0) % blocks * BLOCK_C
    labels_ptr += i_p // H * stride_labels_b + i_p % H * stride_labels_h
    if HAS_MASK:
        mask_ptr += i_p // H * stride_mask_b
    order_ptr += i_p * N
    o_c = first + tl.arange(0, BLOCK_C)
    o_n = tl.arange(0, BLOCK_N)
    o_split = tl.arange(0, SPLITS)
    m_split = (o_split < splits)[:, None]
    p_below = below_ptr + (i_p * splits + o_split)[:, None] * (clusters + 2) + o_c[None, :]
    # [SPLITS, BLOCK_C]
    b_below = tl.load(p_below, mask=m_split & (o_c < clusters + 2)[None, :], other=0)
    b_below_next = tl.load(p_below + 1, mask=m_split & (o_c < clusters + 1)[None, :], other=0)
    b_starts = tl.sum(b_below, 0)

    if i_split == 0:
        tl.store(starts_ptr + i_p * (clusters + 2) + o_c, b_starts, mask=o_c < clusters + 2)
        first_start = tl.sum(tl.where(o_c == first, b_starts, 0), 0)
        last_slot = tl.max(tl.sum(b_below_next, 0), 0) // TILE + first + BLOCK_C
        if first + BLOCK_C > clusters:
            last_slot = slots
        b_first_slots = tl.where(o_c <= clusters, b_starts // TILE + o_c, slots)
        for slot in range(first_start // TILE + first, last_slot, BLOCK_S):
            o_s = slot + tl.arange(0, BLOCK_S)
            b_begun = tl.sum((b_first_slots[None, :] <= o_s[:, None]).to(tl.int32), 1)
            tl.store(tiles_ptr + i_p * slots + o_s, first + b_begun - 1, mask=o_s < last_slot)

    b_next = b_starts + tl.sum(tl.where((o_split < i_split)[:, None], b_below_next - b_below, 0), 0)
    for start in range(i_split * split_rows, tl.minimum(N, (i_split + 1) * split_rows), BLOCK_N):
        b_cluster = load_clusters(
            labels_ptr, mask_ptr, start + o_n, N, clusters, stride_labels_n, stride_mask_n, HAS_MASK
        )
        b_member = (b_cluster[:, None] == o_c[None, :]).to(tl.int32)
        # [BLOCK_N]
        b_places = tl.sum(b_member * (b_next[None, :] + tl.cumsum(b_member, 0) - 1), 1)
        tl.store(order_ptr + b_places, start + o_n, mask=tl.sum(b_member, 1) > 0)
        b_next += tl.sum(b_member, 0)


def sort_by_cluster(labels: torch.Tensor, mask: torch.Tensor | None, clusters: int, tile: int) -> SortedRows:
    """Rows with integer labels `(B, H, N)`, any strides, sorted by cluster; stable, for rows where `mask` `(B, N)`."""
    B, H, N = labels.shape
    slots = N // tile + clusters + 1
    split_rows = max(ROWS_OF_A_SPLIT, triton.next_power_of_2(triton.cdiv(N, LARGEST_SPLIT)))
    splits = max(1, triton.cdiv(N, split_rows))
    order = labels.new_empty(B * H, N, dtype=torch.int32)
    starts = labels.new_empty(B * H, clusters + 2, dtype=torch.int32)
    tiles = labels.new_empty(B * H, slots, dtype=torch.int32)
    below = labels.new_empty(B * H, splits, clusters + 2, dtype=torch.int32)
    # Few clusters a program, so that few heads already fill the chip; more where there would be too many programs.
    block_c = 16 if clusters <= 512 else 32
    blocks = triton.cdiv(clusters + 2, block_c)
    strides = *labels.stride(), *((0, 0) if mask is None else mask.stride())
    sizes = {"HAS_MASK": mask is not None, "BLOCK_C": block_c, "BLOCK_N": 4096 // block_c}
    with on_device_of(labels):
        if B * H:
            _count_by_cluster_kernel[(B * H * splits * blocks,)](
                labels, mask, below, *strides, H, N, clusters, blocks, splits, split_rows, **sizes
            )
            _sort_by_cluster_kernel[(B * H * splits * blocks,)](
                labels, mask, below, order, starts, tiles, *strides,
                H, N, clusters, slots, blocks, splits, split_rows,
                TILE=tile, BLOCK_S=128, SPLITS=LARGEST_SPLIT, **sizes,
            )  # fmt: skip
    return SortedRows(order, starts, tiles, clusters, tile)


@triton.jit(do_not_specialize=LENGTHS)
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


def cluster_means(rows: torch.Tensor, members: SortedRows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Mean of the rows `(B, H, N, D)`, any strides, of each cluster: `(B · H, C, D)`, 0 for an empty one.

    Computed in float32, rounded once to `dtype`.
    """
    B, H, N, D = rows.shape
    means = rows.new_empty(B * H, members.clusters, D, dtype=dtype)
    block_d = triton.next_power_of_2(D)
    with on_device_of(rows):
        if B * H:
            _cluster_means_kernel[(B * H * members.clusters,)](
                rows, members.order, members.starts, means, *rows.stride(), H, N, D, members.clusters,
                BLOCK_N=max(8, min(64, 4096 // block_d)), BLOCK_D=block_d,
            )  # fmt: skip
    return means
