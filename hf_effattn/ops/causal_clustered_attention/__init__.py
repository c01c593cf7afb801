"""Causal attention over clusters: no output depends on a later token."""

from typing import Any

import torch

from ..cluster_queries import DEFAULT_FIT_QUERIES, DEFAULT_ITERATIONS
from ..kmeans import check_seed
from ..shared.arguments import check_count, check_mask, check_query_key_value, choose_backend
from ..shared.dropout import draw_seed
from . import batched, reference
from .reference import Settings


def _triton(*arguments: Any) -> torch.Tensor:
    from . import triton

    return triton.causal_clustered_attention(*arguments)


METHODS = ("clustered", "i-clustered", "bi-clustered")
DEFAULT_SEGMENT_LENGTH = 64
DEFAULT_WINDOW = 64
DEFAULT_KEYS_PER_CLUSTER = 8
DEFAULT_KEY_CLUSTERS = 128
LARGEST_KERNEL_TOPK = 256  # a centroid's top keys must fit into a chip's registers


def causal_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    method: str = "bi-clustered",
    clusters: int,
    topk: int = 32,
    keys_per_cluster: int = DEFAULT_KEYS_PER_CLUSTER,
    key_clusters: int = DEFAULT_KEY_CLUSTERS,
    segment_length: int = DEFAULT_SEGMENT_LENGTH,
    window: int = DEFAULT_WINDOW,
    iterations: int = DEFAULT_ITERATIONS,
    fit_queries: int = DEFAULT_FIT_QUERIES,
    seed: int = 0,
    prefill: bool = False,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Causal self-attention: exact to the nearest keys, over clusters to all older ones.

    Tokens are cut into segments. A query attends exactly to its segment's keys up to itself and to `window` keys
    before the segment. For the older keys, past queries are put into clusters (K-means in the keys' metric, again
    whenever the past has doubled), and the query goes to the nearest centroid `Qc_j`, which chooses the `topk`
    older keys with the largest product for it. One softmax runs over all of

    - the local keys and, but for `"clustered"`, the chosen keys, with the query's own scores;
    - `"clustered"`, `"i-clustered"`: all other older keys, with the centroid's scores (Source: Vyas 2020, for
      bidirectional attention, where the chosen keys share the centroid's mass of them);
    - `"bi-clustered"`: means of clusters of the other older keys, with the query's own scores plus `log n_jc`, as in
      `bi_clustered_attention`. Older segments are clustered in blocks of 1, 2, 4, ... segments, which are the binary
      digits of their number: a block is clustered once, and rotated keys are clustered with near ones only.

    Which keys a query sees in which way depends on its position, on itself and on earlier tokens. Changing a token
    changes no earlier output, bit for bit, but with `prefill=True`; on a GPU a value that is not finite may change
    those of its segment, as with exact attention. With `window >= N`, and for the two latter methods
    with `topk >= N`, the result is exact attention. Gradients are exact for fixed clusters and chosen keys. The work
    grows with `N log N`, memory with `N log N` at most.

    Ours: causal clustered attention elsewhere computes centroids of later queries too.

    Sizes: `B` batch, `H` heads, `N` length, `D` head_dim of query and key, `Dv` of value.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, H, N, D)`, any strides; or with fewer heads that divide `H` (grouped-query layout:
            query head `h` reads key/value head `h // (H / heads)`), which are not expanded.
        value (`torch.Tensor`): `(B, H, N, Dv)`, with the heads of `key`, any strides.
        method (`str`): `"clustered"`, `"i-clustered"` or `"bi-clustered"`.
        clusters (`int`): clusters of past queries per head.
        topk (`int`): older keys attended to exactly per cluster; without meaning for `"clustered"`.
        keys_per_cluster (`int`): mean size of the key clusters of a block, of `"bi-clustered"`.
        key_clusters (`int`): most key clusters of a block: in long blocks they are larger than `keys_per_cluster`.
        segment_length (`int`): tokens of a segment.
        window (`int`): keys before the segment that are attended to exactly, rounded up to whole segments.
        iterations (`int`): rounds of Lloyd's algorithm, for queries and keys.
        fit_queries (`int`): queries, and keys of a block, that clusters are fitted on.
        seed (`int`): of the clustering of queries and keys.
        prefill (`bool`): cluster all queries at once, later ones among them: faster, for prompts whose outputs are
            read at the end only. Then an earlier output is made of no later key or value, but which older keys stand
            out in it, and how, depends on later tokens.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts. Masked tokens are taken out, as if they
            did not stand there: their outputs are 0.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights; what stands for many keys is dropped as one.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`. Default: Triton on a GPU, else batched.
            The kernels take a `topk` up to 256, and add up gradients of keys and values in no fixed order: where
            torch is told to be deterministic and a gradient is wanted, the batched form runs instead. Under a
            `key_mask` they run on copies of the inputs in which the tokens that count stand together.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`.

    Raises:
        ValueError: an unknown method or backend, sizes that do not fit together, counts below 1 (`window` and
            `iterations`: below 0), a `dropout_p` outside [0, 1).
        TypeError: a mask that is not boolean, a count that is not an int.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    for name, count, minimum in (
        ("clusters", clusters, 1),
        ("topk", topk, 1),
        ("keys_per_cluster", keys_per_cluster, 1),
        ("key_clusters", key_clusters, 1),
        ("segment_length", segment_length, 1),
        ("window", window, 0),
        ("iterations", iterations, 0),
        ("fit_queries", fit_queries, 1),
    ):
        check_count(name, count, minimum=minimum)
    check_seed(seed)
    check_query_key_value(query, key, value)
    N = query.shape[2]
    if key.shape[2] != N:
        raise ValueError(f"causal self-attention has as many keys as queries, got {N} queries and {key.shape[2]} keys")
    check_mask("key_mask", key_mask, key)
    forms = reference.causal_clustered_attention, batched.causal_clustered_attention, _triton
    run = choose_backend(backend, forms, query, key, value)
    if run is _triton:
        if method != "clustered" and min(topk, N) > LARGEST_KERNEL_TOPK:
            if backend == "triton":
                raise ValueError(
                    f'the kernels take a topk up to {LARGEST_KERNEL_TOPK}, got {min(topk, N)}; use backend="batched"'
                )
            run = forms[1]
        wants_gradient = torch.is_grad_enabled() and any(rows.requires_grad for rows in (query, key, value))
        if wants_gradient and torch.are_deterministic_algorithms_enabled():
            run = forms[1]
    settings = Settings(
        method,
        min(clusters, max(1, N)),
        0 if method == "clustered" else min(topk, N),
        keys_per_cluster,
        key_clusters,
        min(segment_length, max(1, N)),
        min(window, N),
        iterations,
        fit_queries,
        seed,
        prefill,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        dropout_p,
    )
    return run(query, key, value, key_mask, settings, draw_seed(dropout_p, query.device))
