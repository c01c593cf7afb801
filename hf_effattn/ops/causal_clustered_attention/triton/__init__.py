"""Causal attention over clusters on a GPU: launchers of the backward pass, and what torch needs to know of the op.

Steps of the forward pass: clusters of past queries, epoch by epoch; their top keys and remainders, in one walk over
the keys; clusters of the keys of every block; then the attention. Nothing is asked of the host between the inputs and
the output, so that CUDA graphs can record it: under a mask the tokens that count are brought together by a sort on the
GPU, in copies of the inputs, and all shapes are those of a text without padding.

Between the passes are kept, besides the inputs, the output, one number per query and the `Plan`. Gradients of keys and
values are added up in no fixed order. To `torch.compile` each pass is one op.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ...derivatives import refuse_second_derivatives
from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.chips import on_device_of
from ...shared.triton.tiles import LOG2_E
from ..layout import Layout
from ..reference import ARGUMENTS, Settings
from .backward import (
    _causal_clustered_attention_bwd_group_kernel,
    _causal_clustered_attention_bwd_key_kernel,
    _causal_clustered_attention_bwd_means_kernel,
    _causal_clustered_attention_bwd_query_kernel,
    _causal_clustered_attention_bwd_spread_kernel,
)
from .blocks import group_config, query_tile, segment_config
from .forward import attend, softmax_columns
from .grouping import Plan, block_count, empty_plan, make_plan
from .walk import rest_backward

READERS_OF_A_SPLIT = 1024  # queries of a block that one program walks


@dataclass(frozen=True)
class Packing:
    """Tokens brought together, those that count first; the others are zeros.

    Attributes:
        order: `(B, N)`, the token at each place.
        places: `(B, N)`, the place of each token that counts.
        mask: `(B, N)`, which tokens count.
        counts: `(B,)` int32, how many do.
    """

    order: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def of(mask: torch.Tensor) -> "Packing":
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        return Packing(order, (mask.cumsum(dim=1) - 1).clamp(min=0), mask, mask.sum(dim=1, dtype=torch.int32))

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(B, H, N, D)` brought together."""
        index = self.order[:, None, :, None].expand(rows.shape)
        counted = torch.arange(rows.shape[2], device=rows.device) < self.counts[:, None]
        return rows.gather(2, index).masked_fill_(~counted[:, None, :, None], 0)

    def unpack(self, packed: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `packed` back to where its rows came from, 0 to masked ones."""
        index = self.places[:, None, :, None].expand(packed.shape)
        rows.copy_(packed.gather(2, index).masked_fill_(~self.mask[:, None, :, None], 0))


@torch.library.custom_op(
    "hf_effattn::causal_clustered_attention_triton",
    mutates_args=(),
    schema=f"({ARGUMENTS}) -> Tensor[]",
)
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    *values: Any,
) -> list[torch.Tensor]:
    """The output, the base-2 log-sum-exp `(P, N)` of the queries that count, brought together, and the `Plan`."""
    settings = Settings(*values)
    B, H, N, _ = query.shape
    layout = settings.layout(N)
    lse = query.new_zeros(B * H, N, dtype=torch.float32)  # tokens that do not count have none
    if query.shape[:3].numel() == 0:
        return [empty_output(query, value), lse, *empty_plan(query, value, layout, settings)]
    output = unwritten_output(query, value)
    with torch.autocast(query.device.type, enabled=False):
        packing = None if key_mask is None else Packing.of(key_mask)
        if packing is None:
            plan = make_plan(query, key, value, None, layout, settings)
            attend(output, lse, query, key, value, None, plan, layout, settings, dropout_seed)
        else:
            rows = packing.pack(query), packing.pack(key), packing.pack(value)
            plan = make_plan(*rows, packing.counts, layout, settings)
            packed = torch.empty_like(output)
            attend(packed, lse, *rows, packing.counts, plan, layout, settings, dropout_seed)
            packing.unpack(packed, output)
    return [output, lse, *plan]


@_forward.register_fake
def _(query, key, value, key_mask, dropout_seed, *values):
    settings = Settings(*values)
    layout = settings.layout(int(query.shape[2]))  # the sizes of the tables go in steps: one graph for each length
    lse = query.new_empty(query.shape[0] * query.shape[1], query.shape[2], dtype=torch.float32)
    return [empty_output(query, value), lse, *empty_plan(query, value, layout, settings)]


@torch.library.custom_op(
    "hf_effattn::causal_clustered_attention_triton_backward",
    mutates_args=(),
    schema=f"(Tensor grad_output, Tensor[] forward, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    grad_output: torch.Tensor,
    forward: list[torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    *values: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, clusters and top keys held fixed; `forward` is what the op returned."""
    settings = Settings(*values)
    if query.shape[:3].numel() == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    output, lse, *tables = forward
    layout, plan = settings.layout(query.shape[2]), Plan(*tables)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    with torch.autocast(query.device.type, enabled=False):
        if key_mask is None:
            rows = grad_output, output, query, key, value
            attend_backward(*grads, *rows, lse, None, plan, layout, settings, dropout_seed)
            return grads
        packing = Packing.of(key_mask)
        inputs = packing.pack(query), packing.pack(key), packing.pack(value)
        rows = packing.pack(grad_output), packing.pack(output), *inputs
        packed = torch.empty_like(inputs[0]), torch.empty_like(inputs[1]), torch.empty_like(inputs[2])
        attend_backward(*packed, *rows, lse, packing.counts, plan, layout, settings, dropout_seed)
        for source, target in zip(packed, grads, strict=True):
            packing.unpack(source, target)
    return grads


@_backward_op.register_fake
def _(grad_output, forward, query, key, value, *settings):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attend_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    counts: torch.Tensor | None,
    plan: Plan,
    layout: Layout,
    settings: Settings,
    dropout_seed: torch.Tensor | None,
) -> None:
    """Write the gradients of query, key and value, of tokens that stand together (see `make_plan`)."""
    B, H, N, D = query.shape
    Hk, Dv = value.shape[1], value.shape[3]
    S, U, C, T = layout.segment_length, layout.served, settings.clusters, settings.topk
    has_means, dropout = settings.method == "bi-clustered", dropout_seed is not None
    means = plan.mean_keys.shape[1]
    delta = torch.empty_like(lse)
    query_sums = lse.new_empty(B * H, N, D)
    key_sums, value_sums = lse.new_empty(B * Hk, N, D), lse.new_empty(B * Hk, N, Dv)
    grad_mean_keys, grad_mean_values = (lse.new_zeros(B * Hk, means, dim) for dim in (D, Dv))
    alpha, beta = torch.zeros_like(plan.rest_lse), torch.zeros_like(plan.rest_means)

    tile = query_tile(query, Dv, layout.segments)
    of_queries = segment_config(query, Dv, tile, dropout, "query")
    of_columns = segment_config(query, Dv, tile, dropout, "key")
    of_rows = *grad_output.stride(), *query.stride()
    strides = *key.stride(), *value.stride()
    head = H, H // Hk, N, D, Dv, S, layout.window_segments
    sizes = *head, U, layout.levels, means, settings.keys_per_cluster, settings.key_clusters
    factors = softmax_columns(layout, settings), settings.scale, settings.scale * LOG2_E, settings.dropout_p
    counted = {"HAS_COUNTS": counts is not None}
    with on_device_of(query):
        tiles = triton.cdiv(S, tile)
        _causal_clustered_attention_bwd_query_kernel[(B * H * layout.segments * tiles,)](
            grad_output, output, query, key, value, plan.mean_keys, plan.mean_values, plan.mean_sizes, counts,
            dropout_seed, lse, delta, query_sums,
            *grad_output.stride(), *output.stride(), *query.stride(), *strides,
            *sizes, layout.segments, tiles, *factors, HAS_MEANS=has_means, **counted, **of_queries,
        )  # fmt: skip
        tiles = triton.cdiv(S, of_columns["COLUMNS"])
        _causal_clustered_attention_bwd_key_kernel[(B * Hk * layout.segments * tiles,)](
            grad_output, query, key, value, counts, dropout_seed, lse, delta, key_sums, value_sums,
            *of_rows, *strides, *head, layout.segments, tiles, *factors, **counted, **of_columns,
        )  # fmt: skip
        base = 0
        for level in range(layout.levels if has_means else 0):
            clusters, block_rows = layout.clusters_of_block(level), block_count(level, U)
            tiles = triton.cdiv(clusters, of_columns["COLUMNS"])
            splits = triton.cdiv(S << level, READERS_OF_A_SPLIT)
            _causal_clustered_attention_bwd_means_kernel[(B * Hk * block_rows * tiles * splits,)](
                grad_output, query, plan.mean_keys, plan.mean_values, plan.mean_sizes, counts, dropout_seed,
                lse, delta, grad_mean_keys, grad_mean_values, *of_rows,
                *head, means, clusters, base, layout.first_cluster_columns[level], S << level, block_rows, tiles,
                splits, READERS_OF_A_SPLIT, *factors, **counted, **of_columns,
            )  # fmt: skip
            base += block_rows * clusters
        if U:
            _causal_clustered_attention_bwd_group_kernel[(B * H * U * S,)](
                grad_output, query, key, value, plan.mean_keys, plan.mean_values, plan.rest_lse, plan.rest_means,
                plan.top, plan.labels, plan.key_members, counts, dropout_seed, lse, delta,
                query_sums, key_sums, value_sums, grad_mean_keys, grad_mean_values, alpha, beta,
                *of_rows, *strides, *sizes, C, T, *factors,
                HAS_MEANS=has_means, **counted, **group_config(query, Dv, S, dropout, backward=True),
            )  # fmt: skip
    members, query_shares = plan.key_members, query_sums.new_empty(B * H, 0, D)
    if U and not has_means:
        sums = plan.rest_lse, alpha, beta, key_sums, value_sums
        grad_centroids = rest_backward(plan.centroids, key, value, counts, plan.top, *sums, layout, settings)
        query_shares = (grad_centroids / plan.sizes.clamp(min=1)[..., None]).flatten(1, 2)
    divisors = plan.mean_sizes.clamp(min=1)[..., None]
    for target, sums_of_rows, shares, tables in (
        (grad_query, query_sums, query_shares, plan.past_rows),
        (grad_key, key_sums, grad_mean_keys / divisors, members),
        (grad_value, value_sums, grad_mean_values / divisors, members),
    ):
        spread(target, sums_of_rows, shares, tables)


def spread(target: torch.Tensor, sums: torch.Tensor, shares: torch.Tensor, members: torch.Tensor) -> None:
    """Write `sums` `(P, N, D)`, and of every row the shares `(P, ·, D)` that `members` `(P, tables, N)` names."""
    _, heads, N, D = target.shape
    rows = max(16, 2048 // triton.next_power_of_2(D))
    tiles = triton.cdiv(N, rows)
    with on_device_of(target):
        _causal_clustered_attention_bwd_spread_kernel[(len(sums) * tiles,)](
            sums, shares, members, target, *target.stride(),
            heads, N, D, members.shape[1], shares.shape[1], tiles,
            ROWS=rows, BLOCK_D=triton.next_power_of_2(D),
        )  # fmt: skip


def _setup_context(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.settings = inputs[5:]


def _backward(ctx, grads):
    if grads[0] is None:
        return (None,) * (5 + len(ctx.settings))
    saved = ctx.saved_tensors  # under checkpointing they come only once
    return (*_backward_op(grads[0], list(saved[5:]), *saved[:5], *ctx.settings), *[None] * (2 + len(ctx.settings)))


_forward.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivatives("causal_clustered_attention_triton")


def causal_clustered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    settings: Settings,
    dropout_seed: torch.Tensor | None,
) -> torch.Tensor:
    """One softmax over the local keys, the top keys of the nearest past centroid, and what stands for the others."""
    return _forward(query, key, value, key_mask, dropout_seed, *settings.values())[0]
