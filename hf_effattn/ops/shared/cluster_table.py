"""The step that clustered methods share: a query attends to the few rows that its cluster's table holds.

A method compiles what the queries of a cluster see into a table of rows and what is added to their weighted sum; this
attends to it, forward and backward, in blocks of queries of one cluster. Sizes: `tables` = heads times clusters, `R`
rows of a table, `D` and `Dv` numbers of a row's key and value, `length` queries of a block.
"""

from dataclasses import dataclass

import torch

from .cluster_blocks import ClusterBlocks
from .precision import LEAST_LOG_WEIGHT
from .tables import softmax_
from .torch_internals import softmax_backward

# Bytes of the scores at once. More would leave the cache, and the allocator would fault them in each time.
SCORES_BYTES = 4 * 2**20


@dataclass
class Dipole:
    """`r_i · (Q_i - centroid) · matrix`, `r_i` being the weight of the rows from `first` on."""

    centroids: torch.Tensor  # `(tables, D)`, in float32 or float64
    matrices: torch.Tensor  # `(tables, D, Dv)`, in the dtype of the table's values
    first: int  # the first of the rows that are weighed


@dataclass
class ClusterTable:
    """`mass · softmax(Q_i K^T) V + offset + dipole` for the queries of every cluster; a gradient has the same form."""

    keys: torch.Tensor  # `(tables, R, D)`; a bias of the scores is a last column, where packed queries hold 1
    values: torch.Tensor  # `(tables, R, Dv)`
    mass: torch.Tensor | None = None  # `(tables,)`, or None for 1
    offset: torch.Tensor | None = None  # `(tables, Dv)`, or None for 0
    dipole: Dipole | None = None  # or None; the queries' columns behind its own are no part of it

    def scores(self, blocks: ClusterBlocks, query: torch.Tensor) -> torch.Tensor:
        """`Q_i K^T` `(blocks, length, R)` of packed queries, in float32 or float64."""
        scores = torch.bmm(query, blocks.of_cluster(self.keys).transpose(1, 2))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def attend(
    table: ClusterTable, blocks: ClusterBlocks, query: torch.Tensor, factor: torch.Tensor | None
) -> torch.Tensor:
    """Output of packed queries `(blocks, length, D)`, `(blocks, length, Dv)`; `factor`: dropout of the weights."""
    count, length = query.shape[:2]
    scores_bytes = length * table.keys.shape[1] * torch.promote_types(query.dtype, torch.float32).itemsize
    step = max(1, SCORES_BYTES // max(1, scores_bytes)) if query.device.type == "cpu" else count
    if step >= count:
        return _attend(table, blocks, query, factor)
    output = table.values.new_empty(count, length, table.values.shape[2])
    for start in range(0, count, step):
        part = slice(start, start + step)
        output[part] = _attend(table, blocks.some(part), query[part], None if factor is None else factor[part])
    return output


def _attend(
    table: ClusterTable, blocks: ClusterBlocks, query: torch.Tensor, factor: torch.Tensor | None
) -> torch.Tensor:
    weights = softmax_(table.scores(blocks, query))
    if table.mass is not None:
        weights *= blocks.of_cluster(table.mass)[:, None, None]
    if factor is not None:
        weights *= factor
    values = blocks.of_cluster(table.values)
    if table.dipole is not None:
        eta = _residuals(table.dipole, blocks, query).mul_(_share(table.dipole, weights))
        matrices = blocks.of_cluster(table.dipole.matrices)
        return torch.bmm(eta.to(values.dtype), matrices).baddbmm_(weights.to(values.dtype), values)
    if table.offset is not None:
        return torch.baddbmm(blocks.of_cluster(table.offset)[:, None], weights.to(values.dtype), values)
    return torch.bmm(weights.to(values.dtype), values)


def attend_backward(
    table: ClusterTable,
    blocks: ClusterBlocks,
    query: torch.Tensor,
    factor: torch.Tensor | None,
    grad_output: torch.Tensor,
    whole: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ClusterTable]:
    """Gradients of packed queries and of the table, for packed gradients of the output `(blocks, length, Dv)`.

    `whole`: where the table is a part of a softmax, the log-sum-exp of all its scores, and the dot products of its
    output with `grad_output`, `(blocks, length, 1)` each.
    """
    tables = len(table.keys)
    keys, values = blocks.of_cluster(table.keys), blocks.of_cluster(table.values)
    scores = table.scores(blocks, query)
    softmax = softmax_(scores) if whole is None else scores.sub_(whole[0]).clamp_(min=LEAST_LOG_WEIGHT).exp_()
    weights = softmax if table.mass is None else softmax * blocks.of_cluster(table.mass)[:, None, None]
    if factor is not None:
        weights = weights * factor
    grad_weights = torch.bmm(grad_output, values.transpose(1, 2)).to(softmax.dtype)

    dipole, grad_dipole, grad_eta = table.dipole, None, None
    if dipole is not None:
        eta, share = _residuals(dipole, blocks, query), _share(dipole, weights)
        turned = torch.bmm(grad_output, blocks.of_cluster(dipole.matrices).transpose(1, 2)).to(eta.dtype)
        grad_weights[..., dipole.first :] += torch.linalg.vecdot(eta, turned)[..., None]
        grad_eta = turned.mul_(share)
        weighed = eta.mul_(share).to(values.dtype)
        grad_matrices = blocks.sum(torch.bmm(weighed.transpose(1, 2), grad_output).to(eta.dtype), tables)
        grad_dipole = Dipole(-blocks.sum(grad_eta.sum(dim=1), tables), grad_matrices, dipole.first)

    grad_values = torch.bmm(weights.to(values.dtype).transpose(1, 2), grad_output)
    if factor is not None:
        grad_weights *= factor
    row_dot = None
    if table.mass is None and whole is None:
        grad_scores = softmax_backward(grad_weights, softmax, 2)
    else:
        # (blocks, length, 1); 0 in empty places
        row_dot = torch.linalg.vecdot(softmax, grad_weights)[..., None] if whole is None else whole[1]
        grad_scores = grad_weights.sub_(row_dot).mul_(softmax)
        if table.mass is not None:
            grad_scores *= blocks.of_cluster(table.mass)[:, None, None]
    grad_scores = grad_scores.to(keys.dtype)
    grad_query = torch.bmm(grad_scores, keys)
    if grad_eta is not None:
        grad_query = grad_query.to(grad_eta.dtype)
        grad_query[..., : grad_eta.shape[2]] += grad_eta
    grad_keys = torch.bmm(grad_scores.transpose(1, 2), query)
    return grad_query, ClusterTable(
        blocks.sum(grad_keys.to(softmax.dtype), tables),
        blocks.sum(grad_values.to(softmax.dtype), tables),
        None if table.mass is None or row_dot is None else blocks.sum(row_dot.sum(dim=(1, 2)), tables),
        None if table.offset is None else blocks.sum(grad_output.sum(dim=1, dtype=softmax.dtype), tables),
        grad_dipole,
    )


def _residuals(dipole: Dipole, blocks: ClusterBlocks, query: torch.Tensor) -> torch.Tensor:
    """`Q_i - centroid` `(blocks, length, D)`."""
    return query[..., : dipole.centroids.shape[1]] - blocks.of_cluster(dipole.centroids)[:, None]


def _share(dipole: Dipole, weights: torch.Tensor) -> torch.Tensor:
    """Weight of the rows that the dipole belongs to, `(blocks, length, 1)`."""
    return weights[..., dipole.first :].sum(dim=2, keepdim=True)
