"""Which candidate each head gets: the cheapest within a budget of error, with a margin for other texts.

Sizes: `T` texts, `R` candidates, `L` layers, `H` key/value heads. A table of heads is `(L, H)`: `R` where a head is
exact. Errors of layers that no method is for are infinite: they stay exact, and no budget counts them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

# What `max_error` bounds in a calibration.
ERROR_OF = ("head", "layer")
# The margins that are tried, the smallest first.
MARGINS = tuple(1 + step / 50 for step in range(101))
MOST_ERROR, BUDGET_STEP = 2.0, 0.005
# A difference of errors, or of seconds, below this counts as 0.
NOTHING = 1e-12


class Rule(Protocol):
    """What a budget bounds, which decides how heads share it."""

    def choose(self, errors: torch.Tensor, budget: float, margin: float) -> torch.Tensor:
        """The table of heads within a budget on `errors` `(T, R, L, H)`, times a margin of at least 1."""
        ...

    def within(self, table: torch.Tensor, errors: torch.Tensor, budget: float) -> torch.Tensor:
        """Whether each thing that the budget bounds is within it on one text, errors `(1, R, L, H)`: `(n,)`."""
        ...


class OfHeads:
    """Every head within the budget; errors are relative L2 errors of a head's attention output."""

    def choose(self, errors: torch.Tensor, budget: float, margin: float) -> torch.Tensor:
        """For every head the first candidate whose mean error over the texts is small enough."""
        within = errors.mean(dim=0) * margin <= budget
        return torch.cat([within, torch.ones_like(within[:1])]).int().argmax(dim=0)

    def within(self, table: torch.Tensor, errors: torch.Tensor, budget: float) -> torch.Tensor:
        """One answer for every head."""
        return (errors_of(table, errors)[0] <= budget)[served_layers(errors)].flatten()


@dataclass(frozen=True)
class OfLayers:
    """The mean over the layers within the budget, of the relative L2 error of a layer's output, all heads together.

    Errors are `layer_shares`: squared, and as a share of the layer's squared output, so that they add up. A head that
    is a small part of its layer's output may err more than the others.

    Args:
        costs (`torch.Tensor`): `(R + 1,)`, seconds of a layer by candidate, exact attention last.
    """

    costs: torch.Tensor

    def choose(self, errors: torch.Tensor, budget: float, margin: float) -> torch.Tensor:
        """The table that takes the least time, as far as single steps find it.

        From the cheapest candidate of all, the head that gains most error per second moves to the candidate where it
        does, until the budget is kept. Then heads that the last large step has left room for move to cheaper ones.
        """
        served = served_layers(errors)
        table = torch.full(errors.shape[2:], errors.shape[1])
        if served.any():
            table[served] = self._search(errors[:, :, served], budget / margin)
        return table

    def _search(self, errors: torch.Tensor, budget: float) -> torch.Tensor:
        exact = torch.zeros_like(errors[:, :1])
        squares = torch.cat([errors, exact], dim=1).permute(2, 0, 3, 1).double()  # (L, T, H, R + 1)
        L, _, H, R = squares.shape
        table = torch.full((L, H), int(self.costs.argmin()))
        total, changes = squares.new_zeros(L), squares.new_zeros(L, H, R)

        def look(layer: int) -> None:
            """The error of a layer, and how much every step of one of its heads would change it."""
            of_heads = squares[layer].gather(2, table[layer].expand(len(errors), H)[..., None])  # (T, H, 1)
            of_layer = of_heads.sum(dim=1, keepdim=True)
            after = (of_layer - of_heads + squares[layer]).clamp(min=0).sqrt()
            total[layer] = of_layer.sqrt().mean()
            changes[layer] = (after - of_layer.sqrt()).mean(dim=0)

        def step(scores: torch.Tensor) -> None:
            layer, head, candidate = (int(index) for index in torch.unravel_index(scores.argmax(), scores.shape))
            table[layer, head] = candidate
            look(layer)

        for layer in range(L):
            look(layer)
        while total.sum() > L * budget:
            dearer = (self.costs - self.costs[table][..., None]).clamp(min=NOTHING)
            # What rounding alone gains would be taken again and again.
            step((-changes / dearer).masked_fill(changes >= -NOTHING * total.sum(), -torch.inf))
        while True:
            saved = self.costs[table][..., None] - self.costs
            possible = (saved > NOTHING) & (total.sum() + changes <= L * budget)
            if not possible.any():
                return table
            step((saved / changes.clamp(min=NOTHING)).masked_fill(~possible, -torch.inf))

    def within(self, table: torch.Tensor, errors: torch.Tensor, budget: float) -> torch.Tensor:
        """One answer for the text."""
        return mean_of_layers(table, errors) <= budget


def served_layers(errors: torch.Tensor) -> torch.Tensor:
    """Whether a method serves each layer: `(L,)`, by errors `(T, R, L, H)`."""
    return errors.isfinite().all(dim=3).all(dim=1).all(dim=0)


def errors_of(table: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The errors that heads have on the candidates of a table `(L, H)`: `(T, L, H)`."""
    with_exact = torch.cat([errors, torch.zeros_like(errors[:, :1])], dim=1)
    return with_exact.gather(1, table.expand(len(errors), 1, -1, -1))[:, 0]


def mean_of_layers(table: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The error of a layer's output on every text, the mean over the layers served: `(T,)`."""
    return errors_of(table, shares)[:, served_layers(shares)].sum(dim=2).sqrt().mean(dim=1)


def held_out_coverage(errors: torch.Tensor, budget: float, margin: float, rule: Rule) -> float:
    """The part within the budget on texts that the candidates were not chosen on: each text left out once."""
    inside = []
    for text in range(len(errors)):
        others = torch.cat([errors[:text], errors[text + 1 :]])
        inside.append(rule.within(rule.choose(others, budget, margin), errors[text, None], budget))
    return float(torch.cat(inside).float().mean())


def least_margin(errors: torch.Tensor, budget: float, coverage: float, rule: Rule) -> float:
    """The smallest margin with which that part keeps the budget on texts left out; the largest if none does."""
    margins = (margin for margin in MARGINS if held_out_coverage(errors, budget, margin, rule) >= coverage)
    return next(margins, MARGINS[-1])


def speed_of(table: torch.Tensor, costs: torch.Tensor) -> float:
    """How many times faster than exact attention a table `(L, H)` is, by the seconds of whole layers `(R + 1,)`."""
    return float(costs[-1] / costs[table].mean())


def budget_for(errors: torch.Tensor, costs: torch.Tensor, speed: float, coverage: float, rule: Rule) -> float | None:
    """The least budget of error with which the heads' candidates are that many times faster than exact attention."""
    low, high = 0, round(MOST_ERROR / BUDGET_STEP)

    def reaches(step: int) -> bool:
        budget = step * BUDGET_STEP
        return speed_of(rule.choose(errors, budget, least_margin(errors, budget, coverage, rule)), costs) >= speed

    if not reaches(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high * BUDGET_STEP
