"""Exact attention with sinks, which no kernel of torch has, as exact attention with one key more.

A sink is a score of a query head that takes its weight in every softmax and has no value (gpt-oss, `s_aux`).

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
"""

import torch
import torch.nn.functional as F

# Kernels want rows of whole vectors; two of these hold the score, in two parts: bfloat16 has 8 bits of it.
SPARE_DIMS = 8


def with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    attention_sinks: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float]:
    """What to attend with instead: the first key is the sink, with a value of 0.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, Hk, M, D)`.
        value (`torch.Tensor`): `(B, Hk, M, Dv)`.
        mask (`torch.Tensor`, *optional*): `(B, 1, N, M)`, boolean or to be added.
        attention_sinks (`torch.Tensor`): `(H,)`.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.

    Returns:
        Query, key and value, 8 wider (values of another width than keys stay as wide), the mask, for `M + 1` keys, and
        the scale.
    """
    B, H, N, D = query.shape
    scale = D**-0.5 if scale is None else scale
    # A missing sink is -inf. Keep it finite: -inf times the zero padding of the other keys would be NaN.
    most = torch.finfo(query.dtype).max
    scores = (attention_sinks.to(torch.promote_types(query.dtype, torch.float32)) / scale).clamp(-most, most)
    high = scores.to(query.dtype)
    parts = torch.stack([high, (scores - high).to(query.dtype)], dim=1)
    of_rows = F.pad(parts, (0, SPARE_DIMS - 2))[:, None].expand(B, H, N, -1)
    wider = SPARE_DIMS if value.shape[3] == D else 0
    keys = F.pad(key, (0, SPARE_DIMS, 1, 0))
    keys[:, :, 0, D : D + 2] = 1.0
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
    return torch.cat([query, of_rows], dim=3), keys, F.pad(value, (0, wider, 1, 0)), mask, scale
