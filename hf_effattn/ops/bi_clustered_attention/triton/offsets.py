"""How a few queries differ from the means of their clusters, on a GPU; to `torch.compile` it is one op."""

import torch
import triton
import triton.language as tl

from ...kmeans.triton import update_blocks
from ...kmeans.triton.rows import find_rows, finite, load_fit_rows, load_points
from ...shared.triton.chips import block_width, chip_of, on_device_of
from ...shared.triton.launch import kernel


@triton.jit
def _load_labelled(
    query_ptr, labels_ptr, rows_ptr, i_b, o_r, total, fit_rows, stride_query_n, stride_query_d, stride_labels_n, o_d,
    head_dim,
):  # fmt: skip
    """Some columns of fitted rows, and their labels, -1 for a row that does not count."""
    row = load_fit_rows(rows_ptr, i_b, o_r, total, fit_rows)
    b_label = tl.load(labels_ptr + row.to(tl.int64) * stride_labels_n, mask=row >= 0, other=-1).to(tl.int32)
    b_points = load_points(query_ptr, row, row >= 0, o_d, stride_query_n, stride_query_d, head_dim)
    return finite(b_points), b_label


@kernel
def _query_offsets_kernel(
    query_ptr, labels_ptr, rows_ptr, offsets_ptr,
    stride_query_b, stride_query_h, stride_query_n, stride_query_d,
    stride_labels_b, stride_labels_h, stride_labels_n,
    heads, total, fit_rows, clusters, head_dim,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`BLOCK_K` columns of `Q_i - Q̄_l(i)` of the fitted rows in `BLOCK_C` clusters, from the means of these rows.

    Rows that do not count, or whose label is none, get 0 from the programs of the first clusters of a head.
    """
    blocks, parts = tl.cdiv(clusters, BLOCK_C), tl.cdiv(head_dim, BLOCK_K)
    i_block = tl.program_id(0) // parts % blocks
    i_p = (tl.program_id(0) // (parts * blocks)).to(tl.int64)
    i_b, i_h = i_p // heads, i_p % heads
    o_c = i_block * BLOCK_C + tl.arange(0, BLOCK_C)
    o_k = tl.program_id(0) % parts * BLOCK_K + tl.arange(0, BLOCK_K)
    query_ptr += i_b * stride_query_b + i_h * stride_query_h
    labels_ptr += i_b * stride_labels_b + i_h * stride_labels_h
    offsets_ptr += i_p * fit_rows * head_dim
    b_sums = tl.zeros([BLOCK_C, BLOCK_K], tl.float32)
    b_sizes = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, fit_rows, BLOCK_R):
        b_points, b_label = _load_labelled(
            query_ptr, labels_ptr, rows_ptr, i_b, start + tl.arange(0, BLOCK_R), total, fit_rows,
            stride_query_n, stride_query_d, stride_labels_n, o_k, head_dim,
        )  # fmt: skip
        # [BLOCK_C, BLOCK_R]
        b_member = (o_c[:, None] == b_label[None, :]).to(tl.float32)
        b_sizes += tl.sum(b_member, 1)
        b_sums = tl.dot(b_member.to(b_points.dtype), b_points, b_sums, input_precision=PRECISION)
    b_means = b_sums / tl.maximum(b_sizes, 1.0)[:, None]
    for start in range(0, fit_rows, BLOCK_R):
        o_r = start + tl.arange(0, BLOCK_R)
        b_points, b_label = _load_labelled(
            query_ptr, labels_ptr, rows_ptr, i_b, o_r, total, fit_rows,
            stride_query_n, stride_query_d, stride_labels_n, o_k, head_dim,
        )  # fmt: skip
        m_none = (b_label < 0) | (b_label >= clusters)
        # [BLOCK_R, BLOCK_C], [BLOCK_R, BLOCK_K]
        b_member = (b_label[:, None] == o_c[None, :]).to(tl.float32)
        b_offsets = b_points.to(tl.float32) - tl.dot(b_member, b_means, input_precision=PRECISION)
        b_offsets = tl.where(m_none[:, None], 0.0, b_offsets).to(offsets_ptr.dtype.element_ty)
        m_own = tl.where(m_none, i_block == 0, b_label // BLOCK_C == i_block) & (o_r < fit_rows)
        p_offsets = offsets_ptr + o_r.to(tl.int64)[:, None] * head_dim + o_k[None, :]
        tl.store(p_offsets, b_offsets, mask=m_own[:, None] & (o_k < head_dim)[None, :])


@torch.library.custom_op("hf_effattn::query_offsets_triton", mutates_args=())
def query_offsets(
    query: torch.Tensor, labels: torch.Tensor, query_mask: torch.Tensor | None, clusters: int, rows: int
) -> torch.Tensor:
    """`η` `(B, H, n, D)` of `n = min(N, rows)` evenly spread queries, in their dtype."""
    B, H, N, D = query.shape
    offsets = query.new_empty(B, H, min(N, rows), D)
    if offsets.numel() == 0:
        return offsets
    chip, fitted = chip_of(query), find_rows(query, query_mask, rows)
    blocks = update_blocks(block_width(D), query.dtype == torch.float32, chip, clusters)
    # Some columns for each program: more programs share a head, and a second walk leaves registers for no more.
    blocks |= {"BLOCK_C": 32, "BLOCK_K": 16}
    programs = B * H * triton.cdiv(clusters, 32) * triton.cdiv(D, 16)
    with on_device_of(query):
        _query_offsets_kernel[(programs,)](
            query, labels, fitted.fit, offsets, *query.stride(), *labels.stride(),
            H, N, fitted.most, clusters, D,
            PRECISION=chip.dot_precision(torch.float32), **blocks, **chip.all_registers,
        )  # fmt: skip
    return offsets


@query_offsets.register_fake
def _(query, labels, query_mask, clusters, rows):
    B, H, N, D = query.shape
    return query.new_empty(B, H, min(N, rows), D)
