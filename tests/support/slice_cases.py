"""Cases of slice attention, for the forms that run on a CPU and for the kernels."""

from dataclasses import dataclass

import torch
from support.attention_cases import padding

from hf_effattn.ops import slice_attention


@dataclass(frozen=True)
class Case:
    """Sizes of one test; `key_heads=None` means as many heads of keys and values as of queries."""

    name: str
    B: int = 2
    H: int = 2
    key_heads: int | None = None
    N: int = 37
    D: int = 16
    Dv: int = 16
    L: int = 8
    ratio: float = 1
    causal: bool = False
    positions: bool = False
    sinks: bool = False
    masks: str = "none"

    @property
    def window(self) -> int:
        return round(self.L * self.ratio)

    @property
    def extension(self) -> int:
        return (self.window - self.L) // 2


CASES = (
    Case("plain"),
    Case("one_token", N=1, L=4),
    Case("slices_of_one", L=1),
    Case("slices_of_one_extended", L=1, ratio=3),
    Case("one_slice", N=11, L=64, ratio=2, positions=True, sinks=True),
    Case("full_last_slice", N=40),
    Case("extended", ratio=2, positions=True),
    Case("extension_of_one_token", L=5, ratio=1.4, positions=True),
    Case("whole_neighbours", ratio=3, N=53),
    Case("causal", causal=True, positions=True),
    Case("causal_extended", causal=True, ratio=3, positions=True, N=41),
    Case("sinks", sinks=True, ratio=2, positions=True),
    Case("causal_sinks", sinks=True, causal=True, ratio=1.5),
    Case("odd_dimensions", D=20, Dv=12, N=41, L=7, positions=True),
    Case("right_padding", masks="right", ratio=2, positions=True),
    Case("left_padding", masks="left", ratio=2),
    Case("holes", masks="holes", ratio=3, N=61, sinks=True, positions=True),
    Case("row_fully_padded", masks="row", sinks=True, causal=True),
    Case("grouped_heads", H=6, key_heads=2, ratio=2, positions=True, sinks=True),
    Case("one_key_head_and_holes", H=3, key_heads=1, N=29, masks="holes", causal=True, positions=True),
)


KERNEL_CASES = (
    *(case for case in CASES if case.H < 6),
    Case("grouped_heads", B=1, H=4, key_heads=2, N=19, ratio=2, positions=True, sinks=True, masks="holes"),
    Case("a_slice_of_several_tiles", B=1, N=150, L=140, ratio=1.1, positions=True, sinks=True),
    Case("causal_slice_of_several_tiles", B=1, N=150, L=80, ratio=1.5, positions=True, causal=True),
    Case("many_sinks", B=1, N=150, L=8, sinks=True),
)


def make_inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, torch.Tensor]:
    """Query, key and value as transformers hands them over: `(B, N, H, D)` in memory, seen as `(B, H, N, D)`."""
    generator = torch.Generator().manual_seed(seed)
    heads = case.key_heads or case.H

    def draw(*sizes):
        return torch.randn(*sizes, dtype=torch.float64, generator=generator).to(dtype)

    inputs = {
        "query": draw(case.B, case.N, case.H, case.D).transpose(1, 2),
        "key": draw(case.B, case.N, heads, case.D).transpose(1, 2),
        "value": draw(case.B, case.N, heads, case.Dv).transpose(1, 2),
    }
    if case.positions:
        inputs["query_positions"] = draw(case.H, case.L, case.D)
        inputs["key_positions"] = draw(heads, case.window, case.D)
    mask = padding(case.masks, case.B, case.N)
    if mask is not None:
        inputs["key_mask"] = mask
    if case.sinks:
        inputs["sink_mask"] = torch.zeros(case.B, case.N, dtype=torch.bool)
        inputs["sink_mask"][:, 0] = True
        inputs["sink_mask"][0, -1] = True
        inputs["sink_mask"][-1, case.N // 3] = True
        if case.name == "many_sinks":
            inputs["sink_mask"][:, ::2] = True
    return inputs


def attend(case: Case, inputs: dict[str, torch.Tensor], **options: object) -> tuple[torch.Tensor, ...]:
    return slice_attention(
        **inputs, slice_length=case.L, extension_ratio=case.ratio, causal=case.causal, return_lse=True, **options
    )
