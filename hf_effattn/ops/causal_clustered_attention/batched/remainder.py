"""What the centroids of past queries see of the older keys that are not among their top keys, segment by segment.

A key that leaves the window is a top key or joins the remainder, and so does a top key when a better one takes its
place; none comes back. So a centroid's sum over its remainder only grows, and is no difference of large numbers: a
query may need what weighs almost nothing in its centroid's attention. The work grows with the number of keys and not
with its square.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `S` tokens of a segment, `U` segments that have
older ones, `C` query clusters, `T` top keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...shared.precision import accumulation_dtype
from ..layout import Layout
from .grouping import Epoch, Grouping
from .parts import Gradients, Part


@dataclass(frozen=True)
class _Step:
    """What joins the remainder in one segment of an epoch.

    Attributes:
        new: the keys that left the window with this segment.
        highest: `(P, g · C, 1)`, the largest score in the remainder so far; weights are relative to it.
        entering: `(P, g · C, keys)`, `exp(score - highest)` of the new keys, 0 for top keys.
        before: `(P, g · C, T)`, the top keys of the segment before, none in the first.
        leaving: `(P, g · C, T)`, `exp(score - highest)` of those, 0 for those that stay.
    """

    segment: int
    new: slice
    highest: torch.Tensor
    entering: torch.Tensor
    before: torch.Tensor
    leaving: torch.Tensor


class RemainderPart(Part):
    """One column per query cluster: the logarithm of the sum, and the mean value, of its remaining older keys."""

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        grouping: Grouping,
        layout: Layout,
        first_column: int,
    ) -> None:
        self.layout, self.grouping, self.key = layout, grouping, key
        self.columns = slice(first_column, first_column + 1)
        self.value = value.to(accumulation_dtype(value.dtype))
        P, g, U, C, _ = grouping.top.shape
        self.shape = P, g, U, layout.segment_length
        tables = torch.full((P, g, U, C, 1), -torch.inf, dtype=self.value.dtype, device=value.device)
        self.log_sums, self.sums = tables, torch.ones_like(tables)
        self.means = self.value.new_zeros(P, g, U, C, value.shape[2])
        for epoch in grouping.epochs:
            self._walk(epoch)
        self.values = self.means.to(value.dtype).flatten(0, 2)

    def region(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, self.layout.first_served :]

    def to_rows(self, region: torch.Tensor) -> torch.Tensor:
        return region.flatten(0, 2)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*self.shape, -1)

    def mask_(self, scores: torch.Tensor) -> torch.Tensor:
        C = scores.shape[2]
        other = self.grouping.labels.flatten(0, 2)[..., None] != torch.arange(C, device=scores.device)
        return scores.masked_fill_(other, -torch.inf)

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        log_sums = self.log_sums.flatten(0, 2).transpose(1, 2)
        return self.mask_(log_sums.repeat(1, self.layout.segment_length, 1))

    def _steps(self, epoch: Epoch) -> Iterator[_Step]:
        """The segments with a key that is no top key, in their order."""
        seen, highest, before = 0, None, None
        clusters = epoch.scores.shape[1] // self.shape[1]
        is_top = torch.zeros_like(epoch.scores, dtype=torch.bool)
        for segment in range(epoch.first, epoch.end):
            keys = self.layout.older(segment) * self.layout.segment_length
            new = slice(seen, keys)
            top = self.grouping.top[:, :, segment - self.layout.first_served, :clusters].flatten(1, 2)
            top = top[..., :keys]
            is_top.scatter_(2, top, True)
            if top.shape[2] < keys:
                if before is None:
                    before = top[..., :0]
                entering = epoch.scores[:, :, new].masked_fill(is_top[:, :, new], -torch.inf)
                leaving = epoch.scores.gather(2, before).masked_fill_(is_top.gather(2, before), -torch.inf)
                joined = torch.cat([entering, leaving], dim=2).amax(dim=2, keepdim=True)
                highest = joined if highest is None else torch.maximum(highest, joined)
                yield _Step(segment, new, highest, (entering - highest).exp_(), before, (leaving - highest).exp_())
            is_top.scatter_(2, top, False)
            seen, before = keys, top

    def _tables(self, tensor: torch.Tensor, segment: int, clusters: int) -> torch.Tensor:
        """View of the tables `(P, g, U, C, ...)` of a segment's clusters: `(P, g, clusters, ...)`."""
        return tensor[:, :, segment - self.layout.first_served, :clusters]

    def _top_values(self, top: torch.Tensor) -> torch.Tensor:
        """`(P, g · C, T, Dv)`."""
        heads = torch.arange(len(top), device=top.device)[:, None, None] * self.value.shape[1]
        return self.value.flatten(0, 1).index_select(0, (top + heads).flatten()).view(*top.shape, self.value.shape[2])

    def _walk(self, epoch: Epoch) -> None:
        P, g = self.shape[:2]
        rows = epoch.scores.shape[1]
        total, total_values = self.value.new_zeros(P, rows, 1), self.value.new_zeros(P, rows, self.value.shape[2])
        before = None
        for step in self._steps(epoch):
            if before is not None:
                shrink = (before - step.highest).exp_()
                total, total_values = total * shrink, total_values * shrink
            before = step.highest
            total = total + step.entering.sum(dim=2, keepdim=True) + step.leaving.sum(dim=2, keepdim=True)
            total_values = torch.baddbmm(total_values, step.entering, self.value[:, step.new])
            total_values = total_values + (step.leaving[:, :, None] @ self._top_values(step.before))[:, :, 0]
            log_total = step.highest + total.log()
            for target, table in (
                (self.log_sums, log_total),
                (self.sums, total),
                (self.means, total_values / total),
            ):
                self._tables(target, step.segment, rows // g).copy_(table.view(P, g, rows // g, -1))

    def add_gradients(
        self, query: torch.Tensor, grad_scores: torch.Tensor, grad_values: torch.Tensor, into: Gradients
    ) -> None:
        grad_means = grad_values.to(self.value.dtype).view_as(self.means)
        grad_logs = grad_scores.sum(dim=1).view_as(self.log_sums)
        grad_totals = (grad_logs - (grad_means * self.means).sum(dim=-1, keepdim=True)) / self.sums
        grad_total_values = grad_means / self.sums
        for epoch in self.grouping.epochs:
            self._walk_back(epoch, grad_totals, grad_total_values, into)

    def _walk_back(
        self, epoch: Epoch, grad_totals: torch.Tensor, grad_total_values: torch.Tensor, into: Gradients
    ) -> None:
        P, g = self.shape[:2]
        rows, clusters = epoch.scores.shape[1], epoch.scores.shape[1] // g
        grad_scores = torch.zeros_like(epoch.scores)
        total = self.value.new_zeros(P, rows, 1)
        total_values = self.value.new_zeros(P, rows, self.value.shape[2])
        after = None
        for step in reversed(list(self._steps(epoch))):
            if after is not None:
                shrink = (step.highest - after).exp_()
                total, total_values = total * shrink, total_values * shrink
            after = step.highest
            total = total + self._tables(grad_totals, step.segment, clusters).reshape(P, rows, 1)
            total_values = total_values + self._tables(grad_total_values, step.segment, clusters).reshape(P, rows, -1)

            values = self.value[:, step.new]
            grad_scores[:, :, step.new] += step.entering * (total_values @ values.transpose(1, 2) + total)
            into.value[:, step.new] += step.entering.transpose(1, 2) @ total_values

            of_leaving = (self._top_values(step.before) @ total_values[..., None])[..., 0] + total
            grad_scores.scatter_add_(2, step.before, step.leaving * of_leaving)
            heads = torch.arange(P, device=values.device)[:, None, None] * self.value.shape[1]
            shares = step.leaving[..., None] * total_values[:, :, None]
            into.value.flatten(0, 1).index_add_(0, (step.before + heads).flatten(), shares.flatten(0, 2))
        keys = self.key[:, : epoch.scores.shape[2]].to(grad_scores.dtype)
        into.key[:, : keys.shape[1]] += grad_scores.transpose(1, 2) @ epoch.centroids
        grad_members = grad_scores @ keys / epoch.sizes.clamp(min=1)[..., None]
        of_queries = grad_members.flatten(0, 1).index_select(0, epoch.past_rows).view(P, g, -1, keys.shape[2])
        into.query.flatten(2, 3)[:, :, : of_queries.shape[2]] += of_queries
