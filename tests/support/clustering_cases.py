"""Cases of neural clustering, for the forms that run on a CPU and for the kernels."""

from dataclasses import dataclass

import torch
from support.attention_cases import padding

from hf_effattn.ops import neural_clustering


@dataclass(frozen=True)
class Case:
    """Sizes of one test, and which similarity of words and centroids counts."""

    name: str
    B: int = 2
    N: int = 23
    k: int = 5
    d: int = 12
    masks: str = "none"
    similarity: str = "dot"
    sharpness: float = 4.0


CASES = tuple(
    Case(f"{name}{'_cosine' if similarity == 'cosine' else ''}", similarity=similarity, **sizes)
    for similarity in ("dot", "cosine")
    for name, sizes in {
        "plain": {},
        "one_word": {"B": 1, "N": 1, "k": 3, "d": 4},
        "one_centroid_and_left_padding": {"B": 3, "N": 50, "k": 1, "d": 7, "masks": "left"},
        "more_centroids_than_words": {"N": 4, "k": 9, "d": 3, "masks": "right"},
        "holes": {"masks": "holes"},
        "row_fully_padded": {"masks": "row"},
    }.items()
)


# More words, centroids and columns than a tile, and fewer.
KERNEL_CASES = tuple(
    Case(f"{name}_{masks}_{similarity}", *sizes, masks, similarity, 3.0 if similarity == "cosine" else 0.5)
    for name, sizes in {"few": (2, 23, 5, 12), "fewer_words": (1, 4, 7, 4), "tiles": (1, 90, 40, 70)}.items()
    for masks in ("none", "right", "left", "holes", "row")
    for similarity in ("dot", "cosine")
)


def make_inputs(
    case: Case, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Words, centroids and the mask of the words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(case.B, case.N, case.d, generator=generator, dtype=torch.float64)
    centroids = torch.randn(case.B, case.k, case.d, generator=generator, dtype=torch.float64)
    return words.to(dtype), centroids.to(dtype), padding(case.masks, case.B, case.N)


def cluster(
    case: Case, words: torch.Tensor, centroids: torch.Tensor, mask: torch.Tensor | None, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Updated centroids and the labels of the words."""
    settings = {"mask": mask, "similarity": case.similarity, "sharpness": case.sharpness, **options}
    return neural_clustering(words, centroids, **settings)
