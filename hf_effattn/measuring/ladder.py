"""Which settings each head needs: errors of a ladder of them on several texts, and the cheapest within a budget.

Sizes: `T` texts, `R` rungs, `L` layers, `H` key/value heads.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..patching.methods import Method
from .cost import median, timed
from .errors import head_errors
from .recording import SeenAttention

# Of least error for their time in scripts/results/benchmark_frontier.json, the fastest first. No rung predicts which
# heads are to be exact: that is measured here.
LADDER: tuple[dict[str, Any], ...] = tuple(
    {"method": "bi-clustered", "clusters": C, "topk": k, "key_clusters": G, "exact_above": None}
    for C, k, G in (
        (16, 16, 16), (32, 16, 32), (32, 64, 32), (64, 64, 64), (96, 96, 64), (128, 128, 64), (128, 128, 128),
    )
)  # fmt: skip
# Of models that mask the future; half the default: fewer scores, which pay for exact heads.
SEGMENT_LENGTH = 512
# The margins that are tried, beside which the heads of the texts that a table was not made from stay.
MARGINS = tuple(1 + step / 50 for step in range(101))
MOST_ERROR, BUDGET_STEP = 2.0, 0.005


def default_ladder(*, causal: bool) -> list[dict[str, Any]]:
    """The settings that heads choose from; `causal`: of a model that masks the future."""
    return [dict(one) | ({"segment_length": SEGMENT_LENGTH} if causal else {}) for one in LADDER]


@dataclass
class LadderErrors:
    """The errors of every rung on every text, collected while a model runs, exactly, inside of `recording`.

    Args:
        rungs (`list[Method]`): the settings; one that runs exact attention at a length has no error there.
        errors (`dict[str, dict[int, torch.Tensor]]`): by the number of the text and layer, `(R, H)`: of the query
            heads that share keys the largest.
        seconds (`dict[int, list[list[float]]]`): by length and rung, exact attention last, of one text and layer.
    """

    rungs: list[Method]
    errors: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    seconds: dict[int, list[list[float]]] = field(default_factory=dict)
    first_text: int = 0

    def watch(self, seen: SeenAttention) -> torch.Tensor:
        """An observer of `recording`: run every rung on the queries, keys and values of a layer."""
        device, N = seen.query.device, seen.query.shape[2]
        seconds = self.seconds.setdefault(N, [[] for _ in range(len(self.rungs) + 1)])
        options: dict[str, Any] = {"key_mask": seen.key_mask, "scale": seen.scale, "causal": seen.causal}
        exact, taken = timed(seen.exact, device)
        seconds[-1].append(taken)
        found = []
        for index, rung in enumerate(self.rungs):
            if rung.is_exact(N, N, device.type, causal=seen.causal):
                found.append(torch.zeros(seen.query.shape[0], seen.key.shape[1]))
                continue
            output, taken = timed(partial(rung.run, seen.query, seen.key, seen.value, **options), device)
            seconds[index].append(taken)
            found.append(text_errors(exact, output.transpose(1, 2), seen.key_mask, seen.key.shape[1]))
        errors = torch.stack(found, dim=1)  # (B, R, H)
        for text, of_text in enumerate(errors, self.first_text):
            layers = self.errors.setdefault(text, {})
            layers[seen.layer] = of_text
        return exact

    def stacked(self, layers: int) -> torch.Tensor:
        """The errors `(T, R, L, H)`; infinite in layers that no method is for, which stay exact."""
        heads = next(iter(next(iter(self.errors.values())).values())).shape[1]
        stacked = torch.full((len(self.errors), len(self.rungs), layers, heads), torch.inf)
        for text, of_text in enumerate(self.errors.values()):
            for layer, found in of_text.items():
                stacked[text, :, layer] = found
        return stacked

    def costs(self) -> torch.Tensor:
        """Seconds of a layer at the longest length, by rung and exact attention last; infinite where none ran."""
        times = [median(taken) for taken in self.seconds[max(self.seconds)]]
        return torch.tensor([torch.inf if one is None else one for one in times])


def text_errors(exact: torch.Tensor, other: torch.Tensor, rows: torch.Tensor | None, key_heads: int) -> torch.Tensor:
    """Relative L2 error by text and key/value head, `(B, H)`: the largest of the query heads that share its keys.

    Args:
        exact (`torch.Tensor`): `(B, N, query heads, D)`.
        other (`torch.Tensor`): of the same sizes.
        rows (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts.
        key_heads (`int`): `H`.
    """
    found = [
        head_errors(exact[text, None], other[text, None], None if rows is None else rows[text, None])
        for text in range(len(exact))
    ]
    return torch.tensor(found).view(len(exact), key_heads, -1).amax(dim=2)


def choose_rungs(errors: torch.Tensor, budget: float, margin: float) -> torch.Tensor:
    """For every layer and head the first rung whose mean error over the texts, times a margin, keeps a budget.

    Args:
        errors (`torch.Tensor`): `(T, R, L, H)`.
        budget (`float`): relative L2 error.
        margin (`float`): at least 1.

    Returns:
        `torch.Tensor`: `(L, H)`, `R` where no rung does.
    """
    within = errors.mean(dim=0) * margin <= budget
    return torch.cat([within, torch.ones_like(within[:1])]).int().argmax(dim=0)


def errors_of(table: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The errors that heads have on the rungs of a table `(L, H)`: `(T, L, H)`."""
    with_exact = torch.cat([errors, torch.zeros_like(errors[:, :1])], dim=1)
    return with_exact.gather(1, table.expand(len(errors), 1, -1, -1))[:, 0]


def held_out_coverage(errors: torch.Tensor, budget: float, margin: float) -> float:
    """The part of heads within the budget on texts that their rungs were not chosen on: each text left out once.

    Heads without any rung in a layer that no method is for do not count.
    """
    served = errors.isfinite().all(dim=1).all(dim=0)
    inside = []
    for text in range(len(errors)):
        others = torch.cat([errors[:text], errors[text + 1 :]])
        table = choose_rungs(others, budget, margin)
        inside.append(errors_of(table, errors[text, None])[0][served] <= budget)
    return float(torch.cat(inside).float().mean())


def least_margin(errors: torch.Tensor, budget: float, coverage: float) -> float:
    """The smallest margin with which that part of the heads keeps the budget on texts left out.

    The last one tried where none does.
    """
    found = (margin for margin in MARGINS if held_out_coverage(errors, budget, margin) >= coverage)
    return next(found, MARGINS[-1])


def speed_of(table: torch.Tensor, costs: torch.Tensor) -> float:
    """How many times faster than exact attention a table `(L, H)` is, by the seconds of whole layers `(R + 1,)`."""
    return float(costs[-1] / costs[table].mean())


def budget_for(errors: torch.Tensor, costs: torch.Tensor, speed: float, coverage: float) -> float | None:
    """The least budget of error with which the heads' rungs are that many times faster than exact attention."""
    low, high = 0, round(MOST_ERROR / BUDGET_STEP)

    def reaches(step: int) -> bool:
        budget = step * BUDGET_STEP
        return speed_of(choose_rungs(errors, budget, least_margin(errors, budget, coverage)), costs) >= speed

    if not reaches(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high * BUDGET_STEP
