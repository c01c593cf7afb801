"""What is known before anything is attended to: how queries differ from their centroids, and the error to expect.

Sizes: `B` batch, `H` query heads, `P` key/value heads, `N` queries, `M` keys, `n` of them that are looked at.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..shared.arguments import check_count, check_labels, choose_backend
from ..shared.precision import autocasts
from ..shared.tables import cluster_rows, cluster_sums

# Measured over 72 heads of a pretrained BERT: the error of a head is about a quarter of σ².
ERROR_PER_VARIANCE = 0.25
PREDICTION_ROWS = 2048  # keys of each head that a prediction looks at
PARTS = 16  # of the rows whose products are summed on an accelerator


def query_residuals(
    query: torch.Tensor,
    labels: torch.Tensor,
    clusters: int,
    *,
    key_heads: int | None = None,
    query_mask: torch.Tensor | None = None,
    rows: int = 2048,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`η = Q_i - Q̄_l(i)` of evenly spread queries, the centroids being their means.

    Given to `cluster_queries` as `key`, they make the metric in which two keys are alike if no query's residual tells
    them apart.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        labels (`torch.Tensor`): integers `(B, H, N)` in `0 .. clusters - 1`.
        clusters (`int`): number of query clusters.
        key_heads (`int`, *optional*): `P`, a divisor of `H`; query heads that share one stand together.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts.
        rows (`int`): at most so many queries of each head.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`; default: Triton on a GPU, else batched.

    Returns:
        `(torch.Tensor, torch.Tensor | None)`: `(B, P, H / P · n, D)` in float32 or float64, by the kernel in the dtype
        of the query, and which of them count, `(B, H / P · n)`; None where all do.
    """
    check_count("clusters", clusters)
    check_labels(labels, query)
    (B, H, N, D), query = query.shape, query.detach()
    counts = None
    if query_mask is not None:
        counts = torch.arange(min(N, rows), device=query.device) < query_mask.sum(dim=1, keepdim=True)
    eta = choose_backend(backend, (_residuals, _residuals, _triton), query)(query, labels, query_mask, clusters, rows)
    group = H // (key_heads or H)
    return eta.view(B, H // group, group * eta.shape[2], D), None if counts is None else counts.repeat(1, group)


def _triton(*arguments: Any) -> torch.Tensor:
    from .triton.residuals import query_residuals

    return query_residuals(*arguments)


def _residuals(
    query: torch.Tensor, labels: torch.Tensor, query_mask: torch.Tensor | None, clusters: int, rows: int
) -> torch.Tensor:
    """`η` `(B, H, n, D)` in float32 or float64."""
    B, H = query.shape[:2]
    chosen, counts = spread_rows(query, query_mask, rows)
    points, chosen_labels = _take(query, chosen), _take(labels[..., None], chosen)[..., 0]
    points = points.to(torch.promote_types(query.dtype, torch.float32)).flatten(0, 1)
    index = cluster_rows(chosen_labels.flatten(0, 1), clusters)
    counted = torch.ones_like(chosen_labels, dtype=torch.bool).flatten(0, 1)
    if counts is not None:
        counted = counts.repeat_interleave(H, dim=0)  # (B · H, n)
        points = points.masked_fill(~counted[..., None], 0.0)  # whatever padding holds
    # Sums of ones: torch.compile does not know the shape of a bincount.
    sizes = cluster_sums(counted[..., None].to(points.dtype), index, B * H, clusters)
    means = cluster_sums(points, index, B * H, clusters) / sizes.clamp(min=1)
    return (points - means.flatten(0, 1).index_select(0, index).view_as(points)).view(B, H, *points.shape[1:])


def predicted_error(
    residuals: torch.Tensor,
    residuals_mask: torch.Tensor | None,
    key: torch.Tensor,
    key_labels: torch.Tensor,
    key_clusters: int,
    *,
    group: int = 1,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    rows: int = PREDICTION_ROWS,
) -> torch.Tensor:
    """The relative error that bi-clustered attention will make in each head, `(B, P)`, known before it runs.

    It is `σ² / 4`, where `σ² = tr(Σ_η · W)` is the variance of what a query's residual scores within a key cluster,
    `Σ_η` the covariance of the residuals and `W` the mean covariance of keys within their clusters. Over 72 heads of a
    BERT its rank correlation with the error was .86. Above about 1 the head attends to few keys, which no summary
    serves.

    Args:
        residuals (`torch.Tensor`): `(B, P, group · n, D)`, from `query_residuals`.
        residuals_mask (`torch.BoolTensor`, *optional*): `(B, group · n)`, from `query_residuals`.
        key (`torch.Tensor`): `(B, P, M, D)`.
        key_labels (`torch.Tensor`): integers `(B, P, M)` in `0 .. key_clusters - 1`.
        key_clusters (`int`): number of key clusters.
        group (`int`): query heads that share a key/value head; the worst of them counts.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        rows (`int`): at most so many keys of each head are looked at.
    """
    key = key.detach()
    scale = key.shape[3] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(residuals.dtype, torch.float32)
    eta, counted = _only_counted(residuals.detach(), residuals_mask, dtype)
    within, mask = query_residuals(key, key_labels, key_clusters, query_mask=key_mask, rows=rows)
    within, keys = _only_counted(within, mask, dtype)
    # Only where autocast is on: torch.distributed.pipelining cannot split a graph that contains its context.
    with torch.autocast(key.device.type, enabled=False) if autocasts(key.device.type) else nullcontext():
        if key.is_cpu:
            counted = counted / group if residuals_mask is None else counted[:, :, None] / group
            keys = keys if mask is None else keys[:, :, None, None]
            eta = eta.unflatten(2, (group, -1))  # (B, P, group, n, D)
            return error_of(eta.mT @ eta, counted, within.mT @ within / keys, scale)
        # On an accelerator the launches cost the host more time than all of this arithmetic.
        return largest_product(eta, within, group) * (scale**2 * ERROR_PER_VARIANCE * group / (counted * keys))


def _only_counted(rows: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Rows `(B, P, n, D)`, 0 where the mask `(B, n)` is False, and how many are left: a number, or `(B, 1)`."""
    if mask is None:
        return rows.to(dtype), max(1, rows.shape[2])
    counts = mask.to(dtype)
    return rows * counts[:, None, :, None], counts.sum(dim=1, keepdim=True).clamp(min=1)


def largest_product(eta: torch.Tensor, within: torch.Tensor, group: int) -> torch.Tensor:
    """`max_g tr(η_g^T η_g · w^T w)`, `(B, P)`, of `η` `(B, P, group · n, D)` and `w` `(B, P, n, D)`."""
    B, P, _, D = within.shape
    covariance, spread = (sum_of_products(*rows) for rows in ((eta, B * P * group), (within, B * P)))
    variances = torch.linalg.vecdot(covariance.view(B, P, group, D * D), spread.view(B, P, 1, D * D))
    return variances.amax(dim=2) if group > 1 else variances.view(B, P)


def sum_of_products(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`Σ_i x_i^T x_i` of rows `(..., D)`, as many of each of `count` matrices `(count, D, D)`.

    Rows that can be cut into equal parts are summed in parts: one sum of thousands of numbers is a chain that leaves
    most of a chip idle. The cut does not depend on the rest of the batch.
    """
    D = rows.shape[-1]
    n = rows.numel() // max(1, count * D)
    parts = PARTS if statically_known_true(n % PARTS == 0) else 1  # a length that a graph leaves open is not cut
    rows = rows.reshape(count * parts, n // parts, D)
    products = torch.bmm(rows.mT, rows)
    return products if parts == 1 else products.view(count, parts, D, D).sum(dim=1)


def error_of(
    covariance: torch.Tensor, counted: torch.Tensor | float, spread: torch.Tensor, scale: float
) -> torch.Tensor:
    """The predicted errors `(B, P)` of the sums `η^T η` `(B, P, group, D, D)` of so many residuals, and of `W`."""
    variances = (covariance * spread[:, :, None]).sum(dim=(3, 4)) / counted  # (B, P, group)
    return variances.amax(dim=2) * (scale**2 * ERROR_PER_VARIANCE)


def spread_rows(
    tensor: torch.Tensor, mask: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Evenly spread rows of `(B, H, N, D)`, counted among those that are True in the mask `(B, N)`.

    Returns `(n,)` row numbers, or with a mask `(B, n)` and which of them stand for a row, `(B, n)`.
    """
    N = tensor.shape[2]
    count = min(count, N)  # in a graph of many lengths a symbol; `len` would give the traced length
    places = torch.arange(count, device=tensor.device)
    if mask is None:
        return places * N // max(1, count), None
    lengths = mask.sum(dim=1, keepdim=True)  # (B, 1)
    taken = lengths.clamp(max=count)
    ranks = places * lengths // taken.clamp(min=1)
    rows = torch.searchsorted(mask.cumsum(dim=1), ranks + 1).clamp(max=max(0, N - 1))
    return rows, places < taken


def _take(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows `(n,)`, or `(B, n)`, of `(B, H, N, D)`: `(B, H, n, D)`."""
    if rows.ndim == 1:
        return tensor.index_select(2, rows)
    return tensor.gather(2, rows[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))
