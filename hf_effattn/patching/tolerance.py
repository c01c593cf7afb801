"""A tolerance for the error of every head, held to while a model runs: some queries are computed exactly, too.

Sizes: `B` batch, `H` heads, `N` length, `S` sampled queries, `D` head_dim of query and key, `Dv` of value.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.shared.callers import stacklevel_of_user
from ..ops.shared.head_threads import for_every_chunk, heads_of_threads
from .exact.reference import exact_attention, visible_keys
from .exact.sinks import with_sinks
from .measurements import MeasuredError, measurements_of

ON_EXCESS = ("exact", "warn", "raise")
SAMPLED = 64
# Standard errors of the sample by which a head's squared error may be larger: scripts/benchmark/budget.py measures it.
MARGIN = 1.0
# A quarter of the sample, spread as evenly, is computed first. A head that is within the tolerance by this many
# standard errors needs no more: on the calibration texts of that benchmark a larger margin finds no more excesses. If
# fewer than four queries hold the error, its square has a standard error of half its size, and others like them may be
# missed.
FIRST = slice(2, None, 4)
FIRST_MARGIN = 3.0
LARGEST_SCATTER = 0.5
GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass
class MethodOutput:
    """What a method has computed, and what from.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, H, N, D)`, or with fewer heads.
        value (`torch.Tensor`): `(B, H, N, Dv)`, with the heads of `key`.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = attend; it masks the same rows of the queries.
        scale (`float`, *optional*): factor on the scores.
        causal (`bool`): whether no query sees a later key.
        result (`torch.Tensor`): `(B, H, N, Dv)`.
        heads (`Sequence[int]`, *optional*): the heads that are approximated; the others have no error. None: all.
        attention_sinks (`torch.Tensor`, *optional*): `(H,)`, of a score that has no value.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    scale: float | None
    causal: bool
    result: torch.Tensor
    heads: Sequence[int] | None = None
    attention_sinks: torch.Tensor | None = None

    def checked(self, tolerance: float, on_excess: str | None, module: nn.Module | None) -> torch.Tensor:
        """The result, with the heads computed exactly whose error is above the tolerance.

        Args:
            tolerance (`float`): relative L2 error.
            on_excess (`str`, *optional*): of `ON_EXCESS`; None: errors are measured and nothing else.
            module (`nn.Module`, *optional*): the attention module, which keeps what was measured.

        Raises:
            RuntimeError: a head above the tolerance with `on_excess="raise"`.
        """
        with torch.no_grad():
            error, bound = self.sampled_errors(tolerance=None if on_excess is None else tolerance)
            above = bound > tolerance
        result = self.result
        corrects = on_excess == "exact" and bool(above.any())
        exact = above if corrects else torch.zeros_like(above)
        if module is not None:
            measured = measurements_of(module)
            kept = () if torch.compiler.is_compiling() else measured.calls
            measured.calls = (*kept[:-1], MeasuredError(error, bound, exact))
        if corrects:
            return self._with_exact(above)
        if on_excess in ("warn", "raise") and above.any():
            self._complain(above, bound, tolerance, on_excess, module)
        return result

    def sampled_errors(
        self, margin: float = MARGIN, *, tolerance: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Relative L2 error of every text and head on the sampled queries, and with the margin, both `(B, H)`.

        Args:
            margin (`float`): in standard errors.
            tolerance (`float`, *optional*): a head whose bound by `first_errors` is within it is told by those queries
                alone, on a CPU: a GPU waits longer for the answer than it computes. Not where the future is masked:
                early queries see few keys, and their errors scatter more. Default: all queries tell.
        """
        rows = self._rows()
        if tolerance is None or self.causal or self.query.device.type != "cpu" or rows.shape[1] < SAMPLED:
            return self._bounded(self._squares(rows), margin)
        few = self._squares(rows[:, FIRST])
        error, bound = self._bounded(few, FIRST_MARGIN, LARGEST_SCATTER)
        undecided = bound > tolerance
        if not undecided.any():
            return error, bound
        others = [part for part in range(SAMPLED) if part not in range(SAMPLED)[FIRST]]
        of_all = self._bounded(torch.cat([few, self._squares(rows[:, others], undecided)], dim=3), margin)
        return torch.where(undecided, of_all[0], error), torch.where(undecided, of_all[1], bound)

    def first_errors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors and bounds by a quarter of the queries; the bound is infinite where few of them hold the error."""
        return self._bounded(self._squares(self._rows()[:, FIRST]), FIRST_MARGIN, LARGEST_SCATTER)

    def _rows(self) -> torch.Tensor:
        """The sampled queries, `(B or 1, S)`."""
        return sampled_rows(self.query.shape[2], self.key_mask, self.query.device)

    def _bounded(
        self, squares: torch.Tensor, margin: float, largest_scatter: float = torch.inf
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The error `(B, H)` and its bound by the squares `(2, B, H, S)` of some queries.

        The ratio of two sums is estimated, and its variance by the residuals `d_i - e² r_i` (Source: Cochran,
        Sampling Techniques, section 6.4). The bound is infinite where the standard error of `e²` is larger than
        `largest_scatter` of it.
        """
        difference, reference = squares
        S, N = squares.shape[3], self.query.shape[2]
        total = reference.sum(dim=2).clamp(min=torch.finfo(torch.float32).tiny)
        squared = difference.sum(dim=2) / total
        residual = (difference - squared[..., None] * reference).square().sum(dim=2) * (S / max(S - 1, 1))
        rows_of_text: Any = N if self.key_mask is None else self.key_mask.sum(dim=1, keepdim=True)
        unseen = 1 - S / rows_of_text if self.key_mask is None else (1 - S / rows_of_text).clamp(min=0)
        deviation = (residual * unseen).sqrt() / total
        bound = (squared + margin * deviation).sqrt()
        return squared.sqrt(), bound.masked_fill(deviation > largest_scatter * squared, torch.inf)

    def _squares(self, rows: torch.Tensor, heads: torch.Tensor | None = None) -> torch.Tensor:
        """Of some queries `(B or 1, S)` the squared error and the squared exact output, `(2, B, H, S)`.

        `heads` `(B, H)`: those that are asked for, of others the error is 0. Default: all.
        """
        mask = None if self.key_mask is None else self.key_mask[:, None, None, :]
        if self.causal:
            past = rows[:, None, :, None] >= torch.arange(self.query.shape[2], device=rows.device)
            mask = past if mask is None else past & mask
        index = rows[:, None, :, None].expand(*self.query.shape[:2], -1, -1)
        query = self.query.gather(2, index.expand(-1, -1, -1, self.query.shape[3]))
        computed = self.result.gather(2, index.expand(-1, -1, -1, self.result.shape[3])).float()
        exact = self._exact_rows(query, mask, computed, heads)
        return torch.stack([(computed - exact).square().sum(dim=3), exact.square().sum(dim=3)])

    def _exact_rows(
        self, query: torch.Tensor, mask: torch.Tensor | None, computed: torch.Tensor, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """Exact attention of queries `(B, H, S, D)`; of heads that are exact or not asked for what was `computed`."""
        group, scale, width = query.shape[1] // self.key.shape[1], self.scale, computed.shape[3]
        key, value = self.key, self.value
        if self.attention_sinks is not None:
            query, key, value, mask, scale = with_sinks(query, key, value, mask, self.attention_sinks, scale)
        if query.device.type != "cpu" or torch.compiler.is_compiling():
            exact = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=group > 1
            )
            return exact[..., :width].float()
        exact = computed.clone()
        heads = list(range(query.shape[1]) if self.heads is None else self.heads)
        pairs = [(text, head) for text in range(len(query)) for head in heads]
        if wanted is not None:
            pairs = [pair for pair, counts in zip(pairs, wanted[:, heads].flatten().tolist(), strict=True) if counts]
        if mask is not None:
            mask = mask.expand(len(query), -1, query.shape[2], -1)

        def attend(chunk: tuple[list[tuple[int, int]], slice]) -> None:
            pairs, rows = chunk
            for text, run in neighbours(pairs, group):
                shared = slice(run.start // group, (run.stop - 1) // group + 1)
                inputs = query[text, run, rows], key[text, shared], value[text, shared]
                seen = None if mask is None else mask[text, :, rows]
                output = F.scaled_dot_product_attention(*inputs, attn_mask=seen, scale=scale)
                exact[text, run, rows] = output[..., :width].to(exact.dtype)

        # Each thread has its share of the heads or, where they are few, of the queries. All end together, and no
        # operator starts threads of its own.
        parts = partial(heads_of_threads, device=query.device)
        chunks = [(pairs[part], slice(None)) for part in parts(len(pairs))]
        if len(pairs) < 2 * len(chunks):
            chunks = [(pairs, part) for part in parts(query.shape[2])]
        for_every_chunk(attend, chunks, query.device)
        return exact

    def _with_exact(self, heads: torch.Tensor) -> torch.Tensor:
        """The result with some heads `(B, H)` computed exactly, text by text."""
        group = self.query.shape[1] // self.key.shape[1]
        result = self.result.clone()
        for text in heads.any(dim=1).nonzero()[:, 0].tolist():
            row, chosen = slice(text, text + 1), heads[text].nonzero()[:, 0]
            shared = chosen // group
            mask = None if self.key_mask is None else self.key_mask[row]
            exact = exact_attention(
                self.query[row, chosen],
                self.key[row, shared],
                self.value[row, shared],
                visible_keys(mask, self.query.shape[2], causal=self.causal),
                scale=self.scale,
                dropout_p=0.0,
                causal=self.causal,
                attention_sinks=None if self.attention_sinks is None else self.attention_sinks[chosen],
            )
            if mask is not None:  # as the method leaves masked rows
                exact = exact * mask[:, None, :, None]
            result[text, chosen] = exact[0].to(result.dtype)
        return result

    @staticmethod
    def _complain(
        above: torch.Tensor, bound: torch.Tensor, tolerance: float, on_excess: str, module: nn.Module | None
    ) -> None:
        heads = above.any(dim=0).nonzero()[:, 0].tolist()
        layer = getattr(module, "layer_idx", None)
        where = "" if layer is None else f" of layer {layer}"
        said = (
            f"the error of heads {heads}{where} may be {float(bound.max()):.2g}, the tolerance is {tolerance:g}: take "
            'on_excess="exact", or more exact settings'
        )
        if on_excess == "raise":
            raise RuntimeError(said)
        warnings.warn(said, stacklevel=stacklevel_of_user())


def neighbours(pairs: list[tuple[int, int]], group: int) -> list[tuple[slice, slice]]:
    """Pairs of a text and a head as slices of both: runs of neighbouring heads, or heads where `group` share keys."""
    runs: list[tuple[int, int, int]] = []
    for text, head in pairs:
        if group == 1 and runs and runs[-1][::2] == (text, head):
            runs[-1] = text, runs[-1][1], head + 1
        else:
            runs.append((text, head, head + 1))
    return [(slice(text, text + 1), slice(first, last)) for text, first, last in runs]


def sampled_rows(length: int, key_mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The queries that are computed exactly, `(B, S)`, or `(1, S)` without a mask: one of each stretch of a text.

    Args:
        length (`int`): `N`.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`: no other row is taken where a text has one.
        device (`torch.device`): for the result.
    """
    count = min(SAMPLED, length)
    part = torch.arange(count, device=device, dtype=torch.float64)
    # The place within a stretch follows the golden ratio, which no period of a text fits.
    places = (part + part * GOLDEN_RATIO % 1) / count
    if key_mask is None:
        return (places * length).long()[None]
    tokens = key_mask.sum(dim=1, keepdim=True)
    valid = (~key_mask).to(torch.int8).argsort(dim=1, stable=True)
    return valid.gather(1, (places * tokens).long().clamp(max=length - 1))
