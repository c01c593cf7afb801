"""What a slice of rows can be turned into: one embedding, or rows mixed by an MLP over its places.

Sizes: `B` batch, `N` rows, `S` slices of `L` rows, `d` width.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from ...ops.shared.precision import accumulation_dtype
from .configuration_cst import CSTConfig


def in_slices(rows: torch.Tensor, slice_length: int, fill: float = 0.0) -> torch.Tensor:
    """`(B, N, ...)` as `(B, S, L, ...)`; a short last slice is filled up."""
    missing = -rows.shape[1] % slice_length
    if missing:
        rows = F.pad(rows, (*[0, 0] * (rows.ndim - 2), 0, missing), value=fill)
    return rows.unflatten(1, (-1, slice_length))


def slice_mask(mask: torch.Tensor | None, slice_length: int) -> torch.Tensor | None:
    """Which slices have a token, `(B, S)`."""
    return None if mask is None else in_slices(mask, slice_length, False).any(dim=2)


def add_to_slices(rows: torch.Tensor, coarse: torch.Tensor, slice_length: int) -> torch.Tensor:
    """`ψ`: the slices' rows `(B, S, d)` added to the rows `(B, N, d)` of each slice (Eq. 10)."""
    if rows.shape[1] % slice_length == 0:
        return (rows.unflatten(1, (-1, slice_length)) + coarse[:, :, None]).flatten(1, 2)
    of_row = torch.arange(rows.shape[1], device=rows.device) // slice_length
    return rows + coarse.index_select(1, of_row)


class SlicePooling(nn.Module):
    """`φ`: one embedding for each slice, from its tokens only (Lee 2023, before Eq. 9 and A.6.2)."""

    def __init__(self, config: CSTConfig, slice_length: int) -> None:
        super().__init__()
        self.kind, self.slice_length = config.pooling, slice_length
        if self.kind == "linear":
            # A convolution whose kernel and stride are a slice.
            self.projection = nn.Linear(slice_length * config.hidden_size, config.hidden_size)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Pool every slice.

        Args:
            rows (`torch.Tensor`): `(B, N, d)`.
            mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.

        Returns: `(B, S, d)`; 0 for a slice without a token (with `"linear"`: what the projection makes of zeros).
        """
        if mask is None and rows.shape[1] % self.slice_length:
            mask = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        slices = in_slices(rows, self.slice_length)
        counted = None if mask is None else in_slices(mask, self.slice_length, False)[..., None]
        if self.kind == "max":
            if counted is None:
                return slices.amax(dim=2)
            largest = slices.masked_fill(~counted, torch.finfo(slices.dtype).min).amax(dim=2)
            return largest * counted.any(dim=2)
        if counted is not None:
            slices = slices.masked_fill(~counted, 0.0)
        if self.kind == "linear":
            return self.projection(slices.flatten(2))
        sizes = self.slice_length if counted is None else counted.sum(dim=2).clamp(min=1)
        return (slices.sum(dim=2, dtype=accumulation_dtype(slices.dtype)) / sizes).to(slices.dtype)


class MaskedLinear(nn.Linear):
    """A linear layer of which some weights can be left out."""

    def forward(self, rows: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(rows, self.weight if kept is None else self.weight * kept, self.bias)


class SliceMLP(nn.Module):
    """Local mixing by a two-layer MLP over the places of a slice (Lee 2023, A.6.2).

    Causal (beyond the paper, which uses it for classification only): hidden unit `j` of `h` belongs to place
    `⌊j L / h⌋`, reads the places up to it and writes to those from it on, so that no place reads a later one.
    """

    def __init__(self, config: CSTConfig) -> None:
        super().__init__()
        L, hidden = config.slice_lengths[0], config.local_mixing_size
        self.slice_length = L
        self.reader, self.writer = MaskedLinear(L, hidden), MaskedLinear(hidden, L)
        self.activation = ACT2FN[config.hidden_act]
        self.causal = config.is_decoder

    def forward(self, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Mixes the rows `(B, N, d)` of each slice; masked rows are read as 0 and come back as 0."""
        length = rows.shape[1]
        if mask is not None:
            rows = rows.masked_fill(~mask[..., None], 0.0)
        reads = writes = None
        if self.causal:
            units = self.reader.out_features
            place = torch.arange(self.slice_length, device=rows.device)
            unit = torch.arange(units, device=rows.device) * self.slice_length // units
            reads, writes = place <= unit[:, None], unit <= place[:, None]
        slices = in_slices(rows, self.slice_length).transpose(2, 3)  # (B, S, d, L)
        hidden = self.activation(self.reader(slices, reads))
        mixed = self.writer(hidden, writes).transpose(2, 3).flatten(1, 2)[:, :length]
        return mixed if mask is None else mixed.masked_fill(~mask[..., None], 0.0)
