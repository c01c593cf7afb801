"""Cases of attention within sorted blocks, for the forms that run on a CPU and for the kernels."""

from dataclasses import dataclass, replace

import torch
from support.attention_cases import padding

from hf_effattn.ops import cluster_order, sorted_block_attention


@dataclass(frozen=True)
class Case:
    """Sizes of one test. `block_length=None` means one per row: `⌈n / clusters⌉`."""

    name: str
    B: int = 2
    H: int = 2
    key_heads: int | None = None
    N: int = 37
    D: int = 8
    Dv: int = 8
    clusters: int = 5
    block_length: int | None = None
    window_blocks: int = 2
    causal: bool = False
    strict: bool = False
    gated: bool = False
    masks: str = "none"


CASES = (
    Case("plain"),
    Case("one_word", N=1),
    Case("fewer_words_than_clusters", N=3, clusters=7),
    Case("blocks_of_one", N=11, block_length=1),
    Case("a_multiple", N=40, block_length=8),
    Case("block_beyond_the_words", N=9, block_length=50),
    Case("prime", N=53, clusters=7, H=3),
    Case("one_window_block", window_blocks=1),
    Case("three_window_blocks", window_blocks=3),
    Case("window_beyond_the_blocks", window_blocks=9),
    Case("odd_dimensions", D=5, Dv=3, N=29),
    Case("grouped_heads", H=6, key_heads=2, N=23),
    Case("right_padding", masks="right"),
    Case("left_padding", masks="left"),
    Case("holes", masks="holes", N=61),
    Case("row_fully_padded", masks="row"),
    Case("causal", causal=True),
    Case("causal_and_holes", causal=True, masks="holes", window_blocks=3),
    Case("strict", causal=True, strict=True, block_length=4, N=43),
    Case("strict_and_left_padding", causal=True, strict=True, block_length=3, masks="left"),
    Case("gated", gated=True),
    Case("gated_and_holes", gated=True, masks="holes", H=4, key_heads=2),
    Case("gated_causal", gated=True, causal=True, masks="right"),
    Case("gated_strict", gated=True, causal=True, strict=True, block_length=5, masks="right"),
)


# Two heads per key head where heads are grouped, one text where no mask tells texts apart: the interpreter is slow.
KERNEL_CASES = (
    *(
        replace(
            case,
            N=min(case.N, 23),
            B=1 if case.masks == "none" else 2,
            H=2 if case.key_heads else 1,
            key_heads=case.key_heads and 1,
        )
        for case in CASES
    ),
    # Rows and columns of a block in several tiles, the last of them short.
    Case("tiles_causal", H=1, N=90, clusters=2, causal=True, masks="holes"),
    Case("tiles_strict", H=1, N=80, clusters=2, causal=True, strict=True, block_length=35, masks="left"),
    Case("tiles_wide_window", H=1, N=110, clusters=3, window_blocks=3, masks="right", gated=True),
    Case("head_dim_of_100", B=1, H=1, N=40, clusters=3, D=100, Dv=100),
    Case("head_dim_of_256", B=1, H=1, N=40, clusters=3, D=256, Dv=256),
)


@dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    membership: torch.Tensor | None
    order: torch.Tensor
    labels: torch.Tensor
    block_length: int | torch.Tensor
    key_mask: torch.Tensor | None


def make_inputs(case, dtype=torch.float64, seed=0):
    """Queries, keys and values as transformers hands them over: `(B, N, H, D)` in memory, seen as `(B, H, N, D)`."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(case.B, case.N, heads, dim, dtype=torch.float64, generator=generator).to(dtype).transpose(1, 2)
        for heads, dim in (
            (case.H, case.D),
            (case.key_heads or case.H, case.D),
            (case.key_heads or case.H, case.Dv),
        )
    )
    labels = torch.randint(case.clusters, (case.B, case.N), generator=generator)
    mask = padding(case.masks, case.B, case.N)
    words = torch.full((case.B,), case.N) if mask is None else mask.sum(dim=1)
    length = case.block_length or (-(-words // case.clusters)).clamp(min=1)
    membership = None
    if case.gated:
        logits = 3 * torch.randn(case.B, case.N, case.clusters, generator=generator, dtype=torch.float64)
        membership = logits.softmax(dim=-1).to(dtype)
    return Inputs(query, key, value, membership, cluster_order(labels, mask=mask), labels, length, mask)


def attend(case, inputs, **options):
    return sorted_block_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.order,
        **{
            "block_length": inputs.block_length,
            "window_blocks": case.window_blocks,
            "causal": case.causal,
            "labels": inputs.labels if case.strict else None,
            "key_mask": inputs.key_mask,
            "membership": inputs.membership,
            **options,
        },
    )
