"""Neural clustering on a GPU: launchers, and what torch needs to know of the op.

Two passes over the words: centroids with the logarithm of their sum of weights, then labels. Nothing is asked of the
host, so that CUDA graphs can record it, and runs repeat bit for bit.
"""

import torch
import triton

from ..chips import chip_of, on_device_of
from ..sorted_clusters.triton_centroids import split_count
from .triton_backward import _neural_clustering_bwd_direction_kernel, _neural_clustering_bwd_word_kernel
from .triton_forward import (
    _neural_clustering_fwd_label_kernel,
    _neural_clustering_fwd_length_kernel,
    _neural_clustering_fwd_update_kernel,
)

BLOCK_D = 64  # columns of the words that one program sums


def _config(words: torch.Tensor) -> dict:
    """Block sizes: a tile of `ROWS` against `COLUMNS`, some columns of both sides at a time."""
    wide = words.element_size() == 2
    return {
        "ROWS": 64 if wide else 32,
        "COLUMNS": 64 if wide else 32,
        "PRECISION": chip_of(words).dot_precision(words.dtype),
        "num_warps": 8,
        **chip_of(words).all_registers,
        "num_stages": 2,
    }


def _strides(words: torch.Tensor, directions: torch.Tensor, mask: torch.Tensor | None) -> tuple[int, ...]:
    return *words.stride(), *directions.stride(), *((0, 0) if mask is None else mask.stride())


def _split(words: torch.Tensor, clusters: int, config: dict) -> tuple[int, int, int]:
    """Tiles of centroids, parts of the words, and words of a part, a multiple of a tile's columns."""
    B, N, d = words.shape
    tiles = triton.cdiv(clusters, config["ROWS"])
    splits = split_count(B * tiles * triton.cdiv(d, BLOCK_D), N, config["COLUMNS"])
    length = triton.cdiv(triton.cdiv(N, splits), config["COLUMNS"]) * config["COLUMNS"]
    return tiles, triton.cdiv(N, length), length


@torch.library.custom_op("hf_effattn::neural_clustering_triton", mutates_args=())
def _forward(
    words: torch.Tensor, directions: torch.Tensor, cosine: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Ĉ` in the dtype of the words, labels, `Ĉ` in float32, base-2 log-sum-exps `(B, k)`, and `1 / |Z_j|`."""
    B, N, d = words.shape
    k = directions.shape[1]
    labels = words.new_zeros(B, N, dtype=torch.int64)
    inverse = words.new_zeros(B, N if cosine else 0, dtype=torch.float32)
    if words.numel() == 0:
        exact, total = (words.new_zeros(*shape, dtype=torch.float32) for shape in ((B, k, d), (B, k)))
        return exact.to(words.dtype, copy=True), labels, exact, total, inverse
    config = _config(words)
    tiles, splits, length = _split(words, k, config)
    partial = words.new_empty(B, k, splits, d, dtype=torch.float32)
    lse = words.new_empty(B, k, splits, dtype=torch.float32)
    strides = _strides(words, directions, mask)
    flags = {"COSINE": cosine, "HAS_MASK": mask is not None}
    row_tiles = triton.cdiv(N, config["ROWS"])
    with on_device_of(words):
        if cosine:
            _neural_clustering_fwd_length_kernel[(B * row_tiles,)](
                words, mask, inverse, *words.stride(), *strides[6:], N, d, row_tiles,
                HAS_MASK=mask is not None, ROWS=config["ROWS"], BLOCK_D=BLOCK_D,
            )  # fmt: skip
        _neural_clustering_fwd_update_kernel[(B * tiles * splits, triton.cdiv(d, BLOCK_D))](
            words, directions, mask, inverse, partial, lse, *strides, N, k, d, tiles, splits, length,
            BLOCK_D=BLOCK_D, **flags, **config,
        )  # fmt: skip
    highest = lse.amax(dim=2, keepdim=True)
    shares = torch.exp2(lse - highest)
    total = shares.sum(dim=2)
    with torch.autocast(words.device.type, enabled=False):
        exact = torch.einsum("bks,bksd->bkd", shares / total[..., None], partial)
    total = highest[..., 0] + total.log2()
    with on_device_of(words):
        _neural_clustering_fwd_label_kernel[(B * row_tiles,)](
            words, directions, mask, inverse, total, labels, *strides, N, k, d, row_tiles, **flags, **config
        )
    return exact.to(words.dtype, copy=True), labels, exact, total, inverse


@_forward.register_fake
def _(words, directions, cosine, mask):
    B, N, _ = words.shape
    return (
        directions.new_empty(directions.shape),
        words.new_empty(B, N, dtype=torch.int64),
        directions.new_empty(directions.shape, dtype=torch.float32),
        directions.new_empty(directions.shape[:2], dtype=torch.float32),
        words.new_empty(B, N if cosine else 0, dtype=torch.float32),
    )


@torch.library.custom_op("hf_effattn::neural_clustering_triton_backward", mutates_args=())
def _backward_op(
    grad_updated: torch.Tensor,
    words: torch.Tensor,
    directions: torch.Tensor,
    exact: torch.Tensor,
    total: torch.Tensor,
    inverse: torch.Tensor,
    cosine: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of words and directions, labels held fixed."""
    B, N, d = words.shape
    k = directions.shape[1]
    grad_words = words.new_empty(words.shape)
    if words.numel() == 0:
        return grad_words, directions.new_zeros(directions.shape)
    config = _config(words)
    config |= {"COLUMNS": config["COLUMNS"] // 2}
    tiles, splits, length = _split(words, k, config)
    partial = words.new_empty(B, splits, k, d, dtype=torch.float32)
    mean = (grad_updated.float() * exact).sum(dim=2)
    strides = *_strides(words, directions, mask), *grad_updated.stride()
    flags = {"COSINE": cosine, "HAS_MASK": mask is not None, "BLOCK_D": BLOCK_D}
    row_tiles = triton.cdiv(N, config["ROWS"])
    columns = triton.cdiv(d, BLOCK_D)
    with on_device_of(words):
        _neural_clustering_bwd_direction_kernel[(B * tiles * splits, columns)](
            words, directions, mask, inverse, total, grad_updated, mean, partial, *strides,
            N, k, d, tiles, splits, length, **flags, **config,
        )  # fmt: skip
        _neural_clustering_bwd_word_kernel[(B * row_tiles, columns)](
            words, directions, mask, inverse, total, grad_updated, mean, grad_words, *strides, *grad_words.stride(),
            N, k, d, row_tiles, **flags, **config,
        )  # fmt: skip
    return grad_words, partial.sum(dim=1).to(directions.dtype)


@_backward_op.register_fake
def _(grad_updated, words, directions, *settings):
    return words.new_empty(words.shape), directions.new_empty(directions.shape)


def _setup_context(ctx, inputs, output) -> None:
    words, directions, cosine, mask = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(words, directions, *output[2:], mask)
    ctx.cosine = cosine


def _backward(ctx, grad_updated, *nothing):
    words, directions, exact, total, inverse, mask = ctx.saved_tensors
    grads = _backward_op(grad_updated, words, directions, exact, total, inverse, ctx.cosine, mask)
    return (*grads, None, None)


_forward.register_autograd(_backward, setup_context=_setup_context)


def neural_clustering(
    words: torch.Tensor, directions: torch.Tensor, cosine: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ĉ` `(B, k, d)` and labels `(B, N)`."""
    updated, labels, *_ = _forward(words, directions, cosine, mask)
    return updated, labels
