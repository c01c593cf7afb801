"""The largest of many numbers, for a CPU."""

import numpy as np
import torch

# Numbers of a group, by its largest: a group without one of the k largest maxima has none of the k largest numbers.
GROUP = 8


def largest(scores: torch.Tensor, topk: int, *, in_order: bool) -> torch.Tensor:
    """Places of the `topk` largest numbers of each row of `(P, C, M)`: `(P, C, topk)`; largest first if `in_order`."""
    P, C, M = scores.shape
    groups = M // GROUP
    if scores.device.type != "cpu" or (in_order and groups < 4 * topk):
        return scores.topk(topk, dim=2, sorted=in_order).indices
    if groups < 4 * topk:
        return _largest(scores, topk)
    # Vectors of neighbours go into different groups, so that the maxima are taken of whole vectors.
    maxima = scores[..., : groups * GROUP].view(P, C, GROUP, groups).amax(dim=2)
    steps = torch.arange(GROUP)[:, None] * groups
    places = (_largest(maxima, topk)[:, :, None] + steps).flatten(2)
    rest = torch.arange(groups * GROUP, M).expand(P, C, -1)
    places = torch.cat([places, rest], dim=2)
    candidates = scores.gather(2, places)
    chosen = candidates.topk(topk, dim=2).indices if in_order else _largest(candidates, topk)
    return places.gather(2, chosen)


def _largest(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """As `largest`, in no order: numpy's selection is three times as fast as torch's."""
    first = scores.shape[2] - topk
    return torch.from_numpy(np.argpartition(scores.numpy(), first, axis=2)[..., first:])
