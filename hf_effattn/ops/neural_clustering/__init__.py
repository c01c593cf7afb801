"""Neural clustering: soft memberships of words in centroids, the centroids they make, and a label per word."""

import math
from typing import Any

import torch

from ..shared.arguments import check_alike, check_floats, check_mask, choose_backend
from ..shared.precision import accumulation_dtype
from . import batched, reference

SIMILARITIES = ("dot", "cosine")


def _triton(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from . import triton

    return triton.neural_clustering(*arguments)


def neural_clustering(
    words: torch.Tensor,
    centroids: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    similarity: str = "dot",
    sharpness: float = 1.0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Updated centroids, and the cluster of every word (Source: Wang 2022, Eq. 2 to 4).

    With `φ` the similarity times the sharpness: `U_ij = softmax_j φ(C_i, Z_j)` over the words of a row that count,
    `Ĉ = U Z` and `I_j = argmax_i U_ij`, the first of equals. The gradient of `Ĉ` is exact; labels have none.

    Sizes: `B` batch, `N` words, `d` their width, `k` centroids. The fast forms keep nothing of size `k×N`.

    Args:
        words (`torch.Tensor`): `(B, N, d)`, the paper's `Z = X W^C`, any strides.
        centroids (`torch.Tensor`): `(B, k, d)`, in the dtype of `words`.
        mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other words have no influence and label 0.
        similarity (`str`): `"dot"`, the paper's inner product, or `"cosine"`; a word of length 0 is similar to none.
        sharpness (`float`): factor on the similarity inside the softmax; the paper's is 1.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.

    Returns:
        `Ĉ` `(B, k, d)` in the dtype of `words`, 0 in a row without words; labels `(B, N)`, int64 in `0 .. k - 1`.

    Raises:
        ValueError: sizes, dtypes or devices that do not fit together, an unknown similarity or backend, a sharpness
            that is not above 0 or not finite.
        TypeError: words that are not floating-point, a mask that is not boolean.
    """
    for name, tensor in (("words", words), ("centroids", centroids)):
        check_floats(name, tensor, "(B, rows, width)")
    check_alike("centroids", centroids, "words", words)
    if centroids.shape[0] != words.shape[0] or centroids.shape[2] != words.shape[2]:
        raise ValueError(
            f"centroids {tuple(centroids.shape)} must agree with words {tuple(words.shape)} in B and width"
        )
    if centroids.shape[1] == 0 or words.shape[2] == 0:
        raise ValueError("neural clustering needs at least one centroid and a width of at least 1")
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity must be one of {', '.join(map(repr, SIMILARITIES))}, got {similarity!r}")
    if not 0 < sharpness < math.inf:
        raise ValueError(f"sharpness must be above 0 and finite, got {sharpness}")
    check_mask("mask", mask, words[:, None])
    forms = reference.neural_clustering, batched.neural_clustering, _triton
    run = choose_backend(backend, forms, words, centroids, any_width=True)
    cosine = similarity == "cosine"
    # In float32 and rounded once, so that autocast changes nothing: it takes norms in 16 bits on a CPU, not on a GPU.
    centroids = centroids.to(accumulation_dtype(words.dtype))
    directions = float(sharpness) * (reference.unit(centroids) if cosine else centroids)
    return run(words, directions.to(words.dtype), cosine, mask)
