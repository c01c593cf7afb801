"""Causal attention over clusters: no output depends on a later token."""

import warnings
from math import inf
from typing import Any, cast

import torch

from ..cluster_queries import DEFAULT_ITERATIONS
from ..derivatives import learns
from ..kmeans import check_seed
from ..shared.arguments import check_counts, check_mask, check_number, check_query_key_value, choose_backend
from ..shared.callers import stacklevel_of_user
from ..shared.dropout import draw_seed
from . import batched, reference
from .sinks import check_sinks

METHODS = ("clustered", "i-clustered", "bi-clustered")
# Least loss of perplexity per computed score, on a language model: scripts/benchmark/language_model.py.
DEFAULT_SEGMENT_LENGTH = 1024
DEFAULT_WINDOW = 256
# Fitting on more of a segment's queries does not lower a language model's loss: scripts/benchmark/language_model.py.
FIT_QUERIES_PER_CLUSTER = 32
LARGEST_GROUP = 32  # query heads that share keys: each has a bit of a key's 32-bit word in the kernels


def _triton(*arguments: Any) -> torch.Tensor:
    from . import triton

    return cast("torch.Tensor", triton.causal_clustered_attention(*arguments))


def causal_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    method: str = "bi-clustered",
    clusters: int,
    topk: int = 32,
    key_clusters: int = 32,
    segment_length: int = DEFAULT_SEGMENT_LENGTH,
    window: int = DEFAULT_WINDOW,
    iterations: int = DEFAULT_ITERATIONS,
    fit_queries: int | None = None,
    max_predicted_error: float | None = None,
    seed: int = 0,
    key_mask: torch.Tensor | None = None,
    attention_sinks: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Causal self-attention: exact to the nearest keys, over clusters to all more distant ones.

    Tokens are cut into segments. A query attends exactly to its segment's keys up to itself, to `window` keys before
    the segment, and to `topk` of the distant keys. All other distant keys are summarised at the nearest centroid of
    the previous segment's queries: by clusters of keys with linear summaries (`"bi-clustered"`), or by the centroid's
    scores (`"i-clustered"`; `"clustered"`, without exact distant keys). `ops/DERIVATIONS.md` has the formulas.

    Changing a token changes no earlier output, bit for bit; on a GPU a value that is not finite may change those of
    its segment, as with exact attention. With `window >= N`, and for the first two methods with `topk >= N`, the
    result is exact attention. Gradients are exact for fixed clusters and chosen keys. Of exact attention's work
    `clusters / segment_length` remains at any length, and what grows with `N`; memory grows with `N`.

    Ours, beyond Vyas 2020. Sizes: `B` batch, `H` heads, `N` length, `D` head_dim of query and key, `Dv` of value.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`, any strides.
        key (`torch.Tensor`): `(B, heads, N, D)`, any strides; `heads` is `H` or divides it (grouped-query layout).
        value (`torch.Tensor`): `(B, heads, N, Dv)`, any strides.
        method (`str`): `"clustered"`, `"i-clustered"` or `"bi-clustered"`.
        clusters (`int`): clusters of the previous segment's queries per head.
        topk (`int`): distant keys attended to exactly, of every query head; without meaning for `"clustered"`.
        key_clusters (`int`): clusters of a segment's keys, of `"bi-clustered"`.
        segment_length (`int`): tokens of a segment.
        window (`int`): keys before the segment that are attended to exactly.
        iterations (`int`): rounds of Lloyd's algorithm; at most one is run.
        fit_queries (`int`, *optional*): queries, and keys, of a segment that clusters are fitted on, at most. Default:
            32 for each cluster.
        max_predicted_error (`float`, *optional*): of `"bi-clustered"`: heads in which the error predicted for a
            segment (`predicted_error`) is larger attend exactly to all distant keys. Default: none does.
        seed (`int`): of the clustering of queries and keys.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = counts. Masked tokens are taken out, as if they
            did not stand there: their outputs are 0.
        attention_sinks (`torch.Tensor`, *optional*): `(H,)`, a score of each query head that takes its weight in
            every softmax and has no value (gpt-oss), in any floating-point dtype; it has a gradient.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        dropout_p (`float`): dropout on the attention weights; a summary is dropped as one.
        backend (`str`, *optional*): `"reference"`, `"batched"` or `"triton"`; default: Triton on a GPU, for up to
            32 query heads for each of keys, else batched. Triton's labels and dropout are other ones.

    Returns:
        `(B, H, N, Dv)` in the dtype of `query`.

    Raises:
        ValueError: an unknown method or a backend that cannot run, sizes that do not fit together, counts below 1
            (`window` and `iterations`, `max_predicted_error`: below 0), a `dropout_p` outside [0, 1).
        TypeError: a mask that is not boolean, a count that is not an int, any other argument of a wrong type.

    Example:
        >>> import torch
        >>> from hf_effattn.ops import causal_clustered_attention
        >>> query, key, value = torch.randn(3, 1, 12, 8192, 64)
        >>> causal_clustered_attention(query, key, value, clusters=1, topk=384, key_clusters=16).shape
        torch.Size([1, 12, 8192, 64])
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    check_counts(clusters=clusters, topk=topk, key_clusters=key_clusters)
    check_counts(segment_length=segment_length, **{} if fit_queries is None else {"fit_queries": fit_queries})
    check_counts(minimum=0, window=window, iterations=iterations)
    check_seed(seed)
    if max_predicted_error is not None:
        check_number("max_predicted_error", max_predicted_error, minimum=0)
    if scale is not None:
        check_number("scale", scale)
    check_query_key_value(query, key, value)
    N = query.shape[2]
    if key.shape[2] != N:
        raise ValueError(f"causal self-attention has as many keys as queries, got {N} queries and {key.shape[2]} keys")
    check_mask("key_mask", key_mask, key)
    check_sinks(attention_sinks, query)
    forms = reference.causal_clustered_attention, batched.causal_clustered_attention, _triton
    run = choose_backend(backend, forms, query, key, value)
    group = query.shape[1] // key.shape[1]
    if run is _triton and group > LARGEST_GROUP:
        problem = f"the kernels take up to {LARGEST_GROUP} query heads for each of keys, got {group}"
        if backend == "triton":
            raise ValueError(f'{problem}; use backend="batched"')
        if not torch.compiler.is_compiling():
            said = f"causal attention on a GPU runs its PyTorch form, which is far slower: {problem}"
            warnings.warn(said, stacklevel=stacklevel_of_user())
        run = batched.causal_clustered_attention
    clusters = min(clusters, max(1, N))
    key_clusters = min(key_clusters, segment_length) if method == "bi-clustered" else 1
    return run(
        *(query, key, value, key_mask, draw_seed(dropout_p, query.device), attention_sinks),
        method,
        clusters,
        0 if method == "clustered" else min(topk, N),
        key_clusters,
        min(segment_length, max(1, N)),
        min(window, N),
        iterations,
        fit_queries or FIT_QUERIES_PER_CLUSTER * max(clusters, key_clusters),
        inf if max_predicted_error is None or method != "bi-clustered" else float(max_predicted_error),
        seed,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        dropout_p,
        learns(query, key, value, attention_sinks),
    )
