"""The errors and the costs of candidate settings on several texts, for every layer and head.

Sizes: `T` texts, `R` candidates, `L` layers, `H` key/value heads.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..patching.methods import Method
from ..patching.methods.base import Options, attend_exactly
from .bench import Attend, forward_backward
from .cost import median, timed
from .errors import head_squares, ratio
from .recording import SeenAttention

# Settings that no other beat in both error and time, the fastest first. None predicts which heads must be exact: that
# is measured here.
CANDIDATES: tuple[dict[str, Any], ...] = tuple(
    {"method": "bi-clustered", "clusters": C, "topk": k, "key_clusters": G, "max_predicted_error": None}
    for C, k, G in (
        (16, 16, 16), (32, 16, 32), (32, 64, 32), (64, 64, 64), (96, 96, 64), (128, 128, 64), (128, 128, 128),
    )
)  # fmt: skip
# For a bound on layers, whose heads share it: a head that is a small part of the output may have a large error.
LAYER_CANDIDATES: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 32},
    {"method": "i-clustered", "clusters": 25, "topk": 384},
    *(
        {"method": "bi-clustered", "clusters": C, "topk": k, "key_clusters": G, "max_predicted_error": None}
        # The dearest are for long texts, where one exact head takes as long as a layer of others.
        for C, k, G in ((16, 16, 16), (32, 32, 32), (32, 256, 32), (64, 128, 64), (128, 256, 128), (256, 512, 128))
    ),
)
# For decoders, which plain clusters spoil. Segments are half as long as by default: they need fewer scores, which pays
# for exact heads.
CAUSAL_CANDIDATES: tuple[dict[str, Any], ...] = tuple(
    {"method": "bi-clustered", "exact_keys": k, "key_clusters": G, "segment_length": 512, "max_predicted_error": None}
    for k, G in ((96, 4), (96, 8), (384, 8), (384, 16), (768, 16), (768, 32), (768, 64))
)


def default_candidates(*, causal: bool, error_of: str = "head") -> list[dict[str, Any]]:
    """The settings that heads choose from; `causal`: of a model that masks the future."""
    candidates = CAUSAL_CANDIDATES if causal else CANDIDATES if error_of == "head" else LAYER_CANDIDATES
    return [dict(settings) for settings in candidates]


@dataclass
class CandidateErrors:
    """The errors of every candidate on every text, collected while a model runs, exactly, inside of `recording`.

    Args:
        candidates (`list[Method]`): the settings; one that runs exact attention at a length has no error there.
        errors (`dict[int, dict[int, torch.Tensor]]`): by the number of the text and layer, `(2, R, H)`: `text_errors`
            and `layer_shares`.
        seconds (`dict[int, list[list[float]]]`): the times of one text and layer, by length and candidate, exact
            attention last.
        training (`bool`): whether both passes are timed as well.
        training_seconds (`dict[int, list[list[float]]]`): the times of both passes; of exact attention on one text.
        exact_timed (`set[tuple[int, int]]`): the lengths and layers whose exact attention has been timed for training.
        first_text (`int`): the number of the first text of the batch that runs.
    """

    candidates: list[Method]
    errors: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    seconds: dict[int, list[list[float]]] = field(default_factory=dict)
    training: bool = False
    training_seconds: dict[int, list[list[float]]] = field(default_factory=dict)
    exact_timed: set[tuple[int, int]] = field(default_factory=set)
    first_text: int = 0

    def watch(self, seen: SeenAttention) -> torch.Tensor:
        """An observer of `recording`: run every candidate on the queries, keys and values of a layer."""
        device, (N, key_heads) = seen.query.device, (seen.query.shape[2], seen.key.shape[1])
        options = seen.options
        exact, taken = timed(seen.exact, device)
        self._keep(self.seconds, N, -1, taken)
        if (N, seen.layer) not in self.exact_timed:  # slow, and the same on each text
            self.exact_timed.add((N, seen.layer))
            self._time_training(partial(attend_exactly, options=Options(**options)), seen, -1)
        measured = []
        for index, candidate in enumerate(self.candidates):
            if candidate.is_exact(N, device.type):
                measured.append(torch.zeros(2, len(seen.query), key_heads))
                continue
            output, taken = timed(partial(candidate.run, seen.query, seen.key, seen.value, **options), device)
            self._keep(self.seconds, N, index, taken)
            self._time_training(partial(candidate.run, **options, training=True), seen, index)
            squares = text_squares(exact, output.transpose(1, 2), seen.key_mask)
            measured.append(torch.stack([text_errors(squares, key_heads), layer_shares(squares, key_heads)]))
        errors = torch.stack(measured, dim=2)  # (2, B, R, H)
        for text in range(len(seen.query)):
            place = seen.call * len(seen.query) + text
            self.errors.setdefault(self.first_text + place, {})[seen.layer] = errors[:, text]
        return exact

    @property
    def layers(self) -> set[int]:
        """The layers that ran."""
        return {layer for by_layer in self.errors.values() for layer in by_layer}

    def _keep(self, seconds: dict[int, list[list[float]]], length: int, index: int, taken: float) -> None:
        seconds.setdefault(length, [[] for _ in range(len(self.candidates) + 1)])[index].append(taken)

    def _time_training(self, attend: Attend, seen: SeenAttention, index: int) -> None:
        if self.training:
            query, key, value = (tensor.detach().requires_grad_() for tensor in (seen.query, seen.key, seen.value))
            with torch.enable_grad():
                _, taken = timed(partial(forward_backward, attend, (query, key, value)), query.device)
            self._keep(self.training_seconds, query.shape[2], index, taken)

    def stacked(self, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors of heads and shares of layers, `(T, R, L, H)`; infinite in layers that no method is for."""
        heads = next(iter(next(iter(self.errors.values())).values())).shape[2]
        errors = torch.full((2, len(self.errors), len(self.candidates), layers, heads), torch.inf)
        for text, by_layer in enumerate(self.errors.values()):
            for layer, of_candidates in by_layer.items():
                errors[:, text, :, layer] = of_candidates
        return errors[0], errors[1]

    def costs(self, *, training: bool = False) -> torch.Tensor:
        """Seconds of a layer at the longest length, by candidate and exact attention last; infinite where none ran.

        `training`: of both passes.
        """
        seconds = self.training_seconds if training else self.seconds
        times = [median(taken) for taken in seconds[max(seconds)]]
        return torch.tensor([torch.inf if cost is None else cost for cost in times])


def text_squares(exact: torch.Tensor, other: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Squared L2 of the difference and of the exact output, by text and query head: `(2, B, query heads)`.

    Args:
        exact (`torch.Tensor`): `(B, N, query heads, D)`.
        other (`torch.Tensor`): of the same sizes.
        rows (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts.
    """
    texts = [
        torch.stack(head_squares(exact[text, None], other[text, None], None if rows is None else rows[text, None]))
        for text in range(len(exact))
    ]
    return torch.stack(texts, dim=1).cpu()


def text_errors(squares: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Relative L2 error by text and key/value head, `(B, H)`: the largest of the query heads that share its keys."""
    difference, reference = squares
    return ratio(difference, reference).sqrt().unflatten(1, (key_heads, -1)).amax(dim=2).float()


def layer_shares(squares: torch.Tensor, key_heads: int) -> torch.Tensor:
    """The share of each key/value head in the squared relative error of the layer's output, `(B, H)`; they add up."""
    difference, reference = squares
    return ratio(difference, reference.sum(dim=1, keepdim=True)).unflatten(1, (key_heads, -1)).sum(dim=2).float()
