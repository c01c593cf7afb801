"""Bi-clustered attention over a sequence whose tokens are spread over the ranks of a process group."""

from typing import Any

import torch
import torch.distributed as dist

from ..bi_clustered_attention.reference import Inputs
from ..cluster_queries import DEFAULT_FIT_QUERIES, DEFAULT_ITERATIONS
from ..kmeans import check_seed
from ..shared.arguments import check_counts, check_mask, check_query_key_value
from ..shared.tables import empty_output
from .attention import attend_to_all_ranks
from .labels import cluster_parts
from .ranks import Ranks

DEFAULT_KEY_ITERATIONS = 2


def sequence_parallel_bi_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    clusters: int,
    key_clusters: int,
    topk: int,
    group: dist.ProcessGroup | None = None,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    scale: float | None = None,
    iterations: int = DEFAULT_ITERATIONS,
    key_iterations: int = DEFAULT_KEY_ITERATIONS,
    fit_queries: int = DEFAULT_FIT_QUERIES,
    seed: int = 0,
) -> torch.Tensor:
    """`bi_clustered_attention` to the keys of all ranks, each of which holds some of the tokens and keeps them.

    The sequence is what the ranks hold, one after the other; their lengths may differ, 0 among them. Output, and
    gradients of the sum of all ranks' losses, are to rounding those of one process that has the whole sequence, takes
    labels from `cluster_queries` in the metric of the keys, those of keys in the metric of `query_offsets`, both from
    `F = max(fit_queries, 4 · clusters, 4 · key_clusters)` evenly spread tokens, and runs `bi_clustered_attention`.

    No message grows with the length. In numbers per batch item and key/value head, `C` query clusters of all the query
    heads `g` that share it, `G` key clusters, `T` exact keys and `R` ranks, a rank hands over

    - `F · (g + 1) · D`: the tokens that clusters are fitted on,
    - `C · (D + 1) + G · (D + Dv + 1)`: sums of clusters,
    - `D² + G · D · Dv`: covariances,
    - `C · T · (D + Dv + 1)`: its best keys' scores, and the exact keys,
    - `C · G · (D + Dv + 2)`: the largest score and the tilted sums of every cluster,

    and in the backward pass gradients of all these but the tokens, the scores and the largest score. A rank's memory
    is O(C) numbers for each of its keys, beside its tokens and the tables.

    Every rank must call it, and then backward, in the same order, with the same settings; backward too where its own
    output is in no loss of its own (`output.sum() * 0` is a loss). Not served: dropout, and exact heads, whose keys
    would have to travel: `predicted_error` on one rank's tokens tells whether a head needs them.

    Sizes: `B` batch, `H` heads, `N` and `M` queries and keys that this rank holds, `D` head_dim of query and key, `Dv`
    of value. Source: ours, as `bi_clustered_attention`.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, H, M, D)`, or with fewer heads that divide `H` (grouped-query layout).
        value (`torch.Tensor`): `(B, H, M, Dv)`, with the heads of `key`.
        clusters (`int`): number of query clusters of each head.
        key_clusters (`int`): number of key clusters of each head.
        topk (`int`): keys attended to exactly per query cluster; more than all ranks hold means all.
        group (`torch.distributed.ProcessGroup`, *optional*): the ranks; default: all processes.
        key_mask (`torch.BoolTensor`, *optional*): `(B, M)`, True = attend; None or not on each rank for itself.
        query_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts; other rows are in no mean and get 0.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        iterations (`int`): rounds of Lloyd's algorithm for queries.
        key_iterations (`int`): the same for keys.
        fit_queries (`int`): tokens of the whole sequence that clusters are fitted on.
        seed (`int`): of the clustering.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`: the output of this rank's queries; 0 in rows that are masked or see no
        key.

    Raises:
        ValueError: no process group; sizes, devices or dtypes that do not fit together; counts below 1; settings,
            sizes or gradients asked for that differ between ranks. Where one rank raises for its arguments, all do.
        TypeError: a mask that is not boolean, a count that is not an int, tensors that are not floating-point.
    """
    ranks = Ranks(group)
    counts = {"clusters": clusters, "key_clusters": key_clusters, "topk": topk, "fit_queries": fit_queries}
    rounds = {"iterations": iterations, "key_iterations": key_iterations}
    settings: dict[str, Any] = {**counts, **rounds, "seed": seed, "scale": scale}
    refused: Exception | None = None
    try:
        check_counts(**counts)
        check_counts(minimum=0, **rounds)
        check_seed(seed)
        check_query_key_value(query, key, value)
        check_mask("key_mask", key_mask, key)
        check_mask("query_mask", query_mask, query)
        settings |= _of_tensors(query=query, key=key, value=value)
    except (TypeError, ValueError) as error:
        refused = error
    ranks.agree(settings, refused)
    if query.shape[0] == 0:
        return empty_output(query, value)
    both = (query_mask, key_mask), (clusters, key_clusters), (iterations, key_iterations)
    labels, key_labels = cluster_parts(ranks, query, key, *both, fit_queries, seed)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    rest = clusters, key_clusters, topk, key_mask, query_mask, None, scale, 0.0, None
    return attend_to_all_ranks(ranks, Inputs(query, key, value, labels, key_labels, *rest))


def _of_tensors(**tensors: torch.Tensor) -> dict[str, Any]:
    """What tensors have to agree in on all ranks: all but their length."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        B, heads, _, width = tensor.shape
        found[f"(B, heads, head_dim) of {name}"] = (B, heads, width)
        found[f"the dtype of {name}"] = str(tensor.dtype)
        # A rank that asks for no gradient would leave the others waiting in their backward pass.
        found[f"requires_grad of {name}"] = tensor.requires_grad and torch.is_grad_enabled()
    return found
