"""Clustering the queries on a GPU: hash codes, or K-means in the keys' metric."""

import torch
import triton.language as tl

from ...kmeans.reference import as_sign
from ...kmeans.sampling import most_fit_rows
from ...kmeans.triton import assign, fit, own_clusters
from ...kmeans.triton.rows import Rows, find_rows, finite, load_fit_rows, load_fitted, load_points, sample_mean
from ...shared.gradients import register_op
from ...shared.triton.chips import block_width, chip_of
from ...shared.triton.launch import kernel
from ...shared.triton.recorded import recorded
from ..reference import METRIC_RIDGE, Inputs, empty_labels

BLOCK_I = 64  # rows of products that a program adds up
FEWEST = 256  # fitted keys of a part


@kernel
def _cluster_queries_planes_kernel(planes_ptr, numbers, seed, BLOCK: tl.constexpr):
    """Independent numbers, each a sum of 12 uniform ones: normal enough for directions, without sine and cosine."""
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.full([BLOCK], -6.0, tl.float32)
    for part in range(3):
        a, b, c, d = tl.rand4x(seed, 3 * o_n + part)
        b_sum += a + b + c + d
    tl.store(planes_ptr + o_n, b_sum, mask=o_n < numbers)


def draw_planes(query: torch.Tensor, bits: int, seed: int) -> torch.Tensor:
    """Hash planes `(D, bits)`, drawn on the GPU at every call: a CUDA graph cannot capture a copy from the host.

    They are not those of the other forms, whose generator runs on the host only.
    """
    planes = query.new_empty(query.shape[3], bits)
    _cluster_queries_planes_kernel[(-(-planes.numel() // 1024),)](planes, planes.numel(), seed, BLOCK=1024)
    return planes


@kernel
def _cluster_queries_products_kernel(
    key_ptr, stride_key_b, stride_key_h, stride_key_m, stride_key_d,
    rows_ptr, counts_ptr, products_ptr, sums_ptr, heads, total, fit_rows, splits, head_dim,
    WIDE: tl.constexpr, PART: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`Σ x_i^T x` and `Σ x` of one part of the fitted keys, some columns `x_i` a program.

    Products of 16-bit keys are exact; of others (`WIDE`) an origin near the mean is subtracted first, or the product
    of the sums would eat the digits of the sum of the products.
    """
    blocks = tl.cdiv(head_dim, BLOCK_I)
    i_p = (tl.program_id(0) // (blocks * splits)).to(tl.int64)
    i_split = tl.program_id(0) // blocks % splits
    i_b = i_p // heads
    o_i = tl.program_id(0) % blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    o_d = tl.arange(0, BLOCK_D)
    key_ptr += i_b * stride_key_b + i_p % heads * stride_key_h
    if WIDE:
        fitted = load_fitted(counts_ptr, i_b, total, fit_rows)
        origin_i = sample_mean(
            key_ptr, stride_key_m, stride_key_d, rows_ptr, i_b, total, fit_rows, fitted, o_i, head_dim
        )  # fmt: skip
        origin_d = sample_mean(
            key_ptr, stride_key_m, stride_key_d, rows_ptr, i_b, total, fit_rows, fitted, o_d, head_dim
        )  # fmt: skip
    products = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    # Every row of the sums is the same: a product with ones.
    sums = tl.zeros([16, BLOCK_D], tl.float32)
    for start in range(i_split * PART, tl.minimum((i_split + 1) * PART, fit_rows), BLOCK_R):
        row = load_fit_rows(rows_ptr, i_b, start + tl.arange(0, BLOCK_R), total, fit_rows)
        valid = row >= 0
        b_i = finite(load_points(key_ptr, row, valid, o_i, stride_key_m, stride_key_d, head_dim))
        b_d = finite(load_points(key_ptr, row, valid, o_d, stride_key_m, stride_key_d, head_dim))
        if WIDE:
            b_i = tl.where(valid[:, None], b_i - origin_i[None, :], 0.0)
            b_d = tl.where(valid[:, None], b_d - origin_d[None, :], 0.0)
        products = tl.dot(tl.trans(b_i), b_d, products, input_precision=PRECISION)
        b_ones = tl.full([16, BLOCK_R], 1.0, tl.float32).to(b_d.dtype)
        sums = tl.dot(b_ones, b_d, sums, input_precision=PRECISION)
    i_part = i_p * splits + i_split
    m_d = o_d < head_dim
    p_products = products_ptr + (i_part * head_dim + o_i)[:, None] * head_dim + o_d[None, :]
    tl.store(p_products, products, mask=(o_i < head_dim)[:, None] & m_d[None, :])
    tl.store(sums_ptr + i_part * head_dim + o_d, tl.sum(sums, 0) / 16, mask=m_d & (tl.program_id(0) % blocks == 0))


@kernel
def _cluster_queries_metric_kernel(
    products_ptr, sums_ptr, counts_ptr, metric_ptr, heads, total, fit_rows, splits, head_dim,
    RIDGE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A few rows of `G`: the covariance of the fitted keys, its mean diagonal 1, and the ridge."""
    blocks = tl.cdiv(head_dim, BLOCK_I)
    i_p = (tl.program_id(0) // blocks).to(tl.int64)
    o_i = tl.program_id(0) % blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    o_d = tl.arange(0, BLOCK_D)
    m_i, m_d = o_i < head_dim, o_d < head_dim
    products = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    squares, sums, sums_i = (
        tl.zeros([BLOCK_D], tl.float32),
        tl.zeros([BLOCK_D], tl.float32),
        tl.zeros([BLOCK_I], tl.float32),
    )
    for split in range(0, splits):
        i_part = i_p * splits + split
        p_products = products_ptr + i_part * head_dim * head_dim
        p_rows = p_products + o_i[:, None] * head_dim + o_d[None, :]
        products += tl.load(p_rows, mask=m_i[:, None] & m_d[None, :], other=0.0)
        squares += tl.load(p_products + o_d * (head_dim + 1), mask=m_d, other=0.0)
        sums += tl.load(sums_ptr + i_part * head_dim + o_d, mask=m_d, other=0.0)
        sums_i += tl.load(sums_ptr + i_part * head_dim + o_i, mask=m_i, other=0.0)
    count = tl.maximum(load_fitted(counts_ptr, i_p // heads, total, fit_rows), 1).to(tl.float32)
    means, means_i = sums / count, sums_i / count
    size = tl.sum(tl.maximum(squares / count - means * means, 0.0), 0) / head_dim
    covariance = (products / count - means_i[:, None] * means[None, :]) / tl.where(size > 0, size, 1.0)
    covariance += tl.where(o_i[:, None] == o_d[None, :], RIDGE, 0.0)
    p_metric = metric_ptr + (i_p * head_dim + o_i)[:, None] * head_dim + o_d[None, :]
    tl.store(p_metric, covariance, mask=m_i[:, None] & m_d[None, :])


def keys_metric(key: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`G` `(B · Hk, D, D)` of the fitted rows of keys `(B, Hk, M, D)`."""
    B, heads, _, D = key.shape
    chip, block_d, wide = chip_of(key), block_width(D), key.dtype == torch.float32
    # The length of a part does not depend on the rows, so padding changes no sum. A part is as large as its products.
    part = max(FEWEST, 4 * block_d)
    splits = -(-rows.most // part)
    metric, products, sums = (
        torch.empty(B * heads, *shape, D, dtype=torch.float32, device=key.device)
        for shape in ((D,), (splits, D), (splits,))
    )
    most = 64 if wide or not chip.is_large else 256 if block_d == 64 else 128
    block_i = min(BLOCK_I if block_d <= 128 or not wide else BLOCK_I // 2, block_d)
    _cluster_queries_products_kernel[(B * heads * splits * -(-D // block_i),)](
        key, *key.stride(), rows.fit, rows.counts, products, sums, heads, rows.total, rows.most, splits, D,
        WIDE=wide, PART=part, BLOCK_R=max(16, min(most, 64 * most // block_d)), BLOCK_I=block_i, BLOCK_D=block_d,
        PRECISION=chip.dot_precision(torch.float32), num_warps=8, num_stages=1, **chip.all_registers,
    )  # fmt: skip
    _cluster_queries_metric_kernel[(B * heads * -(-D // 16),)](
        products, sums, rows.counts, metric, heads, rows.total, rows.most, splits, D,
        RIDGE=METRIC_RIDGE, BLOCK_I=16, BLOCK_D=block_d,
    )  # fmt: skip
    return metric


def share_rows(
    query: torch.Tensor, key: torch.Tensor, query_mask: torch.Tensor | None, key_mask: torch.Tensor | None
) -> bool:
    """Whether queries and keys have the same rows that count, as in self-attention."""
    if query_mask is None or key_mask is None:
        return query.shape[2] == key.shape[2] and query_mask is key_mask
    same_layout = query_mask.shape == key_mask.shape and query_mask.stride() == key_mask.stride()
    return same_layout and query_mask.data_ptr() == key_mask.data_ptr()


@recorded
def _forward(x: Inputs) -> torch.Tensor:
    """Labels `(B, H, N)`; a masked query has label 0."""
    query, key, key_mask, query_mask, clusters, method, iterations, bits, fit_queries, seed = x
    B, H, N, _ = query.shape
    if query.numel() == 0 or clusters >= N:
        return own_clusters(query, query_mask)
    most = most_fit_rows(clusters, fit_queries)
    rows = find_rows(query, query_mask, most)
    points, metric = query, None
    if method == "lsh":
        points = as_sign(query @ draw_planes(query, bits, seed))
    elif key is not None and key.shape[2]:
        key_rows = rows if share_rows(query, key, query_mask, key_mask) else find_rows(key, key_mask, most)
        metric = keys_metric(key, key_rows)
    centroids = fit(points, rows, metric, clusters, iterations, seed, binary=method == "lsh")
    labels = torch.empty(B, H, N, dtype=torch.int64, device=query.device)
    assign(points, rows, centroids, labels)
    return labels


cluster_queries = register_op("cluster_queries_triton", Inputs, _forward, fake=empty_labels)
