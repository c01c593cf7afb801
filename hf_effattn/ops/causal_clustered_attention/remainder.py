"""What the centroids of past queries see of the older keys that are not among their top keys, segment by segment.

A centroid's sum over the keys grows as keys leave the window; its top keys are subtracted from it. So the work grows
with the number of keys and not with its square.

Sizes: `P` key/value heads of a chunk, `g` query heads that share one, `S` tokens of a segment, `U` segments that have
older ones, `C` query clusters, `T` top keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..precision import accumulation_dtype
from .grouping import Epoch, Grouping
from .layout import Layout
from .parts import Gradients, Part


@dataclass(frozen=True)
class _Step:
    """One segment of an epoch.

    Attributes:
        new: the keys that left the window with this segment.
        largest: `(P, g · C, 1)`, the largest score so far; weights are relative to it.
        top: `(P, g · C, T)`, the top keys.
        top_weights: `(P, g · C, T)`, `exp(score - largest)` of them.
    """

    segment: int
    new: slice
    largest: torch.Tensor
    top: torch.Tensor
    top_weights: torch.Tensor


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
        seen, largest = 0, None
        clusters = epoch.scores.shape[1] // self.shape[1]
        for segment in range(epoch.first, epoch.end):
            keys = self.layout.older(segment) * self.layout.segment_length
            new = slice(seen, keys)
            highest = epoch.scores[:, :, new].amax(dim=2, keepdim=True)
            largest = highest if largest is None else torch.maximum(largest, highest)
            top = self.grouping.top[:, :, segment - self.layout.first_served, :clusters].flatten(1, 2)
            top = top[..., :keys]
            yield _Step(segment, new, largest, top, (epoch.scores.gather(2, top) - largest).exp_())
            seen = keys

    def _tables(self, tensor: torch.Tensor, segment: int, clusters: int) -> torch.Tensor:
        """View of the tables `(P, g, U, C, ...)` of a segment's clusters: `(P, g, clusters, ...)`."""
        return tensor[:, :, segment - self.layout.first_served, :clusters]

    def _top_values(self, top: torch.Tensor) -> torch.Tensor:
        """`(P, g · C, T, Dv)`."""
        heads = torch.arange(len(top), device=top.device)[:, None, None] * self.value.shape[1]
        return self.value.flatten(0, 1).index_select(0, (top + heads).flatten()).view(*top.shape, self.value.shape[2])

    def _walk(self, epoch: Epoch) -> None:
        P, g = self.shape[:2]
        clusters = epoch.scores.shape[1] // g
        total = self.value.new_zeros(P, g * clusters, 1)
        total_values = self.value.new_zeros(P, g * clusters, self.value.shape[2])
        before = None
        for step in self._steps(epoch):
            if before is not None:
                shrink = (before - step.largest).exp_()
                total, total_values = total * shrink, total_values * shrink
            weights = (epoch.scores[:, :, step.new] - step.largest).exp_()
            total = total + weights.sum(dim=2, keepdim=True)
            total_values = torch.baddbmm(total_values, weights, self.value[:, step.new])
            before = step.largest
            if step.top.shape[2] == step.new.stop:
                continue  # every older key is a top key
            rest = total - step.top_weights.sum(dim=2, keepdim=True)
            rest_values = total_values - (step.top_weights[:, :, None] @ self._top_values(step.top))[:, :, 0]
            # Less than the rounding of the sum it is the difference of: nothing is left.
            some = rest > 8 * torch.finfo(rest.dtype).eps * total
            log_rest = torch.where(some, step.largest + rest.clamp(min=torch.finfo(rest.dtype).tiny).log(), -torch.inf)
            rest = torch.where(some, rest, 1.0)
            rest_values = torch.where(some, rest_values, 0.0) / rest
            for target, table in ((self.log_sums, log_rest), (self.sums, rest), (self.means, rest_values)):
                self._tables(target, step.segment, clusters).copy_(table.view(P, g, clusters, -1))

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
                shrink = (step.largest - after).exp_()
                total, total_values = total * shrink, total_values * shrink
            after = step.largest
            of_total = self._tables(grad_totals, step.segment, clusters).reshape(P, rows, 1)
            of_values = self._tables(grad_total_values, step.segment, clusters).reshape(P, rows, -1)
            total, total_values = total + of_total, total_values + of_values

            values = self.value[:, step.new]
            weights = (epoch.scores[:, :, step.new] - step.largest).exp_()
            grad_scores[:, :, step.new] += weights * (total_values @ values.transpose(1, 2) + total)
            into.value[:, step.new] += weights.transpose(1, 2) @ total_values

            of_top = (self._top_values(step.top) @ of_values[..., None])[..., 0] + of_total
            grad_scores.scatter_add_(2, step.top, -step.top_weights * of_top)
            heads = torch.arange(P, device=step.top.device)[:, None, None] * self.value.shape[1]
            shares = -step.top_weights[..., None] * of_values[:, :, None]
            into.value.flatten(0, 1).index_add_(0, (step.top + heads).flatten(), shares.flatten(0, 2))
        keys = self.key[:, : epoch.scores.shape[2]].to(grad_scores.dtype)
        into.key[:, : keys.shape[1]] += grad_scores.transpose(1, 2) @ epoch.centroids
        grad_members = grad_scores @ keys / epoch.sizes.clamp(min=1)[..., None]
        of_queries = grad_members.flatten(0, 1).index_select(0, epoch.past_rows).view(P, g, -1, keys.shape[2])
        into.query.flatten(2, 3)[:, :, : of_queries.shape[2]] += of_queries
