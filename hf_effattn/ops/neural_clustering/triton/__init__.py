"""Neural clustering on a GPU: launchers, and what torch needs to know of the op.

Two passes over the words: centroids with the logarithm of their sum of weights, then labels, both from the same scores
as long as these fit `SCORE_BYTES`. Nothing is asked of the host, so that CUDA graphs can record it, and runs repeat
bit for bit.
"""

from dataclasses import dataclass

import torch

from ...shared.gradients import register_op
from ...shared.tables import empty_gradient
from ...shared.triton.centroids import split_count
from ...shared.triton.chips import chip_of
from ...shared.triton.recorded import recorded
from ..reference import Inputs
from .kernels import (
    _neural_clustering_bwd_direction_kernel,
    _neural_clustering_bwd_score_kernel,
    _neural_clustering_bwd_word_kernel,
    _neural_clustering_fwd_label_kernel,
    _neural_clustering_fwd_length_kernel,
    _neural_clustering_fwd_score_kernel,
    _neural_clustering_fwd_update_kernel,
)

# Bytes of the scores that are in memory at a time: they stay in a large chip's cache, and memory does not grow with
# words times centroids.
SCORE_BYTES = 32 * 2**20


def _config(tensor: torch.Tensor, stored: torch.dtype) -> dict:
    """Block sizes: words, centroids and columns of a tile whose scores are stored as `stored`."""
    chip = chip_of(tensor)
    small = stored.itemsize == 4
    return {
        "WORDS": 32 if small else 64,
        "CENTROIDS": 32 if small else 64,
        "BLOCK_D": 64 if small else 128,
        "PRECISION": chip.dot_precision(tensor.dtype),
        # AMD's warps are twice as wide.
        "num_warps": 8 if chip.name == "cuda" else 4,
        **chip.all_registers,
        "num_stages": 2,
    }


@dataclass(frozen=True)
class Steps:
    """How a pass goes over the words: some of every row in each step."""

    config: dict  # the tiles
    length: int  # words of a row
    blocks: int  # tiles of centroids
    rows: int  # words of every row whose scores are in memory at a time, a multiple of a tile's
    splits: int  # parts of these words that programs sum side by side
    split_length: int  # words of a part, a multiple of a tile's

    @classmethod
    def over(cls, words: torch.Tensor, clusters: int, config: dict, bytes_per_score: int) -> "Steps":
        """Steps whose scores stay within `SCORE_BYTES`, or those of one tile of words."""
        B, N, d = words.shape
        tile = config["WORDS"]
        blocks = -(-clusters // config["CENTROIDS"])
        fitting = SCORE_BYTES // (B * blocks * config["CENTROIDS"] * bytes_per_score * tile)
        rows = min(-(-N // tile), max(1, fitting)) * tile
        splits = split_count(B * blocks * -(-d // config["BLOCK_D"]), rows, tile)
        length = -(-rows // (splits * tile)) * tile
        return cls(config, N, blocks, rows, -(-rows // length), length)

    def each(self) -> list[dict[str, int]]:
        """The words of every step, and their tiles."""
        ends = ((first, min(first + self.rows, self.length)) for first in range(0, self.length, self.rows))
        return [
            {"first_row": first, "last_row": last, "tiles": -(-(last - first) // self.config["WORDS"])}
            for first, last in ends
        ]

    def as_arguments(self) -> tuple[dict[str, int], dict[str, int]]:
        """What kernels are told of the scores, and those that sum over a part of the words."""
        parts = {"splits": self.splits, "split_length": self.split_length}
        return {"blocks": self.blocks, "rows": self.rows}, parts

    def scores(self, words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a number per word of a step and centroid."""
        return words.new_empty(words.shape[0], self.rows, self.blocks * self.config["CENTROIDS"], dtype=dtype)


@recorded
def _forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Ĉ` in the dtype of the words, labels, `Ĉ` in float32, base-2 log-sum-exps `(B, k)`, and `1 / |Z_j|`."""
    words, directions, cosine, mask = x
    B, N, d = words.shape
    k = directions.shape[1]
    labels = words.new_zeros(B, N, dtype=torch.int64)
    inverse = words.new_zeros(B, N if cosine else 0, dtype=torch.float32)
    if words.numel() == 0:
        exact, total = (words.new_zeros(*shape, dtype=torch.float32) for shape in ((B, k, d), (B, k)))
        return exact.to(words.dtype, copy=True), labels, exact, total, inverse
    config = _config(words, words.dtype)
    # For kernels that hold several blocks of columns in registers instead of one tile's sum.
    narrow = config | {"BLOCK_D": config["BLOCK_D"] // 2}
    steps = Steps.over(words, k, config, torch.float32.itemsize)
    sizes, parts = steps.as_arguments()
    tile, columns = config["WORDS"], -(-d // config["BLOCK_D"])
    scores = steps.scores(words, torch.float32)
    partial = words.new_empty(B, k, steps.splits, d, dtype=torch.float32)
    lse = words.new_empty(B, k, steps.splits, columns, dtype=torch.float32)
    mask_strides = (0, 0) if mask is None else mask.stride()

    def score(step: dict[str, int]) -> None:
        _neural_clustering_fwd_score_kernel[(B * step["tiles"] * steps.blocks,)](
            words, directions, mask, inverse, scores, *words.stride(), *directions.stride(), *mask_strides, N, k, d,
            **step, **sizes, COSINE=cosine, **narrow,
        )  # fmt: skip

    if cosine:
        tiles = -(-N // tile)
        _neural_clustering_fwd_length_kernel[(B * tiles,)](
            words, mask, inverse, *words.stride(), *mask_strides, N, d, tiles, WORDS=tile,
            BLOCK_D=config["BLOCK_D"],
        )  # fmt: skip
    for step in steps.each():
        score(step)
        _neural_clustering_fwd_update_kernel[(B * steps.blocks * steps.splits, columns)](
            words, mask, scores, partial, lse, *words.stride(), *mask_strides, k, d, step["first_row"],
            step["last_row"], **sizes, **parts, **config,
        )  # fmt: skip
    lse = lse[..., 0]
    highest = lse.amax(dim=2, keepdim=True)
    shares = torch.exp2(lse - highest)
    total = shares.sum(dim=2)
    exact = torch.einsum("bks,bksd->bkd", shares / total[..., None], partial)
    total = highest[..., 0] + total.log2()
    # Backwards: the scores of the last words are still there.
    for place, step in enumerate(reversed(steps.each())):
        if place > 0:
            score(step)
        _neural_clustering_fwd_label_kernel[(B * step["tiles"],)](
            scores, total, labels, N, k, **step, **sizes, WORDS=tile, CENTROIDS=config["CENTROIDS"],
            num_warps=config["num_warps"], **chip_of(words).all_registers,
        )  # fmt: skip
    return exact.to(words.dtype, copy=True), labels, exact, total, inverse


def _fake(x: Inputs) -> tuple[torch.Tensor, ...]:
    words, directions = x.words, x.directions
    B, N, _ = words.shape
    return (
        directions.new_empty(directions.shape),
        words.new_empty(B, N, dtype=torch.int64),
        directions.new_empty(directions.shape, dtype=torch.float32),
        directions.new_empty(directions.shape[:2], dtype=torch.float32),
        words.new_empty(B, N if x.cosine else 0, dtype=torch.float32),
    )


@recorded
def gradients(
    grad_updated: torch.Tensor, exact: torch.Tensor, total: torch.Tensor, inverse: torch.Tensor, x: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of words and directions, labels held fixed."""
    words, directions, cosine, mask = x
    B, N, d = words.shape
    k = directions.shape[1]
    grad_words = words.new_empty(words.shape)
    if words.numel() == 0:
        return grad_words, directions.new_zeros(directions.shape)
    # One word's share among many, times its gradient, underflows to 0 in float16; bfloat16 has float32's exponents.
    stored = torch.float32 if words.dtype == torch.float16 else words.dtype
    config = _config(words, stored)
    narrow = config | {"BLOCK_D": config["BLOCK_D"] // 2}
    steps = Steps.over(words, k, config, 2 * stored.itemsize)
    sizes, parts = steps.as_arguments()
    columns = -(-d // config["BLOCK_D"])
    weights, grad_scores = steps.scores(words, stored), steps.scores(words, stored)
    pull = words.new_empty(B, steps.rows if cosine else 0, steps.blocks, dtype=torch.float32)
    partial = words.new_empty(B, steps.splits, k, d, dtype=torch.float32)
    mean = (grad_updated.float() * exact).sum(dim=2)
    mask_strides = (0, 0) if mask is None else mask.stride()
    strides = *words.stride(), *directions.stride(), *mask_strides, *grad_updated.stride()
    for step in steps.each():
        _neural_clustering_bwd_score_kernel[(B * step["tiles"] * steps.blocks,)](
            words, directions, mask, inverse, total, grad_updated, mean, weights, grad_scores, pull, *strides,
            N, k, d, **step, **sizes, COSINE=cosine, **narrow,
        )  # fmt: skip
        _neural_clustering_bwd_direction_kernel[(B * steps.blocks * steps.splits, columns)](
            words, mask, grad_scores, partial, *words.stride(), *mask_strides, k, d, step["first_row"],
            step["last_row"], **sizes, **parts, **config,
        )  # fmt: skip
        _neural_clustering_bwd_word_kernel[(B * step["tiles"], columns)](
            words, directions, mask, grad_updated, weights, grad_scores, pull, grad_words, *strides,
            *grad_words.stride(), k, d, **step, **sizes, COSINE=cosine, **config,
        )  # fmt: skip
    return grad_words, partial.sum(dim=1).to(directions.dtype)


neural_clustering = register_op(
    "neural_clustering_triton", Inputs, _forward, gradients, ("words", "directions"),
    fake=_fake, shown=2, keeps=slice(2, None), empty=empty_gradient,
)  # fmt: skip
